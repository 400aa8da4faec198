"""Reads torch's settings of the current thread, and replaces them for a while."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from pipert import _torch
from pipert.queues.process_lock import ProcessLock

T = TypeVar("T")

Autocast = tuple[bool, tuple[tuple[bool, torch.dtype], ...]]


@contextlib.contextmanager
def current_streams(streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
    """Make these the current streams of their devices."""
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


def _set_streams(streams: Sequence[torch.cuda.Stream], device: int) -> None:
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


@contextlib.contextmanager
def autocast(settings: Autocast) -> Iterator[None]:
    """Set what ``torch.autocast`` sets.

    The cache of cast weights is process-wide. The outermost autocast block clears it at its end, so
    that no weight is used as it was before an optimizer's step: the caller's block does so.
    """
    before = get_autocast()
    _set_autocast(settings)
    try:
        yield
    finally:
        _set_autocast(before)


@contextlib.contextmanager
def modes(functions: list[Any], dispatches: list[Any]) -> Iterator[None]:
    """Replace the stacks of modes.

    The modes are pushed, not entered: the caller has entered them.
    """
    before = _torch.function_modes(), _torch.dispatch_modes()
    _set_modes(functions, dispatches)
    try:
        yield
    finally:
        _set_modes(*before)


def _set_modes(functions: list[Any], dispatches: list[Any]) -> None:
    for _ in _torch.function_modes():  # not by their methods, which may do more
        _torch.pop_function_mode()
    for mode in functions:
        _torch.push_function_mode(mode)
    for _ in _torch.dispatch_modes():
        _torch.pop_dispatch_mode()
    for mode in dispatches:
        _torch.push_dispatch_mode(mode)
