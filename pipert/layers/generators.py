"""Gives each operation that draws random numbers a generator of its task.

Most operations that draw take a generator, or have a sibling that does, as ``rand(size)`` has; a
kernel adds it (``layers/dispatch_keys.py``). To those that take none at all, such as
``native_dropout`` and attention on CUDA, the default generator is lent: under a lock it gets the
state of the task's, and its own back. The user's other threads should not draw at that moment.

Who gives a generator of his own gets its numbers. What is traced draws nothing, but when it runs.
What an operation of the user's draws inside of it, under a dispatch mode, is not seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from pipert.layers.dispatch_keys import Key, is_traced, operations, stashed
from pipert.layers.nested_checkpoint import refuse_nested_checkpoint

__all__: list[str] = []

Operation = Callable[..., Any]


class Source(Protocol):
    """The generators of a task, which it has stashed: one for each device."""

    def settled(self, device: torch.device) -> torch.Generator | None:
        """Return it, if anything has been drawn in the run."""

    def alone(self, device: torch.device) -> AbstractContextManager[torch.Generator]:
        """Lend it to an operation that may be the run's first to draw."""


def _register(drawing: Key) -> None:
    takers = {_kind(op): op for op, _ in operations(_takes_generator)}
    packets = {f"aten::{packet.__name__}" for packet, *_ in takers}
    for op, _ in operations(lambda schema: schema.name in packets):
        drawing.register(op, _adds_generator(takers[_kind(op)]))
    for op, _ in operations(_might_need_default):
        if _needs_default(op):
            drawing.register(op, _lends_generator(op))


DRAWING = Key("TESTING_ONLY_GenericMode", _register)


def _takes_generator(schema: Any) -> bool:
    return any(argument.name == "generator" for argument in schema.arguments)


def _kind(operation: Any) -> tuple[Any, ...]:
    """What ``randint.low_out`` and its sibling ``randint.low_generator_out`` have in common."""
    words = operation._overloadname.split("_")
    return operation.overloadpacket, *[w for w in words if w not in _OF_ALL]


_OF_ALL = ("default", "generator", "with")  # such as in rand.generator_with_names of torch 2.11


def _might_need_default(schema: Any) -> bool:
    """By its name: to ask each operation of torch whether it is marked takes 0.2 s."""
    is_of_those = any(word in schema.name for word in ("dropout", "attention", "rnn"))
    return is_of_those and not _takes_generator(schema)


def _needs_default(operation: Any) -> bool:
    """Whether it draws by itself. On CPU attention does not, nor what is composed of others."""
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    elsewhere = any(has(operation.name(), key) for key in ("CPU", "CompositeImplicitAutograd"))
    return not elsewhere or operation.overloadpacket.__name__ == "native_dropout"


def _adds_generator(operation: Operation) -> Operation:
    """Makes a kernel that calls ``operation``, which takes a generator: last, or by name."""

    def draw(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.pop("generator", None)
        if args and isinstance(args[-1], torch.Generator):
            args, given = args[:-1], args[-1]
        with DRAWING.excluded():
            device = _device_of(args, kwargs)
            source = _source(device) if given is None or _is_default(given) else None
            if source is None:
                return operation(*args, generator=given, **kwargs)
            generator = source.settled(device)
            if generator is not None:
                refuse_nested_checkpoint(DRAWN)
                return operation(*args, generator=generator, **kwargs)
            with source.alone(device) as generator:
                return operation(*args, generator=generator, **kwargs)

    return draw


def _lends_generator(operation: Operation) -> Operation:
    """Makes a kernel that calls ``operation``, which draws from a default generator."""

    def draw(*args: Any, **kwargs: Any) -> Any:
        with DRAWING.excluded():
            device = _device_of(args, kwargs)
            source = _source(device)
            if source is None:
                return operation(*args, **kwargs)
            with source.alone(device) as generator, _lent(generator, device):
                return operation(*args, **kwargs)

    return draw


@contextlib.contextmanager
def _lent(generator: torch.Generator, device: torch.device) -> Iterator[None]:
    default = _default(device)
    before = default.get_state()
    default.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(default.get_state())
        default.set_state(before)


def _source(device: torch.device) -> Source | None:
    """The task's generators, if the operation is to have one."""
    if device.type not in ("cpu", "cuda") or is_traced():
        return None
    source: Source | None = stashed()
    return source


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Where an operation draws."""
    device: Any = kwargs.get("device")
    if device is None:
        tensors = [x for x in (kwargs.get("out"), *args) if isinstance(x, Tensor)]
        return tensors[0].device if tensors else torch.device("cpu")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    found: torch.device = device
    return found


def _is_default(generator: Any) -> bool:
    if generator.device.type not in ("cpu", "cuda"):
        return False
    default: Any = _default(generator.device)
    return bool(generator._cdata == default._cdata)  # objects for the same generator may differ


def _default(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[device.index]


DRAWN = (
    "a layer used torch.utils.checkpoint around an operation that draws random numbers from a "
    "default generator; its recomputation would draw others"
)
