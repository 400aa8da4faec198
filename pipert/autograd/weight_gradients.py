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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from pipert._torch import backward_id
from pipert.autograd.engine import differentiate
from pipert.autograd.leaves import Behind
from pipert.autograd.weight_uses import Use, find_uses
from pipert.batch.tensors import alone, version


class _Kept(NamedTuple):
    """A tensor that is kept for ``W[i,j]``, and its version."""

    tensor: Tensor
    version: int

    def get(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: it was changed in place.
        """
        if version(self.tensor) != self.version:
            raise RuntimeError(
                "a tensor needed for the gradient of a weight was modified in place before that "
                "was computed, which the schedule does later; clone it, or use schedule='1f1b'"
            )
        return self.tensor


class Later(NamedTuple):
    """A use of a weight whose gradient is computed later. References no node that saves tensors."""

    leaves: list[Tensor]
    """The weight, and the bias if that is put off, too."""
    edges: list[GradientEdge]
    """For each, where the way to it begins."""
    compute: Any
    x: _Kept
    dy: _Kept

    def gradients(self) -> tuple[Tensor, ...]:
        """Return the gradients that go out on the edges."""
        found: tuple[Tensor, ...] = self.compute(self.x.get(), self.dy.get(), len(self.leaves) > 1)
        return found


class _Watch:
    """Notes the gradients that arrive at one node, by the number of the backward."""

    __slots__ = ("_handle", "_seen", "_use", "_version")

    def __init__(self, use: Use) -> None:
        self._use, self._version = use, version(use.x)
        self._seen: dict[int | None, _Kept | None] = {}
        self._handle = use.node.register_prehook(self._see)  # after all others

    def _see(self, dys: Sequence[Tensor | None]) -> None:
        self._seen[backward_id()] = _kept(dys[0])

    def end(self, number: int | None, captured: Tensor | None) -> Later | None:
        """Stop; return what is left to do after the backward of this number, if anything.

        ``captured`` is what the engine returned: if it did not execute the node, hooks on tensors
        have seen that, and there are no others.
        """
        self._handle.remove()
        dy = self._seen[number] if number in self._seen else _kept(captured)
        if dy is None:
            return None
        ways = [way for way in (self._use.weight, self._use.bias) if way is not None]
        leaves, edges = [way.leaf for way in ways], [way.edge for way in ways]
        return Later(leaves, edges, self._use.compute, _Kept(self._use.x, self._version), dy)


def _kept(tensor: Tensor | None) -> _Kept | None:
    """Keep a tensor, and no larger one of which it is a part."""
    if tensor is None:
        return None
    tensor = alone(tensor)
    return _Kept(tensor, version(tensor))


class PutOff:
    """What one backward puts off.

    Args:
        behind: the graph, which has not been freed.
        ends: the nodes at which its backward starts.
    """

    def __init__(self, behind: Behind, ends: Sequence[Node]) -> None:
        uses = find_uses(behind, ends)
        ways = [way for use in uses for way in (use.weight, use.bias) if way is not None]
        put_off = {id(way.leaf) for way in ways}
        self.leaves = [leaf for leaf in behind.leaves if id(leaf) not in put_off]
        """The leaves that are left."""
        self._nodes = [GradientEdge(use.node, 0) for use in uses]
        self._watches = list(map(_Watch, uses))
        self._number: int | None = None

    def differentiate(
        self, run: Any, wanted: Sequence[Any], ys: Sequence[Any], dys: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor | None], list[Later]]:
        """Run the backward by ``run(wanted, ys, dys)``.

        Returns:
            The gradients of ``wanted``, and what is left to do.
        """
        if not self._watches:
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
            captured = found[len(wanted) : -1]
            ended = [
                watch.end(self._number, dy)
                for watch, dy in zip(self._watches, captured, strict=True)
            ]
        return found[: len(wanted)], [later for later in ended if later is not None]

    def _begin(self, _: object) -> None:
        self._number = backward_id()


def compute_later(later: list[Later]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return weights and their gradients. Empties the list, to free memory as it goes."""
    sums: dict[tuple[Any, int], tuple[GradientEdge, Tensor]] = {}
    wanted: dict[int, Tensor] = {}
    later.reverse()
    with torch.no_grad():
        while later:
            use = later.pop()
            if any(leaf.requires_grad for leaf in use.leaves):
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
