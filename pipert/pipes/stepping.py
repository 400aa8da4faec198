"""``Steps``: what all pipes do in a step, forward and backward."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from pipert._typing import Value
from pipert.batch.for_step import ready_batch, split_batch
from pipert.batch.microbatch import arguments_of, as_value
from pipert.engine.runtime import Runtime
from pipert.layers.batchnorm import DeferredStats
from pipert.layers.compiling import refuse_compilation
from pipert.model.placed import Placed
from pipert.model.settings import check_timeout, refuse_keywords_of
from pipert.schedules.plan import BOUNDED, Schedule, maker_of, plan, recomputed_in_each
from pipert.stage.inner_backward import weights_beside
from pipert.stage.loss import (
    LossFunction,
    StepFunction,
    check_step,
    denominator_of,
    loss_of,
    scale_of,
)
from pipert.stage.step import Step
from pipert.workers.context import refuse_transforms

__all__: list[str] = []


class Steps(Placed):
    """A model on its devices, and how it takes a step."""

    _runtime: Runtime

    @abstractmethod
    def _entry_module(self) -> nn.Module | None:
        """Return the module that receives the arguments of a call."""

    def _batch_norm_groups(self) -> Sequence[nn.Module]:
        """Return the parts of the model whose running statistics are each noted by one worker."""
        return self._partitions

    def forward_backward(
        self,
        *args: Any,
        loss_fn: LossFunction | None = None,
        target: Value = None,
        microbatches: Iterable[Any] | None = None,
        step: StepFunction | None = None,
        schedule: str | Schedule = "1f1b",
        reduction: str = "mean",
        denominator: float | Tensor | None = None,
        loss_scale: float | Tensor | torch.amp.GradScaler | None = None,
        return_outputs: bool = False,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a mini-batch forward and backward, and add the gradients of the loss to ``.grad``.

        The backward runs on the workers like the forward, so one micro-batch can go backward while
        others still go forward. With ``'1f1b'`` partition *j* keeps the activations of at most
        ``n - j`` micro-batches; on CPU, partitions go backward at the same time.

        >>> loss = pipe.forward_backward(x, target=target, loss_fn=loss_fn)  # doctest: +SKIP
        >>> optimizer.step()  # doctest: +SKIP

        Gradients are added to ``.grad`` once all tasks have succeeded: a step that fails changes
        none, unless a parameter's hook fails while they are added. Hooks see the whole gradient,
        once. Inputs that require grad get their gradients through the caller's graph.

        Which micro-batches are recomputed depends on :attr:`checkpoint`. If that was never chosen,
        none are; but with ``'gpipe'`` and your own schedules, all except the last.

        Args:
            *args: as in :meth:`forward`.
            **kwargs: likewise.
            loss_fn: required; called with the output and the target of each micro-batch, on the
                last worker; returns a tensor of one element.
            target: any pytree; split like the arguments, and moved to the last device. Of
                ``microbatches`` an iterable with one target for each.
            microbatches: micro-batches that are ready, in place of arguments: an iterable with a
                dict of keyword arguments for each, a tuple of positional ones, or a single one.
                Nothing is split, so each may have shapes of its own; the mean is over their losses.
            step: in place of ``loss_fn``, only for :func:`pipert.pipeline`: called with each
                micro-batch, calls the model, and returns the loss, or a pair of it and an output.
            schedule: ``'1f1b'`` (default); ``'eager-1f1b'``, which keeps the activations of
                ``2 * (n - j) - 1`` micro-batches and waits for no copies; ``'interleaved'``, for
                devices with several partitions; ``'zb'``, ``'zb-h1'``, ``'zb-h2'`` and ``'zb-v'``,
                which fill the bubble with gradients of weights; ``'gpipe'``, which fills and
                drains; or a function, see :func:`pipert.schedules.plan`.
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
            The loss of the mini-batch, unscaled and without a graph, on the last device; with
            ``return_outputs`` a pair of it and what :meth:`forward` would return, without a graph;
            of ``microbatches`` a list with the output of each.

        Raises:
            ValueError: as :meth:`forward`; or the schedule or the reduction is unknown.
            TypeError: as :meth:`forward`; or ``loss_fn`` is missing, or returned
                anything else; or the denominator is no number.
            RuntimeError: gradients are disabled, or the loss does not require any.
            Exception: as :meth:`forward`; also whatever a layer raises in the backward.
        """
        refuse_compilation(is_step=True)
        refuse_transforms()
        seconds = self._timeout if timeout is None else check_timeout(timeout)
        keywords = {
            "loss_fn": loss_fn, "target": target, "microbatches": microbatches, "step": step,
            "timeout": timeout,
        }  # fmt: skip
        entry = self._entry_module()
        refuse_keywords_of(entry, keywords, len(args))
        if not self._partitions:
            raise ValueError("a pipe without layers has nothing to go backward through")
        last = self._devices[-1:]
        if step is not None:
            self._refuse_function()
        function = check_step(loss_fn, reduction, step, target)
        if microbatches is None:
            batch = split_batch(args, kwargs, target, self._chunks)
        else:
            batch = ready_batch(microbatches, target, [*args, *kwargs])
        inputs = batch.inputs
        if step is None and microbatches is not None:
            inputs = [as_value(*arguments_of(each)) for each in inputs]
        loss = loss_of(
            function, batch.targets, batch.sizes, reduction,
            denominator_of(denominator, last), scale_of(loss_scale, last),
        )  # fmt: skip
        m, n = len(inputs), len(self._partitions)
        chosen = self._checkpoint or ("never" if maker_of(schedule) in BOUNDED else "except_last")
        checkpointed = recomputed_in_each(chosen, m, n)
        planned = plan(schedule, m, n, self._runtime.workers, checkpointed)
        beside = cache(partial(weights_beside, self._partitions, (entry, loss_fn)))
        run_step = Step(loss, return_outputs, beside)
        deferred = self._deferred_batch_norm
        stats = DeferredStats(self._batch_norm_groups()) if deferred else None
        total = self._runtime.step(inputs, planned, run_step, stats, seconds, step)
        self._check_cuts()
        return (total, run_step.output) if return_outputs else total

    def _check_cuts(self) -> None:
        """Warn, after the first run, of cuts at which no partition has begun."""

    def _refuse_function(self) -> None:
        """Refuse a ``step``, unless the model's own code runs for each micro-batch."""
        raise TypeError(
            "step calls the model as a whole, which a Pipe has cut into layers; make the pipe with "
            "pipert.pipeline(module, cuts), or give loss_fn"
        )
