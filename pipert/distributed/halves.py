"""Which backwards torch can split in two: the gradients of inputs first, those of weights later.

torch (2.13) computes in the first half all that lies between the outputs and the inputs. It keeps
the gradients at the *places* there from which ways branch off to the weights, and detaches the
outputs in place. In the second half it goes on from these places, for one group of weights after
the other. So:

1. What is detached must be nobody else's: not a view, not saved for the second half, no parameter.
   The outputs come out of one node more, and that is what is detached.
2. Behind this node, what depends on no input has a place, too, if anything depends on an input.
3. A weight with two places, such as one that is used twice, would let torch go through what lies
   between them twice. And only parameters get a gradient: no other leaf may need one.

Where 3. does not hold, both halves are done at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from pipert._typing import Tensors
from pipert.autograd import order
from pipert.autograd.leaves import AccumulateGrad

__all__: list[str] = []


def behind_one_node(outputs: Sequence[Tensor]) -> Tensors:
    """The same, of which those that require grad come out of one node, which saves none."""
    _, *ends = order.fork(None, None, *[y for y in outputs if y.requires_grad])
    left = iter(ends)
    return tuple([next(left) if y.requires_grad else y.detach() for y in outputs])


def can_be_split(end: Tensor, inputs: Iterable[Tensor], weights: Iterable[Tensor]) -> bool:
    """Whether the second half finds what each weight needs.

    Args:
        end: of the graph: the loss, or one of what :func:`behind_one_node` made.
        inputs: the leaves that have arrived.
        weights: the parameters.
    """
    inputs = list(inputs)
    if any(x.grad_fn is not None for x in inputs):
        return False  # one without grad was changed in place: torch would take it for a leaf
    entering, own = set(map(id, inputs)), set(map(id, weights))
    root: Any = end.grad_fn
    above: dict[Any, list[Any]] = defaultdict(list)
    entered, left, seen = [], [root], {root, None}
    while left:
        node = left.pop()
        if type(node) is AccumulateGrad:
            if id(node.variable) in entering:
                entered.append(node)
            elif id(node.variable) not in own and node.variable is not order.ENTRANCE:
                return False
        for child, _ in node.next_functions:
            above[child].append(node)
            if child not in seen:
                seen.add(child)
                left.append(child)
    between = set(entered)  # the outputs and the inputs
    while entered:
        for node in above[entered.pop()]:
            if node not in between:
                between.add(node)
                entered.append(node)
    return root in between and _has_one_place_each(between)


def _has_one_place_each(between: set[Any]) -> bool:
    """Whether no way from one place to a weight meets one from another place."""
    place_of: dict[Any, Any] = {}
    for place in between:
        left = [place]
        while left:
            for child, _ in left.pop().next_functions:
                if child is None or child in between or _is_entrance(child):
                    continue
                if child not in place_of:
                    place_of[child] = place
                    left.append(child)
                elif place_of[child] is not place:
                    return False
    return True


def _is_entrance(node: Any) -> bool:
    return type(node) is AccumulateGrad and node.variable is order.ENTRANCE
