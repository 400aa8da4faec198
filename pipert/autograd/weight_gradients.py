"""Puts off the gradients of weights, for which no other partition waits (arXiv:2401.10241).

The backward of a matrix product or a convolution computes two gradients: that of its input, which
the partition before waits for, and that of its weight. So ``B[i,j]`` asks the engine for the first
alone, and notes the gradient that arrives at the node. ``W[i,j]`` computes the second from that and
from the input that the node has saved, and lets the engine go the rest of the way to the weight.
Until then these two tensors are kept, and no graph. Neither may be changed in place, which is
refused.

What arrives at a node is noted by a prehook, after all hooks on the tensor that it made. Hooks may
run other backward passes through the same node: each is told by its number, and that of ``B[i,j]``
by a node of its own, which no other executes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from pipert._torch import backward_id
from pipert.autograd.engine import differentiate
from pipert.autograd.leaves import Behind
from pipert.autograd.weight_uses import WeightUse, find_uses
from pipert.batch.tensors import alone, version, versions


class DeferredGradients:
    """A use of a weight whose gradient is computed later, once the backward has ended."""

    __slots__ = ("_compute", "_handle", "_seen", "_versions", "dy", "edges", "leaves", "x")

    def __init__(self, use: WeightUse) -> None:
        ways = (use.weight,) if use.bias is None else (use.weight, use.bias)
        self.leaves = [way.leaf for way in ways]
        """The weight, and the bias if that is put off, too."""
        self.edges = [way.edge for way in ways]
        """For each, where the way to it begins."""
        self._compute, self.x, self._versions = use.compute, use.x, versions((use.x,))
        self.dy: Tensor  # once the backward has ended
        self._seen: dict[int | None, tuple[Tensor, int] | None] = {}  # by number of the backward
        self._handle = use.node.register_prehook(self._see)  # after all others

    def _see(self, dys: Sequence[Tensor | None]) -> None:
        self._seen[backward_id()] = _kept(dys[0])

    def end(self, number: int | None, captured: Tensor | None) -> bool:
        """Return whether the backward of this number has left anything to do.

        ``captured`` is what the engine returned: if it did not execute the node, hooks on tensors
        have seen that, and there are no others. From now on no node that saves tensors is held.
        """
        self._handle.remove()
        dy = self._seen[number] if number in self._seen else _kept(captured)
        self._seen = {}
        if dy is None:
            return False
        self.dy = dy[0]
        self._versions.append(dy[1])
        return True

    def gradients(self) -> tuple[Tensor, ...]:
        """Return the gradients that go out on the edges.

        Raises:
            RuntimeError: a tensor that was kept has been changed in place.
        """
        if versions((self.x, self.dy)) != self._versions:
            raise RuntimeError(
                "a tensor needed for the gradient of a weight was modified in place before that "
                "was computed, which the schedule does later; clone it, or use schedule='1f1b'"
            )
        found: tuple[Tensor, ...] = self._compute(self.x, self.dy, len(self.leaves) > 1)
        return found


def _kept(tensor: Tensor | None) -> tuple[Tensor, int] | None:
    """Return a tensor, but no larger one of which it is a part, and its version."""
    if tensor is None:
        return None
    tensor = alone(tensor)
    return tensor, version(tensor)


class Deferral:
    """What one backward puts off.

    Args:
        behind: the graph, which has not been freed.
        ends: the nodes at which its backward starts.
    """

    def __init__(self, behind: Behind, ends: Sequence[Node]) -> None:
        uses = find_uses(behind, ends)
        self._later = list(map(DeferredGradients, uses))
        put_off = {id(leaf) for later in self._later for leaf in later.leaves}
        self.leaves = [leaf for leaf in behind.leaves if id(leaf) not in put_off]
        """The leaves that are left."""
        self._nodes = [GradientEdge(use.node, 0) for use in uses]
        self._number: int | None = None

    def differentiate(
        self, run: Any, wanted: Sequence[Any], ys: Sequence[Any], dys: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor | None], list[DeferredGradients]]:
        """Run the backward by ``run(wanted, ys, dys)``.

        Returns:
            The gradients of ``wanted``, and what is left to do.
        """
        if not self._later:
            return run(wanted, ys, dys), []
        leaf = torch.empty(0, device=dys[0].device, requires_grad=True)  # V3
        with torch.enable_grad():
            own = leaf.view_as(leaf)
        own.grad_fn.register_prehook(self._begin)  # type: ignore[union-attr]
        every = (*wanted, *self._nodes, leaf)  # asked for, so that the engine goes there
        found: Sequence[Tensor | None] = (None,) * len(every)
        try:
            found = run(every, (own, *ys), (leaf.detach(), *dys))  # last, it might meet y's node
        finally:
            self._nodes.clear()
            pairs = zip(self._later, found[len(wanted) : -1], strict=True)
            left = [later for later, dy in pairs if later.end(self._number, dy)]
        return found[: len(wanted)], left

    def _begin(self, _: object) -> None:
        self._number = backward_id()


def compute_deferred(later: list[DeferredGradients]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return weights and their gradients. Empties the list, to free memory as it goes."""
    sums: dict[tuple[Any, int], tuple[GradientEdge, Tensor]] = {}
    wanted: dict[int, Tensor] = {}
    later.reverse()
    with torch.no_grad():
        while later:
            use = later.pop()
            if any([leaf.requires_grad for leaf in use.leaves]):
                for leaf, edge, gradient in zip(
                    use.leaves, use.edges, use.gradients(), strict=True
                ):
                    if leaf.requires_grad:  # not frozen since
                        wanted[id(leaf)] = leaf
                        key = edge.node, edge.output_nr
                        total = gradient if key not in sums else sums[key][1] + gradient
                        sums[key] = edge, total
            del use
    # Hooks on a cast or a transposed weight see the sum of all uses.
    leaves = list(wanted.values())
    edges, gradients = zip(*sums.values(), strict=True) if sums else ((), ())
    return leaves, list(differentiate(edges, leaves, gradients))
