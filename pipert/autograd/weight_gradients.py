"""Puts off the gradients of weights, for which no other partition waits (arXiv:2401.10241).

The backward of a matrix product or a convolution computes two gradients: that of its input, which
the partition before waits for, and that of its weight. So ``B[i,j]`` asks the engine for the first
alone, and notes the gradient that arrives at the node. ``W[i,j]`` computes the second from that and
from the input that the node has saved. Until then these two tensors are kept, and no graph.

A weight is put off if that is known to be the same:

1. All of its uses behind the outputs are nodes in :data:`.RULES`, in graphs that no other backward
   goes through. What is not known stays in ``B``.
2. It is a leaf, behind nothing but transposes and the cast of autocast; the engine goes that way.
3. It is an ordinary dense tensor on the device of its use, has not been frozen since, and gets a
   gradient of its own dtype.
4. Nobody sees more than that: the node has no hooks of its own, and no saved-tensor hooks but a
   checkpoint's see its input, which would unpack it twice. Hooks on the tensor that it made are
   called before what arrives is noted.

Neither of the two tensors may be changed in place before ``W[i,j]``, which is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from pipert._torch import AccumulateGrad, backward_id, sequence_nr
from pipert.autograd.checkpoint import Checkpoint
from pipert.autograd.engine import differentiate
from pipert.autograd.leaves import Behind
from pipert.autograd.weight_operations import RULES, ToWeight
from pipert.batch.tensors import alone, version

__all__: list[str] = []


class _Way(NamedTuple):
    """The way from a use of a weight to the weight."""

    weight: Tensor
    edge: GradientEdge
    nodes: list[Node]
    is_transposed: bool


class _Use(NamedTuple):
    """A use of a weight by a known node."""

    node: Any
    way: _Way
    saved: str | None
    """As in :class:`.Rule`."""
    compute: ToWeight


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


def _keep(tensor: Tensor | None) -> _Kept | None:
    """Keep a tensor, and no larger one of which it is a part."""
    if tensor is None:
        return None
    tensor = alone(tensor)
    return _Kept(tensor, version(tensor))


class Later:
    """One use of a weight whose gradient is computed later."""

    __slots__ = ("_compute", "_dys", "_handle", "_way", "_x", "dy", "node")

    def __init__(self, use: _Use, x: Tensor) -> None:
        self.node: Any = GradientEdge(use.node, 0)
        """Where the gradient arrives; to be asked for, so that the engine goes there."""
        self.dy: _Kept | None = None
        self._way, self._x, self._compute = use.way, _Kept(x, version(x)), use.compute
        self._dys: dict[int | None, _Kept | None] = {}  # by backward, as hooks may run others
        self._handle = use.node.register_prehook(self._see)  # after all others

    @property
    def weight(self) -> Tensor:
        return self._way.weight

    @property
    def edge(self) -> GradientEdge:
        """Where the way to the weight begins."""
        return self._way.edge

    def _see(self, dys: Sequence[Tensor | None]) -> None:
        self._dys[backward_id()] = _keep(dys[0])

    def end(self, backward: int | None, captured: Tensor | None) -> bool:
        """Forget the node, after the backward. Return whether a gradient has arrived.

        ``captured`` is what the engine returned: if it did not execute the node, hooks on tensors
        have seen that, and there are no others.
        """
        self._handle.remove()
        self.node = None
        seen, self._dys = self._dys, {}
        self.dy = seen[backward] if backward in seen else _keep(captured)
        return self.dy is not None

    def gradient(self) -> Tensor:
        """Return the gradient that goes out on the edge."""
        assert self.dy is not None
        return self._compute(self._x.get(), self.dy.get())


class PutOff:
    """What one backward, which starts at ``ends``, puts off."""

    def __init__(self, uses: list[Later], ends: Iterable[Node]) -> None:
        self.uses = uses
        self._number: int | None = None
        self._handles = [end.register_prehook(self._begin) for end in ends] if uses else []

    def _begin(self, _: object) -> None:
        """Note the number of the backward. Those that hooks run within it have higher ones."""
        number = backward_id()
        self._number = number if self._number is None else min(self._number, number)

    def end(self, captured: Sequence[Tensor | None]) -> list[Later]:
        """Return the uses at which a gradient has arrived, after the backward."""
        for handle in self._handles:
            handle.remove()
        pairs = zip(self.uses, captured, strict=True)
        return [use for use, dy in pairs if use.end(self._number, dy)]


def put_off(behind: Behind, ends: Sequence[Node]) -> tuple[PutOff, list[Tensor]]:
    """Return the uses of weights that are put off, and the leaves that are left.

    Args:
        behind: the graph, which has not been freed.
        ends: the nodes at which its backward starts.
    """
    nodes = [node for node in behind.nodes if node is not None]
    shared = set(behind.others)
    known = [node for node in nodes if type(node).__name__ in RULES and node not in shared]
    # In the same order in each run.
    uses = [use for node in sorted(known, key=sequence_nr) for use in _uses_of(node)]
    others = _other_uses(uses, nodes, ends) if uses else {}
    taken = [
        (use, _saved_input(use.node, use.saved, use.way.weight))
        for use in uses
        if not others[id(use.way.weight)]
    ]
    left = {id(use.way.weight) for use, x in taken if x is None}
    later = [
        Later(use, x) for use, x in taken if x is not None and id(use.way.weight) not in left
    ]
    weights = {id(one.weight) for one in later}
    return PutOff(later, ends), [leaf for leaf in behind.leaves if id(leaf) not in weights]


def _uses_of(node: Any) -> list[_Use]:
    """Return the uses of weights by a known node that may be put off."""
    found = list[_Use]()
    for rule in RULES[type(node).__name__] if _is_free_of_hooks(node) else ():
        way = _way_to_weight(*node.next_functions[rule.place])
        compute = None if way is None else rule.make(node, way.is_transposed, way.weight)
        if way is not None and compute is not None:
            found.append(_Use(node, way, rule.saved, compute))
    return found


def _other_uses(
    uses: Sequence[_Use], nodes: Iterable[Node], ends: Iterable[Node]
) -> dict[int, int]:
    """Count, by the id of the weight, how often each is used behind ``ends`` beside ``uses``."""
    owner = {node: id(use.way.weight) for use in uses for node in use.way.nodes}
    count = dict.fromkeys(owner.values(), 0)
    for use in uses:
        count[id(use.way.weight)] -= 1
    for end in ends:
        if end in owner:
            count[owner[end]] += 1
    for node in nodes:
        if node not in owner:
            for child, _ in node.next_functions:
                if child in owner:
                    count[owner[child]] += 1
    return count


def compute_later(later: list[Later]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return weights and their gradients. Empties the list, to free memory as it goes."""
    sums: dict[tuple[Any, int], tuple[GradientEdge, Tensor]] = {}
    weights: dict[int, Tensor] = {}
    later.reverse()
    with torch.no_grad():
        while later:
            use = later.pop()
            if use.weight.requires_grad:  # not frozen since
                weights[id(use.weight)] = use.weight
                key, gradient = (use.edge.node, use.edge.output_nr), use.gradient()
                sums[key] = use.edge, gradient if key not in sums else sums[key][1] + gradient
            del use
    # Hooks on a cast or a transposed weight see the sum of all uses.
    wanted = list(weights.values())
    edges, gradients = zip(*sums.values(), strict=True) if sums else ((), ())
    return wanted, list(differentiate(edges, wanted, gradients))


def _is_free_of_hooks(node: Any) -> bool:
    """Whether nobody sees what ``node`` gets and returns."""
    for handle in node.register_hook(_no_hook), node.register_prehook(_no_hook):
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return False
    return True


def _no_hook(*_: object) -> None:
    pass


def _way_to_weight(node: Any, output: int) -> _Way | None:
    edge, nodes, is_transposed = None, list[Node](), False
    while node is not None:
        edge = edge or GradientEdge(node, output)
        nodes.append(node)
        if type(node) is AccumulateGrad:
            weight = node.variable
            return _Way(weight, edge, nodes, is_transposed) if _is_ordinary(weight) else None
        name = type(node).__name__
        if name == "TBackward0":
            is_transposed = not is_transposed
        elif name != "ToCopyBackward0":
            return None
        node = node.next_functions[0][0]
    return None


def _is_ordinary(weight: Tensor) -> bool:
    return (
        type(weight) in (Tensor, nn.Parameter)
        and weight.requires_grad
        and weight.layout == torch.strided
        and weight.grad_dtype in (None, weight.dtype)
    )


_NONE = torch.empty(0)


def _saved_input(node: Any, name: str | None, weight: Tensor) -> Tensor | None:
    """Return the input that ``node`` has saved as ``name``; ``None`` if it cannot simply be had.

    An empty tensor stands for none.

    Raises:
        RuntimeError: it was changed in place.
    """
    if name is None:
        return _NONE
    saved = getattr(node, f"_raw_saved_{name}", None)
    if saved is None:
        return None
    x: Any = None
    unpack = saved.unpack_hook
    if unpack is None:
        x = saved.unpack().detach()
    elif isinstance(getattr(unpack, "__self__", None), Checkpoint):
        x = unpack.__self__.peek(saved.data)
    is_beside = type(x) in (Tensor, nn.Parameter) and x.device == weight.device
    return x if is_beside and x.layout == torch.strided else None
