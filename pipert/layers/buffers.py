"""Protects running statistics and other buffers from recomputations.

A normalisation layer in training mode updates its running statistics at each call, and a
recomputation calls it again. Switching the module's updates off would affect other threads that
use it at the same moment, so the operations are redirected (``layers/dispatch_keys.py``): they get
copies of the statistics, and a counter is returned unchanged (and read as 1 if it is 0). A kernel
in Python costs as much as the operation itself. So during a recomputation torch's own BatchNorm
layers have a shortcut in the slot of ``layers/intercepted.py``, which updates no statistics and
counts nothing. It is ignored by threads that are not recomputing. Where it is missing, or there are
hooks, the kernels do the work.

Other layers change their buffers in their own ways, such as the power iteration of spectral norm,
and their results may depend on the change. So a recomputation is refused if it changes a buffer
(``layers/changes.py``), replaces one, or reads one that has changed since the first forward.
Detecting that costs much for each operation, so it is done only if a buffer's version has changed
since then, which normalisation does not cause, or its values are seen to have changed
(``layers/fingerprints.py``).
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
from torch.nn.parameter import is_lazy

from pipert._torch import HOOKS_OF_ALL, BatchNorm
from pipert.autograd.hooks import are_hooks_on
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
from pipert.layers.fingerprints import Fingerprints, Pair
from pipert.layers.intercepted import SLOT, Shortcut, compiled_call

__all__: list[str] = []

kept_counters: ContextVar[frozenset[int] | None] = ContextVar("pipert_kept", default=None)
"""The ids of the counters of the normalisation layers that are being recomputed, which must not
change. Set in a recomputation, and in runs inside it."""

T = TypeVar("T")

_COUNTER = "num_batches_tracked"
_FORWARD = BatchNorm.forward  # as it is now: others may replace it later


def _register(keeping: Key) -> None:
    for operation, schema in operations(_updates_statistics):
        names = [argument.name for argument in schema.arguments]
        places = {k for k, name in enumerate(names) if name in ("running_mean", "running_var")}
        flags = [k for k, name in enumerate(names) if name in ("training", "use_input_stats")]
        keeping.register(operation, _copying(operation, places, flags))
    for operation in (torch.ops.aten.add_.Tensor, torch.ops.aten.add_.Scalar):
        keeping.register(operation, _not_counting(operation))
    keeping.register(torch.ops.aten._local_scalar_dense.default, _read_number)


KEEPING = Key("TESTING_ONLY_GenericWrapper", _register)


def _updates_statistics(schema: Any) -> bool:
    has_statistics = any(argument.name == "running_mean" for argument in schema.arguments)
    return has_statistics and "backward" not in schema.name


def _copying(
    operation: Callable[..., Any], places: set[int], flags: list[int]
) -> Callable[..., Any]:
    """Makes a kernel that calls ``operation`` with copies of the arguments at ``places``.

    Not in evaluation mode, as one of ``flags`` says: then its result depends on the statistics.
    """

    def normalise(*args: Any, **kwargs: Any) -> Any:
        with KEEPING.excluded():
            if any(args[k] is False for k in flags if k < len(args)):
                return operation(*args, **kwargs)
            with unused():
                copied = [
                    x.clone() if k in places and x is not None else x for k, x in enumerate(args)
                ]
            return operation(*copied, **kwargs)

    return normalise


def _not_counting(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a kernel that adds in place, except to a kept counter."""

    def add(*args: Any, **kwargs: Any) -> Any:
        if id(args[0]) in (kept_counters.get() or ()):
            return args[0]
        with KEEPING.excluded():
            return operation(*args, **kwargs)

    return add


def _read_number(tensor: Tensor) -> Any:
    """Read a tensor's number; a kept counter that is 0, as it may be in a step, is read as 1.

    ``BatchNorm(momentum=None)`` divides by it; the result only reaches copies of the statistics.
    """
    with KEEPING.excluded():
        number = torch.ops.aten._local_scalar_dense.default(tensor)
    return number or 1 if id(tensor) in (kept_counters.get() or ()) else number


def _normalise(norm: BatchNorm, input: Tensor) -> Any:
    """Call a BatchNorm layer; take the shortcut if this thread is recomputing it."""
    buffers = norm._buffers
    if id(buffers[_COUNTER]) not in (kept_counters.get() or ()) or _has_hooks(norm):
        return norm._call_impl(input)  # type: ignore[no-untyped-call]
    with KEEPING.excluded():
        mean, var = buffers["running_mean"], buffers["running_var"]
        if mean is None or var is None or not (norm.training and norm.track_running_stats):
            return norm._call_impl(input)  # type: ignore[no-untyped-call]  # changes nothing
        norm._check_input_dim(input)  # type: ignore[no-untyped-call]
        # Hooks see the statistics among the saved tensors, and their dtype may be computed with.
        if input.dtype is mean.dtype and not are_hooks_on():
            mean = var = None
        else:
            mean, var = torch.empty_like(mean), torch.empty_like(var)
        return F.batch_norm(input, mean, var, norm.weight, norm.bias, True, 0.0, norm.eps)


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or any(HOOKS_OF_ALL)
    )


class Buffers:
    """The buffers of modules that are recomputed together, recorded before their first forward."""

    __slots__ = (
        "_before", "_fingerprints", "_may_change", "_modules", "_norm_dicts", "_other_dicts",
        "_runs_compiled", "_shortcuts", "_versions", "_watched",
    )  # fmt: skip

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []
        self._norm_dicts: list[Any] = []  # the ``_buffers`` of modules that have a counter
        self._other_dicts: list[dict[str, Tensor | None]] = []  # those of other modules
        self._watched: dict[int, Tensor] = {}  # buffers that must not change, by id
        self._versions = Versions()  # of the watched ones
        self._before: list[tuple[dict[str, Tensor | None], str, Tensor | None]] = []
        self._fingerprints = Fingerprints()
        self._may_change = False  # by calls of these modules
        self._runs_compiled = False
        self._shortcuts: list[tuple[dict[str, Any], Shortcut]] = []

    def add(self, module: nn.Module, parts: Collection[nn.Module]) -> None:
        """Record the buffers of ``parts``: a module and all modules inside it."""
        self._modules.append(module)
        compiled = any(map(_runs_compiled_code, _of_each_kind(parts)))
        self._runs_compiled |= compiled
        # Compiled code copies running statistics, which changes their versions.
        updated = ("running_mean", "running_var", _COUNTER) if compiled else (_COUNTER,)
        known, found = set[int](), list[Tensor]()
        for part in parts:  # runs for each module in each run
            buffers: Any = part._buffers
            if not buffers:
                continue
            if _COUNTER in buffers:
                self._norm_dicts.append(buffers)
                known.update([id(buffers[name]) for name in updated if name in buffers])
                is_fixed = not part.training
                if isinstance(part, BatchNorm) and type(part).forward is _FORWARD:
                    if "forward" not in part.__dict__:
                        self._shortcuts.append((part.__dict__, Shortcut(_normalise, part)))
            else:
                is_fixed = True
                if isinstance(buffers, dict):
                    self._other_dicts.append(buffers)
                if part.training:
                    self._fingerprints.add(part)
            if is_fixed and isinstance(buffers, dict):
                self._before += [(buffers, name, buffer) for name, buffer in buffers.items()]
            held = [buffer for buffer in buffers.values() if buffer is not None]
            found += held
            if part.training and (held or _COUNTER not in buffers):
                self._may_change = True
        watched = [x for x in found if id(x) not in known and (type(x) is Tensor or not is_lazy(x))]
        self._watched.update(zip(map(id, watched), watched, strict=True))
        self._versions.add(watched)

    def keep_during(self, call: Callable[[], T]) -> T:
        """Return the result of ``call``, a recomputation, and leave the buffers as they are.

        Sets a context variable for good, so it must run in a copy of the caller's.

        Raises:
            RecomputationError: ``call`` changes a buffer, or reads one that has changed.
        """
        if not self._may_change and self._are_current():
            return call()
        counters = [buffers[_COUNTER] for buffers in self._norm_dicts]
        kept_counters.set(frozenset(map(id, counters)))
        before = [(d, name, old) for d in self._other_dicts for name, old in d.items()]
        shortcuts = () if self._runs_compiled else self._shortcuts
        begun = self._fingerprints.begin()
        try:
            for attributes, shortcut in shortcuts:
                attributes.setdefault(SLOT, shortcut)  # unless it is compiled, or intercepted
            with self._keeping_statistics(), self._refusing_changes(begun):
                result = call()
            for buffers, name, old in before:
                if buffers.get(name) is not old:
                    refuse_replaced(buffers, name, old)
            refuse_changed(self._fingerprints.end(begun))
            return result
        finally:
            for attributes, shortcut in shortcuts:
                if attributes.get(SLOT) is shortcut:
                    attributes.pop(SLOT, None)  # a concurrent backward may have removed it
            for buffers, counter in zip(self._norm_dicts, counters, strict=True):
                if buffers[_COUNTER] is not counter:  # replaced by an incremented one
                    buffers[_COUNTER] = counter

    def _are_current(self) -> bool:
        same = all([home.get(name) is old for home, name, old in self._before])
        return same and self._versions.are_current()

    def _keeping_statistics(self) -> AbstractContextManager[object]:
        # Compiled code may update statistics without an operation of torch's. A function mode is
        # seen by torch.compile.
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
                if id(buffer) in self._watched or place_of(buffer) in places
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


def has_buffers(module: nn.Module) -> bool:
    """Whether a module has buffers of its own, or may have; a norm without statistics has none."""
    buffers = module._buffers
    if not buffers:
        return False
    return _COUNTER not in buffers or any([buffer is not None for buffer in buffers.values()])


def _runs_compiled_code(module: nn.Module) -> bool:
    """Whether torch.compile made the module, its call, or its ``forward``."""
    return (
        compiled_call(module) is not None
        or type(module).__module__.startswith("torch._dynamo")
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


def _of_each_kind(modules: Collection[nn.Module]) -> Iterable[nn.Module]:
    """Return one module of each class, and those with a call or ``forward`` of their own."""
    by_class = dict(zip(map(type, modules), modules, strict=True))
    special = [m for m in modules if "forward" in m.__dict__ or SLOT in m.__dict__]
    return (*by_class.values(), *special)
