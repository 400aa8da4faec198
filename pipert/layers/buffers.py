"""Puts buffers aside around recomputations.

A normalisation layer in training mode updates its running statistics at each call, and a
recomputation calls it again. So while ``R[i,j]`` runs, layers have copies of their buffers, and
afterwards the buffers are put back:

1. The buffers of modules in training mode are put aside, if they are small or have been written
   since the run's first forward. The others may be the weights of a quantised model, or a mask.
2. A run copies a buffer once, however many recomputations it has. Where a result depends on what
   they leave in the copy, :mod:`pipert.layers.effects` refuses it.
3. A forward of the same layer must not find the copies, which would take its updates with them: one
   of another caller, or in another partition. So a layer is called under the locks of the modules
   in it, which layers that share modules take in the same order.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from operator import setitem
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from pipert._torch import is_lazy
from pipert.batch.tensors import version
from pipert.layers.modules import modules_of
from pipert.layers.random_numbers import current_task, paused
from pipert.workers.context import NOTHING

_SMALL = 1 << 16  # elements; such a buffer is put aside even if nothing shows that it changes

# By modules that have buffers, and by layers. Each access is one operation of a dict.
_locks: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_of_layers: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
os.register_at_fork(after_in_child=_locks.clear)  # another thread may have held them
os.register_at_fork(after_in_child=_of_layers.clear)

# The run whose layers the current code is in. Set in the task's own copy of the context variables.
_run: ContextVar[object] = ContextVar("pipert_run", default=None)


def locks_of(layer: nn.Module) -> Sequence[Any]:
    """Return the locks under which ``layer`` is called; none if nothing in it has buffers."""
    locks: Any = _of_layers.get(layer)
    if locks is None:
        modules = [module for module in modules_of(layer) if module._buffers]
        if not modules:
            return ()  # not for good: a buffer may be registered later
        new = next(filter(None, map(_locks.get, modules)), threading.RLock())
        found = {_locks.setdefault(module, new) for module in modules}
        locks = _of_layers.setdefault(layer, sorted(found, key=id))
    return locks  # type: ignore[no-any-return]


def under(locks: Sequence[Any], run: object) -> AbstractContextManager[object]:
    """Return a block in which a layer, and others that share its buffers, are called here alone.

    What a layer of another ``run`` has started has the locks of that layer, on all its threads.
    """
    if _run.get() is None:
        _run.set(run)
    elif _run.get() is not run:
        return NOTHING
    draws = current_task() is not None
    first: AbstractContextManager[object] = _WithoutGenerators(locks[0]) if draws else locks[0]
    return first if len(locks) < 2 else _under(map(_WithoutGenerators, locks))


@contextmanager
def _under(locks: Iterable[AbstractContextManager[object]]) -> Iterator[None]:
    with ExitStack() as stack:
        deque(map(stack.enter_context, locks), 0)
        yield


class _WithoutGenerators:
    """A block under a lock, for which nobody waits while he has a generator (G4)."""

    __slots__ = ("_lock",)

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        has_it = False
        try:
            has_it = self._lock.acquire(blocking=False)
            if not has_it:
                with paused():
                    has_it = self._lock.acquire()
        except BaseException:
            if has_it:
                self._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Buffers:
    """The buffers of a layer's ``modules``, before their first forward in the run."""

    __slots__ = ("_copies", "_modules", "_versions")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._versions = {  # by id
            id(buffer): _version(buffer)
            for module in self._modules
            for buffer in module._buffers.values()
        }
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # by id, each beside its original

    def put_aside(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the layer, whose lock is held, and leave the buffers as they are."""
        before: list[tuple[Any, str, Any]] = []
        for module in self._modules:
            if module.training and module._buffers:
                before += [(module._buffers, *item) for item in module._buffers.items()]
        back = map(setitem, *zip(*before, strict=True)) if before else iter(())
        try:
            for buffers, name, buffer in before:
                if self._may_change(buffer):
                    buffers[name] = self._copy_of(buffer)
            return call(*args, **kwargs)
        finally:
            deque(back, 0)  # one call of C, which no interrupt cuts short

    def _may_change(self, buffer: Tensor | None) -> bool:
        if buffer is None or is_lazy(buffer) or buffer.requires_grad:
            return False
        return buffer.numel() <= _SMALL or self._versions.get(id(buffer)) != version(buffer)

    def _copy_of(self, buffer: Tensor) -> Tensor:
        found = self._copies.get(id(buffer))
        if found is None:
            with torch.no_grad():
                found = self._copies[id(buffer)] = buffer, buffer.clone()
            setattr(found[1], _ORIGINAL, ref(buffer))
        return found[1]


_ORIGINAL = "pipert_original"


def original_of(value: Any) -> Any:
    """Return the buffer that a layer has ``value`` in place of while it is recomputed."""
    original = getattr(value, _ORIGINAL, None) if isinstance(value, Tensor) else None
    return value if original is None else original()


def _version(buffer: Tensor | None) -> int:
    return -1 if buffer is None or is_lazy(buffer) else version(buffer)
