"""Tests hooks of layers, parameters and tensors, and optimizers that step in the backward.

What a hook of the whole pipe or module sees is tested with ``Pipe`` itself; hooks of parameters,
in calls and steps, in ``tests/contract``. A hook of a layer is
called for each micro-batch, on the thread that runs the layer, and again in a recomputation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from pipert import Pipe, is_recomputing

mse_loss: Any = F.mse_loss  # torch does not type Tensor.backward

Agree = Callable[..., None]

modes = pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])


def batches(count: int, requires_grad: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(count):
        x = torch.randn(7, 6, dtype=torch.double, requires_grad=requires_grad)
        yield x, torch.randn(7, 3, dtype=torch.double)


def loss_of(model: nn.Module, x: Tensor, target: Tensor) -> Any:
    y = model(x)
    # A sum, so that micro-batches can be told apart from the mini-batch by nothing but their rows.
    return mse_loss(y, target.to(y.device), reduction="sum")


def train(model: nn.Module) -> list[float]:
    optimizer = SGD(model.parameters(), lr=0.02)
    losses = []
    for x, target in batches(3):
        optimizer.zero_grad()
        loss = loss_of(model, x, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# Hooks of layers ----------------------------------------------------------------------------------

Register = Callable[[nn.Module], Any]


def halved(grads: Any) -> Any:
    return tuple(None if grad is None else grad * 0.5 for grad in grads)


CHANGING: dict[str, Register] = {
    "forward": lambda layer: layer.register_forward_hook(lambda m, x, y: y * 0.5),
    "forward_pre": lambda layer: layer.register_forward_pre_hook(lambda m, x: (x[0] * 0.5,)),
    "full_backward": lambda layer: layer.register_full_backward_hook(
        lambda m, grads, _: halved(grads)
    ),
    "full_backward_pre": lambda layer: layer.register_full_backward_pre_hook(
        lambda m, grads: halved(grads)
    ),
}


@pytest.mark.pairwise
@modes
@pytest.mark.parametrize("layer", ["2", "3"])
@pytest.mark.parametrize("kind", CHANGING)
def test_a_layers_hook_that_changes_something_does_so_as_without_a_pipe(
    agree: Agree, kind: str, layer: str, checkpoint: str
) -> None:
    def loop(model: nn.Module) -> list[list[float]]:
        before = train(model)
        handle = CHANGING[kind](model.get_submodule(layer))
        changed = train(model)
        handle.remove()
        return [before, changed, train(model)]

    agree(loop, checkpoint=checkpoint)


@modes
def test_activations_taken_by_a_hook_are_those_of_the_module_in_order(
    agree: Agree, checkpoint: str
) -> None:
    def loop(model: nn.Module) -> list[Tensor]:
        taken: list[Tensor] = []

        def take(layer: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
            if not is_recomputing():
                taken.append(y.detach().clone())

        handle = model.get_submodule("1").register_forward_hook(take)
        loss_of(model, *next(batches(1))).backward()
        handle.remove()
        return [torch.cat(taken)]

    agree(loop, checkpoint=checkpoint)


def test_state_dict_hooks_of_a_layer_are_called_as_without_a_pipe(agree: Agree) -> None:
    def loop(model: nn.Module) -> None:
        layer: Any = model.get_submodule("2")
        calls: list[str] = []
        handles = [
            layer.register_state_dict_pre_hook(lambda *args: calls.append("saving " + args[1])),
            layer.register_state_dict_post_hook(lambda *args: calls.append("saved " + args[2])),
            layer.register_load_state_dict_pre_hook(lambda *args: calls.append("load " + args[2])),
            layer.register_load_state_dict_post_hook(lambda *args: calls.append("loaded")),
        ]
        model.load_state_dict(model.state_dict())
        for handle in handles:
            handle.remove()
        assert calls == ["saving 2.", "saved 2.", "load 2.", "loaded"]

    agree(loop)


@pytest.mark.layered  # they see the model, too
def test_hooks_for_all_modules_see_the_layers_and_the_pipe() -> None:
    module = nn.Sequential(nn.Linear(6, 3), nn.Tanh()).double()
    seen: Counter[str] = Counter()
    handle = nn.modules.module.register_module_forward_hook(
        lambda m, x, y: seen.update([type(m).__name__])
    )
    try:
        with Pipe(module, [1, 1], devices=["cpu"] * 2, chunks=3, checkpoint="never") as pipe:
            pipe(next(batches(1))[0])
    finally:
        handle.remove()
    assert seen == {"Linear": 3, "Tanh": 3, "Pipe": 1}


# Hooks of parameters and tensors ------------------------------------------------------------------


@modes
def test_an_optimizer_may_step_in_the_backward(agree: Agree, checkpoint: str) -> None:
    def loop(model: nn.Module) -> list[float]:
        optimizers = {p: SGD([p], lr=0.02, momentum=0.9) for p in model.parameters()}

        def step(parameter: Tensor) -> None:
            optimizer = optimizers[parameter]  # type: ignore[index]
            optimizer.step()
            optimizer.zero_grad()

        parameters: list[Any] = list(optimizers)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(step)
        losses = []
        for x, target in batches(3):
            loss = loss_of(model, x, target)
            loss.backward()
            losses.append(loss.item())
        assert all(p.grad is None for p in model.parameters())
        return losses

    agree(loop, checkpoint=checkpoint)
