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
dispatch modes        the caller's stack
context variables     a copy per task: changes stay in the task
saved-tensor hooks    the caller's innermost pair
current streams       of each CUDA device of the pipe, and of others where it is not the default
                      one, which a worker has; on its own threads autograd has set them
intra-op threads      on a worker, its share of the caller's count, divided among the pipe's CPU
                      workers; on a thread of autograd, which runs alone, all of them
flush_denormal        the caller's
====================  ==========================================================================

**W4** what is applied is undone, also after an error. A worker that an exception hits in the middle
of applying or undoing ends, since it is unknown what is in effect then. The count of intra-op
threads and ``flush_denormal`` stay with the worker, which owns its thread;
:func:`.set_own_threads` says how other threads keep theirs.

All other settings of torch belong to the process; ``docs/contract.md`` has a table of them.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from pipert._torch import (
    WithFunctions,
    dispatch_modes,
    forward_level,
    function_modes,
    transforms,
)
from pipert.autograd.hooks import hooks_of_caller
from pipert.errors import TransformError
from pipert.workers.thread_state import (
    NEW_THREAD_AUTOCAST,
    SMALLEST,
    autocast,
    current_streams,
    get_autocast,
    has_default_settings,
    modes,
    set_own_threads,
)

T = TypeVar("T")

NOTHING: AbstractContextManager[object] = contextlib.nullcontext()
"""A context manager that does nothing."""


def is_transformed() -> bool:
    """Return whether the current thread is in a ``torch.func`` transform."""
    return bool(transforms())


def refuse_transforms() -> None:
    """Refuse what cannot be carried from a caller to a worker.

    Raises:
        TransformError: the current thread is in a ``torch.func`` transform, or differentiates in
            forward mode.
    """
    if transforms() or forward_level() >= 0:
        raise TransformError(
            "a pipe was called inside of a torch.func transform, such as grad or vmap, or of "
            "forward-mode differentiation, where its workers would compute without it. Use "
            "backward or torch.autograd.grad, or call the plain module"
        )


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
        self._flushes = SMALLEST / 2 == 0.0
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
    def on_worker(self) -> OnWorker:
        """A new block that applies all settings on a worker."""
        is_usual = self._is_plain and not self.streams
        make_block = None if is_usual else self._all_on_worker
        return OnWorker(self._grad, self._threads_of_worker, self._flushes, make_block)

    @property
    def going_back_on_worker(self) -> OnWorker:
        """The same without autocast: what the forward has cast, the graph casts back."""
        make_block = self._going_back if self._has_modes or self.streams else None
        return OnWorker(True, self._threads_of_worker, self._flushes, make_block)

    @contextlib.contextmanager
    def on_any_thread(self) -> Iterator[None]:
        """Apply all but the streams, which a thread of autograd has; undo that at the end."""
        count, grad = torch.get_num_threads(), torch.is_grad_enabled()
        flushes = SMALLEST / 2 == 0.0
        if count != self._threads:
            set_own_threads(self._threads)
        if flushes != self._flushes:
            torch.set_flush_denormal(self._flushes)
        try:
            torch.set_grad_enabled(self._grad)
            # A loss of another class runs its backward() without that class's functions.
            with WithFunctions():
                if self._is_plain and has_default_settings():
                    yield
                else:
                    with self._all():
                        yield
        finally:
            torch.set_grad_enabled(grad)
            torch.set_flush_denormal(flushes)
            if count != self._threads:
                set_own_threads(count)

    @contextlib.contextmanager
    def _all(self) -> Iterator[None]:
        hooks = self.saved_tensor_hooks
        with contextlib.ExitStack() as stack:
            if self._inference != torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(self._inference))
                torch.set_grad_enabled(self._grad)
            stack.enter_context(autocast(self._autocast))
            if hooks is not None and hooks != hooks_of_caller():
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*hooks))
            stack.enter_context(modes(self._functions, self._dispatches))
            yield

    @contextlib.contextmanager
    def _all_on_worker(self) -> Iterator[None]:
        with current_streams(self.streams), self._all():
            yield

    @contextlib.contextmanager
    def _going_back(self) -> Iterator[None]:
        with current_streams(self.streams), modes(self._functions, self._dispatches):
            yield


@dataclass(slots=True, eq=False)
class OnWorker:
    """A block on a worker, whose thread has default settings. Reusable, but never nested."""

    _grad: bool
    _threads: int
    """The count of intra-op threads, which the worker keeps."""
    _flushes: bool
    """Whether denormal numbers are flushed, which the worker keeps, too."""
    _make_block: Callable[[], AbstractContextManager[None]] | None
    """Makes the block for all other settings, if there are any."""
    _block: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        if torch.get_num_threads() != self._threads:
            set_own_threads(self._threads)
        if (SMALLEST / 2 == 0.0) != self._flushes:
            torch.set_flush_denormal(self._flushes)
        torch.set_grad_enabled(self._grad)
        if self._make_block is not None:
            self._block = self._make_block()
            self._block.__enter__()

    def __exit__(self, *error: Any) -> None:
        block, self._block = self._block, None
        try:
            if block is not None:
                block.__exit__(*error)
        finally:
            torch.set_grad_enabled(True)
