"""Tests what ``R[i,j]`` of a step recomputes, and which leaves ``B[i,j]`` finds in its graph."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, RecomputationError, is_recomputing
from tests.layers import Apply

M = 4
modes = pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])


def rows(m: int = M) -> Tensor:
    """Makes ``m`` micro-batches of one row, whose first column is its number."""
    return torch.cat([torch.arange(float(m)).unsqueeze(1), torch.rand(m, 2)], 1)


def total(y: Tensor, _: Any) -> Tensor:
    return y.square().sum()


def step(model: nn.Module, checkpoint: str, loss_fn: Callable[..., Tensor] = total) -> Tensor:
    layers = nn.Sequential(model, nn.Linear(3, 3))  # drawn before the rows
    with Pipe(layers, [1, 1], devices=["cpu"] * 2, chunks=M, checkpoint=checkpoint) as pipe:
        loss: Tensor = pipe.forward_backward(
            rows(), loss_fn=loss_fn, reduction="sum", schedule="1f1b"
        )
    return loss


def test_a_graph_with_other_nodes_that_saves_the_same_is_no_other_computation() -> None:
    """Compilers and caches, for example, have more to do the first time."""

    def warm_up(x: Tensor) -> Tensor:
        if not is_recomputing():
            _ = x + 1  # a node that saves nothing
        return x.exp()

    weight = nn.Linear(3, 3)
    step(nn.Sequential(deepcopy(weight), Apply(warm_up)), "always")
    own = nn.Sequential(weight, Apply(warm_up))
    torch.manual_seed(0)
    step(own, "always")
    recomputed = weight.weight.grad
    weight.weight.grad = None
    torch.manual_seed(0)
    step(own, "never")
    torch.testing.assert_close(weight.weight.grad, recomputed)


def test_a_recomputation_that_returns_another_shape_is_refused() -> None:
    model = nn.Sequential(
        nn.Linear(3, 3), Apply(lambda x: x[:, :2] if is_recomputing() else x)
    )
    with pytest.raises(RecomputationError, match=r"\[1, 2\].* its forward .*\[1, 3\]"):
        step(model, "always")


class Experts(nn.Module):
    """A layer with a weight for each micro-batch, used by equally many operations."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.weights = weights
        for k, weight in enumerate(weights):
            if isinstance(weight, nn.Parameter):
                self.register_parameter(f"expert{k}", weight)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weights[int(x[0, 0].item())]


@modes
@pytest.mark.parametrize("make", [nn.Parameter, torch.Tensor.requires_grad_])
def test_each_micro_batch_may_use_other_weights(
    checkpoint: str, make: Callable[[Tensor], Tensor]
) -> None:
    """The weights are parameters, or tensors that a layer keeps for itself."""
    weights = [make(torch.full((3,), float(k))) for k in range(M)]
    step(Experts(weights), checkpoint)
    grads = [weight.grad for weight in weights]
    assert all(grad is not None and grad.any() for grad in grads)


@modes
def test_a_loss_may_train_another_tensor_for_each_micro_batch(checkpoint: str) -> None:
    scales = [torch.ones((), requires_grad=True) for _ in range(M)]
    used = iter(scales)

    def loss_fn(y: Tensor, _: Any) -> Tensor:
        return (y * next(used)).square().sum()

    step(nn.Linear(3, 3), checkpoint, loss_fn)
    assert all(scale.grad is not None and scale.grad > 0 for scale in scales)


@modes
def test_a_weight_of_the_layers_that_the_loss_uses_gets_both_gradients(checkpoint: str) -> None:
    layer = nn.Linear(3, 3)

    def loss_fn(y: Tensor, _: Any) -> Tensor:
        return y.square().sum() + layer.weight.square().sum()

    torch.manual_seed(1)
    step(layer, checkpoint, loss_fn)
    found, layer.weight.grad = layer.weight.grad, None
    torch.manual_seed(1)
    head, x = nn.Linear(3, 3), rows()
    torch.autograd.backward(total(head(layer(x)), None) + M * layer.weight.square().sum())
    torch.testing.assert_close(found, layer.weight.grad)


def test_autocast_casts_a_weight_once_for_all_micro_batches_and_again_changes_nothing() -> None:
    layer = nn.Linear(3, 3)
    grads = []
    for checkpoint in ("never", "always"):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            step(layer, checkpoint)
        assert layer.weight.grad is not None
        grads.append(layer.weight.grad)
        layer.weight.grad = None
    torch.testing.assert_close(grads[0], grads[1])


@modes
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_branch_with_as_many_operations_may_use_a_tensor_that_is_no_parameter(
    checkpoint: str, schedule: str
) -> None:
    one, other = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    layers = nn.Sequential(Apply(lambda x: x * (one if x[0, 0] > M - 2 else other)))
    layers.append(nn.Linear(3, 3))
    with Pipe(layers, [1, 1], devices=["cpu"] * 2, chunks=M, checkpoint=checkpoint) as pipe:
        pipe.forward_backward(rows(), loss_fn=total, reduction="sum", schedule=schedule)
    assert one.grad is not None and other.grad is not None
