"""Defines the exceptions that pipert raises for a wrong *state*, and its warnings.

A wrong argument raises ``TypeError``, ``ValueError`` or ``IndexError``. An exception that a layer
raises propagates unchanged, with a note. All others are here. Each raise creates a new instance,
since a shared one would accumulate the tracebacks of everyone who caught it.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable

from pipert.status import WorkerStatistics

__all__ = [
    "NestedCheckpointError",
    "NotBatchFirstWarning",
    "PipeClosedError",
    "PipelineTimeout",
    "PipertError",
    "RecomputationError",
    "ReentrantCallError",
    "SharedStateWarning",
    "TransformError",
    "WholeBatchWarning",
    "WorkerBusyError",
    "WorkerDiedError",
]

_log = logging.getLogger("pipert")


def add_note(error: BaseException, text: Callable[[], str]) -> None:
    """Adds the note ``text()``, which says where ``error`` was raised, unless it is empty.

    A failure to make the note is logged, and does not hide the error itself.
    """
    try:
        note = text()
        if note:
            error.add_note(note)
    except Exception:
        # As text, so that a handler that keeps records does not keep the tensors in the frames.
        _log.warning("cannot say where %s was raised: %s", type(error), traceback.format_exc())


class PipertError(RuntimeError):
    """Base class of pipert's errors, so that a service can tell them from those of its layers."""


class PipeClosedError(PipertError):
    """The pipe was called after :meth:`Pipe.close`, or closed by another thread during the call."""


class WorkerDiedError(PipertError):
    """A worker thread, or the clock's, ended during a call.

    Only something outside pipert can end it, such as an asynchronous exception thrown into the
    thread. The next call starts a new worker. Unlike with :class:`PipeClosedError`, nobody asked
    for the end.
    """


class PipelineTimeout(PipertError, TimeoutError):
    """A call, or :meth:`Pipe.close`, took longer than its ``timeout``.

    The message says what each worker was doing, and at which line of Python. A layer that is
    executing cannot be interrupted: its worker stays busy, see :class:`WorkerBusyError`.
    """

    workers: tuple[WorkerStatistics, ...] = ()
    """What each worker was doing when the time ran out."""


class WorkerBusyError(PipertError):
    """A worker is still busy with a task of an abandoned call.

    After a :class:`PipelineTimeout`, calls raise this until the task is over; then they work again.
    Unlike the timeout, it is raised at once, before anything starts.
    """

    workers: tuple[WorkerStatistics, ...] = ()
    """The busy workers and their tasks."""


class ReentrantCallError(PipertError):
    """A call would wait for itself for ever.

    A layer called the pipe that runs it, or imports a module that the calling thread is importing.
    """


class RecomputationError(PipertError):
    """A recomputation did something different from its forward, so gradients would be wrong.

    It returned other values, shapes or dtypes, or saved another number of tensors. Other values are
    detected at the end of a step, before any gradient arrives, or of a backward.

    Layers must be referentially transparent under checkpointing (section 3 of the paper).
    """


class NestedCheckpointError(PipertError):
    """``torch.utils.checkpoint`` was used where recomputation gives wrong gradients or statistics.

    * Inside a layer, around a BatchNorm with deferred statistics: it would update them again.
    * Around a cut, as part of a function whose beginning is in another partition.
    * Around a pipe, in its non-reentrant form: it would mix up what the workers save.
    """


class TransformError(PipertError):
    """A pipe was called inside a ``torch.func`` transform, forward-mode differentiation, or code
    that ``torch.compile``, ``torch.export`` or ``torch.jit`` traces.

    These apply only to the thread that began them, not to the workers. Use ``backward`` or
    ``torch.autograd.grad``; compile each layer, then wrap the layers.

    Also raised for a layer that differentiates in forward mode while another thread does, as torch
    has one level for the whole process. Use ``torch.func.jacrev`` or ``vjp``, or a lock around it.
    And for ``torch.cond`` and its like, with gradients, where tasks run at the same time.
    """


class NotBatchFirstWarning(UserWarning):
    """A layer has time in dimension 0, along which a pipe splits: torch's ``batch_first=False``.

    The remedy is ``batch_first=True``. Layers that transpose the input of such a layer are right
    all the same; if you have them, ignore this::

        warnings.filterwarnings("ignore", category=pipert.NotBatchFirstWarning)
    """


class SharedStateWarning(UserWarning):
    """A ``forward`` keeps a value on a module across a cut, or leaves one with a graph there.

    Code behind the cut, or after the call, may read another micro-batch's value. The remedy is a
    local variable, a value that is returned, or a ``ContextVar``. If nothing reads it, ignore::

        warnings.filterwarnings("ignore", category=pipert.SharedStateWarning)
    """


class WholeBatchWarning(UserWarning):
    """A layer depends on the whole mini-batch, as ``nn.Embedding(scale_grad_by_freq=True)`` does.

    In a pipe it sees a micro-batch at a time. If that is what you want, ignore this::

        warnings.filterwarnings("ignore", category=pipert.WholeBatchWarning)
    """
