"""A gate in the graph: inputs that are connected under ``create_graph``, once that is safe."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipert._typing import Tensors
from pipert.autograd.function import applied

__all__: list[str] = []


class Gate:
    """Whether gradients pass from a computation to what is before it."""

    __slots__ = ("is_open",)

    def __init__(self) -> None:
        self.is_open = False


class _Gate(torch.autograd.Function):
    """Connects inputs under ``create_graph``; opens when the gradients are known.

    What is before may lead to leaves and inputs of the same computation, such as a tied weight:
    their gradients from there are others' to find.
    """

    @staticmethod
    def forward(ctx: Any, gate: Gate, values: Tensors, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.materialize_grads = False
        ctx.gate = gate
        return tuple(map(Tensor.detach, values))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *grads) if ctx.gate.is_open else (None,) * (2 + len(grads))


def connect_inputs(gate: Gate, xs: Tensors, values: Tensors) -> Tensors:
    """Give ``values`` the graph of ``xs``."""
    connected: Tensors = _apply_gate(gate, values, *xs)
    return connected


_apply_gate = applied(_Gate)


class _Proxy(torch.autograd.Function):
    """Stands for a tensor in the graph, and takes no memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.materialize_grads = False
        return x.new_empty(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:
        return gradient


proxy_of = applied(_Proxy)
"""``y = proxy_of(x)``."""
