"""What a task takes over from the thread that asked for it.

torch keeps most of its modes for each thread, so a layer that runs on a worker would not see the
caller's: autocast would be lost and training run in float32 without a word. A
:class:`CallerContext` is captured in the call and put on around each task of a worker, and around
what autograd computes again on a thread of its own. Each row:

====================  ==========================================================================
grad mode             as the caller's
inference mode        as the caller's
autocast              enabled and dtype of every device type, and whether it caches
default device        with all other torch-function modes, one of which it is
dispatch modes        as the caller's stack
context variables     a copy for each task: changes stay in the task
saved-tensor hooks    the caller's innermost pair
current streams       of each CUDA device of the pipe, and of others where it is not the default
                      one, which a worker has; on its own threads autograd has set them
intra-op threads      on a worker the caller's count shared out among the pipe's CPU workers; on a
                      thread of autograd, which runs alone, all of them
deterministic         process-wide in torch, so it is seen anyway and nothing is carried
====================  ==========================================================================

**W4** what is put on is taken off again, also after an error; a worker that is hit by an exception
in the middle of either ends, since nobody knows what is on then. The count of intra-op threads
stays with the worker, who owns its thread; :func:`.set_own_threads` says how the rest of the
process is spared.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

from pipert.autograd.checkpoint import hooks_of_caller
from pipert.errors import TransformError
from pipert.workers.thread_state import (
    NEW_THREAD_AUTOCAST,
    autocast,
    current_streams,
    dispatch_modes,
    function_modes,
    get_autocast,
    modes,
    nothing_put_on,
    set_own_threads,
)

__all__: list[str] = []

T = TypeVar("T")


def refuse_transforms() -> None:
    """Refuse what a worker cannot take over from its caller.

    Raises:
        TransformError: the current thread is in a ``torch.func`` transform, or differentiates in
            forward mode.
    """
    what = ""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        what = "a torch.func transform such as grad, jvp or vmap"
    elif forward_ad._current_level >= 0:
        what = "forward-mode differentiation"
    if what:
        raise TransformError(
            f"a pipe was called inside of {what}, which belongs to the calling thread: its workers "
            "would compute without. Use backward or torch.autograd.grad, or call the plain module"
        )


class CallerContext:
    """The caller's thread-local settings; immutable, shared by all tasks of a run.

    Its blocks put all on but the context variables, which a block cannot: run what is to see them
    by ``variables.copy().run``. :attr:`on_worker` puts the rest on, on a thread that has nothing
    put on; :attr:`going_back_on_worker` all but autocast, since what was cast in the forward is
    cast back by the graph; :meth:`on_any_thread` what the thread lacks.

    Args:
        devices: the CUDA devices whose current streams matter.
        cpu_workers: how many CPU workers share the caller's intra-op threads.
    """

    __slots__ = (
        "_plain", "_settings", "_threads", "going_back_on_worker", "on_worker",
        "saved_tensor_hooks", "variables",
    )  # fmt: skip

    def __init__(self, devices: Sequence[torch.device] = (), cpu_workers: int = 0) -> None:
        self._settings = settings = _Settings(devices)
        self._threads = torch.get_num_threads()
        self.variables = contextvars.copy_context()
        self.saved_tensor_hooks = settings.hooks
        has_modes = bool(settings.functions or settings.dispatches)
        self._plain = settings.autocast == NEW_THREAD_AUTOCAST and not (
            settings.inference or settings.hooks or has_modes
        )
        share = max(1, self._threads // max(1, cpu_workers))
        usual = self._plain and not settings.streams
        more = None if usual else partial(_all_on_worker, settings)
        self.on_worker = OnWorker(settings.grad, share, more)
        going_back = partial(_going_back, settings) if has_modes or settings.streams else None
        self.going_back_on_worker = OnWorker(True, share, going_back)

    @property
    def grad_enabled(self) -> bool:
        """Whether a graph is to be made."""
        return self._settings.grad and not self._settings.inference

    def set_variable(self, variable: contextvars.ContextVar[T], value: T) -> None:
        """Let the tasks see ``value``; the caller does not. Before the first task."""
        self.variables.run(variable.set, value)

    @contextlib.contextmanager
    def on_any_thread(self) -> Iterator[None]:
        """Put on what another thread lacks, such as one of autograd's; and take it off again."""
        count, grad = torch.get_num_threads(), torch.is_grad_enabled()
        if count != self._threads:
            set_own_threads(self._threads)
        try:
            torch._C._set_grad_enabled(self._settings.grad)
            if self._plain and nothing_put_on():
                yield
            else:
                with _all(self._settings, clear_cache=True):
                    yield
        finally:
            torch._C._set_grad_enabled(grad)
            if count != self._threads:
                set_own_threads(count)


class _Settings:
    """What the current thread has put on. References no context, so that no cycle keeps one."""

    __slots__ = ("autocast", "dispatches", "functions", "grad", "hooks", "inference", "streams")

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = get_autocast()
        self.hooks = hooks_of_caller()
        # A run inside a task has random numbers of its own to watch over.
        self.functions = [
            mode for mode in function_modes() if not getattr(mode, "belongs_to_its_task", False)
        ]
        self.dispatches = dispatch_modes()
        self.streams = [torch.cuda.current_stream(device) for device in devices]


@contextlib.contextmanager
def _all(settings: _Settings, clear_cache: bool) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if settings.inference != torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(settings.inference))
            torch._C._set_grad_enabled(settings.grad)
        stack.enter_context(autocast(settings.autocast, clear_cache))
        if settings.hooks is not None and settings.hooks != hooks_of_caller():
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*settings.hooks))
        stack.enter_context(modes(settings.functions, settings.dispatches))
        yield


@contextlib.contextmanager
def _all_on_worker(settings: _Settings) -> Iterator[None]:
    with current_streams(settings.streams), _all(settings, clear_cache=False):
        yield


@contextlib.contextmanager
def _going_back(settings: _Settings) -> Iterator[None]:
    with current_streams(settings.streams), modes(settings.functions, settings.dispatches):
        yield


class OnWorker:
    """A block on a worker, a thread that has nothing put on. Any number of threads at once.

    Args:
        grad: the grad mode.
        count: intra-op threads, which the worker keeps.
        more: makes the block of what else is put on, if anything.
    """

    __slots__ = ("_count", "_grad", "_more")

    def __init__(
        self, grad: bool, count: int, more: Callable[[], AbstractContextManager[None]] | None
    ) -> None:
        self._grad = grad
        self._count = count
        self._more = more

    def __enter__(self) -> None:
        if torch.get_num_threads() != self._count:
            set_own_threads(self._count)
        torch._C._set_grad_enabled(self._grad)
        if self._more is not None:
            block = self._more()
            block.__enter__()
            _open.blocks.append(block)

    def __exit__(self, *error: Any) -> None:
        try:
            if self._more is not None and _open.blocks:
                _open.blocks.pop().__exit__(*error)
        finally:
            torch._C._set_grad_enabled(True)


class _Open(threading.local):
    """The blocks that the current thread is in."""

    def __init__(self) -> None:
        self.blocks: list[AbstractContextManager[None]] = []


_open = _Open()
