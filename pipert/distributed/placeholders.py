"""Describes tensors of other ranks, and computes their shapes: the vocabulary of a ``replay``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipert._torch import NormBase, pytree
from pipert.any_model.checkpointed_calls import objects_in, refuse_changes
from pipert.any_model.intercept import _METADATA
from pipert.batch.tensors import describe, tensors_of, versions
from pipert.batch.trees import REMEDY, flatten, held_by
from pipert.errors import PipertError
from pipert.layers.modules import modules_of
from pipert.layers.nested_checkpoint import is_in_checkpoint
from pipert.model.calls import unchanged

__all__ = ["ReplayError"]

META = torch.device("meta")
Name = tuple[int, int]
"""Of a tensor: the event that made it, and its index among the results."""

_CLOSED = (nn.Module, Tensor)

DEVICES: frozenset[Any] = frozenset(
    getattr(Tensor, name).__get__ for name in ("device", "is_meta", "is_cuda", "is_cpu")
)
OF_META = _METADATA - DEVICES | {Tensor.is_signed, torch.is_floating_point, torch.is_complex}
"""Functions that are the same of a placeholder."""


class ReplayError(PipertError):
    """A model's own code needs values that only another rank has."""

    needs_values = False
    """Whether a recording with values, by all ranks together, may succeed."""


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
    """The ``k``-th tensor of a layer's arguments, which the layer returns as it is."""

    k: int


@dataclass(slots=True, eq=False)
class Header:
    """What a partition tells the next one of a micro-batch, besides tensors."""

    names: list[Name]
    """Of the tensors that cross."""
    calls: dict[int, tuple[str, Any]]
    """For each event that was a call of a layer, its name and the structure of its result."""
    made: dict[Name, int]
    """The partition that made each tensor."""
    dtypes: dict[Name, torch.dtype]
    """Those of results of the own code, which may differ on meta under autocast."""


class Record(NamedTuple):
    """What a recording has found."""

    crossing: Sequence[Sequence[Name]]
    """For each partition the names that it sends on."""
    paths: Sequence[int]
    """The path to each cut."""
    structure: Any
    """That of the model's output; ``None`` if unknown."""


class Cuts(NamedTuple):
    """A model's layers, and where its partitions begin."""

    model: nn.Module
    names: Sequence[str]
    """The cuts, in the order of their calls."""
    layers: dict[nn.Module, str]
    begins: dict[nn.Module, int]
    """The partition that each cut begins."""

    @property
    def n(self) -> int:
        """The number of partitions."""
        return len(self.names) + 1


def on_meta(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[int, Tensor]]:
    """Call a torch function with meta tensors in place of real ones.

    Returns:
        The result; and by the id of its meta tensor each real one that the function would change.
    """
    if func in (Tensor.cpu, Tensor.cuda):
        return args[0], {}
    if func in (Tensor.__getitem__, Tensor.__setitem__):  # a real mask has its number of rows
        args = (args[0], _as_numbers(args[1]), *args[2:])
    metas: dict[int, tuple[Tensor, Tensor]] = {}

    def meta(x: Any) -> Any:
        if isinstance(x, Tensor) and not x.is_meta:
            if id(x) not in metas:
                empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=META)
                metas[id(x)] = x, empty
            return metas[id(x)][1]
        return META if isinstance(x, torch.device) or func is Tensor.to and type(x) is str else x

    args, kwargs = pytree.tree_map(meta, (tuple(args), dict(kwargs)))
    if kwargs.get("device") is not None:
        kwargs["device"] = META
    with torch.no_grad():
        y = func(*args, **kwargs)
    return y, {id(empty): real for real, empty in metas.values() if empty._version}


def called(func: Any) -> str:
    """Return the name of a torch function."""
    return str(getattr(func, "__name__", func))


def _as_numbers(index: Any) -> Any:
    """Return an index whose real masks are replaced by the numbers of the rows they select."""
    found: list[Any] = []
    for item in index if isinstance(index, tuple) else (index,):
        is_mask = isinstance(item, Tensor) and item.dtype == torch.bool and not item.is_meta
        found += item.nonzero(as_tuple=True) if is_mask else [item]
    return tuple(found) if isinstance(index, tuple) or len(found) != 1 else found[0]


@contextmanager
def refuse_changed_arguments(layer: str, values: Sequence[Any]) -> Iterator[None]:
    """Refuse a layer that is called in the block and changes an object that it is given."""
    objects, sizes = objects_in(values), [_size(value) for value in values]
    yield
    changed = [v for v, size in zip(values, sizes, strict=True) if _size(v) != size]
    try:
        refuse_changes(objects)
    except RuntimeError:
        changed += [value for value, _ in objects]
    if changed:
        raise ReplayError(
            f"the layer {layer!r} changes an argument, a {type(changed[0]).__qualname__}, which "
            "other ranks would not see; avoid that (models of transformers take use_cache=False)"
        )


def _size(value: Any) -> int:
    return len(value) if isinstance(value, list | dict) else 0


@contextmanager
def inputs_unchanged(x: Any) -> Iterator[None]:
    """Refuse own code in the block that changes the inputs, which further replays need."""
    tensors = tensors_of(x)[0]
    before = versions(tensors)
    yield
    for tensor, count, now in zip(tensors, before, versions(tensors), strict=True):
        if count != now:
            raise ReplayError(
                f"the model changes one of its inputs in place, {describe(tensor)}; its forward "
                "runs again for each partition on the same inputs, so change a clone"
            )


def refuse_hidden(
    what: str, y: Any, wanted: Callable[[Tensor], bool] = lambda _: True
) -> None:
    """Refuse to return ``wanted`` tensors in an object in which none is looked for."""
    for leaf in flatten(y)[0]:
        if not isinstance(leaf, Tensor):
            if any(isinstance(hidden, Tensor) and wanted(hidden) for hidden in held_by(leaf)):
                raise ReplayError(
                    f"{what} returns a tensor inside of a {type(leaf).__qualname__}, where "
                    f"other ranks would not find it; {REMEDY}"
                )


@contextmanager
def refuse_reading_hooks(layer: str) -> Iterator[None]:
    """Refuse hooks that read values of a layer of another rank, which run in the block."""
    try:
        yield
    except Exception as error:
        raise ReplayError(
            f"a hook of the layer {layer!r} fails on a rank that has no values of that layer "
            f"({type(error).__name__}: {str(error)[:200]}); let hooks pass over tensors that are "
            "on the meta device, or remove them, such as checks for NaN"
        ) from error


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers; and attributes, dicts and lists that have got meta tensors."""
    tables = [vars(module) for module in modules_of(model)]
    kept: list[Any] = [one for table in tables for one in (table, *table.values())]
    before = [(one, copy(one)) for one in kept if type(one) in (dict, list)]
    with unchanged(model):
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
    found = [one for one in (value, *held_by(value, _CLOSED)) if isinstance(one, Tensor)]
    return any(one.is_meta and not isinstance(one, nn.Parameter) for one in found)


def refuse_unrepeatable() -> None:
    """Refuse a call of a layer that a checkpoint of the own code would repeat."""
    if torch.is_grad_enabled() and is_in_checkpoint():
        raise ReplayError(
            "the model's own code calls a layer inside of torch.utils.checkpoint, which would "
            "call it again without what other ranks have sent; give the pipe checkpoint=, or "
            "checkpoint inside of the layer"
        )


def modules_in(values: Sequence[Any]) -> list[nn.Module]:
    """Return the modules that a layer is given, such as an embedding whose weight a head uses."""
    return [value for value in values if isinstance(value, nn.Module)]


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


def unseen(phase: int, tensor: Tensor, model: nn.Module) -> ReplayError:
    """Return the error for a tensor of the own code that no event has made."""
    where = ""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if value is tensor or any(one is tensor for one in held_by(value, _CLOSED)):
                where = f", and is kept in {f'{name}.{key}'.lstrip('.')!r}"
    return ReplayError(
        f"the model's own code in partition {phase} uses a tensor, {describe(tensor)}, that was "
        f"made unseen{where}: in an earlier call; inside of a layer that does not return it, such "
        "as an auxiliary loss or attention weights that a hook collects; in a compiled function, "
        "or in a torch.autograd.Function. Return it from the layer, or make the function a module "
        "with parameters"
    )


def not_crossed(j: int, name: Name, made: int) -> ReplayError:
    """Return the error for a tensor that its record did not let cross to partition ``j``."""
    return ReplayError(
        f"partition {j} uses result {name[1]} of event {name[0]} of partition {made}, which did "
        "not cross: the forward has gone another way than when it was recorded"
    )


def lacking(structure: Any, recorded: Any) -> ReplayError:
    """Return the error for an output of another structure than was recorded."""
    return ReplayError(
        "the model's output lacks what layers of other partitions keep for it elsewhere than in "
        f"what they return, such as output_attentions: it is {structure}, but must be {recorded}"
    )


HOOKS = {Tensor.register_hook, Tensor.retain_grad}


def statistics_of(layers: Iterable[nn.Module]) -> set[int]:
    """Return the ids of the running statistics in these layers."""
    norms = [m for layer in layers for m in layer.modules() if isinstance(m, NormBase)]
    return {id(buffer) for norm in norms for buffer in norm._buffers.values()} - {id(None)}


def refuse_reading(statistics: set[int], tensors: Iterable[Tensor], function: Any) -> None:
    """Refuse own code that reads running statistics, which other ranks would find unchanged."""
    if not statistics.isdisjoint(map(id, tensors)):
        raise ReplayError(
            f"the model's own code reads running statistics of a layer, in {called(function)}, "
            "which only the rank of that layer has; do that in the layer"
        )


def refuse_hook(function: Any, phase: int, is_elsewhere: bool) -> None:
    """Refuse a hook on a tensor of another rank, which has a part of its gradient."""
    if is_elsewhere:
        raise ReplayError(
            f"the model's own code in partition {phase} calls {called(function)} of a tensor of an "
            "earlier partition, and would see this rank's part of its gradient; call it behind "
            "the layer that makes the tensor, before the next cut"
        )


def written_elsewhere(function: str) -> ReplayError:
    """Return the error for memory of inputs' tensors that has been written under another name."""
    return ReplayError(
        f"the model's own code has written a value of a layer, in {function}, into memory that it "
        "uses under another name, such as a view: another rank would not see the change. Write "
        "into a clone, or make the view after the change"
    )


def elsewhere(j: int, what: str) -> ReplayError:
    """Return the error for a parameter that the recording has not seen in partition ``j``."""
    return ReplayError(
        f"partition {j} uses a parameter or buffer of another partition, {what}; when the model "
        "was recorded with the example, it did not: give an example that takes the same way"
    )
