"""Carries the caller's thread-local settings into tasks.

torch keeps most of its modes per thread, so a layer that runs on a worker would not see the
caller's: autocast would be lost, and training would silently run in float32. A
:class:`CallerContext` is captured by the call and applied around each task of a worker, and around
what autograd recomputes on one of its own threads. It carries:

====================  ==========================================================================
grad mode             the caller's
inference mode        the caller's
autocast              enabled and dtype of CPU and CUDA, and whether it caches
default device        as one of the torch-function modes, which are carried, except a pipe's own
dispatch modes        the caller's stack, such as a ``FlopCounterMode``
context variables     a copy per task: changes stay in the task
saved-tensor hooks    the caller's innermost pair
current streams       of each CUDA device of the pipe, and of others where it is not the default
                      one, which a worker has; on its own threads autograd has set them
intra-op threads      on a worker, its share of the caller's count, divided among the pipe's CPU
                      workers; on a thread of autograd, which runs alone, all of them
====================  ==========================================================================

**W4** what is applied is undone, also after an error. A worker that an exception hits in the middle
of applying or undoing ends, since it is unknown what is in effect then. The count of intra-op
threads stays with the worker, which owns its thread; :func:`.set_own_threads` says how other
threads keep theirs.

All other settings of torch belong to the process; ``docs/contract.md`` has a table of them.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from pipert._torch import (
    WithFunctions,
    dispatch_modes,
    function_modes,
    transforms,
)
from pipert.autograd.hooks import hooks_of_caller
from pipert.workers.thread_state import (
    NEW_THREAD_AUTOCAST,
    autocast,
    current_streams,
    get_autocast,
    modes,
    set_own_threads,
)

T = TypeVar("T")

NOTHING: AbstractContextManager[object] = contextlib.nullcontext()
"""A context manager that does nothing."""


def is_transformed() -> bool:
    """Return whether the current thread is in a ``torch.func`` transform."""
    return bool(transforms())


def is_of_pipe(mode: object) -> bool:
    """Return whether a function mode is a pipe's own, for the micro-batch of one thread."""
    return getattr(mode, "is_of_pipe", False) is True


class CallerContext:
    """The caller's thread-local settings; immutable, shared by all tasks of a run.

    Its blocks apply all settings except the context variables, which a block cannot apply: call
    ``variables.copy().run`` for what has to see them.

    Args:
        devices: the CUDA devices whose current streams matter.
        cpu_workers: the number of CPU workers that share the caller's intra-op threads.
    """

    def __init__(self, devices: Sequence[torch.device] = (), cpu_workers: int = 0) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self.grad_enabled = self._grad and not self._inference
        """Whether a graph is to be built."""
        self._autocast = get_autocast()
        # A pipe that runs inside of another one's micro-batch has tensors and devices of its own.
        self._functions = [mode for mode in function_modes() if not is_of_pipe(mode)]
        self._dispatches = dispatch_modes()
        self.streams = [torch.cuda.current_stream(device) for device in devices]
        """The caller's, of the devices that were given."""
        self._threads = torch.get_num_threads()
        self._threads_of_worker = max(1, self._threads // max(1, cpu_workers))
        self.variables = contextvars.copy_context()
        self.saved_tensor_hooks = hooks_of_caller()
        self._has_modes = bool(self._functions or self._dispatches)
        self._is_plain = self._autocast == NEW_THREAD_AUTOCAST and not (
            self._inference or self.saved_tensor_hooks or self._has_modes
        )

    def set_variable(self, variable: contextvars.ContextVar[T], value: T) -> None:
        """Set ``variable`` for the tasks, not for the caller. Call it before the first task."""
        self.variables.run(variable.set, value)

    @property
    def on_worker(self) -> Block:
        """A new block that applies all settings on a worker."""
        is_usual = self._is_plain and not self.streams
        others = None if is_usual else self._others
        return Block(self._grad, self._threads_of_worker, others, self.streams)

    @property
    def going_back_on_worker(self) -> Block:
        """The same without autocast: what the forward has cast, the graph casts back."""
        others = self._modes if self._has_modes or self.streams else None
        return Block(True, self._threads_of_worker, others, self.streams)

    @contextlib.contextmanager
    def on_any_thread(self) -> Iterator[None]:
        """Apply all but the streams, which a thread of autograd has; undo that at the end."""
        count, grad = torch.get_num_threads(), torch.is_grad_enabled()
        try:
            # A loss of another class runs its backward() without that class's functions.
            with WithFunctions(), Block(self._grad, self._threads, self._others):
                yield
        finally:
            torch.set_grad_enabled(grad)
            if count != self._threads:
                set_own_threads(count)

    def _others(self) -> Iterator[AbstractContextManager[object]]:
        """Yield a block for each other setting that the current thread has not."""
        if self._inference != torch.is_inference_mode_enabled():
            yield torch.inference_mode(self._inference)
        if self._autocast != get_autocast():
            yield autocast(self._autocast)
        hooks = self.saved_tensor_hooks
        if hooks is not None and hooks != hooks_of_caller():
            yield torch.autograd.graph.saved_tensors_hooks(*hooks)
        yield from self._modes()

    def _modes(self) -> Iterator[AbstractContextManager[object]]:
        if (function_modes(), dispatch_modes()) != (self._functions, self._dispatches):
            yield modes(self._functions, self._dispatches)


@dataclass(slots=True, eq=False)
class Block:
    """A block that applies settings. Reusable, but never nested.

    The thread keeps the count of intra-op threads, and has grad mode afterwards, as workers have.
    """

    _grad: bool
    _threads: int
    _others: Callable[[], Iterable[AbstractContextManager[object]]] | None = None
    """Makes the blocks of other settings, each in effect when the next is made, if any."""
    _streams: Sequence[torch.cuda.Stream] = ()
    _entered: contextlib.ExitStack | None = None

    def __enter__(self) -> None:
        if torch.get_num_threads() != self._threads:
            set_own_threads(self._threads)
        if self._others is not None:
            with contextlib.ExitStack() as stack:
                stack.enter_context(current_streams(self._streams))
                for block in self._others():
                    stack.enter_context(block)
                self._entered = stack.pop_all()
        torch.set_grad_enabled(self._grad)  # inference mode sets it, too

    def __exit__(self, *error: Any) -> None:
        entered, self._entered = self._entered, None
        try:
            if entered is not None:
                entered.__exit__(*error)
        finally:
            torch.set_grad_enabled(True)
