"""Runs a model once, unchanged, to find the order in which it calls its modules.

Only a forward can show it: modules may be called twice, not at all, or in another order than they
are registered in. Calls are intercepted as in a pipe, so hooks run as usual, and a compiled module
need not be compiled again because of another hook.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipert._torch import pytree
from pipert._typing import Value
from pipert.batch.microbatch import Arguments, arguments_of
from pipert.batch.tensors import tensors_of
from pipert.layers.intercepted import Interceptor, current_thread, intercept, release
from pipert.layers.modules import modules_of
from pipert.model.devices import default_devices, where_tensors_are
from pipert.model.values import copy_of, has_values, made_up


def order_of_calls(
    model: nn.Module,
    example: Value,
    layers: Mapping[str, nn.Module],
    cuts: Collection[str] = (),
) -> list[str]:
    """Return the names of those ``layers`` that the model calls, in the order of first calls.

    Runs one forward without gradients, in the model's current mode, on the device of its first
    parameter; what is elsewhere, as where a pipe has been, is brought there. Layers on the meta
    device are computed one by one, by copies with made-up values on the default device. Buffers and
    the random state are restored; what else the model keeps from a call, or changes in it, stays.

    Args:
        model: the model; the example moves to the device of its first parameter.
        example: the arguments, see :func:`arguments_of`. It is not split, so a few rows suffice.
        layers: modules of the model, by name.
        cuts: names of layers whose calls inside other layers do not count, as no partition begins
            there.

    Raises:
        Exception: any error of the model.
    """
    devices = [tensor.device for tensor in (*model.parameters(), *model.buffers())]
    if not has_values(model):
        devices[0] = where_tensors_are(default_devices(1))[0]
    args, kwargs = arguments_of(example)
    if devices:
        args, kwargs = settled(Arguments(args, kwargs), devices[0])
    gathering = Gathering(devices[0]) if len({*devices}) > 1 else contextlib.nullcontext()
    first_calls = _FirstCalls(layers, cuts, devices[0] if devices else None)
    with intercepted(layers.values(), first_calls), unchanged(model), torch.no_grad(), gathering:
        model(*args, **kwargs)
    return list(first_calls.found)


_DEVICE, _IS_META = (getattr(Tensor, name).__get__ for name in ("device", "is_meta"))


class Gathering(TorchFunctionMode):
    """Brings the tensors of each operation to a device; may add their copies to a list.

    Tensors on the meta device get made-up values there, and say that they are on that device.
    """

    def __init__(self, device: torch.device, brought: list[Tensor] | None = None) -> None:
        super().__init__()
        self._device, self._brought = device, brought
        self._is_paused = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the tensors of operations where they are."""
        self._is_paused = True
        yield
        self._is_paused = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._is_paused:
            if func in (_DEVICE, _IS_META) and _IS_META(args[0]):
                return self._device if func == _DEVICE else False
            args, kwargs = pytree.tree_map(self.bring, (args, kwargs or {}))
        return func(*args, **kwargs or {})

    def bring(self, value: Any) -> Any:
        """Return a tensor on the device; also that device in place of meta."""
        if isinstance(value, torch.device) and value.type == "meta":
            return self._device
        if not isinstance(value, Tensor) or value.device == self._device:
            return value
        copy = made_up(value, self._device) if value.is_meta else value.to(self._device)
        if self._brought is not None:
            self._brought.append(copy)
        return copy


class Valueless(Gathering):
    """Computes on meta what depends on tensors there, and all else with values, on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, cpu = kwargs or {}, torch.device("cpu")
        if self._is_paused:
            return func(*args, **kwargs)
        if func in (_DEVICE, _IS_META) and _IS_META(args[0]):
            return cpu if func == _DEVICE else False
        leaves = pytree.tree_leaves((args, kwargs))
        on_meta = any(isinstance(each, Tensor) and _IS_META(each) for each in leaves)
        where = self._device if on_meta else cpu

        def bring(value: Any) -> Any:
            if isinstance(value, torch.device):
                return where
            return value.to(where) if isinstance(value, Tensor) and on_meta else value

        args, kwargs = pytree.tree_map(bring, (args, kwargs))
        if isinstance(kwargs.get("device"), str):
            kwargs["device"] = where
        return func(*args, **kwargs)

    def bring(self, value: Any) -> Any:
        """Return the value: a layer's arguments are brought to meta with all others."""
        return value


class _FirstCalls:
    """An interceptor that notes the names of layers in the order of their first calls."""

    def __init__(
        self, layers: Mapping[str, nn.Module], cuts: Collection[str],
        device: torch.device | None,
    ) -> None:  # fmt: skip
        self.found: dict[str, None] = {}
        self._names = {layer: name for name, layer in layers.items()}
        self._cuts, self._is_in_layer, self._device = cuts, False, device

    def call(self, module: nn.Module, call: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name, was_in_layer = self._names.get(module), self._is_in_layer
        if name is None or (was_in_layer and name in self._cuts):  # None belongs to a pipe
            return call(*args, **kwargs)
        self.found.setdefault(name)
        if self._device is not None and not has_values(module):
            call = copy_of(module, self._device)
        self._is_in_layer = True
        try:
            return call(*args, **kwargs)
        finally:
            self._is_in_layer = was_in_layer


def settled(value: Value, device: torch.device) -> Value:
    """Return ``value`` on the device, detached; its tensors require grad as before."""
    tensors, rebuild = tensors_of(value)
    return rebuild(tuple([t.detach().to(device).requires_grad_(t.requires_grad) for t in tensors]))


@contextlib.contextmanager
def intercepted(layers: Collection[nn.Module], interceptor: Interceptor) -> Iterator[None]:
    """Pass the calls of ``layers`` on this thread to ``interceptor``.

    It also receives the calls of layers that any pipe intercepts.
    """
    before = current_thread.interceptor, current_thread.is_trial
    intercept(layers)
    current_thread.interceptor, current_thread.is_trial = interceptor, True
    try:
        yield
    finally:
        current_thread.interceptor, current_thread.is_trial = before
        release(layers)


@contextlib.contextmanager
def unchanged(model: nn.Module, *devices: torch.device) -> Iterator[None]:
    """Restore the model's buffers, and the random state of Python and of torch, on its devices and
    on ``devices``."""
    registries = [b for b in (m._buffers for m in modules_of(model)) if isinstance(b, dict)]
    before = [(buffers, dict(buffers)) for buffers in registries]
    copies = [(b, b.detach().clone()) for b in model.buffers() if not b.is_meta]
    used = {*devices, *(t.device for t in (*model.parameters(), *model.buffers()))}
    indices = [device.index for device in used if device.type == "cuda"]
    state = random.getstate()  # a model may drop layers by it, in each call the same ones
    with torch.random.fork_rng(indices):
        try:
            yield
        finally:
            random.setstate(state)
            for buffers, old in before:
                buffers.clear()
                buffers.update(old)
            for buffer, copy in copies:
                # Not by version, which norms do not change. torch cannot compare sparse tensors.
                if buffer.layout != torch.strided or not torch.equal(buffer, copy):
                    buffer.detach().copy_(copy)
