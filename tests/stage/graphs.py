"""Lists the names of the autograd nodes that stages leave in the graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.layers import Apply


def chain(y: Tensor) -> list[str]:
    """Names the nodes from ``y`` down to the first that is not pipert's, along the first edges."""
    names: list[str] = []
    node = y.grad_fn
    while node is not None:
        names.append(node.name().replace("Backward", ""))
        if not names[-1].startswith("_"):
            break
        node = next((child for child, _ in node.next_functions if child is not None), None)
    return names


def all_nodes(y: Tensor) -> set[str]:
    """Returns the names of all nodes in the graph of ``y``."""
    seen, names = set(), set()
    nodes = [y.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.add(node.name().replace("Backward", ""))
            nodes += [child for child, _ in node.next_functions]
    return names


def scale() -> nn.Module:
    """Makes a layer that multiplies by a parameter; its node is ``Mul``."""
    layer = Apply(lambda x: x * layer.get_parameter("weight"))
    layer.register_parameter("weight", nn.Parameter(torch.ones(2)))
    return layer


def inputs_of(m: int) -> list[Any]:
    """Makes non-leaf inputs that require grad, as all partitions but the first receive."""
    return [torch.ones(2, requires_grad=True).exp() for _ in range(m)]
