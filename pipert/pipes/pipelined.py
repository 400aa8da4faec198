"""``Pipelined``: what all pipes can do, from running mini-batches to closing."""

from __future__ import annotations

import logging
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Self

import torch

from pipert._typing import Value
from pipert.any_model.shared_state import LeftBehind
from pipert.batch.joining import JoinNumbers, gather
from pipert.batch.microbatch import arguments_of, as_value, ready, scatter_with_sizes
from pipert.engine.runtime import Function, Runtime
from pipert.engine.timeout import still_busy
from pipert.errors import PipelineTimeout
from pipert.layers.batchnorm import DeferredStats
from pipert.layers.compiling import refuse_compilation
from pipert.layers.phase import is_recomputing
from pipert.model.settings import check_timeout, refuse_keywords_of
from pipert.observe.observers import Observer
from pipert.pipes.stepping import Steps
from pipert.schedules.plan import recomputed_in_each
from pipert.stage.assembly import Model
from pipert.status import Statistics
from pipert.timeline.timeline import Record, Timeline
from pipert.workers.context import refuse_transforms

__all__: list[str] = []

_log = logging.getLogger("pipert")

when_made: list[Callable[[Pipelined], None]] = []
"""Functions to call with each new pipe; for programs that run others, such as ``traced_script``."""


class Pipelined(Steps):
    """A model on its devices, and the threads that run it."""

    _own = Steps._own | {"_left", "_runtime", "_stop"}

    is_pipe = True  # tells an enclosing pipe that skips and statistics in here are not its own

    @abstractmethod
    def _model(self) -> Model:
        """Return the model as the runtime runs it."""

    def _start(self) -> None:
        self._left = LeftBehind(self._batch_norm_groups())
        self._runtime = Runtime(self._model(), self._devices, self._workers)
        # The pool's method: a finalizer must not reference the object that it is for.
        self._stop = weakref.finalize(self, self._runtime.pool.stop)
        self._stop.atexit = False
        for tell in when_made:
            tell(self)

    def forward(self, *args: Any, timeout: float | None = None, **kwargs: Any) -> Value:
        """Run a mini-batch through all partitions.

        Args:
            *args: arguments of the first layer, any pytrees, on any device; each later layer gets
                the output of the one before. Tensors with at least one dimension are split along
                dimension 0 into ``min(chunks, rows)`` micro-batches, whose sizes differ by at most
                one. Everything else, and what is wrapped in :class:`Replicate`, goes whole to each.
            **kwargs: likewise.
            timeout: seconds that this call may take, in place of the pipe's limit; ``math.inf`` for
                no limit. Not passed to the first layer.

        Returns:
            The last layer's output on the last device: tensors concatenated along dimension 0,
            0-dimensional ones stacked to ``(micro-batches,)``, other leaves once if they are equal.

        Raises:
            ValueError: arguments disagree on the number of rows, or outputs cannot be joined.
            TypeError: an argument hides rows that cannot be split.
            PipeClosedError: the pipe is closed, or was closed during the call.
            PipelineTimeout: the outputs were not ready in time.
            WorkerBusyError: a layer of a call that timed out has not returned yet.
            TransformError: called inside a ``torch.func`` transform or forward-mode
                differentiation.
            Exception: whatever a layer raises, with a note that says where.
        """
        refuse_compilation()
        refuse_transforms()
        seconds = self._timeout if timeout is None else check_timeout(timeout)
        if timeout is not None:
            refuse_keywords_of(self._entry_module(), {"timeout": timeout}, len(args))
        if not self._partitions:
            if len(args) != 1 or kwargs:
                raise TypeError("a pipe without layers takes one positional argument")
            return args[0]
        return self._call(args, kwargs, self._chunks, seconds)

    def _call(
        self, args: Any, kwargs: dict[str, Any], chunks: int, seconds: float | None,
        function: Function = None, join_numbers: JoinNumbers | None = None,
    ) -> Value:  # fmt: skip
        """Run a mini-batch forward through the model, or through a ``function`` that calls it."""
        inputs, sizes = scatter_with_sizes(args, kwargs, chunks)
        deferred = self._deferred_batch_norm and not is_recomputing()
        stats = DeferredStats(self._batch_norm_groups()) if deferred else None
        checkpointed = recomputed_in_each(self.checkpoint, len(inputs), len(self._partitions))
        refuse_compilation(recomputes=any(checkpointed))
        with self._left.inspecting(len(inputs) > 1 and torch.is_grad_enabled()):
            found = self._runtime.call(inputs, checkpointed, stats, seconds, function)
        outputs = gather(found, sizes, join_numbers)
        if stats is not None:
            stats.commit()
        return outputs

    def map(
        self, microbatches: Iterable[Any], *, timeout: float | None = None
    ) -> Iterator[Value]:
        """Run micro-batches as they come, such as a whole data set; yield their outputs in order.

        Partitions are busy with the next ones while the last are on their way, so that the pipe
        drains once, at the end. At most ``2 n + 1`` are in flight. Each is a call of its own.

        >>> with torch.no_grad():  # doctest: +SKIP
        ...     found = [y.argmax(-1).cpu() for y in pipe.map(batch["x"] for batch in loader)]

        Args:
            microbatches: as in :meth:`forward_backward`; read as needed. If that raises, or the
                iterator is closed, those in flight are cancelled.
            timeout: as in :meth:`forward`, for each of them.

        Raises:
            TypeError: ``microbatches`` is one batch, or no iterable.
            Exception: as :meth:`forward`.
        """
        refuse_compilation()
        refuse_transforms()
        seconds = self._timeout if timeout is None else check_timeout(timeout)
        values = (as_value(*arguments_of(each)) for each in ready(microbatches))
        if not self._partitions:
            return values
        checkpointed = recomputed_in_each(self.checkpoint, 1, len(self._partitions))
        return self._runtime.map(values, checkpointed, seconds)

    def record(self) -> AbstractContextManager[Timeline]:
        """Record what each device does in the calls that begin inside the block.

        >>> with pipe.record() as timeline:  # doctest: +SKIP
        ...     loss_fn(pipe(x), target).backward()
        >>> print(timeline.report())  # doctest: +SKIP

        Records forward, recomputation and backward, on any thread, while the block is open. On CUDA
        the devices are synchronised once, at its beginning; the calls are not. Each task is kept,
        about a kilobyte with its backward, so record a few steps, not a whole training.
        """
        return Record(self._runtime.counters, self._runtime.devices, self._runtime.workers)

    def statistics(self) -> Statistics:
        """Return counts of what the pipe has done, and what its workers do now. Thread-safe."""
        return self._runtime.statistics()

    def add_observer(self, observer: Observer) -> None:
        """Tell ``observer`` about all calls from now on. Copies of the pipe have no observers."""
        self._runtime.counters.add_observer(observer)

    def remove_observer(self, observer: Observer) -> None:
        """Stop telling ``observer`` about calls."""
        self._runtime.counters.remove_observer(observer)

    def close(self, timeout: float | None = None) -> None:
        """End the threads and wait for them. Later calls are refused; closing again is fine.

        May be called from any thread. A call that is running is cancelled and raises
        :class:`PipeClosedError`. From inside a layer the threads are ended, but not waited for. The
        layers and their parameters remain usable.

        Args:
            timeout: seconds to wait at most; default: the pipe's.

        Raises:
            PipelineTimeout: a layer has not returned in time. Its thread ends when it returns.
        """
        self._runtime.close(self._timeout if timeout is None else check_timeout(timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        stuck = self._runtime.waiting.stuck()
        if error is not None and stuck:
            self._stop()  # without waiting: a layer that never returns must not hide the error
            _log.warning("%s", still_busy(stuck))
            return
        try:
            self.close()
        except PipelineTimeout as timed_out:
            if error is None:
                raise
            _log.warning("%s", timed_out)  # the error being raised matters more

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the threads: a copy starts its own."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_left", "_runtime", "_stop")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._start()
