"""What a task takes over from the thread that asked for it.

torch keeps most of its modes for each thread, so a layer that runs on a worker would not see the
caller's: autocast would be lost and training run in float32 without a word. A
:class:`CallerContext` is captured in the call and put on around ``F[i,j]`` on the worker and around
``R[i,j]`` on whatever thread runs the backward. Each row:

====================  ==========================================================================
grad mode             as the caller's
inference mode        as the caller's
autocast              enabled and dtype of every device type, and whether it caches
default device        with all other torch-function modes, one of which it is
dispatch modes        as the caller's stack
context variables     a copy for each task: changes stay in the task
saved-tensor hooks    the caller's innermost pair
current streams       of each CUDA device of the pipe, and of others where it is not the default
                      one, which a worker has; in ``R`` autograd has set them
intra-op threads      in ``F`` the caller's count shared out among the pipe's CPU workers; in ``R``,
                      which runs alone on its thread, all of them
deterministic         process-wide in torch, so it is seen anyway and nothing is carried
====================  ==========================================================================

**W4** what is put on is taken off again, also after an error. The count of intra-op threads stays
with the worker, who owns its thread; :func:`set_own_threads` says how the rest of the process is
spared.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad
from torch.overrides import (
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils import _python_dispatch as dispatch

from pipert.autograd.checkpoint import hooks_of_caller
from pipert.errors import TransformError
from pipert.queues.process_lock import ProcessLock

__all__: list[str] = []

T = TypeVar("T")

_AUTOCAST_TYPES = tuple(
    kind
    for kind in ("cpu", "cuda", "xpu", "mps", "hpu", "xla", "mtia", "ipu", "maia", "privateuseone")
    if torch.amp.is_autocast_available(kind)
)

Autocast = tuple[bool, tuple[tuple[bool, torch.dtype], ...]]


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

    Args:
        devices: the CUDA devices whose current streams matter.
        cpu_workers: how many CPU workers share the caller's intra-op threads.
    """

    __slots__ = (
        "_autocast", "_dispatch_modes", "_function_modes", "_grad", "_inference", "_plain",
        "_streams", "_threads", "_threads_share", "_variables", "saved_tensor_hooks",
    )  # fmt: skip

    def __init__(self, devices: Sequence[torch.device] = (), cpu_workers: int = 0) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = _get_autocast()
        # A run inside a task has random numbers of its own to watch over.
        self._function_modes = [
            mode for mode in _function_modes() if not getattr(mode, "belongs_to_its_task", False)
        ]
        self._dispatch_modes = _dispatch_modes()
        self._variables = contextvars.copy_context()
        self.saved_tensor_hooks = hooks_of_caller()
        self._streams = [torch.cuda.current_stream(device) for device in devices]
        self._threads = torch.get_num_threads()
        self._threads_share = max(1, self._threads // max(1, cpu_workers))
        self._plain = self._autocast == _NEW_THREAD_AUTOCAST and not (
            self._inference
            or self._function_modes
            or self._dispatch_modes
            or self.saved_tensor_hooks
        )

    @property
    def grad_enabled(self) -> bool:
        """Whether a graph is to be made."""
        return self._grad and not self._inference

    def set_variable(self, variable: contextvars.ContextVar[T], value: T) -> None:
        """Let the tasks see ``value``; the caller does not. Before the first task."""
        self._variables.run(variable.set, value)

    def run_forward(self, function: Callable[..., T], *args: Any) -> T:
        """``function(*args)`` for ``F[i,j]``, on a worker: a thread with nothing put on."""
        if torch.get_num_threads() != self._threads_share:
            set_own_threads(self._threads_share)
        if self._streams:
            with _current_streams(self._streams):
                return self._run_unusual(False, function, *args)
        if not self._plain:
            return self._run_unusual(False, function, *args)
        torch._C._set_grad_enabled(self._grad)
        try:
            return self._variables.copy().run(function, *args)
        finally:
            torch._C._set_grad_enabled(True)

    def run_backward(self, function: Callable[..., T], *args: Any) -> T:
        """``function(*args)`` for ``B[i,j]``, on a worker: as the caller, but for autocast.

        What was cast in the forward is cast back by the graph.
        """
        if torch.get_num_threads() != self._threads_share:
            set_own_threads(self._threads_share)
        modes = self._function_modes, self._dispatch_modes
        if not (self._streams or any(modes)):
            return self._variables.copy().run(function, *args)
        with _current_streams(self._streams), _modes(*modes):
            return self._variables.copy().run(function, *args)

    def run_recomputation(self, function: Callable[..., T], *args: Any) -> T:
        """``function(*args)`` for ``R[i,j]``, on the thread of a backward."""
        threads = torch.get_num_threads()
        if threads == self._threads:
            return self._run_under_modes(function, *args)
        set_own_threads(self._threads)
        try:
            return self._run_under_modes(function, *args)
        finally:
            set_own_threads(threads)

    def _run_under_modes(self, function: Callable[..., T], *args: Any) -> T:
        if not self._plain or not _nothing_put_on():
            return self._run_unusual(True, function, *args)
        grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(self._grad)
        try:
            return self._variables.copy().run(function, *args)
        finally:
            torch._C._set_grad_enabled(grad)

    def _run_unusual(self, clear_cache: bool, function: Callable[..., T], *args: Any) -> T:
        grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(self._grad)
        try:
            with self._unusual(clear_cache):
                return self._variables.copy().run(function, *args)
        finally:
            torch._C._set_grad_enabled(grad)

    @contextlib.contextmanager
    def _unusual(self, clear_cache: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._inference != torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(self._inference))
                torch._C._set_grad_enabled(self._grad)
            stack.enter_context(_autocast(self._autocast, clear_cache))
            if self.saved_tensor_hooks is not None and self.saved_tensor_hooks != hooks_of_caller():
                stack.enter_context(
                    torch.autograd.graph.saved_tensors_hooks(*self.saved_tensor_hooks)
                )
            stack.enter_context(_modes(self._function_modes, self._dispatch_modes))
            yield


@contextlib.contextmanager
def _current_streams(streams: list[torch.cuda.Stream]) -> Iterator[None]:
    if not streams:
        yield
        return
    device = torch.cuda.current_device()
    before = [torch.cuda.current_stream(stream.device) for stream in streams]
    _set_streams(streams, device)
    try:
        yield
    finally:
        _set_streams(before, device)


def _set_streams(streams: list[torch.cuda.Stream], device: int) -> None:
    for stream in streams:
        torch.cuda.set_stream(stream)  # makes the stream's device the current one
    torch.cuda.set_device(device)


def set_own_threads(count: int) -> None:
    """Set the intra-op thread count of the current thread alone.

    ``torch.set_num_threads`` sets it for the current thread and as the default of threads to come.
    The default is seen and put back by a thread made for that: it starts with the default, and what
    it sets for itself is gone with it. ``get_num_threads`` comes first, because a thread that never
    asked would take the default again at its first operation.
    """
    torch.get_num_threads()
    with _default_threads.current:
        default: list[int] = []
        _on_new_thread(lambda: default.append(torch.get_num_threads()))
        torch.set_num_threads(count)
        _on_new_thread(lambda: torch.set_num_threads(default[0]))


_default_threads = ProcessLock()  # held while the default is not what it was


def _on_new_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function, name="pipert-helper", daemon=True)
    thread.start()
    thread.join()


def _get_autocast() -> Autocast:
    return torch.is_autocast_cache_enabled(), tuple(
        [
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in _AUTOCAST_TYPES
        ]
    )


def _get_new_thread_autocast() -> Autocast:
    found: list[Autocast] = []
    _on_new_thread(lambda: found.append(_get_autocast()))
    return found[0]


_NEW_THREAD_AUTOCAST = _get_new_thread_autocast()


def _set_autocast(autocast: Autocast) -> None:
    torch.set_autocast_cache_enabled(autocast[0])
    for kind, (enabled, dtype) in zip(_AUTOCAST_TYPES, autocast[1], strict=True):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


@contextlib.contextmanager
def _autocast(autocast: Autocast, clear_cache: bool) -> Iterator[None]:
    """Set what ``torch.autocast`` sets.

    The cache of cast weights is one for the process. The outermost autocast block clears it at its
    end, so that no weight is used as it was before an optimizer's step: the caller's does so after
    ``F``. A recomputation may run outside of any block, and clears the cache itself.
    """
    before = _get_autocast()
    if before == autocast:
        yield
        return
    outermost = not any(enabled for enabled, _ in before[1])
    _set_autocast(autocast)
    try:
        yield
    finally:
        _set_autocast(before)
        if outermost and clear_cache:
            torch.clear_autocast_cache()


def _nothing_put_on() -> bool:
    """Whether the current thread is like a new one, but for its grad mode."""
    return (
        not torch.is_inference_mode_enabled()
        and not torch._C._len_torch_function_stack()
        and not torch._C._len_torch_dispatch_stack()
        and _get_autocast() == _NEW_THREAD_AUTOCAST
    )


def _function_modes() -> list[Any]:
    if not torch._C._len_torch_function_stack():
        return []
    return _get_current_function_mode_stack()  # type: ignore[no-untyped-call,no-any-return]


def _dispatch_modes() -> list[Any]:
    if not torch._C._len_torch_dispatch_stack():
        return []
    return dispatch._get_current_dispatch_mode_stack()


@contextlib.contextmanager
def _modes(function_modes: list[Any], dispatch_modes: list[Any]) -> Iterator[None]:
    """Replace the current thread's stacks of modes.

    The modes are pushed as they are, not entered: they have been entered, by the caller.
    """
    old_function, old_dispatch = _function_modes(), _dispatch_modes()
    same = old_function == function_modes and old_dispatch == dispatch_modes
    if not same:
        _replace_modes(old_function, function_modes, old_dispatch, dispatch_modes)
    try:
        yield
    finally:
        if not same:
            _replace_modes(function_modes, old_function, dispatch_modes, old_dispatch)


def _replace_modes(
    functions: list[Any], new_functions: list[Any], dispatches: list[Any], new_dispatches: list[Any]
) -> None:
    for _ in functions:
        _pop_mode()  # type: ignore[no-untyped-call]
    for mode in new_functions:
        _push_mode(mode)  # type: ignore[no-untyped-call]
    for _ in dispatches:
        dispatch._pop_mode()
    for mode in new_dispatches:
        dispatch._push_mode(mode)
