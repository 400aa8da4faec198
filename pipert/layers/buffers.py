"""Protects running statistics and other buffers from recomputations.

A normalisation layer in training mode updates its running statistics at each call, and a
recomputation calls it again. Switching the module's updates off would affect other threads that
use it at the same moment, so the operations are redirected (``layers/dispatch_keys.py``): they get
copies of the statistics, and a counter is returned as it is (and read as 1 if it is 0). A kernel in
Python costs as much as the operation does. So torch's own BatchNorm layers get a shorter way
meanwhile, which threads that recompute nothing pass by, in the slot of ``layers/intercepted.py``:
it updates other statistics and counts nothing. Where it is missing, or there are hooks, the kernels
do the work.

Other layers change their buffers in their own ways, such as the power iteration of spectral norm.
Their results may depend on that, as they do there, so a recomputation that changes a buffer is
refused (``layers/changes.py``), and so are one that puts another tensor in its place and one that
reads a buffer which has changed since the first forward. To see that costs much for each operation,
so it is done only where the version of a buffer has moved meanwhile, which normalisation does not
do, or its values are seen to have changed (``layers/fingerprints.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from pipert.batch.tensors import Versions
from pipert.layers.batchnorm import PartitionStats
from pipert.layers.changes import (
    RefuseChanges,
    differ,
    place_of,
    refuse_changed,
    refuse_replaced,
    unused,
)
from pipert.layers.dispatch_keys import Key, operations
from pipert.layers.drawing import HOOKS_OF_ALL
from pipert.layers.fingerprints import Fingerprints, Pair
from pipert.layers.intercepted import SLOT, Shortcut, compiled_call

__all__: list[str] = []

# In a recomputation, and in runs inside of it: the ids of the counters of its normalisation layers.
kept_counters: ContextVar[frozenset[int] | None] = ContextVar("pipert_kept", default=None)

T = TypeVar("T")

_COUNTER = "num_batches_tracked"
_FORWARD = _BatchNorm.forward  # as long as nobody puts another in its place


def _register(keeping: Key) -> None:
    for operation, schema in operations(_normalises):
        names = [argument.name for argument in schema.arguments]
        places = {k for k, name in enumerate(names) if name in ("running_mean", "running_var")}
        keeping.register(operation, _copies(operation, places))
    for operation in (torch.ops.aten.add_.Tensor, torch.ops.aten.add_.Scalar):
        keeping.register(operation, _counts(operation))
    keeping.register(torch.ops.aten._local_scalar_dense.default, _read)


KEEPING = Key("TESTING_ONLY_GenericWrapper", _register)


def _normalises(schema: Any) -> bool:
    of_statistics = any(argument.name == "running_mean" for argument in schema.arguments)
    return of_statistics and "backward" not in schema.name


def _copies(operation: Callable[..., Any], places: set[int]) -> Callable[..., Any]:
    """Makes a kernel that calls ``operation`` with copies of some arguments."""

    def normalise(*args: Any, **kwargs: Any) -> Any:
        with KEEPING.excluded():
            with unused():
                copied = [
                    x.clone() if k in places and x is not None else x for k, x in enumerate(args)
                ]
            return operation(*copied, **kwargs)

    return normalise


def _counts(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a kernel that adds in place, but not to a counter."""

    def add(*args: Any, **kwargs: Any) -> Any:
        if id(args[0]) in (kept_counters.get() or ()):
            return args[0]
        with KEEPING.excluded():
            return operation(*args, **kwargs)

    return add


def _read(tensor: Tensor) -> Any:
    """Read a tensor's number; of a counter that is not counted yet, in a step, as if it were.

    ``BatchNorm(momentum=None)`` divides by it; what for goes to copies.
    """
    with KEEPING.excluded():
        number = torch.ops.aten._local_scalar_dense.default(tensor)
    return number or 1 if id(tensor) in (kept_counters.get() or ()) else number


def _normalise(norm: _BatchNorm, input: Tensor) -> Any:
    """Call a BatchNorm layer: in its recomputation by the shorter way."""
    buffers = norm._buffers
    if id(buffers[_COUNTER]) not in (kept_counters.get() or ()) or _has_hooks(norm):
        return norm._call_impl(input)  # type: ignore[no-untyped-call]
    with KEEPING.excluded():
        mean, var = buffers["running_mean"], buffers["running_var"]
        if mean is None or var is None or not (norm.training and norm.track_running_stats):
            return norm._call_impl(input)  # type: ignore[no-untyped-call]  # changes nothing
        norm._check_input_dim(input)  # type: ignore[no-untyped-call]
        others = torch.empty_like(mean), torch.empty_like(var)
        return F.batch_norm(input, *others, norm.weight, norm.bias, True, 0.0, norm.eps)


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or any(HOOKS_OF_ALL)
    )


class Buffers:
    """The buffers of modules that are computed again together, before their first forward."""

    __slots__ = (
        "_before", "_counters", "_fingerprints", "_homes", "_modules", "_others", "_runs_compiled",
        "_shorter", "_versions",
    )  # fmt: skip

    def __init__(self) -> None:
        self._counters: list[Any] = []  # the homes of the counters of normalisation layers
        self._homes: list[dict[str, Tensor | None]] = []
        self._modules: list[nn.Module] = []
        self._others: dict[int, Tensor] = {}  # by id
        self._versions = Versions()  # of the others
        self._before: list[tuple[dict[str, Tensor | None], str, Tensor | None]] = []  # by home
        self._fingerprints = Fingerprints()
        self._runs_compiled = False
        self._shorter: list[tuple[dict[str, Any], Shortcut]] = []

    def add(self, module: nn.Module, parts: Collection[nn.Module]) -> None:
        """Note the buffers of a module and of all modules inside of it, its ``parts``."""
        self._modules.append(module)
        compiled = any(map(_runs_compiled_code, _of_each_kind(parts)))
        self._runs_compiled |= compiled
        homes = [part._buffers for part in parts if part._buffers]
        counters = [home for home in homes if _COUNTER in home]
        self._counters += counters
        own = [h for h in homes if isinstance(h, dict) and _COUNTER not in h]
        self._homes += own
        self._before += [(home, name, buffer) for home in own for name, buffer in home.items()]
        for part in parts:
            if part.training and part._buffers and _COUNTER not in part._buffers:
                self._fingerprints.add(part)
        # Compiled code copies running statistics, which moves their versions.
        updated = ("running_mean", "running_var", _COUNTER) if compiled else (_COUNTER,)
        known = {id(home[name]) for home in counters for name in updated if name in home}
        self._shorter += [
            (part.__dict__, Shortcut(_normalise, part))
            for part in parts
            if isinstance(part, _BatchNorm)
            and type(part).forward is _FORWARD
            and "forward" not in part.__dict__
        ]
        others = [
            buffer
            for home in homes
            for buffer in home.values()
            if buffer is not None and id(buffer) not in known and not is_lazy(buffer)
        ]
        self._others.update(zip(map(id, others), others, strict=True))
        self._versions.add(others)

    def keep_during(self, call: Callable[[], T]) -> T:
        """Return what ``call`` does, which computes again, in context variables of its own.

        Raises:
            RecomputationError: it changes a buffer.
        """
        counters = [home[_COUNTER] for home in self._counters]
        kept_counters.set(frozenset(map(id, counters)))
        before = [(home, name, old) for home in self._homes for name, old in home.items()]
        shorter = () if self._runs_compiled else self._shorter
        begun = self._fingerprints.begin()
        try:
            for attributes, normalise in shorter:
                attributes.setdefault(SLOT, normalise)  # unless it is compiled, or intercepted
            with self._keeping_statistics(), self._refusing_changes(begun):
                result = call()
            for home, name, old in before:
                if home.get(name) is not old:
                    refuse_replaced(home, name, old)
            refuse_changed(self._fingerprints.end(begun))
            return result
        finally:
            for attributes, normalise in shorter:
                if attributes.get(SLOT) is normalise:
                    attributes.pop(SLOT, None)  # another backward of the graph may have, too
            for home, counter in zip(self._counters, counters, strict=True):
                if home[_COUNTER] is not counter:  # replaced by one that is greater
                    home[_COUNTER] = counter

    def _keeping_statistics(self) -> AbstractContextManager[object]:
        # Compiled code may run no operation of torch for it; torch.compile sees a function mode.
        if not self._runs_compiled:
            return KEEPING.included()
        return PartitionStats(nn.ModuleList(self._modules)).discarding()

    def _refusing_changes(self, begun: list[Pair]) -> AbstractContextManager[object]:
        changed = self._changed(begun)
        if not changed and self._versions.are_current():
            return contextlib.nullcontext()
        places = set(map(place_of, changed))
        return RefuseChanges(
            {
                place_of(buffer): (buffer, name)
                for module in self._modules
                for name, buffer in module.named_buffers()
                if id(buffer) in self._others or place_of(buffer) in places
            },
            places,
        )

    def _changed(self, begun: list[Pair]) -> list[Tensor]:
        """Return the buffers that have changed since the first forward."""
        looked_at = {id(old.buffer) for old, _ in begun}
        found = [buffer for buffer in self._versions.changed() if id(buffer) not in looked_at]
        found += [old.buffer for old, now in begun if old.values != now.values]
        for home, name, old in self._before:
            new = home.get(name)
            if new is not old and new is not None and old is not None and differ(new, old):
                found.append(new)
        return found


def _runs_compiled_code(module: nn.Module) -> bool:
    """Whether torch.compile has made it, its call, or the ``forward`` of its class."""
    return (
        compiled_call(module) is not None
        or type(module).__module__.startswith("torch._dynamo")
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


def _of_each_kind(modules: Collection[nn.Module]) -> Iterable[nn.Module]:
    """One of each class, and those that have a call or a ``forward`` of their own."""
    found = {type(module): module for module in modules}
    own = [m for m in modules if "forward" in m.__dict__ or SLOT in m.__dict__]
    return (*found.values(), *own)


def may_change_buffers(parts: Iterable[nn.Module]) -> bool:
    """Whether calling these modules now might update running statistics or other buffers."""
    return any(part.training and part._buffers for part in parts)
