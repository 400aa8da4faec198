"""Runs a model once, as it is, to see which modules it calls in which order.

Nothing but the forward can say that: modules are called in another order than they are registered,
twice, or not at all. Calls are seen by interception, as those of a pipe: hooks run as they always
do, and a compiled module does not have to be compiled again for one more hook.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pipert._typing import Value
from pipert.batch.microbatch import Arguments
from pipert.batch.tensors import tensors_of
from pipert.layers.intercepted import Interceptor, here, intercept, release
from pipert.layers.modules import modules_of

__all__: list[str] = []


def order_of_calls(
    model: nn.Module, layers: Mapping[str, nn.Module], example: Value
) -> list[str]:
    """Return the names of those ``layers`` that the model calls, in the order of first calls.

    One forward without gradients, in the mode the model is in, where its parameters are. Buffers
    and torch's random state are put back; what the model itself keeps of a call stays.

    Args:
        model: the model; its first parameter's device is the example's, too.
        layers: modules of the model, by name.
        example: the arguments, see :func:`arguments_of`. It goes whole into the forward: give as
            few rows as the model works with.

    Raises:
        ValueError: a parameter is not initialised.
        Exception: whatever the model raises, with a note that says what it was called for.
    """
    check_initialised(model)
    noting = _Noting(layers)
    where = next((t.device for t in (*model.parameters(), *model.buffers())), None)
    args, kwargs = arguments_of(example)
    if where is not None:
        args, kwargs = settled(Arguments(args, kwargs), where)
    with intercepted(layers.values(), noting), unchanged(model), torch.no_grad():
        call_model(model, args, kwargs)
    return list(noting.found)


class _Noting:
    """Notes which layers are called."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self.found: dict[str, None] = {}
        self._names = {layer: name for name, layer in layers.items()}

    def call(self, module: nn.Module, call: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if module in self._names:  # else one of a pipe
            self.found.setdefault(self._names[module])
        return call(*args, **kwargs)


def call_model(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call the model with an example, and say so in its errors."""
    try:
        return model(*args, **kwargs)
    except Exception as error:
        error.add_note(
            "while the model was called with the example; it is a dict of keyword arguments, a "
            "tuple of positional ones, or the only one"
        )
        raise


def arguments_of(example: Value) -> Arguments:
    """Return what an example stands for: a mapping keyword arguments, a tuple positional ones.

    Anything else is the only argument.
    """
    if isinstance(example, Arguments):
        return example
    if isinstance(example, Mapping):
        return Arguments((), dict(example))
    return Arguments(example if isinstance(example, tuple) else (example,))


def settled(value: Value, device: torch.device) -> Value:
    """Return ``value`` on the device, without the graph that made it."""
    tensors, rebuild = tensors_of(value)
    return rebuild(tuple([t.detach().to(device).requires_grad_(t.requires_grad) for t in tensors]))


def check_initialised(model: nn.Module) -> None:
    """Refuse parameters that only the first call makes: a trial would make them."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(f"{name!r} is not initialised; call the model once before")


@contextlib.contextmanager
def intercepted(layers: Collection[nn.Module], interceptor: Interceptor) -> Iterator[None]:
    """Have the calls of ``layers`` on this thread go to ``interceptor``.

    Those of layers of a pipe go there, too.
    """
    before = here.interceptor
    intercept(layers)
    here.interceptor = interceptor
    try:
        yield
    finally:
        here.interceptor = before
        release(layers)


@contextlib.contextmanager
def unchanged(model: nn.Module, *devices: torch.device) -> Iterator[None]:
    """Put back the buffers of the model, and torch's random state there and on the devices."""
    places = [b for b in (m._buffers for m in modules_of(model)) if isinstance(b, dict)]
    before = [(buffers, dict(buffers)) for buffers in places]
    copies = [(b, b.detach().clone()) for b in model.buffers() if not b.is_meta]
    used = {*devices, *(t.device for t in (*model.parameters(), *model.buffers()))}
    indices = [device.index for device in used if device.type == "cuda"]
    with torch.random.fork_rng(indices):
        try:
            yield
        finally:
            for buffers, old in before:
                buffers.clear()
                buffers.update(old)
            for buffer, copy in copies:
                # Not by version, which norms do not count up; and torch compares no sparse tensors.
                if buffer.layout != torch.strided or not torch.equal(buffer, copy):
                    buffer.detach().copy_(copy)
