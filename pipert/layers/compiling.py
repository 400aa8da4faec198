"""What torch.compile and the threads of a pipe may not do to each other.

A compiled layer is compiled where it is called for the first time, and again when it gets what it
was not compiled for: on a worker, or on the thread of a backward when it is recomputed. Several
threads get there at the same moment. What must hold, and why it does:

1. One thread compiles at a time. dynamo has a lock for that, the same one for the whole process.
2. Calls of what has been compiled wait for nobody. They find their code without that lock.
3. No random numbers are drawn while something is compiled. dynamo notes the states of the default
   generators before it compiles and puts them back afterwards, whoever has drawn meanwhile. So
   pipert holds dynamo's lock while it draws. It comes before all locks of pipert's own, because a
   compiled layer that draws takes both: the generator for itself, and dynamo's lock to be compiled.
4. A pipe is not compiled. Its layers run on threads that torch.compile does not see, so all that it
   would compile is pipert itself.

Importing dynamo takes seconds. It is not imported here: it is there if somebody has compiled.
"""

from __future__ import annotations

import contextlib
import os
import sys
from contextlib import AbstractContextManager
from typing import Any

import torch

from pipert.errors import TransformError

__all__: list[str] = []

_NO_LOCK: AbstractContextManager[object] = contextlib.nullcontext()


def _lock_of_dynamo() -> Any:
    return getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)


class CompileLock:
    """dynamo's lock, a reentrant one. Made once, at import. Hold it by ``with lock.current``.

    A child that was forked in the middle of a compilation finds it taken for ever, and does without
    it: to compile would hang there, but to draw does not.
    """

    __slots__ = ("_lost",)

    def __init__(self) -> None:
        self._lost: Any = None
        os.register_at_fork(after_in_child=self._look_after_fork)

    @property
    def current(self) -> AbstractContextManager[object]:
        """Nothing compiles while this is held. A lock that does nothing if dynamo is not there."""
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
    """Raise if torch.compile watches the current thread, or is tracing this call.

    Raises:
        TransformError: it does.
    """
    if torch.compiler.is_dynamo_compiling() or callable(_watcher()):
        raise TransformError(
            "a pipe was called inside of torch.compile, which does not see the threads of the pipe "
            "and would leave its layers as they are. Compile each layer, then wrap: "
            "Pipe(nn.Sequential(*[torch.compile(layer) for layer in module]), ...). In a compiled "
            "function of yours, call torch.compiler.disable(pipe)"
        )


_watcher = torch._C._dynamo.eval_frame.get_eval_frame_callback
