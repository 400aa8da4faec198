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

The uses of weights whose gradients may be put off are found in the graph of a task.

:data:`.RULES` has the operations whose weight's gradient takes ``x`` and ``dy`` alone.

A weight is put off if that is known to be the same:

1. All of its uses behind the outputs are nodes in :data:`.RULES`, in graphs that no other backward
   goes through. What is not known stays in ``B``.
2. It is a leaf, behind nothing but transposes and the cast of autocast.
3. It is an ordinary dense tensor on the device of its use, and gets a gradient of its own dtype.
4. Nobody sees more than that: the node has no hooks of its own, and no saved-tensor hooks see its
   input, which would unpack it twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from pipert._torch import AccumulateGrad, backward_id, sequence_nr
from pipert.autograd.engine import differentiate
from pipert.autograd.leaves import Reachable, find_leaves
from pipert.batch.tensors import alone, version, versions

Differentiate = Callable[[Sequence[Any], Sequence[Any], Sequence[Tensor]], Sequence[Tensor | None]]
"""Returns the gradients of its second argument, given the first and the gradients of that."""


class LeafPath(NamedTuple):
    """The way from a use of a weight, or of a bias, to the leaf."""

    leaf: Tensor
    edge: GradientEdge
    """Where it begins."""
    nodes: list[Node]
    is_transposed: bool


def find_uses(reachable: Reachable) -> dict[Node, DeferredGradients]:
    """Return the uses of all weights that may be put off, in the same order in each run.

    Args:
        reachable: the graph, which has not been freed.

    Raises:
        RuntimeError: an input was changed in place.
    """
    rules = {kind: RULES.get(kind.__name__) for kind in set(map(type, reachable.nodes))}
    shared, uses = set(reachable.others), dict[Node, DeferredGradients]()
    known = [node for node in reachable.nodes if rules[type(node)] and node not in shared]
    for node in sorted(known, key=sequence_nr):
        if (use := _use_of(node, rules[type(node)])) is not None:
            uses[node] = use
    if not uses:
        return {}
    total = _count_uses(uses.values(), reachable.again)
    of_weights = Counter([id(use.ways[0].leaf) for use in uses.values()])
    for node, use in [*uses.items()]:
        if of_weights[id(use.ways[0].leaf)] != total[id(use.ways[0].leaf)]:
            uses.pop(node).drop()
    of_biases = Counter([id(use.ways[1].leaf) for use in uses.values() if len(use.ways) > 1])
    for use in uses.values():
        if len(use.ways) > 1 and of_biases[id(use.ways[1].leaf)] != total[id(use.ways[1].leaf)]:
            del use.ways[1]
    return uses


def _use_of(node: Any, rule: Any) -> DeferredGradients | None:
    """Return the use of a weight by a known node, if it may be put off (rules 2 to 4)."""
    inputs = node.next_functions
    weight = _way_to_leaf(*inputs[rule.place])
    compute = None if weight is None else rule.make(node, weight.is_transposed, weight.leaf)
    if weight is None or compute is None or _has_other_hooks(node.register_hook(_no_hook)):
        return None
    x = _saved_input(node, rule.saved, weight.leaf)
    if x is None:
        return None
    ways = [weight]
    bias = None if rule.bias is None else _way_to_leaf(*inputs[rule.bias])
    if bias is not None and not bias.is_transposed and bias.leaf.device == x.device:
        ways.append(bias)
    use = DeferredGradients(node, ways, x, compute)
    return None if use.drop_if_seen() else use


def _count_uses(uses: Iterable[DeferredGradients], again: Iterable[Node]) -> Counter[int]:
    """Count all uses of the leaves of ``uses``, by the id of the leaf.

    Of the nodes on the ways to a leaf, each has been reached by one edge and is left by one, but
    for that of the leaf. So there is one use, and one more for each further edge to any of them.
    """
    owner = {node: id(way.leaf) for use in uses for way in use.ways for node in way.nodes}
    count = Counter(set(owner.values()))
    count.update([owner[node] for node in again if node in owner])
    return count


def is_free_of_hooks(node: Any) -> bool:
    """Whether nobody sees what ``node`` gets and returns."""
    registering = (node.register_hook, node.register_prehook)
    return not any([_has_other_hooks(register(_no_hook)) for register in registering])


def _has_other_hooks(handle: Any) -> bool:
    """Whether there are hooks beside that of ``handle``, which is removed."""
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return bool(hooks)


def _no_hook(*_: object) -> None:
    pass


def _way_to_leaf(node: Any, output: int) -> LeafPath | None:
    edge, nodes, is_transposed = None, list[Node](), False
    while node is not None:
        edge = edge or GradientEdge(node, output)
        nodes.append(node)
        if type(node) is AccumulateGrad:
            leaf = node.variable
            return LeafPath(leaf, edge, nodes, is_transposed) if _is_ordinary(leaf) else None
        name = type(node).__name__
        if name == "TBackward0":
            is_transposed = not is_transposed
        elif name != "ToCopyBackward0":
            return None
        node = node.next_functions[0][0]
    return None


def _is_ordinary(leaf: Tensor) -> bool:
    return (
        type(leaf) in (Tensor, nn.Parameter)
        and leaf.requires_grad
        and leaf.layout == torch.strided
        and leaf.grad_dtype in (None, leaf.dtype)
    )


def _saved_input(node: Any, name: str, weight: Tensor) -> Tensor | None:
    """Return the input that ``node`` has saved; ``None`` if reading it runs hooks.

    Raises:
        RuntimeError: it was changed in place.
    """
    saved = getattr(node, f"_raw_saved_{name}", None)
    if saved is None or saved.unpack_hook is not None:
        return None
    x = getattr(node, f"_saved_{name}").detach()
    is_beside = type(x) in (Tensor, nn.Parameter) and x.device == weight.device
    return x if is_beside and x.layout == torch.strided else None


ToWeight = Callable[[Tensor, Tensor, bool], tuple[Tensor, ...]]
"""Computes the gradient of a weight from the input and the gradient of one of its uses; if the
flag is set, that of the bias as well."""


class WeightRule(NamedTuple):
    """The rule for the nodes of one operation."""

    place: int
    """The place of the weight among the inputs of the node."""
    bias: int | None
    """The place of a bias that is put off together with the weight."""
    saved: str
    """The name of the input that the weight meets, among what the node saves."""
    make: Callable[[Any, bool, Tensor], ToWeight | None]
    """Takes the node, whether the weight is transposed on the way, and the weight."""


def _of_product(node: Any, is_transposed: bool, _: Tensor) -> ToWeight | None:
    if getattr(node, "_saved_alpha", 1) != 1:
        return None
    return _transposed_product if is_transposed else _product


def _product(x: Tensor, dy: Tensor, _: bool) -> tuple[Tensor, ...]:
    return (x.mH @ dy,)


def _transposed_product(x: Tensor, dy: Tensor, _: bool) -> tuple[Tensor, ...]:
    """Compute the same, in the layout of the weight once it is transposed back."""
    return ((dy.t() @ x.conj()).t(),)


def _of_convolution(node: Any, is_transposed: bool, weight: Tensor) -> ToWeight | None:
    if is_transposed:
        return None
    settings = [getattr(node, f"_saved_{name}", None) for name in _SETTINGS]
    return None if None in settings else partial(_convolved, weight.detach(), settings)


_SETTINGS = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")


def _convolved(
    weight: Tensor, settings: list[Any], x: Tensor, dy: Tensor, has_bias: bool
) -> tuple[Tensor, ...]:
    w = weight if weight.dtype == x.dtype else torch.empty_like(weight, dtype=x.dtype)
    _, of_weight, of_bias = torch.ops.aten.convolution_backward(
        dy, x, w, [dy.shape[1]], *settings, [False, True, has_bias]
    )
    return (of_weight, of_bias) if has_bias else (of_weight,)


RULES = {
    "AddmmBackward0": WeightRule(2, None, "mat1", _of_product),
    "MmBackward0": WeightRule(1, None, "self", _of_product),
    # On CPU the gradient of the bias alone takes as long as with that of the weight.
    "ConvolutionBackward0": WeightRule(1, 2, "input", _of_convolution),
}
"""By the name of a node. A node of another name computes all its gradients in ``B``."""


class DeferredGradients:
    """A use of a weight whose gradient is computed later, once the backward has ended."""

    __slots__ = ("_compute", "_handle", "_seen", "_versions", "dy", "ways", "x")

    def __init__(self, node: Any, ways: list[LeafPath], x: Tensor, compute: ToWeight) -> None:
        self.ways = ways
        """The way to the weight, and that to the bias if it is put off, too."""
        self.x = x
        """The input that the weight meets."""
        self._compute, self._versions = compute, versions((x,))
        self.dy: Tensor  # once the backward has ended
        self._seen: dict[int, tuple[Tensor, int] | None] = {}  # by number of the backward
        self._handle = node.register_prehook(self._see)  # after all others

    @property
    def leaves(self) -> list[Tensor]:
        """The weight, and the bias if that is put off, too."""
        return [way.leaf for way in self.ways]

    def drop(self) -> None:
        """Note nothing more, since nothing is put off."""
        self._handle.remove()

    def drop_if_seen(self) -> bool:
        """Return whether other prehooks see what arrives, and if so, note nothing more."""
        is_seen = len(self._handle.hooks_dict_ref()) > 1
        if is_seen:
            self.drop()
        return is_seen

    def _see(self, dys: Sequence[Tensor | None]) -> None:
        self._seen[backward_id()] = _kept(dys[0])

    def end(self, numbers: Sequence[int], captured: Tensor | None) -> bool:
        """Return whether the backward, whose number is the first one, has left anything to do.

        ``captured`` is what the engine returned: if it did not execute the node, hooks on tensors
        have seen that, and there are no others. From now on no node that saves tensors is held.
        """
        self._handle.remove()
        seen, self._seen = self._seen, {}
        is_seen = bool(numbers) and numbers[0] in seen
        dy = seen[numbers[0]] if is_seen else _kept(captured)
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
        found: tuple[Tensor, ...] = self._compute(self.x, self.dy, len(self.ways) > 1)
        return found


def _kept(tensor: Tensor | None) -> tuple[Tensor, int] | None:
    """Return a tensor, but no larger one of which it is a part, and its version."""
    if tensor is None:
        return None
    tensor = alone(tensor)
    return tensor, version(tensor)


def defer_weights(
    ys: Sequence[GradientEdge],
    xs: Sequence[Any],
    dys: Sequence[Tensor],
    reachable: Reachable,
    later: list[DeferredGradients],
    run: Differentiate = differentiate,
) -> tuple[Sequence[Tensor | None], list[Tensor]]:
    """Run a backward that puts off gradients of weights.

    Args:
        ys: where it starts.
        xs: edges or leaves whose gradients are wanted now.
        dys: the gradients of ``ys``.
        reachable: the graph behind ``ys``, which has not been freed.
        later: gets what is put off.
        run: runs the backward.

    Returns:
        The gradients of ``xs`` and of leaves that are not put off, and these leaves.
    """
    uses = find_uses(reachable)
    put_off = {id(way.leaf) for one in uses.values() for way in one.ways}
    leaves = [leaf for leaf in reachable.leaves if id(leaf) not in put_off]
    if not uses:
        return run(ys, (*xs, *leaves), dys), leaves
    own = torch.empty(0, device=dys[0].device, requires_grad=True)  # V3
    with torch.enable_grad():
        begin: Any = own.view_as(own)
    numbers = list[int]()
    begin.grad_fn.register_prehook(lambda _: numbers.append(backward_id()))
    nodes = [GradientEdge(node, 0) for node in uses]
    wanted = (*xs, *leaves, *nodes, own)  # nodes, so that the engine goes there
    found: Sequence[Tensor | None] = (None,) * len(wanted)
    try:
        found = run((begin, *ys), wanted, (own.detach(), *dys))  # last, it might meet y's node
    finally:
        captured = found[-1 - len(nodes) : -1]
        pairs = zip(uses.values(), captured, strict=True)
        later += [one for one, dy in pairs if one.end(numbers, dy)]
    return found[: -1 - len(nodes)], leaves


def differentiate_recomputed(
    later: list[DeferredGradients] | None,
    node: Any,
    ys: Sequence[GradientEdge],
    wanted: Sequence[Any],
    dys: Sequence[Tensor],
) -> Sequence[Tensor | None]:
    """Return the gradients of what a segment began with, in the backward of a step.

    Without those that are put off; none is if hooks see what the segment's ``node`` returns.
    """
    if later is None or not is_free_of_hooks(node):
        return differentiate(ys, wanted, dys)
    xs = [one for one in wanted if not isinstance(one, Tensor)]
    reachable = find_leaves([y.node for y in ys], stop={x.node for x in xs})
    found, leaves = defer_weights(ys, xs, dys, reachable, later)
    gradients = dict(zip(map(id, (*xs, *leaves)), found, strict=True))
    return [gradients.get(id(one)) for one in wanted]


def compute_deferred(later: list[DeferredGradients]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return weights and their gradients. Empties the list, to free memory as it goes."""
    sums: dict[GradientEdge, Tensor] = {}
    wanted: dict[int, Tensor] = {}
    later.reverse()
    with torch.no_grad():
        while later:
            use = later.pop()
            if any([way.leaf.requires_grad for way in use.ways]):
                for (leaf, edge, *_), gradient in zip(use.ways, use.gradients(), strict=True):
                    if leaf.requires_grad:  # not frozen since
                        wanted[id(leaf)] = leaf
                        total = gradient if edge not in sums else sums[edge] + gradient
                        sums[edge] = total
            del use
    # Hooks on a cast or a transposed weight see the sum of all uses.
    leaves = list(wanted.values())
    return leaves, list(differentiate([*sums], leaves, [*sums.values()]))
