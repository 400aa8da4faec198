"""Gives each operation that draws random numbers a generator of its task.

Most operations of torch that draw take a generator; a kernel adds it (``layers/dispatch_keys.py``).
``rand(size)`` and the like take none, but have a sibling that does. Some take none at all, such as
``native_dropout`` and the attention of CUDA: to these the default generator is lent. Under a lock it
gets the state of the task's, and its own back. As without pipert, the user's other threads should
not draw from it at that moment.

An operation that is given a generator of the user's has that one. One that is traced has none: a
compiled layer draws when it runs.
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

_NO_POSITION = 1 << 10


class Source(Protocol):
    """The generators of one task, as it is stashed."""

    def settled(self, device: torch.device) -> torch.Generator | None:
        """The generator for ``device``; ``None`` if nothing has been drawn in the run."""

    def alone(self, device: torch.device) -> AbstractContextManager[torch.Generator]:
        """The same, for one operation, which may be the run's first to draw. No other draws."""


def _register(drawing: Key) -> None:
    takers = operations(lambda schema: "generator" in _names(schema))
    siblings = {(op.overloadpacket, _rest(schema)): op for op, schema in takers}
    packets = {op.overloadpacket for op, _ in takers}
    for op, schema in takers:
        place = _names(schema).index("generator")
        named = schema.arguments[place].kwarg_only
        drawing.register(op, _adds_generator(op, _NO_POSITION if named else place))
    without = {f"aten::{packet.__name__}" for packet in packets}
    for op, schema in operations(lambda schema: schema.name in without):
        if "generator" not in _names(schema):
            sibling = siblings[op.overloadpacket, _rest(schema)]
            drawing.register(op, _adds_generator(sibling, _NO_POSITION))
    for op, _ in operations(_might_need_default):
        if _needs_default(op):
            drawing.register(op, _lends_generator(op))


DRAWING = Key("TESTING_ONLY_GenericMode", _register)


def _names(schema: Any) -> list[str]:
    return [argument.name for argument in schema.arguments]


def _rest(schema: Any) -> tuple[tuple[str, str], ...]:
    """The arguments but for the generator, by which siblings are told."""
    return tuple([(a.name, str(a.type)) for a in schema.arguments if a.name != "generator"])


def _might_need_default(schema: Any) -> bool:
    """All that torch marks would be the right answer, but asking for each mark takes 0.2 s."""
    if "generator" in _names(schema):
        return False
    return any(word in schema.name for word in ("dropout", "attention", "rnn"))


def _needs_default(operation: Any) -> bool:
    """Whether it draws by itself. On CPU attention does not, and what is composed of others."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    name, packet = operation.name(), operation.overloadpacket.__name__
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    if packet == "native_dropout":
        return True
    return not has(name, "CompositeImplicitAutograd") and not has(name, "CPU")


def _adds_generator(operation: Operation, position: int) -> Operation:
    """Makes a kernel that calls ``operation``, of which the generator may be at ``position``."""

    def draw(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.pop("generator", None)
        if len(args) > position:
            args, given = args[:position], args[position]
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
    default = default_of(device)
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
    out = kwargs.get("out")
    if isinstance(out, Tensor):
        return out.device
    device = kwargs.get("device")
    if device is None:
        of_tensors = [arg.device for arg in args if isinstance(arg, Tensor)]
        return of_tensors[0] if of_tensors else _CPU
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device  # type: ignore[no-any-return]


def _is_default(generator: torch.Generator) -> bool:
    # Compared by what they hold: one that has passed the dispatcher is another object.
    return generator.device.type in ("cpu", "cuda") and (
        generator._cdata == default_of(generator.device)._cdata  # type: ignore[attr-defined]
    )


def default_of(device: torch.device) -> torch.Generator:
    """The generator that draws on ``device`` unless another is given."""
    if device.type == "cpu":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


_CPU = torch.device("cpu")
DRAWN = (
    "a layer used torch.utils.checkpoint around an operation that draws random numbers from a "
    "default generator; its recomputation would draw others"
)
