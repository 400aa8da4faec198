"""``PipeBase``: runs mini-batches, records, observes and closes, for all kinds of pipes."""

from __future__ import annotations

import logging
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from itertools import starmap
from typing import Any, Self

import torch
from torch import Tensor, nn

from pipert._typing import Value
from pipert.any_model.shared_state import SharedState
from pipert.batch.joining import JoinNumbers, gather
from pipert.batch.microbatch import (
    arguments_of,
    as_value,
    batch_of_step,
    ready,
    scatter_with_sizes,
)
from pipert.engine.runtime import Function, Runtime
from pipert.engine.waiting import still_busy
from pipert.errors import PipelineTimeout
from pipert.layers.batchnorm import DeferredStats
from pipert.layers.compiling import refuse_tracers
from pipert.model.devices import refuse_other_devices
from pipert.model.settings import (
    OF_CALLS,
    OF_STEPS,
    check_keywords,
    check_timeout,
)
from pipert.observe.event import Observer
from pipert.observe.timeline import Timeline
from pipert.pipes.settings import Settings
from pipert.recompute.public import is_recomputing
from pipert.schedules.plan import BOUNDED, Schedule, maker_of, plan, recomputed_in_each
from pipert.stage.assembly import Layered
from pipert.stage.backward import unpartitioned_weights
from pipert.stage.loss import Loss, LossFunction, StepFunction, own_loss
from pipert.stage.loss_checks import (
    LossChecks,
    StepCall,
    check_step,
    denominator_of,
    scale_of,
)
from pipert.stage.step import Step
from pipert.status import Statistics

_log = logging.getLogger("pipert")


class PipeBase(Settings):
    """A model on its devices, and the threads that run it; its arguments are ``Pipe``'s."""

    is_pipe = True  # tells an enclosing pipe that skips and statistics in here are not its own

    _devices: list[torch.device]
    _workers: list[int]

    @abstractmethod
    def _model(self) -> Layered:
        """Return the model as the runtime runs it."""

    def _start(self) -> None:
        self._runtime = Runtime(self._model(), self._devices, self._workers)
        self._left = SharedState(self._runtime.model.norm_parts)
        self._checks = LossChecks()
        # The pool's method: a finalizer must not reference the object that it is for.
        self._stop = weakref.finalize(self, self._runtime.pool.stop)
        self._stop.atexit = False

    @property
    def devices(self) -> list[torch.device]:
        """The device of each partition, as torch knows it: logical CPU devices are ``cpu``."""
        return list(self._devices)

    @property
    def partitions(self) -> tuple[nn.Sequential, ...]:
        """The partitions, each an ``nn.Sequential`` of the module's own layers."""
        return self._partitions

    def _limit_of_call(self, timeout: float | None, is_step: bool = False) -> float | None:
        """Return the seconds that a call may take; refuse it where no pipe can run."""
        refuse_tracers(is_step)
        return self._timeout if timeout is None else check_timeout(timeout)

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
        seconds = self._limit_of_call(timeout)
        entry = self._runtime.model.entry
        check_keywords(entry, OF_CALLS, {"timeout": timeout}, len(args), kwargs)
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
        stats = DeferredStats(self._runtime.model.norm_parts) if deferred else None
        checkpointed = recomputed_in_each(self.checkpoint, len(inputs), len(self._partitions))
        with self._left.inspect_what_is_left(len(inputs) > 1 and torch.is_grad_enabled()):
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
        seconds = self._limit_of_call(timeout)
        checkpointed = recomputed_in_each(self.checkpoint, 1, len(self._partitions))
        values = starmap(as_value, map(arguments_of, ready(microbatches)))
        return self._runtime.map(values, checkpointed, seconds) if self._partitions else values

    def forward_backward(
        self,
        *args: Any,
        loss_fn: LossFunction | None = None,
        target: Value = None,
        microbatches: Iterable[Any] | None = None,
        step: StepFunction | None = None,
        schedule: str | Schedule | None = None,
        reduction: str = "mean",
        denominator: float | Tensor | None = None,
        loss_scale: float | Tensor | torch.amp.GradScaler | None = None,
        return_outputs: bool = False,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a mini-batch forward and backward, and add the gradients of the loss to ``.grad``.

        The backward runs on the workers like the forward, so one micro-batch can go backward while
        others still go forward; on CPU, partitions go backward at the same time.

        >>> loss = pipe.forward_backward(x, target=target, loss_fn=loss_fn)  # doctest: +SKIP
        >>> optimizer.step()  # doctest: +SKIP

        Gradients are added to ``.grad`` once all tasks have succeeded: a step that fails changes
        none, unless a parameter's hook fails while they are added. Hooks see the whole gradient,
        once. Inputs that require grad get their gradients through the caller's graph.

        If you have not chosen a :attr:`checkpoint`, nothing is recomputed; but with ``'gpipe'`` and
        schedules of your own, all micro-batches except the last.

        Args:
            *args: as in :meth:`forward`.
            **kwargs: likewise.
            loss_fn: called with the output and the target of each micro-batch, on the last worker;
                returns a tensor of one element. Default, if there is neither a target nor a
                ``step``: the loss that the model has computed, ``output.loss``,
                ``output["loss"]``, or a first element that is a number. If that is a sum divided by
                ``num_items_in_batch``, as that of causal models of transformers, it is the loss of
                the mini-batch; else its means are weighed by rows.
            target: any pytree; split like the arguments, and moved to the last device. With
                ``microbatches``, an iterable with one target for each.
            microbatches: micro-batches that are ready, in place of arguments: an iterable with a
                dict of keyword arguments for each, a tuple of positional ones, or a single one.
                Nothing is split, so each may have shapes of its own; the mean is over their losses.
            step: in place of ``loss_fn``, only for :func:`pipert.pipeline`: called with each
                micro-batch, calls the model, and returns the loss, or a pair of it and an output.
            schedule: as in :class:`Pipe`, for this step. Default: that of the pipe.
            reduction: ``'mean'`` (default) if ``loss_fn`` takes the mean over the rows: then the
                loss is that of the mini-batch, however it was split. ``'sum'`` adds the losses up.
            denominator: a number or a tensor of one element; then ``loss_fn`` returns sums, and the
                loss is their total divided by it. For means over something else than rows, such as
                ``(target != -100).sum()`` with ``ignore_index``. Default: nothing is divided.
            loss_scale: a factor by which the loss is multiplied before the backward, or the
                ``GradScaler`` that holds it. Default: not scaled.
            return_outputs: whether to return the outputs as well; default: no.
            timeout: as in :meth:`forward`.

        Returns:
            The loss of the mini-batch, unscaled, on the last device. It has no graph, since the
            backward is done: call no ``backward()``. With ``return_outputs``, a pair of the loss
            and what :meth:`forward` would return, without a graph; with ``microbatches``, a list
            of their outputs.

        Raises:
            ValueError: as :meth:`forward`; or the schedule or the reduction is unknown.
            TypeError: as :meth:`forward`; or ``loss_fn`` is missing, or returned
                anything else; or the denominator is no number.
            RuntimeError: gradients are disabled, or the loss does not require any.
            Exception: as :meth:`forward`; also whatever a layer raises in the backward.
        """
        seconds = self._limit_of_call(timeout, is_step=True)
        own = {"loss_fn": loss_fn, "target": target, "microbatches": microbatches, "step": step}
        own["timeout"] = timeout
        check_keywords(self._runtime.model.entry, OF_STEPS, own, len(args), kwargs)
        if not self._partitions:
            raise ValueError("a pipe without layers has nothing to go backward through")
        function = self._runtime.model.function_of(step)
        if loss_fn is None and target is None and step is None:
            loss_fn = own_loss
        call = StepCall(
            args, kwargs, check_step(loss_fn, reduction, function, target), function, target,
            microbatches, self._chunks, self._schedule if schedule is None else schedule,
            reduction, denominator, loss_scale, return_outputs,
        )  # fmt: skip
        return self._take_step(call, seconds)

    def _take_step(self, call: StepCall, seconds: float | None) -> Any:
        """Run a step: split the mini-batch, plan, and run it forward and backward."""
        batch = batch_of_step(
            call.args, call.kwargs, call.target, call.chunks, call.microbatches,
            as_arguments=call.own is None,
        )  # fmt: skip
        m, n, last = len(batch.inputs), len(self._partitions), self._devices[-1]
        loss = Loss(
            call.loss_fn, batch.targets, batch.sizes, call.reduction,
            denominator_of(call.denominator, last), scale_of(call.loss_scale, last),
            self._checks.of_step(call, batch),
        )  # fmt: skip
        if self._checks.steps == 1 and call.microbatches is None:
            self._advise(batch.inputs)
        checkpointed = recomputed_in_each(self._checkpoint_of(call.schedule), m, n)
        planned = plan(call.schedule, m, n, self._runtime.workers, checkpointed)
        model, partitions = self._runtime.model, self._partitions
        others = model.entry, call.loss_fn
        extra_parameters = cache(lambda: unpartitioned_weights(partitions, others))
        step = Step(loss, call.return_outputs, extra_parameters)
        stats = DeferredStats(model.norm_parts) if self._deferred_batch_norm else None
        total = self._runtime.step(batch.inputs, planned, step, stats, seconds, call.own)
        return (total, step.output) if call.return_outputs else total

    def record(self) -> AbstractContextManager[Timeline]:
        """Record what each device does in the calls that begin inside the block.

        >>> with pipe.record() as timeline:  # doctest: +SKIP
        ...     loss_fn(pipe(x), target).backward()
        >>> print(timeline.report())  # doctest: +SKIP

        Records forward, recomputation and backward, on any thread, while the block is open. On CUDA
        the devices are synchronised once, at its beginning; the calls are not. Each task is kept,
        about a kilobyte with its backward, so record a few steps, not a whole training.
        """
        return self._runtime.trace.record(self._runtime.devices, self._runtime.workers)

    def statistics(self) -> Statistics:
        """Return counts of what the pipe has done, and what its workers do now. Thread-safe."""
        return self._runtime.statistics()

    def add_observer(self, observer: Observer) -> None:
        """Tell ``observer`` about all calls from now on. Copies of the pipe have no observers."""
        self._runtime.trace.add_observer(observer)

    def remove_observer(self, observer: Observer) -> None:
        """Stop telling ``observer`` about calls."""
        self._runtime.trace.remove_observer(observer)

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
        own = "_checks", "_left", "_runtime", "_stop"
        return {k: v for k, v in self.__dict__.items() if k not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._start()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Implement ``to``, ``half``, ``cuda``, ``to_empty`` and similar methods."""
        refuse_other_devices(fn, self._devices)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        return f"chunks={self._chunks}, checkpoint={self._checkpoint_of(self._schedule)!r}"

    def _checkpoint_of(self, schedule: str | Schedule) -> str | tuple[str, ...]:
        """Return the checkpoint of a step: as chosen, or what its schedule needs."""
        return self._checkpoint or ("never" if maker_of(schedule) in BOUNDED else "except_last")
