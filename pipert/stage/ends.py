"""The ends of a stage: how values enter and leave it. All that differs between a call and a step.

============  ======================================  ==========================================
\\             in the graph: a call                    cut: a step
============  ======================================  ==========================================
Copy, Wait    nodes, whose backward goes back         copies of the value in ``F``, of the gradient
                                                      in ``B``; both on copy streams
Fork, Join    nodes that order the backward           none: the plan says what comes after what
Checkpoint    the graph of ``F`` without its data     no graph of ``F``
Recompute     a node that fills it with data          ``R[i,j]``, an action, makes the graph
B[i,j]        autograd's walk along the graph         ``torch.autograd.grad`` from the outputs of
                                                      the stage to its inputs and weights
============  ======================================  ==========================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from pipert._typing import Value
from pipert.autograd.again import Replay
from pipert.layers.tied import Weights

__all__: list[str] = []


class Ends(Protocol):
    """Both ends of one stage. Its worker's alone, but for :meth:`drop`."""

    def enter(self, i: int, x: Value) -> Value:
        """Make an input of micro-batch ``i`` ready for the layers."""

    def checkpoint(self, again: Replay, compute: Callable[[Value], Value], x: Value) -> Value:
        """Compute ``x`` without keeping what the backward needs: ``again`` computes it again."""

    def leave(self, i: int, y: Value) -> Value:
        """Make what the layers returned ready to be sent."""

    def borrow(self, i: int, weights: Weights) -> Sequence[Tensor]:
        """Return what stands for ``weights`` in this stage, for the whole run."""

    def drop(self) -> None:
        """Forget every micro-batch: nobody waits for the run any more. Any thread."""
