"""Carries values from stage to stage within one run.

A stage has a link for its inputs and one for its outputs, and in a step the same in the opposite
direction, which tell that ``B`` of the next stage is done.

A link ends with its run. It never tells micro-batches apart: all stages have them in the same order
(rule 4 of ``schedules.plan``), so a FIFO is enough. Only the inputs from the caller, who has them
all at once, are received by number.

The *ledger* remembers where gradients go in a step, whose graph is cut between partitions.

A tensor *crosses* where a later partition uses it: it enters that partition with the same values
and a graph of its own. The ledger has both edges of each crossing: the one at which the tensor left
the graph of the partition that has made it, and the one at which it entered the other. ``B`` of the
partition that it entered notes its gradient, with which ``B`` of the other begins::

    F[i,j]     y ----left            B[i,j]     begins at ``left`` with the gradient
                      | crossing                    ^
    F[i,k]           entered----z    B[i,k]     notes the gradient at ``entered``

All ``F`` of a micro-batch run one after the other, and so do all ``B``, which come later. So nobody
else uses what a task finds here, and each list is in a fixed order.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from pipert._typing import Tensors, Value
from pipert.autograd import order
from pipert.autograd.leaves import Reachable
from pipert.queues.closable import ClosableQueue
from pipert.recompute.segment import Segments
from pipert.workers.worker import NOT_RUN


class _Sent(enum.Enum):
    SENT = "sent"


SENT = _Sent.SENT
"""Takes the place of a value that has been sent already, by whoever computed it."""


class Link(NamedTuple):
    """A link that carries one value per micro-batch."""

    send: Callable[[int, Value], None]
    """Sends the value of a micro-batch, or ``NOT_RUN``; ignores ``SENT``. Never blocks."""
    receive: Callable[[int], Value]
    """Waits for the value of a micro-batch. Returns ``NOT_RUN`` if there will be none."""
    close: Callable[[], object]
    """Wakes all who wait, and drops what is on its way. Thread-safe."""


NOWHERE = Link(lambda i, value: None, lambda i: (), lambda: None)
"""Discards what is sent, and delivers an empty tuple."""


def between() -> Link:
    """Return a link from one stage to the next: a queue."""
    queue: ClosableQueue[tuple[Value]] = ClosableQueue()  # a value may be None

    def send(i: int, value: Value) -> None:
        if value is not SENT:
            queue.put((value,))

    def receive(i: int) -> Value:
        (value,) = queue.get() or (NOT_RUN,)  # the run was given up
        return value

    return Link(send, receive, queue.drain)


def from_caller(inputs: list[Value]) -> Link:
    """Return a link to the first stage, which empties ``inputs`` as the run proceeds."""

    def receive(i: int) -> Value:
        value, inputs[i] = inputs[i], None
        return value

    def close() -> None:
        inputs[:] = [NOT_RUN] * len(inputs)

    return Link(NOWHERE.send, receive, close)


def to_caller(outputs: list[Value]) -> Link:
    """Return a link from the last stage to ``outputs``, which the caller reads after the run."""
    return Link(lambda i, value: outputs.append(value), NOWHERE.receive, outputs.clear)


@dataclass(slots=True, eq=False)
class Crossing:
    """A tensor of an earlier partition, or an input, that partition ``j`` uses."""

    j: int
    left: GradientEdge | None
    """Its place in the graph of the partition that made it; ``None`` for an input."""
    entered: GradientEdge
    """Its place in the graph of partition ``j``."""
    gradient: Tensor | None = None
    """What ``B[i,j]`` has found, on the device of partition ``j``."""


@dataclass(slots=True, eq=False)
class PartitionGraph:
    """What ``B[i,j]`` needs from ``F[i,j]``."""

    entered: list[Crossing] = field(default_factory=list)
    """The tensors that entered the partition."""
    left: list[Crossing] = field(default_factory=list)
    """The tensors made in the partition that later ones use."""
    loss: Tensor | None = None
    """The loss, in the last partition."""
    segments: Segments | None = None
    """What ``R[i,j]`` repeats, if the micro-batch is checkpointed."""
    find_reachable: Callable[[list[Node]], Reachable] | None = None
    """Returns what is behind the ends of the graph; by default the stage's nodes are its own."""


class Ledger:
    """The graphs of all partitions and micro-batches in a step, from ``F`` until ``B``."""

    def __init__(self) -> None:
        self.graphs: dict[tuple[int, int], PartitionGraph] = defaultdict(PartitionGraph)
        """By micro-batch and partition."""

    def cross(
        self, i: int, j: int, origin: int | None, tensors: Tensors, values: Tensors
    ) -> Tensors:
        """Return tensors with these ``values`` that begin a graph in partition ``j``.

        They take the places of ``tensors``, which partition ``origin`` has made, or the caller.
        """
        entered = order.enter(values)
        graphs = self.graphs
        for tensor, begun in zip(tensors, entered, strict=True):
            left = None if origin is None else order.edge_of(tensor)
            crossing = Crossing(j, left, order.edge_of(begun))
            graphs[i, j].entered.append(crossing)
            if origin is not None:
                graphs[i, origin].left.append(crossing)
        return entered
