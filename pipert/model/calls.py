"""Runs a model once, as it is, to see which modules it calls in which order.

Nothing but the forward can say that: modules are called in another order than they are registered,
twice, or not at all. A module's ``__call__`` looks first for what ``torch.compile`` may have put in
its place, so that is where calls are seen: hooks run as they always do, and a compiled module does
not have to be compiled again for one more hook.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pipert._typing import Value
from pipert.batch.microbatch import Arguments
from pipert.batch.tensors import tensors_of
from pipert.layers.modules import modules_of

__all__: list[str] = []

Call = Callable[..., Any]
_SLOT = "_compiled_call_impl"


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
    found: dict[str, None] = {}

    def noting(name: str, module: nn.Module, call: Call) -> Call:
        def noted(*args: Any, **kwargs: Any) -> Any:
            found.setdefault(name)
            return call(*args, **kwargs)

        return noted

    where = next((t.device for t in (*model.parameters(), *model.buffers())), None)
    args, kwargs = arguments_of(example)
    if where is not None:
        args, kwargs = settled(Arguments(args, kwargs), where)
    with intercepted(layers, noting), unchanged(model), torch.no_grad():
        call_model(model, args, kwargs)
    return list(found)


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
def intercepted(
    layers: Mapping[str, nn.Module], make: Callable[[str, nn.Module, Call], Call]
) -> Iterator[None]:
    """Have calls of ``layers`` go to ``make(name, layer, call)``, where ``call`` is the old way.

    On all threads: the model must not be in use.
    """
    before = [(module, vars(module).get(_SLOT)) for module in layers.values()]
    try:
        for (name, module), (_, old) in zip(layers.items(), before, strict=True):
            vars(module)[_SLOT] = make(name, module, old or module._call_impl)
        yield
    finally:
        for module, old in before:
            if old is None:
                vars(module).pop(_SLOT, None)
            else:
                vars(module)[_SLOT] = old


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
                if not torch.equal(buffer, copy):  # norms change theirs without a new version
                    buffer.detach().copy_(copy)
