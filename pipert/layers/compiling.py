"""Keeps torch.compile and the threads of a pipe from disturbing each other.

A compiled layer is compiled at its first call, and again for inputs that its code does not cover:
on a worker, or on the thread of a backward when it is recomputed. Several threads may compile at
the same moment. The rules:

1. One thread compiles at a time, under dynamo's process-wide lock.
2. Calls of compiled code wait for nothing. They find their code without that lock.
3. pipert leaves the default generators alone during a compilation. dynamo saves their states before
   it compiles and restores them afterwards, even if other threads drew meanwhile. So pipert holds
   dynamo's lock, taken before its own, while it draws a run's seed or lends a default generator.
4. A pipe cannot be compiled, exported, traced or scripted. Its layers run on threads that such
   tools do not see, so they would capture pipert itself.

Importing dynamo takes seconds, so this file does not: dynamo is loaded once something has compiled.
"""

from __future__ import annotations

import contextlib
import os
import sys
from contextlib import AbstractContextManager
from typing import Any

import torch

from pipert._torch import dispatch_mode, is_traced_by_fx, is_traced_by_jit, mode_kinds, watcher
from pipert.errors import TransformError

__all__: list[str] = []

_NO_LOCK: AbstractContextManager[object] = contextlib.nullcontext()


def _lock_of_dynamo() -> Any:
    return getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)


class CompileLock:
    """dynamo's reentrant lock. Made once, at import. Hold it by ``with lock.current``.

    In a child forked during a compilation the lock stays taken for ever, so the child ignores it:
    compiling would hang there, but drawing does not.
    """

    __slots__ = ("_lost",)

    def __init__(self) -> None:
        self._lost: Any = None
        os.register_at_fork(after_in_child=self._look_after_fork)

    @property
    def current(self) -> AbstractContextManager[object]:
        """The lock that keeps others from compiling; a dummy if dynamo is not loaded."""
        lock = _lock_of_dynamo()
        return _NO_LOCK if lock is None or lock is self._lost else lock

    def _look_after_fork(self) -> None:
        lock = _lock_of_dynamo()
        if lock is None:
            return
        if lock.acquire(blocking=False):
            lock.release()
        else:
            self._lost = lock

    def __repr__(self) -> str:
        return f"<CompileLock, {'none' if self.current is _NO_LOCK else 'of dynamo'}>"


def refuse_compilation() -> None:
    """Refuse a call of a pipe that is traced, or made on a thread that torch.compile watches.

    Raises:
        TransformError: the call is one of these.
    """
    if torch.compiler.is_exporting():
        raise not_traced("torch.export")
    if is_traced_by_jit():
        raise not_traced("torch.jit.trace")
    if is_traced_by_fx() and dispatch_mode(mode_kinds.PROXY) is None:  # not make_fx
        raise not_traced("torch.fx.symbolic_trace")
    if torch.compiler.is_dynamo_compiling() or callable(watcher()):
        raise TransformError(
            "a pipe was called inside of torch.compile, which does not see the threads of the pipe "
            "and would leave its layers uncompiled. Compile each layer, then wrap: "
            "Pipe(nn.Sequential(*[torch.compile(layer) for layer in module]), ...). In a compiled "
            "function of yours, call torch.compiler.disable(pipe)"
        )


def not_traced(by: str) -> TransformError:
    """Return the error for a pipe that was given to ``by``, which makes a graph of a model."""
    return TransformError(
        f"{by} got a pipe, whose threads it does not see. Give it the layers: the plain module, or "
        "nn.Sequential(*pipe), after moving them to one device if there are several"
    )
