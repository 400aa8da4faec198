"""Protects running statistics and other buffers from recomputations.

A normalisation layer in training mode updates its running statistics at each call, and a
recomputation calls it again. Switching the module's updates off would affect other threads that
use it at the same moment, so the operations are redirected (``layers/dispatch_keys.py``): they get
copies of the statistics, and a counter is returned as it is.

Other layers change their buffers in their own ways, such as the power iteration of spectral norm.
Their results may depend on that, as they do there, so a recomputation that changes a buffer is
refused, and so is one that puts another tensor in its place. A dispatch mode sees changes. It costs
much for each operation, so it is on only where the version of a buffer has moved since the first
forward, which normalisation does not do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from pipert.batch.tensors import Versions
from pipert.errors import RecomputationError
from pipert.layers.batchnorm import PartitionStats
from pipert.layers.dispatch_keys import Key, operations
from pipert.layers.intercepted import SLOT, compiled_call

__all__: list[str] = []

# In a recomputation, and in runs inside of it: the ids of the counters of its normalisation layers.
kept_counters: ContextVar[frozenset[int] | None] = ContextVar("pipert_kept", default=None)

T = TypeVar("T")

_COUNTER = "num_batches_tracked"


def _register(keeping: Key) -> None:
    for operation, schema in operations(_normalises):
        names = [argument.name for argument in schema.arguments]
        places = {k for k, name in enumerate(names) if name in ("running_mean", "running_var")}
        keeping.register(operation, _copies(operation, places))
    for operation in (torch.ops.aten.add_.Tensor, torch.ops.aten.add_.Scalar):
        keeping.register(operation, _counts(operation))


KEEPING = Key("TESTING_ONLY_GenericWrapper", _register)


def _normalises(schema: Any) -> bool:
    of_statistics = any(argument.name == "running_mean" for argument in schema.arguments)
    return of_statistics and "backward" not in schema.name


def _copies(operation: Callable[..., Any], places: set[int]) -> Callable[..., Any]:
    """Makes a kernel that calls ``operation`` with copies of some arguments."""

    def normalise(*args: Any, **kwargs: Any) -> Any:
        with KEEPING.excluded():
            copied = [x.clone() if k in places and x is not None else x for k, x in enumerate(args)]
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


class Buffers:
    """The buffers of modules that are computed again together, before their first forward."""

    __slots__ = ("_counters", "_homes", "_modules", "_others", "_runs_compiled", "_versions")

    def __init__(self) -> None:
        self._counters: list[Any] = []  # the homes of the counters of normalisation layers
        self._homes: list[dict[str, Tensor | None]] = []
        self._modules: list[nn.Module] = []
        self._others: dict[int, Tensor] = {}  # by id
        self._versions = Versions()  # of the others
        self._runs_compiled = False

    def add(self, module: nn.Module, parts: Collection[nn.Module]) -> None:
        """Note the buffers of a module and of all modules inside of it, its ``parts``."""
        self._modules.append(module)
        compiled = any(map(_runs_compiled_code, _of_each_kind(parts)))
        self._runs_compiled |= compiled
        homes = [part._buffers for part in parts if part._buffers]
        counters = [home for home in homes if _COUNTER in home]
        self._counters += counters
        self._homes += [h for h in homes if isinstance(h, dict) and _COUNTER not in h]
        # Compiled code copies running statistics, which moves their versions.
        updated = ("running_mean", "running_var", _COUNTER) if compiled else (_COUNTER,)
        known = {id(home[name]) for home in counters for name in updated if name in home}
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
        try:
            with self._keeping_statistics(), self._refusing_changes():
                result = call()
            for home, name, old in before:
                if home.get(name) is not old:
                    _refuse_replaced(home, name, old)
            return result
        finally:
            for home, counter in zip(self._counters, counters, strict=True):
                if home[_COUNTER] is not counter:  # replaced by one that is greater
                    home[_COUNTER] = counter

    def _keeping_statistics(self) -> AbstractContextManager[object]:
        # Compiled code may run no operation of torch for it; torch.compile sees a function mode.
        if not self._runs_compiled:
            return KEEPING.included()
        return PartitionStats(nn.ModuleList(self._modules)).discarding()

    def _refusing_changes(self) -> AbstractContextManager[object]:
        if self._versions.are_current():
            return contextlib.nullcontext()
        return _RefuseChanges(
            {
                _place(buffer): (buffer, name)
                for module in self._modules
                for name, buffer in module.named_buffers()
                if id(buffer) in self._others
            }
        )


class _RefuseChanges(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that change buffers.

    Args:
        buffers: by where their data are, with their names.
    """

    supports_higher_order_operators = True

    def __init__(self, buffers: dict[int, tuple[Tensor, str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers = buffers

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or its first call would import dynamo, which takes seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        places = {_place(tensor) for tensor in _written(func, args, kwargs or {})}
        changed = [self._buffers[place] for place in places & self._buffers.keys()]
        before = [buffer.clone() for buffer, _ in changed]
        result = func(*args, **kwargs or {})
        for (buffer, name), old in zip(changed, before, strict=True):
            if not torch.equal(buffer, old):
                buffer.copy_(old)
                raise _changed(name)
        return result


def _refuse_replaced(home: dict[str, Tensor | None], name: str, old: Tensor | None) -> None:
    """Refuse that another tensor is in the place of a buffer, unless it has the same values."""
    new = home.get(name)
    if new is None or old is None or new.shape != old.shape or not torch.equal(new, old):
        home[name] = old
        raise _changed(name)


def _changed(name: str) -> RecomputationError:
    return RecomputationError(
        f"a layer changes its buffer {name!r} when it is recomputed, so its result may differ from "
        "its forward's. Use checkpoint='never', or leave the buffer alone while "
        "pipert.is_recomputing()"
    )


def _place(tensor: Tensor) -> int:
    """Where its data are, as for all of its views."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes to."""
    arguments: Any = getattr(getattr(func, "_schema", None), "arguments", ())
    given = {a.name: value for a, value in zip(arguments, args, strict=False)} | kwargs
    found = [given[a.name] for a in arguments if a.is_write and a.name in given]
    flat = [x for one in found for x in (one if isinstance(one, list | tuple) else (one,))]
    return [x for x in flat if isinstance(x, Tensor)]


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
