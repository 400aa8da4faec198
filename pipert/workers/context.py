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

All other settings of torch belong to the process; ``docs/limits.md`` has a table of them.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from pipert._torch import (
    WithFunctions,
    dispatch_modes,
    function_modes,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
)
from pipert.autograd.hooks import hooks_of_caller
from pipert.queues.locks import ProcessLock

T = TypeVar("T")
Setting = AbstractContextManager[object]

NOTHING: AbstractContextManager[object] = contextlib.nullcontext()
"""A context manager that does nothing."""


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
        self._functions = [x for x in function_modes() if not getattr(x, "is_of_pipe", False)]
        self._dispatches = dispatch_modes()
        self.streams = [torch.cuda.current_stream(device) for device in devices]
        """The caller's, of the devices that were given."""
        self._threads = torch.get_num_threads()
        self._threads_of_worker = max(1, self._threads // max(1, cpu_workers))
        self.variables = contextvars.copy_context()
        self.saved_tensor_hooks = hooks_of_caller()
        self._has_modes = bool(self._functions or self._dispatches)
        self._is_usual = self._autocast == NEW_THREAD_AUTOCAST and not (
            self._inference or self.saved_tensor_hooks or self._has_modes or self.streams
        )

    def set_variable(self, variable: contextvars.ContextVar[T], value: T) -> None:
        """Set ``variable`` for the tasks, not for the caller. Call it before the first task."""
        self.variables.run(variable.set, value)

    @property
    def on_worker(self) -> Block:
        """A new block that applies all settings on a worker."""
        others = None if self._is_usual else partial(self._others, self.streams)
        return Block(self._grad, self._threads_of_worker, others)

    @property
    def going_back_on_worker(self) -> Block:
        """The same without autocast: what the forward has cast, the graph casts back."""
        others = partial(self._others, self.streams, False)
        is_usual = not (self._has_modes or self.streams)
        return Block(True, self._threads_of_worker, None if is_usual else others)

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

    def _others(
        self, streams: Sequence[torch.cuda.Stream] = (), is_forward: bool = True
    ) -> Iterator[Setting]:
        """Yield a block for each other setting that the current thread has not."""
        if streams:  # a stack whose block fails as it ends leaves a cycle of frames
            here = [stream.device for stream in streams]
            yield _replaced(partial(_streams_of, here), _set_streams, streams)
        if is_forward:
            if self._inference != torch.is_inference_mode_enabled():
                yield torch.inference_mode(self._inference)
            if self._autocast != get_autocast():
                yield autocast(self._autocast)
            hooks = self.saved_tensor_hooks
            if hooks is not None and hooks != hooks_of_caller():
                yield torch.autograd.graph.saved_tensors_hooks(*hooks)
        modes = self._functions, self._dispatches
        if _get_modes() != modes:
            yield _replaced(_get_modes, _set_modes, modes)


@dataclass(slots=True, eq=False)
class Block:
    """A block that applies settings. Reusable, but never nested.

    The thread keeps the count of intra-op threads, and has grad mode afterwards, as workers have.
    """

    _grad: bool
    _threads: int
    _others: Callable[[], Iterable[Setting]] | None = None
    """Makes the blocks of other settings, each in effect when the next is made, if any."""
    _entered: contextlib.ExitStack | None = None

    def __enter__(self) -> None:
        if torch.get_num_threads() != self._threads:
            set_own_threads(self._threads)
        if self._others is not None:
            with contextlib.ExitStack() as stack:
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


# Settings of the current thread -------------------------------------------------------------------

Autocast = tuple[bool, tuple[tuple[bool, torch.dtype], ...]]


@contextlib.contextmanager
def _replaced(get: Callable[[], T], put: Callable[[T], None], settings: T) -> Iterator[None]:
    """Replace settings of the current thread in the block."""
    before = get()
    put(settings)
    try:
        yield
    finally:
        put(before)


def _streams_of(devices: Iterable[torch.device]) -> list[torch.cuda.Stream]:
    return [torch.cuda.current_stream(device) for device in devices]


def _set_streams(streams: Sequence[torch.cuda.Stream]) -> None:
    device = torch.cuda.current_device()
    for stream in streams:
        torch.cuda.set_stream(stream)  # makes the stream's device the current one
    torch.cuda.set_device(device)


def set_own_threads(count: int) -> None:
    """Set the intra-op thread count of the current thread only.

    ``torch.set_num_threads`` sets it for the current thread and as the default of new threads. The
    default is read and restored by threads started for that: such a thread starts with the default,
    and its own setting ends with it. ``get_num_threads`` comes first, because a thread that never
    asked would take the default again at its first operation.
    """
    torch.get_num_threads()
    with _default_threads.current:
        default = _on_new_thread(torch.get_num_threads)
        torch.set_num_threads(count)
        _on_new_thread(lambda: torch.set_num_threads(default))


_default_threads = ProcessLock()  # held while the default is another


def _on_new_thread(function: Callable[[], T]) -> T:
    results: list[T] = []

    def run() -> None:
        results.append(function())

    thread = threading.Thread(target=run, name="pipert-helper", daemon=True)
    thread.start()
    thread.join()
    return results[0]


_AUTOCAST_TYPES = ("cpu", "cuda")  # of the devices that a pipe may have


def get_autocast() -> Autocast:
    """Return what ``torch.autocast`` sets."""
    one, other = _AUTOCAST_TYPES
    return torch.is_autocast_cache_enabled(), (
        (torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)),
        (torch.is_autocast_enabled(other), torch.get_autocast_dtype(other)),
    )


NEW_THREAD_AUTOCAST = _on_new_thread(get_autocast)


def _set_autocast(autocast: Autocast) -> None:
    torch.set_autocast_cache_enabled(autocast[0])
    for kind, (enabled, dtype) in zip(_AUTOCAST_TYPES, autocast[1], strict=True):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def autocast(settings: Autocast) -> Setting:
    """Set what ``torch.autocast`` sets in a block.

    The cache of cast weights is process-wide. The outermost autocast block clears it at its end, so
    that no weight is used as it was before an optimizer's step: the caller's block does so.
    """
    return _replaced(get_autocast, _set_autocast, settings)


def _get_modes() -> tuple[list[Any], list[Any]]:
    return function_modes(), dispatch_modes()


def _set_modes(modes: tuple[list[Any], list[Any]]) -> None:
    """Replace the stacks of modes, by pushing: the caller has entered them."""
    functions, dispatches = modes
    for _ in function_modes():  # not by their methods, which may do more
        pop_function_mode()
    for mode in functions:
        push_function_mode(mode)
    for _ in dispatch_modes():
        pop_dispatch_mode()
    for mode in dispatches:
        push_dispatch_mode(mode)
