"""Runs autograd's engine for the backward of a task. All backward passes of tasks go through here.

``torch.autograd.grad`` checks the shapes, dtypes and overrides of its arguments, in Python, before
it calls the engine. Gradients of a task's outputs, which come out of the engine, need no checks,
and for layers that compute next to nothing the checks take as long as the engine itself. The engine
converts dtypes on its own, sums gradients to the shapes of the outputs, and refuses what it cannot
sum. Where function modes are on, or a leaf's class overrides torch functions,
``torch.autograd.grad`` is called, so that they see it: a backward does not see the modes.

**V3** one backward has one thread: what pipert adds to the graph of a task is on the device of the
task, leaves included. The engine has a thread for each GPU, and the caller's is that of the CPU;
a node of a slice assignment changes the table of the backward, which the others read without a
lock. Tensors of several devices in a layer, and a call's ``loss.backward()``, are the user's.

Objects of a thread are here, too, that torch hands on to the threads of a backward.

The standard ways, context variables and ``threading.local``, end at the thread that starts a
backward. The objects kept here follow it to the engine's threads, of which each GPU has one.

Two rules hold for torch older than 2.13, and cost nothing elsewhere:

1. Up to 2.11 torch takes a reference to an object without counting it, and drops it later. This is
   measured at import; there each object is counted here first.
2. Up to 2.12 nothing removes an object: ``None`` takes its place. A thread that ends takes the GIL
   to drop what it holds, and aborts the process if that is exiting meanwhile, as it does without
   pipert. So a process that exits waits until such threads are gone.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from pipert import _torch
from pipert._torch import run_backward

_AT_EXIT = 1.0  # s; a thread is gone within milliseconds of its last line of Python
_holders: set[int] = set()
"""The system's numbers, which it reuses, of the threads that were left with a ``None``."""


def get_thread_local(key: str) -> Any:
    """Return the object under ``key`` of this thread, or of the one whose backward it runs."""
    return _torch.get_object(key) if _torch.has_object(key) else None


def _set_counted(key: str, value: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    _torch.set_object(key, value)


def _set_none(key: str) -> None:
    _holders.add(threading.get_native_id())
    set_thread_local(key, None)


def _is_counted() -> bool:
    """Whether torch counts its reference to an object."""
    probe = object()
    before = sys.getrefcount(probe)
    _set_counted("pipert", probe)
    return sys.getrefcount(probe) == before + 2


@atexit.register  # before the pool registers its function, which ends workers: it is called first
def _wait_for_holders() -> None:
    running = {thread.native_id for thread in threading.enumerate()}
    deadline = time.monotonic() + _AT_EXIT
    for thread in _holders - running:
        while _is_ending(thread) and time.monotonic() < deadline:
            time.sleep(0.001)


def _is_ending(thread: int) -> bool:
    """Whether a thread without Python exists, other than the engine's, which never end."""
    try:
        name = Path(f"/proc/self/task/{thread}/comm").read_text()
    except OSError:
        return False
    return not name.startswith("pt_autograd")


if _torch.remove_object is not None:  # C alone: an interrupt cannot cut it short
    set_thread_local, remove_thread_local = _torch.set_object, _torch.remove_object
else:
    set_thread_local, remove_thread_local = _set_counted, _set_none
    if _is_counted():
        set_thread_local = _torch.set_object
    remove_thread_local("pipert")


def differentiate(
    ys: Sequence[Any],
    wanted: Sequence[Any],
    dys: Sequence[Tensor],
    *,
    retain_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``wanted``, with ``None`` for those that were not used.

    Args:
        ys: tensors or gradient edges at which the backward starts.
        wanted: leaves or gradient edges. If empty, nothing is done, which is no error: all that
            were used may have been frozen since.
        dys: the gradients of ``ys``.
        retain_graph: whether the graph will be used again.
    """
    if not wanted:
        return ()
    if has_torch_function((*ys, *wanted)):
        return torch.autograd.grad(ys, wanted, dys, retain_graph, False, allow_unused=True)
    found: tuple[Tensor | None, ...] = run_backward(
        tuple(ys),
        tuple(dys),
        retain_graph,
        False,  # no graph of the gradients
        tuple(wanted),
        True,  # unused ones get None
        accumulate_grad=False,
    )
    return found


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return the ``apply`` that ``function`` inherits from the C++ base class.

    ``Function.apply`` first searches its arguments, in Python, for wrappers of ``torch.func``. A
    pipe refuses to run inside a transform, so pipert's functions never get any.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply
