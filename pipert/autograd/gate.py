"""Connects a task's inputs to the graph before it under ``create_graph``, once that is safe."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipert._typing import Tensors
from pipert.autograd.function import applied

__all__: list[str] = []


class Gate:
    """A switch for gradients that pass from a task to the graph before it. Closed at first."""

    __slots__ = ("is_open",)

    def __init__(self) -> None:
        self.is_open = False


class _Gate(torch.autograd.Function):
    """A connection of inputs that passes gradients when the gate is open.

    It opens when the task's gradients are known: the graph before the task may lead to the task's
    own leaves and inputs, such as a tied weight, and gradients along those paths are not this
    task's to compute.
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
    """Return ``values`` connected to the graph of ``xs`` through ``gate``."""
    connected: Tensors = _apply_gate(gate, values, *xs)
    return connected


_apply_gate = applied(_Gate)


class _Proxy(torch.autograd.Function):
    """A placeholder for a tensor in the graph, of the same shape, that takes no memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.materialize_grads = False
        return x.new_empty(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:
        return gradient


proxy_of = applied(_Proxy)
"""``y = proxy_of(x)``: a differentiable placeholder for ``x`` that does not keep its data."""
