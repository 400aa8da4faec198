"""The exceptions that pipert raises for a wrong *state*.

A wrong argument is a ``TypeError``, ``ValueError`` or ``IndexError``; what a layer raises comes out
as it is, with a note. What is left is here. Each is made fresh where it is raised: a shared
instance would gather the tracebacks of everyone who caught it.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable

from pipert.status import WorkerStatistics

__all__ = [
    "NestedCheckpointError",
    "PipeClosedError",
    "PipelineTimeout",
    "PipertError",
    "RecomputationError",
    "ReentrantCallError",
    "TransformError",
    "WorkerBusyError",
    "WorkerDiedError",
]


_log = logging.getLogger("pipert")


def add_note(error: BaseException, text: Callable[[], str]) -> None:
    """Say where ``error`` was raised, unless ``text()`` is empty.

    That this may fail, too, must not hide the error itself.
    """
    try:
        note = text()
        if note:
            error.add_note(note)
    except Exception:
        # As text: whoever keeps what was logged must not keep the tensors in an error's frames.
        _log.warning("cannot say where %s was raised: %s", type(error), traceback.format_exc())


class PipertError(RuntimeError):
    """Base of the errors below, so that a service can tell them from those of its layers."""


class PipeClosedError(PipertError):
    """The pipe was called after :meth:`Pipe.close`, or closed by another thread during the call."""


class WorkerDiedError(PipertError):
    """A worker thread, or the clock's, ended during a call.

    Only something outside pipert does that, such as an asynchronous exception thrown into the
    thread. The next call starts a new worker. Unlike :class:`PipeClosedError` nobody asked for it.
    """


class PipelineTimeout(PipertError, TimeoutError):
    """A call, or :meth:`Pipe.close`, took longer than its ``timeout``.

    The message says what each worker was doing, and where in Python. A layer that is executing
    cannot be interrupted: its worker stays with it, see :class:`WorkerBusyError`.
    """

    workers: tuple[WorkerStatistics, ...] = ()
    """What each worker was doing when the time was over."""


class WorkerBusyError(PipertError):
    """A worker is still busy with a task of a call that was given up.

    After a :class:`PipelineTimeout` calls raise this until the task is over; then they work again.
    Unlike the timeout it comes at once, and nothing was begun.
    """

    workers: tuple[WorkerStatistics, ...] = ()
    """Those that are busy, and what with."""


class ReentrantCallError(PipertError):
    """A layer called the pipe that was running it; its worker would wait for itself for ever."""


class RecomputationError(PipertError):
    """A recomputation did something else than its forward, so gradients would be wrong.

    It saved other tensors, or changed a buffer.

    Layers must be referentially transparent under checkpointing (section 3 of the paper).
    """


class NestedCheckpointError(PipertError):
    """``torch.utils.checkpoint`` was used where its recomputation would give wrong gradients.

    Inside a layer, around what draws from the CPU's random generator: it would replay other random
    numbers, because it saves the state of a generator that the workers of one process share. Or
    around a BatchNorm whose statistics are deferred: it would update them. Around a pipe, in its
    non-reentrant form: it would mix up what the workers save.
    """


class TransformError(PipertError):
    """A pipe was called inside of a ``torch.func`` transform, forward-mode differentiation, or code
    that torch.compile compiles.

    They belong to the thread that began them, so the workers would compute without. Use
    ``backward`` or ``torch.autograd.grad``; compile each layer, then wrap.
    """
