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
at all, and the first and last micro-batch have nothing to join and nobody to fork for. Skips will
enter after ``receive`` and leave before ``send``, as further values beside ``x`` and ``y``.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from pipert import stream
from pipert._typing import Tensors, Value
from pipert.autograd import order, transfer
from pipert.autograd.checkpoint import Checkpoint, recompute_before
from pipert.autograd.random_state import RunSeed, TaskRandom
from pipert.computation import Computation, Snapshot
from pipert.partition import draws
from pipert.progress import SKIPPED, Progress
from pipert.queues.closable import ClosableQueue
from pipert.stream import CopyStreams
from pipert.value import differentiable, select
from pipert.workers.context import CallerContext
from pipert.workers.turn import Turn

__all__: list[str] = []


class Lane:
    """Partition *j* in one run. Used by its worker alone, but for :meth:`skip`.

    Args:
        j: the partition's index.
        partition: its layers, on ``device``.
        device: where it computes.
        previous, following: the devices of the partitions before and after; ``None`` at the ends.
        checkpointed: how many micro-batches, from the first, are checkpointed.
        progress: the run's.
        context: the caller's.
        seed: of the run's random numbers.
        streams: the pipe's copy streams.
        receive: where the inputs come from: a list of them, or the queue of the partition before.
        send: takes the output, in the order of micro-batches.
    """

    __slots__ = (
        "_checkpointed", "_context", "_device", "_draws", "_following", "_partition", "_previous",
        "_receive", "_seed", "_send", "_snapshot", "_streams", "_token", "j", "progress",
    )  # fmt: skip

    def __init__(
        self,
        j: int,
        partition: nn.Sequential,
        device: torch.device,
        previous: torch.device | None,
        following: torch.device | None,
        checkpointed: int,
        progress: Progress,
        context: CallerContext,
        seed: RunSeed,
        streams: CopyStreams,
        receive: list[Value] | ClosableQueue[Value],
        send: Callable[[Value], None],
    ) -> None:
        self.j = j
        self.progress = progress
        self._partition = partition
        self._device = device
        self._previous = previous
        self._following = following
        self._checkpointed = checkpointed
        self._context = context
        self._seed = seed
        self._streams = streams
        self._receive = receive
        self._send = send
        self._token: Tensor | None = None
        self._draws = draws(partition)
        self._snapshot: Snapshot | None = None

    def forward(self, i: int, turn: Turn) -> None:
        """``F[i,j]``: run it, or skip it if the run has failed before it. Never raises."""
        progress = self.progress
        position = progress.schedule.position(i, self.j)
        y: Any = SKIPPED
        try:
            if position < progress.failed_at:
                x = self._receive_input(i, turn)
                if x is not SKIPPED and position < progress.failed_at:
                    turn.take()
                    y = self._context.run_forward(self._forward, i, x, turn)
        except BaseException as error:  # noqa: B036  raised in the caller
            progress.fail(position, error)
        self._send(y)

    def skip(self, i: int, error: BaseException) -> None:
        """``F[i,j]`` never runs. Whoever waits for its output gets none."""
        self.progress.fail(self.progress.schedule.position(i, self.j), error)
        self._send(SKIPPED)

    def _receive_input(self, i: int, turn: Turn) -> Value:
        if not isinstance(self._receive, list):
            return self._receive.get(turn.give_up)
        x, self._receive[i] = self._receive[i], None
        return x

    def _forward(self, i: int, x: Value, turn: Turn) -> Value:
        x, copied = self._copy_in(i, x)
        x = self._join(x)
        if copied is not None:
            x = self._wait_for(copied, x)
        computation, checkpoint = self._computation(i), None
        started = perf_counter()
        if i >= self._checkpointed or not self._context.grad_enabled:
            y = computation.forward(x)
        else:
            checkpoint = Checkpoint(computation.recompute, x, self._context.saved_tensor_hooks)
            y = checkpoint.record(computation.checkpointed_forward, x)
        turn.layers_took(perf_counter() - started)
        return self._leave(i, y, checkpoint)

    def _join(self, x: Value) -> Value:
        if self._token is None:
            return x
        xs, rebuild = differentiable(x)
        if not xs:
            return x  # the token goes into the fork
        token, self._token = self._token, None
        return rebuild(order.join(xs, token))

    def _wait_for(self, copied: torch.cuda.Stream, x: Value) -> Value:
        """Let compute wait for the copy, and the copy back for compute."""
        compute = stream.compute_stream(self._device)
        xs, rebuild = differentiable(x) if self._context.grad_enabled else ((), None)
        if rebuild is None or not xs:
            stream.wait(compute, copied)
            return x
        return rebuild(transfer.wait(xs, compute, copied))

    def _computation(self, i: int) -> Computation:
        progress = self.progress
        random = None
        if self._draws:
            place = progress.schedule.position(i, self.j)
            random = TaskRandom(self._seed, place, self._device)
        if self._snapshot is None and i < self._checkpointed and self._context.grad_enabled:
            self._snapshot = Snapshot(self._partition)
        return Computation(
            self._partition,
            i,
            self.j,
            progress.schedule.m,
            self._device,
            self._context,
            random,
            self._snapshot,
        )

    def _leave(self, i: int, y: Value, checkpoint: Checkpoint | None) -> Value:
        """What comes after compute: wait, recompute, fork."""
        copying = compute = None
        if self._following is not None and self._following != self._device:
            copying = self._streams.get(self._device, i)
            compute = stream.compute_stream(self._device)
        if not self._context.grad_enabled:
            stream.wait(copying, compute)
            return y
        ys, rebuild = differentiable(y)
        if not ys:
            stream.wait(copying, compute)
            return y
        if copying is not None:
            ys = transfer.wait(ys, copying, compute)
        if checkpoint is not None:
            ys = recompute_before(ys, checkpoint)
        last = i == self.progress.schedule.m - 1
        if not last or self._token is not None:
            ys, forked = order.fork(ys, self._token)
            self._token = None if last else forked
        return rebuild(ys)

    def _copy_in(self, i: int, x: Value) -> tuple[Value, torch.cuda.Stream | None]:
        """Bring ``x`` to this device; also the stream to wait for before it is read, if any.

        What moves is all of a call's arguments, and what partition j-1 has on its own device. What
        a layer keeps elsewhere on purpose, such as lengths on the CPU, stays there.
        """
        home, before = self._device, self._previous
        if before == home:
            return x, None
        tensors, rebuild = select(x, lambda t: t.device == before if before else t.device != home)
        if not tensors:
            return x, None
        target = self._streams.get(home, i)
        for device in {tensor.device for tensor in tensors}:
            source = self._streams.get(device, i)
            tensors = self._copy_from(device, tensors, source, target)
        return rebuild(tensors), target

    def _copy_from(
        self,
        device: torch.device,
        tensors: Tensors,
        source: torch.cuda.Stream | None,
        target: torch.cuda.Stream | None,
    ) -> Tensors:
        """Copy those of ``tensors`` that are on ``device``; inside the graph what belongs to it."""
        results = list(tensors)
        for move, in_graph in ((transfer.copy, True), (stream.copy, False)):
            places = [
                k
                for k, tensor in enumerate(tensors)
                if tensor.device == device
                and (tensor.requires_grad and self._context.grad_enabled) == in_graph
            ]
            if places:
                moving = tuple([tensors[k] for k in places])
                if self._previous is None:  # no partition has made the copy stream wait
                    moving = self._wait_for_input(device, moving, source, in_graph)
                moved = move(moving, self._device, source, target)
                for k, tensor in zip(places, moved, strict=True):
                    results[k] = tensor
        return tuple(results)

    def _wait_for_input(
        self,
        device: torch.device,
        tensors: Tensors,
        source: torch.cuda.Stream | None,
        in_graph: bool,
    ) -> Tensors:
        """Let the copy of a call's arguments wait for the caller, and the caller for dx."""
        compute = stream.compute_stream(device)
        if in_graph and source is not None:
            return transfer.wait(tensors, source, compute)
        stream.wait(source, compute)
        return tensors

    def __repr__(self) -> str:
        return f"<Lane {self.j} on {self._device} of {self.progress!r}>"
