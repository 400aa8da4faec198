"""The lane of ``F[i,j]``: everything the task does, and every autograd piece of it, in its worker.

::

    forward, in time order                       backward, in time order (read upwards)

    receive   x from partition j-1               dx goes on to partition j-1
    copy      on copy streams j-1 -> j           Copy'      on the copy streams
    join      with the token of F[i-1,j]         Join'      releases B[i-1,j]
    wait      compute waits for the copy         Wait'
    compute   y = partition(x)                   B[i,j]
    wait      copy stream waits for compute      Wait'      compute waits for dy   <- only here
    recompute if checkpointed                    R[i,j]     while dy is still being copied
    fork      token for F[i+1,j]                 Fork'      B[i+1,j] is done
    send      y to partition j+1                 Copy'      dy arrives from partition j+1

What does nothing is left out: on CPU there are no copies and waits, without grad no autograd pieces
at all, and the first and last micro-batch have nothing to join and nobody to fork for.

The skips that a partition pops from others are further values beside ``x`` all the way, copied from
the device of the partition that stashed them; those that others pop are further values beside ``y``
and posted before it is sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipert._typing import Tensors, Value
from pipert.autograd import order
from pipert.autograd import streams as stream
from pipert.autograd import transfer
from pipert.autograd.checkpoint import Checkpoint, recompute_before
from pipert.autograd.transfer import Stream
from pipert.batch.tensors import differentiable, select, version
from pipert.layers.batchnorm import PartitionStats
from pipert.layers.call import Computation
from pipert.layers.tied import Weights
from pipert.model.split import draws
from pipert.queues.closable import ClosableQueue, QueueClosed
from pipert.schedules.clock_cycle import Forward
from pipert.skip.routes import Carried, PartitionSkips
from pipert.stage.outcome import NOT_RUN
from pipert.stage.run import Run
from pipert.status import FORWARD, WAITING, Doing
from pipert.workers.activity import Seat
from pipert.workers.turn import Turn

__all__: list[str] = []


class Lane:
    """Partition *j* in one run.

    Used by its worker alone, but for :meth:`abandon` and :meth:`give_up`.

    Args:
        run: the run.
        j: the partition's index.
        partition: its layers, on its device.
        skips: which it stashes and pops.
        borrowed: the parameters that it uses and that live on another device.
        stats: where it notes what its running statistics are to be updated by, if that is deferred.
        receive: where the inputs come from: a list of them, or the queue of the partition before.
        send: takes the output, in the order of micro-batches.
    """

    __slots__ = (
        "_borrowed", "_computation", "_copies", "_device", "_is_copied", "_receive", "_run",
        "_send", "_skips", "_stats", "_versions", "_token", "j", "progress",
    )  # fmt: skip

    def __init__(
        self,
        run: Run,
        j: int,
        partition: nn.Sequential,
        skips: PartitionSkips,
        borrowed: Weights,
        stats: PartitionStats | None,
        receive: list[Value] | ClosableQueue[Value],
        send: Callable[[Value], None],
    ) -> None:
        self.j = j
        self.progress = run.progress
        self._run = run
        self._device = run.devices[j]
        self._skips = skips
        self._borrowed = borrowed
        self._versions = [version(weight) for weight in borrowed]
        self._stats = stats
        self._receive = receive
        self._send = send
        self._token: Tensor | None = None
        sources = [*range(j)[-1:], *(k for _, k in skips.arriving)]
        readers = [*range(len(run.devices))[j + 1 : j + 2], *(k for _, k in skips.leaving)]
        # Whether values come, or may come, from other devices, and whether others copy from here.
        self._copies = j == 0 or any(run.devices[k] != self._device for k in sources)
        self._is_copied = any(run.devices[k] != self._device for k in readers)
        seed = run.seed if draws(partition) else None
        self._computation = Computation(
            partition, j, run.schedule, self._device, run.context, seed, skips, run.account
        )

    def perform(self, task: Forward, seat: Seat) -> None:
        """Do a task of this partition, or not if the run has failed before it. Never raises."""
        self.forward(task.i, seat)

    def forward(self, i: int, seat: Seat) -> None:
        """``F[i,j]``."""
        position = self._run.schedule.position(i, self.j)
        y = self._work(FORWARD, i, position, seat, self._receive_input, self._forward)
        self._deliver(y)

    def _work(
        self,
        phase: str,
        i: int,
        position: int,
        seat: Seat,
        receive: Callable[[int, Turn], Value],
        compute: Callable[[int, Value, Turn], Value],
    ) -> Value:
        """Receive and compute; ``NOT_RUN`` if the run has failed before, or fails now."""
        progress, run = self.progress, self._run
        number = run.account.run.number
        y: Any = NOT_RUN
        seat.activity.waits(Doing(number, WAITING, self.j, i))
        try:
            if position < progress.failed_at:
                x = receive(i, seat.turn)
                if x is not NOT_RUN and position < progress.failed_at:
                    seat.turn.take()
                    seat.activity.works(Doing(number, phase, self.j, i))
                    y = compute(i, x, seat.turn)
        except BaseException as error:  # noqa: B036  raised in the caller
            self._computation.note_task(error, i, phase)
            progress.fail(position, error)
        seat.activity.rests()
        return y

    def abandon(self, task: Forward, error: BaseException) -> None:
        """The task never runs. Whoever waits for its output gets none."""
        self.progress.fail(self._run.schedule.position(task.i, self.j), error)
        self._deliver(NOT_RUN)

    def give_up(self) -> None:
        """Nobody waits for the run any more, though a task may be executing. Called by the caller.

        Wakes the worker if it waits for an input, and forgets all that no task has in its hands.
        """
        if isinstance(self._receive, list):
            self._receive[:] = [NOT_RUN] * len(self._receive)
        else:
            self._receive.close()
        self._token = None  # through it the graph of the micro-batches before
        self._run.drop()

    def _deliver(self, y: Value) -> None:
        self._hand_on(y, self._send)

    def _hand_on(self, y: Value, send: Callable[[Value], None]) -> None:
        try:
            send(NOT_RUN if self._run.dropped else y)
        except QueueClosed:
            pass  # the run was given up
        if self._run.dropped:
            self._run.drop()  # again: it may have been while this came

    def _receive_input(self, i: int, turn: Turn) -> Value:
        if not isinstance(self._receive, list):
            return self._take(self._receive, turn)
        x, self._receive[i] = self._receive[i], None
        return x

    def _take(self, queue: ClosableQueue[Any], turn: Turn) -> Any:
        """The next of ``queue``; ``NOT_RUN`` if the run was given up."""
        try:
            return queue.get(turn.give_up)
        except QueueClosed:
            return NOT_RUN

    def _forward(self, i: int, x: Value, turn: Turn) -> Value:
        return self._run.context.run_forward(self._observed_forward, i, x, turn)

    def _observed_forward(self, i: int, x: Value, turn: Turn) -> Value:
        # In here a call of the pipe by an observer is one by its own task, and refused.
        account = self._run.account
        return account.forward(i, self.j, self._device, self._run_with_skips, i, x, turn)

    def _run_with_skips(self, i: int, x: Value, turn: Turn) -> Value:
        if not self._skips:
            return self._run_one(i, x, turn)
        y, leaving = self._run_one(i, Carried(x, self._fetch(i)), turn)
        for (key, k), value in zip(self._skips.leaving, leaving, strict=True):
            self._run.mail.post(key, i, k, value)
        return y

    def _fetch(self, i: int) -> tuple[Value, ...]:
        fetch = self._run.mail.fetch
        return tuple([fetch(key, i, self.j) for key, _ in self._skips.arriving])

    def _run_one(self, i: int, x: Value, turn: Turn) -> Value:
        if self._borrowed:
            self._borrow(i)
        x, copied = self._copy_in(i, x) if self._copies else (x, None)
        x = self._join(x)
        if copied is not None:
            x = self._wait_for(i, copied, x)
        y, checkpoint = self._compute(i, x)
        turn.layers_took(self._computation.layers_took)
        return self._leave(i, y, checkpoint)

    def _compute(self, i: int, x: Value) -> tuple[Value, Checkpoint | None]:
        """The layers; and what recomputes them, if the micro-batch is checkpointed."""
        computation, checkpoint = self._computation, None
        compute: Callable[[], Value]
        if i >= self._run.checkpointed or not self._run.context.grad_enabled:
            compute = partial(computation.forward, i, x)
        else:
            hooks = self._run.context.saved_tensor_hooks
            checkpoint = Checkpoint(self._recomputation_of(i), x, hooks)
            compute = partial(checkpoint.record, partial(computation.checkpointed_forward, i), x)
        y = compute() if self._stats is None else self._stats.collect(compute)
        return y, checkpoint

    def _recomputation_of(self, i: int) -> Callable[..., None]:
        """``R[i,j]``, which must reference neither the lane nor the run."""
        return partial(self._computation.recompute, i)

    def _borrow(self, i: int) -> None:
        """Copy the parameters that live elsewhere, like a call's arguments: once for the run.

        Each for itself, since they have nothing in common but the device: what is used in a call
        must not depend on what is not. Without grad they are leaves, and never inference tensors,
        so that layers may differentiate by them and changes in place are seen.
        """
        weights, self._borrowed = self._borrowed, ()
        copies: list[Tensor] = []
        grad = self._run.context.grad_enabled
        with contextlib.nullcontext() if grad else _no_graph():
            for weight in weights:
                (copy,), copied = self._copy_value(i, (weight,), None)
                if copied is not None:
                    (copy,) = self._wait_for(i, copied, (copy,))
                copies.append(copy if grad else copy.detach().requires_grad_(weight.requires_grad))
        self._computation.lend(weights, copies, self._versions)

    def _join(self, x: Value) -> Value:
        """Tie the token to the first value that can take it.

        To that alone: two values that pass through one node are both entered by a backward that
        needs only one of them.
        """
        if isinstance(x, Carried):
            return Carried(self._join(x.value), tuple([self._join(skip) for skip in x.skips]))
        if self._token is None:
            return x
        xs, rebuild = differentiable(x)
        if not xs:
            return x  # a token that nobody takes goes into the fork
        token, self._token = self._token, None
        return rebuild(order.join(xs, token))

    def _wait_for(self, i: int, copied: torch.cuda.Stream, x: Value) -> Value:
        """Let compute wait for the copy, and the copy back for compute."""
        if isinstance(x, Carried):
            skips = [self._wait_for(i, copied, skip) for skip in x.skips]
            return Carried(self._wait_for(i, copied, x.value), tuple(skips))
        return self._wait(i, x, stream.compute_stream(self._device), copied)

    def _wait(self, i: int, x: Value, waiter: Stream, awaited: Stream) -> Value:
        """Let ``waiter`` wait for ``awaited``; in the backward of ``x`` the other way round."""
        xs, rebuild = differentiable(x) if self._run.context.grad_enabled else ((), None)
        if rebuild is None or not xs:
            stream.wait(waiter, awaited)
            return x
        return rebuild(transfer.wait(xs, waiter, awaited))

    def _leave(self, i: int, y: Value, checkpoint: Checkpoint | None) -> Value:
        """What comes after compute: wait, recompute, fork."""
        copying = self._run.streams.get(self._device, i) if self._is_copied else None
        if copying is not None:
            y = self._wait(i, y, copying, stream.compute_stream(self._device))
        if not self._run.context.grad_enabled:
            return y
        ys, rebuild = differentiable(y)
        if not ys:
            return y
        if checkpoint is not None:
            ys = recompute_before(ys, checkpoint)
        last = i == self._run.schedule.m - 1
        if self._run.components.fork_join and (not last or self._token is not None):
            ys, forked = order.fork(ys, self._token)
            self._token = None if last else forked
        return rebuild(ys)

    def _copy_in(self, i: int, x: Value) -> tuple[Value, Stream]:
        """Bring ``x`` to this device; also the stream to wait for before it is read, if any.

        Skips first: they have been there for longer.
        """
        before = self.j - 1 if self.j > 0 else None
        if not isinstance(x, Carried):
            return self._copy_value(i, x, before)
        copied, skips = None, []
        for (_, source), skip in zip(self._skips.arriving, x.skips, strict=True):
            skip, target = self._copy_value(i, skip, source)
            copied = copied or target
            skips.append(skip)
        value, target = self._copy_value(i, x.value, before)
        return Carried(value, tuple(skips)), copied or target

    def _copy_value(
        self, i: int, x: Value, origin: int | None
    ) -> tuple[Value, Stream]:
        """Bring a value here from partition ``origin``, or ``None`` from a call's arguments.

        What moves is all of a call's arguments, and what a partition has on its own device. What
        a layer keeps elsewhere on purpose, such as lengths on the CPU, stays there.
        """
        home = self._device
        before = None if origin is None else self._run.devices[origin]
        if before == home:
            return x, None
        tensors, rebuild = select(x, lambda t: t.device == before if before else t.device != home)
        if not tensors:
            return x, None
        target = self._run.streams.get(home, i)
        for device in {tensor.device for tensor in tensors}:
            tensors = self._copy_from(i, device, tensors, target, origin)
        return rebuild(tensors), target

    def _copy_from(
        self,
        i: int,
        device: torch.device,
        tensors: Tensors,
        target: Stream,
        origin: int | None,
    ) -> Tensors:
        """Copy those of ``tensors`` that are on ``device``; inside the graph what belongs to it."""
        source = self._run.streams.get(device, i)
        if source is not None:
            self._run.sources[device, i] = source
        results = list(tensors)
        for in_graph in (True, False):
            places = [
                k
                for k, tensor in enumerate(tensors)
                if tensor.device == device
                and (tensor.requires_grad and self._run.context.grad_enabled) == in_graph
            ]
            if places:
                moving = tuple([tensors[k] for k in places])
                if origin is None:  # no partition has made the copy stream wait
                    moving = self._wait_for_input(device, moving, source, in_graph)
                moved = self._move(i, moving, source, target, origin)
                for k, tensor in zip(places, moved, strict=True):
                    results[k] = tensor
        return tuple(results)

    def _move(
        self, i: int, tensors: Tensors, source: Stream, target: Stream, origin: int | None
    ) -> Tensors:
        """Copy ``tensors``, all on one device and all in the graph or none, to this one."""
        in_graph = tensors[0].requires_grad and self._run.context.grad_enabled
        copy_in_graph = partial(transfer.copy, to_caller=origin is None)
        move = copy_in_graph if in_graph else stream.copy
        return move(tensors, self._device, source, target)

    def _wait_for_input(
        self,
        device: torch.device,
        tensors: Tensors,
        source: Stream,
        in_graph: bool,
    ) -> Tensors:
        """Let the copy of a call's arguments wait for the caller, and the caller for dx."""
        compute = stream.compute_stream(device)
        if in_graph and source is not None:
            return transfer.wait(tensors, source, compute)
        stream.wait(source, compute)
        return tensors

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.j} on {self._device} of {self.progress!r}>"


@contextlib.contextmanager
def _no_graph() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield
