"""A lane of a whole training step: ``F[i,j]``, ``R[i,j]`` and ``B[i,j]`` are tasks, all of them.

In ``pipe(x)`` a lane builds autograd nodes, and the backward is autograd's walk along them. Here
the graph ends at the borders of the partition, and tasks do what the nodes do there:

============  =================================================================================
in the graph  here
============  =================================================================================
Copy, Wait    a copy of the value in ``F``, of the gradient in ``B``; both on copy streams
Fork, Join    none: the schedule says what comes after what
Recompute     ``R[i,j]``, a task
B[i,j]        ``torch.autograd.grad`` from the outputs of the partition to its inputs and weights
============  =================================================================================

On CPU each worker goes backward on its own thread, so partitions do so at the same time. A
micro-batch is kept from its ``F`` to its ``B``: how many are kept is up to the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from pipert._typing import Tensors, Value
from pipert.autograd import order
from pipert.autograd import streams as stream
from pipert.autograd.checkpoint import Checkpoint
from pipert.autograd.transfer import Stream
from pipert.batch.tensors import differentiable
from pipert.queues.closable import ClosableQueue
from pipert.skip.routes import Carried
from pipert.stage.gradients import Gradients, leaves_behind
from pipert.stage.lane import Lane
from pipert.stage.outcome import NOT_RUN
from pipert.stage.step import Step
from pipert.status import BACKWARD, FORWARD, RECOMPUTATION
from pipert.workers.activity import Seat
from pipert.workers.turn import Turn

__all__: list[str] = []

Arrived = Sequence[Tensor | None]


Edges = tuple[GradientEdge, ...]


class Kept(NamedTuple):
    """What ``B[i,j]`` needs of ``F[i,j]``: places in its graph, and no values, which may be large.

    What the backward reads of the inputs and outputs themselves, the graph has saved.
    """

    xs: Edges
    """The inputs that want a gradient, those of arriving skips behind those of the value."""
    arriving: tuple[int, ...]
    """How many of them each arriving skip has."""
    ys: Edges
    """The outputs that get a gradient, those of leaving skips behind those of the value."""
    leaving: tuple[int, ...]
    """How many of them each leaving skip has."""
    loss: Tensor | None
    """Of the last partition, which has no other output."""
    checkpoint: Checkpoint | None


class StepLane(Lane):
    """Partition *j* in one step. Used by its worker alone, but for what :class:`Lane` says.

    Args:
        step: what the lanes of the step share.
        arrive: where gradients of its outputs come from; ``None`` for the last partition.
        depart: takes gradients of its inputs, in the order of the schedule.
    """

    __slots__ = (
        "_arrive", "_depart", "_kept", "_step", "_timetable", "_weights", "_xs", "gradients",
    )  # fmt: skip

    def __init__(
        self,
        step: Step,
        arrive: ClosableQueue[Any] | None,
        depart: Callable[[Any], None],
        *of_lane: Any,
    ) -> None:
        super().__init__(*of_lane)
        self.gradients = Gradients()
        self._step = step
        self._timetable = step.schedule
        self._arrive = arrive
        self._depart = depart
        self._kept: dict[int, Kept] = {}
        self._xs: Edges = ()  # of the F that is at work
        self._weights: dict[Tensor, Tensor] = {}  # what stands for weights in this lane

    def perform(self, task: Any, seat: Seat) -> None:
        """Do a task of this partition, or not if the step has failed before it. Never raises."""
        i, position = task.i, self._timetable.position(task)
        if task.kind == "F":
            y = self._work(FORWARD, i, position, seat, self._receive_input, self._forward)
            self._deliver(y)
        elif task.kind == "R":
            self._work(RECOMPUTATION, i, position, seat, _nothing, self._recompute)
        else:
            gradients = self._work(
                BACKWARD, i, position, seat, self._receive_gradients, self._backward
            )
            self._hand_on(gradients, self._depart)

    def abandon(self, task: Any, error: BaseException) -> None:
        self.progress.fail(self._timetable.position(task), error)
        if task.kind == "F":
            self._deliver(NOT_RUN)
        elif task.kind == "B":
            self._hand_on(NOT_RUN, self._depart)

    def give_up(self) -> None:
        super().give_up()
        if self._arrive is not None:
            self._arrive.close()
        self._let_go()

    def _hand_on(self, y: Value, send: Callable[[Value], None]) -> None:
        super()._hand_on(y, send)
        if self._run.dropped:
            self._let_go()  # again: what was given up may have been at work

    def _let_go(self) -> None:
        self._kept.clear()
        self.gradients.clear()
        self._step.drop()

    # Forward --------------------------------------------------------------------------------------

    def _borrow(self, i: int) -> None:
        """Copies of parameters that live elsewhere; stand-ins for those that have hooks.

        Autograd calls the hooks of a tensor whenever it comes by with a part of its gradient. They
        are to see the whole, once, so that part is the stand-in's.
        """
        weights, self._borrowed = self._borrowed, ()
        leaves = []
        for weight in weights:
            (copy,), copied = self._copy_value(i, (weight.detach(),), None)
            if copied is not None:
                stream.wait(stream.compute_stream(self._device), copied)
            leaves.append(copy.requires_grad_(weight.requires_grad))
        self._weights.update(zip(leaves, weights, strict=True))
        self._computation.lend(weights, leaves, self._versions)

    def _join(self, x: Value) -> Value:
        return x

    def _wait(self, i: int, x: Value, waiter: Stream, awaited: Stream) -> Value:
        stream.wait(waiter, awaited)
        return x

    def _wait_for_input(
        self, device: torch.device, tensors: Tensors, source: Stream, in_graph: bool
    ) -> Tensors:
        stream.wait(source, stream.compute_stream(device))
        return tensors

    def _move(
        self, i: int, tensors: Tensors, source: Stream, target: Stream, origin: int | None
    ) -> Tensors:
        plain = tuple([tensor.detach() for tensor in tensors])
        moved = stream.copy(plain, self._device, source, target)
        for old, new in zip(tensors, moved, strict=True):
            new.requires_grad_(old.requires_grad)
        return moved

    def _compute(self, i: int, x: Value) -> tuple[Value, Checkpoint | None]:
        skips = x.skips if isinstance(x, Carried) else ()
        arriving = tuple([len(differentiable(skip)[0]) for skip in skips])
        xs, rebuild = differentiable(x)
        if xs:
            xs = order.enter(xs)
            self._xs = edges_of(xs)
            x = rebuild(xs)
            del xs
        y, checkpoint = super()._compute(i, x)
        if self._arrive is None:
            y = Carried(self._lose(i, y.value if isinstance(y, Carried) else y), ())
        return (y, arriving), checkpoint

    def _leave(self, i: int, y: Value, checkpoint: Checkpoint | None) -> Value:
        y, arriving = y
        xs, self._xs = self._xs, ()
        self._let_copy(i)
        ys, rebuild = differentiable(y)
        skips = y.skips if isinstance(y, Carried) else ()
        leaving = tuple([len(differentiable(skip)[0]) for skip in skips])
        if ys:
            loss = ys[0] if self._arrive is None else None
            self._kept[i] = Kept(xs, arriving, edges_of(ys), leaving, loss, checkpoint)
        if self._arrive is None:
            return Carried(None, ()) if self._skips else None
        return rebuild(tuple([tensor.detach().requires_grad_() for tensor in ys]))

    def _lose(self, i: int, y: Value) -> Tensor:
        """The loss of micro-batch ``i``, unscaled; its share of the whole is noted."""
        step, loss = self._step, self._step.loss
        target, copied = self._copy_value(i, leaf_inputs(loss.targets[i]), None)
        if copied is not None:
            self._wait(i, target, stream.compute_stream(self._device), copied)
        wanting = differentiable(loss.targets[i])[0]
        self._weights.update(zip(differentiable(target)[0], wanting, strict=True))
        schedule, seed = self._run.schedule, self._run.seed
        place = (schedule.m + schedule.n) * schedule.n + i  # no task's
        own = loss.compute(place, seed, self._device, y, target)
        if step.keep_outputs:
            step.outputs[i] = detached(y)
        step.losses[i] = own.detach() * loss.shares[i]
        return own

    def _let_copy(self, i: int) -> None:
        """Let others copy what this lane has computed for micro-batch ``i``."""
        if self._is_copied or self._copies:
            copying = self._run.streams.get(self._device, i)
            stream.wait(copying, stream.compute_stream(self._device))

    # Recomputation and backward -------------------------------------------------------------------

    def _recompute(self, i: int, _: None, turn: Turn) -> None:
        kept = self._kept.get(i)
        if kept is not None and kept.checkpoint is not None:
            self._computation.on_worker = True
            try:
                kept.checkpoint.recompute()
            finally:
                self._computation.on_worker = False
            # From now on it belongs to its slots, and goes with the last of them.
            self._kept[i] = kept._replace(checkpoint=None)

    def _receive_gradients(self, i: int, turn: Turn) -> Any:
        return () if self._arrive is None else self._take(self._arrive, turn)

    def _backward(self, i: int, arrived: Arrived, turn: Turn) -> Any:
        return self._run.context.run_backward(self._observed_backward, i, arrived)

    def _observed_backward(self, i: int, arrived: Arrived) -> Any:
        account = self._run.account
        return account.backward(i, self.j, self._device, self._differentiate, i, arrived)

    def _differentiate(self, i: int, arrived: Arrived) -> Any:
        """From the gradients of the outputs to those of the inputs, which are returned."""
        kept = self._kept.pop(i, None)
        if kept is None:
            return ()
        found = self._find_gradients(i, kept, self._gather(i, arrived, kept))
        return self._scatter(i, found, kept)

    def _find_gradients(
        self, i: int, kept: Kept, dys: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """``B[i,j]`` itself: note the gradients of the weights, return those of the inputs."""
        pairs = [(y, dy) for y, dy in zip(kept.ys, dys, strict=True) if dy is not None]
        if not pairs:
            return (None,) * len(kept.xs)
        ys, given = zip(*pairs, strict=True)
        leaves = leaves_behind([y.node for y in ys], [order.ENTRANCE])
        for leaf in leaves:
            if leaf._backward_hooks and leaf not in self._weights:
                raise RuntimeError(
                    f"a tensor of shape {tuple(leaf.shape)} has a hook that would see a part of "
                    "its gradient for each micro-batch: nothing can stand in for what loss_fn or "
                    "a custom autograd function uses, or what is no parameter of a layer. Use "
                    "register_post_accumulate_grad_hook, or loss.backward()"
                )
        try:
            wanted: list[Any] = [*kept.xs, *leaves]
            found = torch.autograd.grad(ys, wanted, given, allow_unused=True)
        except BaseException:
            # What was ready when a node raised stays with this thread until its next backward.
            torch.autograd.backward(torch.ones((), device="cpu", requires_grad=True))
            raise
        inputs = found[: len(kept.xs)]
        found = found[len(kept.xs) :]
        dxs = tuple([None if dx is None else alone(dx) for dx in inputs])
        del inputs  # and what they were parts of
        self._let_copy(i)  # before the sums: the copy needs none of them
        self.gradients.add([self._weights.get(leaf, leaf) for leaf in leaves], found)
        return dxs

    def _gather(self, i: int, arrived: Arrived, kept: Kept) -> list[Tensor | None]:
        """The gradient of each output, from all who have used it."""
        if self._arrive is None:
            assert kept.loss is not None
            return [self._step.loss.seed_of(i, kept.loss)]
        gathered = self._bring(i, list(arrived), self.j + 1)
        if not gathered:
            gathered = [None] * (len(kept.ys) - sum(kept.leaving))
        for (key, k), count in zip(self._skips.leaving, kept.leaving, strict=True):
            of_skip = self._step.skip_gradients.pop((key, i, self.j, k), [None] * count)
            gathered += self._bring(i, list(of_skip), k)
        return gathered

    def _scatter(self, i: int, found: Sequence[Tensor | None], kept: Kept) -> Any:
        """Send the gradients of skips where they come from; return those of the value."""
        start = len(kept.xs) - sum(kept.arriving)
        value, rest = found[:start], found[start:]
        for (key, k), count in zip(self._skips.arriving, kept.arriving, strict=True):
            self._step.skip_gradients[key, i, k, self.j] = rest[:count]
            rest = rest[count:]
        if self.j == 0:
            self._step.input_gradients[i] = value
        return value

    def _bring(self, i: int, gradients: list[Tensor | None], origin: int) -> list[Tensor | None]:
        """Copy gradients here from partition ``origin``."""
        if self._run.devices[origin] == self._device:
            return gradients
        there = [gradient for gradient in gradients if gradient is not None]
        moved, copied = self._copy_value(i, tuple(there), origin)
        if copied is not None:
            self._wait(i, moved, stream.compute_stream(self._device), copied)
        here = iter(moved)
        return [None if gradient is None else next(here) for gradient in gradients]


def edges_of(tensors: Tensors) -> Edges:
    """Where they are in the graph, which stays alive without them."""
    return tuple([order.edge_of(tensor) for tensor in tensors])


def alone(gradient: Tensor) -> Tensor:
    """The same, and not as a part of a larger one, which it would keep while it waits.

    Such as that of a skip, which was concatenated to something, until its stash goes backward.
    """
    if gradient.layout != torch.strided or gradient.untyped_storage().nbytes() <= gradient.nbytes:
        return gradient
    return gradient.clone()


def _nothing(i: int, turn: Turn) -> None:
    """What a recomputation receives."""


def leaf_inputs(value: Value) -> Value:
    """The same, as the first lane gets it: tensors that want a gradient are leaves."""
    tensors, rebuild = differentiable(value)
    return rebuild(tuple([t.detach().requires_grad_() for t in tensors])) if tensors else value


def detached(value: Value) -> Value:
    """The same without its graph."""
    tensors, rebuild = differentiable(value)
    return rebuild(tuple([tensor.detach() for tensor in tensors])) if tensors else value
