"""Decides which backwards torch can split in two: the inputs' gradients first, the weights' later.

In the first half, torch (2.13) goes through every node between the outputs and the inputs. It
keeps the gradients at those nodes, called *branch points* here, from which the weights branch off,
and it detaches the outputs in place. In the second half it goes on from the branch points, one
group of weights at a time. Three rules follow:

1. The tensors that torch detaches must have no other user: they may not be views, parameters or
   saved for the second half. So the outputs pass through one more node, and its outputs are what
   torch detaches.
2. Behind that node, what depends on no input has a branch point as well, if anything depends on an
   input.
3. If a weight had two branch points, as a weight that is used twice may, torch could go through
   what lies between them twice. And torch gives a gradient to parameters only, so no other leaf may
   need one.

Where rule 3 might not hold, both halves are done at once; before torch 2.13, whose halves fail
where an output needs no gradient, everywhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipert._torch import AccumulateGrad
from pipert._typing import Tensors
from pipert.autograd import order
from pipert.autograd.leaves import leaves_behind

IS_SPLIT = torch.__version__ >= "2.13"
"""Whether any backward is split."""


def behind_one_node(outputs: Sequence[Tensor]) -> Tensors:
    """Pass the differentiable outputs through one node, which saves no tensor; detach the rest."""
    _, *passed = order.fork(None, None, *[y for y in outputs if y.requires_grad])
    remaining = iter(passed)
    return tuple([next(remaining) if y.requires_grad else y.detach() for y in outputs])


def can_be_split(end: Tensor, inputs: Iterable[Tensor], weights: Iterable[Tensor]) -> bool:
    """Check that the second half reaches everything each weight needs.

    Args:
        end: the end of the graph: the loss, or an output of :func:`behind_one_node`.
        inputs: the leaves that arrived from the previous partition.
        weights: the parameters.
    """
    inputs = list(inputs)
    if any(x.grad_fn is not None for x in inputs):
        return False  # an input without grad was changed in place: torch would take it for a leaf
    root: Any = end.grad_fn
    behind = leaves_behind([root], [*inputs, *weights, order.ENTRANCE])
    if behind.leaves:
        return False
    parents: dict[Any, list[Any]] = defaultdict(list)
    for node in behind.nodes:
        for child, _ in node.next_functions:
            parents[child].append(node)
    leaf_of = {node: node.variable for node in parents if type(node) is AccumulateGrad}
    left = [node for node, leaf in leaf_of.items() if any(leaf is x for x in inputs)]
    between = set(left)  # the nodes between the outputs and the inputs, both ends included
    while left:
        for node in parents[left.pop()]:
            if node not in between:
                between.add(node)
                left.append(node)
    # A node beside the way that is reached once has one branch point.
    beside = [n for n in parents if n is not None and n not in between]
    once = [n for n in beside if len(parents[n]) == 1 or leaf_of.get(n) is order.ENTRANCE]
    return root in between and len(once) == len(beside)
