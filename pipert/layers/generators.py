"""Gives each operation that draws random numbers a generator of its task.

Most operations that draw take a generator, or have an overload that does, as ``rand(size)`` has; a
kernel adds it (``layers/dispatch_keys.py``). Those that take none at all, such as
``native_dropout`` and attention on CUDA, draw from the default generator, which is lent to them:
under a lock it gets the state of the task's generator, and afterwards its own back. The user's
other threads should not draw at that moment.

An operation that is given a generator other than a default one draws from that. Operations being
traced draw nothing until they run. Numbers drawn inside an operation of the user's, under a
dispatch mode, are not seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from pipert._torch import has_kernel, overload_of
from pipert.layers import forward_mode
from pipert.layers.dispatch_keys import Key, is_traced, operations, stashed
from pipert.layers.nested_checkpoint import refuse_nested_checkpoint

__all__: list[str] = []

Operation = Callable[..., Any]


class Source(Protocol):
    """The generators of a task, one for each device. The task has stashed it."""

    def get_if_drawn(self, device: torch.device) -> torch.Generator | None:
        """Return the device's generator if anything has been drawn in the run already."""

    def exclusive(self, device: torch.device) -> AbstractContextManager[torch.Generator]:
        """Lend the device's generator to an operation that may be the first in the run to draw."""


def _register(drawing: Key) -> None:
    takers = {_kind(op): op for op, _ in operations(_takes_generator)}
    packets = {f"aten::{packet.__name__}" for packet, *_ in takers}
    for op, schema in operations(lambda schema: schema.name in packets):
        drawing.register(op, _adding_generator(takers[_kind(op)], _place_of_generator(schema)))
    for op, _ in operations(_might_need_default):
        if _needs_default(op):
            drawing.register(op, _lending_generator(op))
    forward_mode.register(drawing)


DRAWING = Key("TESTING_ONLY_GenericMode", _register)


def _takes_generator(schema: Any) -> bool:
    return any(argument.name == "generator" for argument in schema.arguments)


def _place_of_generator(schema: Any) -> int | None:
    """Return the index of the generator among the positional arguments, if it is one of them."""
    places = (k for k, x in enumerate(schema.arguments) if x.name == "generator")
    return next((k for k in places if not schema.arguments[k].kwarg_only), None)


def _kind(operation: Any) -> tuple[Any, ...]:
    """Return a key that ``randint.low_out`` and ``randint.low_generator_out`` have in common."""
    words = overload_of(operation).split("_")
    return operation.overloadpacket, *[word for word in words if word not in _IGNORED]


_IGNORED = ("default", "generator", "with")  # as in rand.generator_with_names of torch 2.11


def _might_need_default(schema: Any) -> bool:
    """Select candidates for :func:`_needs_default` by name, as asking all of torch takes 0.2 s."""
    is_candidate = any(word in schema.name for word in ("dropout", "attention", "rnn"))
    return is_candidate and not _takes_generator(schema)


def _needs_default(operation: Any) -> bool:
    """Whether an operation itself draws. Composite ones do not, nor does attention on CPU."""
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    name = operation.name()
    delegates = has_kernel(name, "CPU") or has_kernel(name, "CompositeImplicitAutograd")
    return not delegates or operation.overloadpacket.__name__ == "native_dropout"


def _adding_generator(operation: Operation, place: int | None) -> Operation:
    """Makes a kernel that adds a generator to calls of ``operation``, which accepts one.

    Calls of the overload that the kernel replaces may have one at ``place``, the last, or by name.
    """

    def draw(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.pop("generator", None)
        if place is not None and len(args) > place:
            args, given = args[:place], args[place]
        with DRAWING.excluded():
            device = _device_of(args, kwargs)
            source = _source(device) if given is None or _is_default(given) else None
            if source is None:
                return operation(*args, generator=given, **kwargs)
            generator = source.get_if_drawn(device)
            if generator is not None:
                refuse_nested_checkpoint(DRAWN)
                return operation(*args, generator=generator, **kwargs)
            with source.exclusive(device) as generator:
                return operation(*args, generator=generator, **kwargs)

    return draw


def _lending_generator(operation: Operation) -> Operation:
    """Makes a kernel that calls ``operation``, which can only draw from a default generator."""

    def draw(*args: Any, **kwargs: Any) -> Any:
        with DRAWING.excluded():
            device = _device_of(args, kwargs)
            source = _source(device)
            if source is None:
                return operation(*args, **kwargs)
            with source.exclusive(device) as generator, _lent(generator, device):
                return operation(*args, **kwargs)

    return draw


@contextlib.contextmanager
def _lent(generator: torch.Generator, device: torch.device) -> Iterator[None]:
    """Let the default generator of ``device`` draw the numbers of ``generator``."""
    default = _default(device)
    before = default.get_state()
    default.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(default.get_state())
        default.set_state(before)


def _source(device: torch.device) -> Source | None:
    """Return the task's generators, unless the operation must not get one of them."""
    source: Source | None = stashed()
    return None if source is None or not _has_generators(device) or is_traced() else source


@cache
def _has_generators(device: torch.device) -> bool:
    return device.type in ("cpu", "cuda")


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Return the device on which an operation draws."""
    device: Any = kwargs.get("device")
    if device is None:
        if args and not kwargs and type(args[0]) is Tensor:  # as usual, and at a fifth of the cost
            return args[0].device
        tensors = [x for x in (kwargs.get("out"), *args) if isinstance(x, Tensor)]
        return tensors[0].device if tensors else torch.device("cpu")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    found: torch.device = device
    return found


def _is_default(generator: Any) -> bool:
    if not _has_generators(generator.device):
        return False
    default: Any = _default(generator.device)
    return bool(generator._cdata == default._cdata)  # one generator may have several objects


def _default(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[device.index]


DRAWN = (
    "a layer used torch.utils.checkpoint around an operation that draws random numbers from a "
    "default generator; its recomputation would draw others"
)
