"""Describes tensors of other ranks, and computes their shapes: the vocabulary of a ``replay``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipert._typing import Tensors
from pipert.any_model.checkpointed_calls import objects_in, refuse_changes
from pipert.batch.tensors import describe, map_tensors, tensors_of, versions
from pipert.batch.trees import REMEDY, flatten, held_by, unflatten
from pipert.errors import PipertError
from pipert.layers.modules import modules_of
from pipert.model.calls import unchanged

__all__ = ["ReplayError"]

META = torch.device("meta")
Name = tuple[int, int]
"""Of a tensor: the event that made it, and its index among the results."""


class ReplayError(PipertError):
    """A model's own code needs what only another rank has."""


class NeedsValue(ReplayError):
    """A recording reached a function that needs the value of a tensor."""


LACKS = (
    "which only another rank has; compute that inside of the layer that has it, and return it from "
    "there"
)
CHANGES = "which other ranks would not see; do that inside of a layer, or with a clone"
HIDES = "where other ranks do not find it; return it from its layer"
STRAYS = (
    "the forward has gone another way than with the example. Give an example that goes this way; "
    "or pass what decides it as a bool or a number, in place of a tensor"
)


class Leave(BaseException):
    """Ends a forward at the cut behind a partition; no ``Exception``, which a model may catch."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor in the result of a layer, as the header describes it."""

    name: Name
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def placeholder(self) -> Tensor:
        """Return a meta tensor like the one described."""
        empty = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=META)
        return empty.requires_grad_(self.requires_grad and torch.is_grad_enabled())


@dataclass(frozen=True, slots=True)
class Given:
    """The ``k``-th tensor among the arguments, which is returned as it is."""

    k: int


@dataclass(slots=True, eq=False)
class Header:
    """What a partition tells the next one of a micro-batch, besides tensors."""

    names: list[Name]
    """Of the tensors that cross."""
    calls: dict[int, tuple[str, int, Any, Sequence[int]]]
    """For each event the name of what was called, its partition, the structure of its result, and
    which of its tensors it has changed."""


class Names:
    """The names of tensors in one replay, and what the header tells of events."""

    def __init__(self) -> None:
        self.header = Header([], {})
        self.received: dict[Name, Tensor] = {}
        """The tensors that have come, by their names."""
        self._names: dict[int, tuple[weakref.ref[Tensor], Name]] = {}
        self._tensors: dict[Name, weakref.ref[Tensor]] = {}

    def receive(self, header: Header, tensors: Tensors) -> None:
        """Take what has come from the partition before."""
        self.header = Header([], {**header.calls})
        self.received = dict(zip(header.names, tensors, strict=True))
        self._names.update({id(t): (weakref.ref(t), name) for name, t in self.received.items()})

    def of(self, tensor: Tensor) -> Name | None:
        """Return the name of a tensor, if an event has made it."""
        found = self._names.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def add(self, tensor: Tensor, name: Name) -> None:
        """Name a tensor, unless it has a name."""
        if self.of(tensor) is None:
            reference = weakref.ref(tensor)
            self._names[id(tensor)], self._tensors[name] = (reference, name), reference

    def home(self, name: Name) -> int:
        """Return the partition that made a tensor."""
        return self.header.calls[name[0]][1]

    def alive(self) -> dict[Name, Tensor]:
        """Return all tensors that are still referenced and have values here."""
        made = {name: t for name, ref in self._tensors.items() if (t := ref()) is not None}
        return {name: t for name, t in {**made, **self.received}.items() if not t.is_meta}

    def tell(
        self, event: int, j: int, name: str, given: Tensors, y: Any, written: Sequence[int]
    ) -> list[int]:
        """Name the results of an event, and put them into the header; return which are old."""
        tensors, rebuild = tensors_of(y)
        of = {id(tensor): k for k, tensor in enumerate(given)}
        leaves: list[Any] = []
        old = []
        for k, tensor in enumerate(tensors):
            if id(tensor) not in of:
                self.add(tensor, (event, k))
            if (found := self.of(tensor)) is None:
                leaves.append(Given(of[id(tensor)]))
            else:
                about = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad
                leaves.append(Leaf(found, *about))
            if found is None or found[0] != event:
                old.append(k)
        self.header.calls[event] = name, j, rebuild(tuple(leaves)), written
        return old

    def told(self, event: int, name: str, given: Tensors) -> tuple[Any, Sequence[int]]:
        """Return an event's result, in placeholders, and which of ``given`` it has changed."""
        there, _, result, written = self.header.calls.get(event, ("nothing", 0, None, ()))
        if there != name:
            raise ReplayError(
                f"event {event} is a call of {name!r} here, but of {there!r} on an earlier rank, "
                f"so ranks differ in the model, its mode or its inputs: {STRAYS}"
            )
        leaves, spec = flatten(result)
        found = []
        for leaf in leaves:
            if type(leaf) is Given:
                leaf = given[leaf.k]
            elif type(leaf) is Leaf:
                about, leaf = leaf, self._tensors.get(leaf.name, lambda: None)()
                if leaf is None:
                    self.add(leaf := about.placeholder(), about.name)
                reshape(leaf, about.shape, about.stride)
            found.append(leaf)
        return unflatten(spec, iter(found)), written


def reshape(placeholder: Tensor, shape: Sequence[int], stride: Sequence[int]) -> None:
    """Change a placeholder as ``unsqueeze_`` and its like would."""
    if placeholder.is_meta and tuple(placeholder.shape) != tuple(shape):
        with torch.no_grad():
            placeholder.as_strided_(shape, stride)


class Record(NamedTuple):
    """What a recording has found."""

    crossing: Sequence[Sequence[Name]]
    """For each partition the names that it sends on."""
    paths: Sequence[int]
    """The path to each cut."""
    structure: Any
    """That of the model's output."""


class Cuts(NamedTuple):
    """A model's layers, and where its partitions begin."""

    model: nn.Module
    device: torch.device
    """This rank's."""
    names: Sequence[str]
    """The cuts, in the order of their calls."""
    layers: dict[nn.Module, str]
    begins: dict[nn.Module, int]
    """The partition that each cut begins."""

    @property
    def n(self) -> int:
        """The number of partitions."""
        return len(self.names) + 1


@contextmanager
def refuse_changed_arguments(layer: str, values: Sequence[Any]) -> Iterator[None]:
    """Refuse a layer that is called in the block and adds to an object, list or dict it is given.

    Most language models of transformers do that, to a cache.
    """
    objects, count = objects_in(values), len(flatten(values)[0])
    yield
    try:
        refuse_changes(objects)
        is_changed = len(flatten(values)[0]) != count
    except RuntimeError:
        is_changed = True
    if is_changed:
        raise ReplayError(
            f"the layer {layer!r} changes an argument (models of transformers take "
            f"use_cache=False), {CHANGES}"
        )


@contextmanager
def inputs_unchanged(x: Any) -> Iterator[None]:
    """Refuse own code in the block that changes the inputs, which further replays need."""
    tensors = tensors_of(x)[0]
    before = versions(tensors)
    yield
    for tensor, count, now in zip(tensors, before, versions(tensors), strict=True):
        if count != now:
            what = f"the model changes one of its inputs in place, {describe(tensor)}"
            raise ReplayError(f"{what}, {CHANGES}")


def refuse_hidden(
    what: str, y: Any, wanted: Callable[[Tensor], bool] = lambda _: True
) -> None:
    """Refuse to return ``wanted`` tensors in an object in which none is looked for."""
    for leaf in flatten(y)[0]:
        if not isinstance(leaf, Tensor):
            if any(isinstance(hidden, Tensor) and wanted(hidden) for hidden in held_by(leaf)):
                kind = type(leaf).__qualname__
                where = f"{what} returns a tensor inside of a {kind} ({REMEDY})"
                raise ReplayError(f"{where}, {HIDES}")


@contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore buffers and random states; and attributes, dicts and lists that have meta tensors.

    Others stay: transformers notes in an attribute that it has registered hooks.
    """
    tables = [vars(module) for module in modules_of(model)]
    kept: list[Any] = [one for table in tables for one in (table, *table.values())]
    before = [(one, copy(one)) for one in kept if type(one) in (dict, list)]
    with unchanged(model, device):
        try:
            yield
        finally:
            for now, old in before:
                if type(now) is list:
                    now[:] = old if any(map(_has_meta, now[len(old) :])) else now
                    continue
                for key in [k for k, v in now.items() if v is not old.get(k) and _has_meta(v)]:
                    if key in old:
                        now[key] = old[key]
                    else:
                        del now[key]


def _has_meta(value: Any) -> bool:
    parts = value, *held_by(value, (nn.Module, Tensor))
    found = [one for one in parts if isinstance(one, Tensor)]
    return any(one.is_meta and not isinstance(one, nn.Parameter) for one in found)


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let ``forward`` take the place of the module's in the block; hooks stay."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before


def placeholder_of(tensor: Tensor, needs_grad: bool) -> Tensor:
    """Return a meta tensor like this one; it requires grad if its dtype can."""
    is_trained = needs_grad and (tensor.is_floating_point() or tensor.is_complex())
    return empty_like(tensor).requires_grad_(is_trained)


def empty_like(tensor: Tensor, device: torch.device | None = META) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


class Zeros:
    """Zeros for a ``layer`` that cannot be recorded on meta tensors, as experts choose by values.

    Whatever has no value here is a zero of the same shape, made where a function needs it.
    """

    def __init__(self, layer: nn.Module, device: torch.device) -> None:
        self._layer, self._device = layer, device
        self._buffers = {id(buffer) for buffer in layer.buffers()}

    def of(self, tensor: Tensor) -> Tensor:
        """Return what a function inside of the layer gets for ``tensor``."""
        if tensor.is_meta or isinstance(tensor, nn.Parameter):
            return empty_like(tensor, self._device).zero_()
        return tensor.to(self._device) if id(tensor) in self._buffers else tensor

    def call(self, name: str, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call the layer; return its result in meta tensors but for its arguments."""
        given = tensors_of((args, kwargs))[0]
        zeros = {id(tensor): self.of(tensor) for tensor in given}
        back = {id(zeros[id(tensor)]): tensor for tensor in given}
        trained = any(t.requires_grad for t in (*given, *self._layer.parameters()))
        needs_grad = torch.is_grad_enabled() and trained
        args, kwargs = map_tensors((args, kwargs), lambda t: zeros[id(t)])
        try:
            with torch.no_grad():
                y = call(*args, **kwargs)
        except Exception as error:
            raise ReplayError(
                f"the layer {name!r} needs values to be recorded, and fails with zeros in their "
                f"place ({type(error).__name__}: {str(error)[:200]}); let it take zeros"
            ) from error
        finally:
            map_tensors((args, kwargs), lambda t: back.get(id(t), t))  # in the caller's lists
        tensors, rebuild = tensors_of(y)
        found = [
            back[id(t)] if id(t) in back else placeholder_of(t, needs_grad) for t in tensors
        ]
        return rebuild(tuple(found))
