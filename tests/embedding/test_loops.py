"""Tests training loops as users have them, by ``agree``: with the plain model and in two pipes.

Hooks of the whole pipe are tested with ``Pipe`` itself; hooks of parameters, in calls and steps, in
``tests/contract``. A hook of a layer is called for each micro-batch, on the thread that runs the
layer, and again in a recomputation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parametrize
from torch.nn.utils.parametrizations import orthogonal, weight_norm
from torch.optim import SGD, AdamW, Optimizer, swa_utils
from torch.optim.swa_utils import AveragedModel, update_bn

from pipert import Pipe, RecomputationError

Agree = Callable[..., None]

# What torch does not type.
mse_loss: Any = F.mse_loss
get_ema_multi_avg_fn: Any = swa_utils.get_ema_multi_avg_fn

modes = pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(count):
        yield torch.randn(7, 6, dtype=torch.double), torch.randn(7, 3, dtype=torch.double)


def loss_of(model: nn.Module, x: Tensor, target: Tensor) -> Any:
    y = model(x)
    # A sum, so that micro-batches can be told apart from the mini-batch by nothing but their rows.
    return mse_loss(y, target.to(y.device), reduction="sum")


def train(model: nn.Module, optimizer: Optimizer | None = None) -> list[float]:
    """The loop of README."""
    optimizer = optimizer or SGD(model.parameters(), lr=0.02)
    losses = []
    for x, target in batches(3):
        loss = loss_of(model, x, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# Optimizers ---------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda parameters, **how: SGD(parameters, lr=0.02, momentum=0.9, nesterov=True, **how),
    "AdamW": lambda parameters, **how: AdamW(parameters, lr=0.05, weight_decay=0.1, **how),
}


@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_trains_a_pipe_as_the_module(
    agree: Agree, name: str, how: dict[str, bool]
) -> None:
    def loop(model: nn.Module) -> list[float]:
        return train(model, OPTIMIZERS[name](model.parameters(), **how))

    agree(loop)


def closure_of(
    model: nn.Module, optimizer: Optimizer, x: Tensor, target: Tensor, calls: list[float]
) -> Callable[[], float]:
    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model, x, target)
        loss.backward()
        calls.append(loss.item())
        return calls[-1]

    return closure


# LBFGS makes one vector of all gradients, which torch does on one device only.
on_one_device = pytest.mark.parametrize(
    "devices",
    [["cpu", "cpu"], pytest.param(["cuda:0", "cuda:0"], marks=pytest.mark.cuda)],
    ids=["cpu", "cuda"],
)


@on_one_device
@pytest.mark.parametrize("line_search_fn", [None, "strong_wolfe"])
def test_lbfgs_calls_its_closure_as_often_and_gets_as_far(
    agree: Agree, line_search_fn: str | None
) -> None:
    def loop(model: nn.Module) -> list[float]:
        optimizer: Any = torch.optim.LBFGS(
            model.parameters(), lr=0.5, max_iter=3, line_search_fn=line_search_fn
        )
        calls: list[float] = []
        for x, target in batches(2):
            optimizer.step(closure_of(model, optimizer, x, target, calls))
        return calls

    agree(loop)


# Clipping -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_gradients_are_clipped_by_the_norm_of_all_devices(
    agree: Agree, norm_type: float, foreach: bool
) -> None:
    def loop(model: nn.Module) -> list[Tensor]:
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        norms = []
        for x, target in batches(3):
            loss_of(model, x, target).backward()
            norms.append(clip_grad_norm_(model.parameters(), 0.1, norm_type, foreach=foreach))
            optimizer.step()
        assert min(norms) > 0.1
        return norms

    agree(loop)


# Averages of weights ------------------------------------------------------------------------------

AVERAGES: dict[str, dict[str, Any]] = {
    "mean": {},
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "ema with buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
    "own function": {"avg_fn": lambda average, p, count: 0.5 * average + 0.5 * p},
}


def done_with(average: AveragedModel) -> None:
    """The average of a pipe is a copy of it, with threads of its own."""
    if isinstance(average.module, Pipe):
        average.module.close()


@pytest.mark.parametrize("how", AVERAGES)
def test_an_average_of_a_pipe_is_that_of_the_module(agree: Agree, how: str) -> None:
    def loop(model: nn.Module) -> list[Any]:
        average = AveragedModel(model, **AVERAGES[how])
        optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
        outputs = []
        for x, target in batches(3):
            loss_of(model, x, target).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            with torch.no_grad():
                outputs.append(average(x))
        done_with(average)
        return [outputs, average.state_dict()]

    agree(loop)


def test_update_bn_gives_a_pipe_with_deferred_statistics_those_of_the_module() -> None:
    plain = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    module, data = copy.deepcopy(plain), [x for x, _ in batches(3)]
    update_bn(data, plain)
    with Pipe(
        module, [1, 1], devices=["cpu"] * 2, chunks=3, deferred_batch_norm=True
    ) as pipe:
        update_bn(data, pipe)
    torch.testing.assert_close(module.state_dict(), plain.state_dict())


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


# Parametrizations ---------------------------------------------------------------------------------


class Symmetric(nn.Module):
    """A parametrization that saves nothing for the backward."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Bounded(nn.Module):
    """A parametrization that saves its result for the backward."""

    def forward(self, weight: Tensor) -> Tensor:
        return torch.tanh(weight)


PARAMETRIZATIONS: dict[str, Register] = {
    "weight norm": lambda layer: weight_norm(layer),
    "orthogonal": lambda layer: orthogonal(layer),
    "symmetric": lambda layer: parametrize.register_parametrization(layer, "weight", Symmetric()),
    "bounded": lambda layer: parametrize.register_parametrization(layer, "weight", Bounded()),
}


def six_wide(kind: str) -> nn.Sequential:
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 3)]
    for k in (0, 2):
        PARAMETRIZATIONS[kind](layers[k])
    return nn.Sequential(*layers).double()


@pytest.mark.pairwise
@modes
@pytest.mark.parametrize("kind", PARAMETRIZATIONS)
def test_a_parametrized_model_trains_as_without_a_pipe(
    agree: Agree, kind: str, checkpoint: str
) -> None:
    agree(train, six_wide(kind), checkpoint=checkpoint)


@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_a_cached_parametrization_is_refused_where_it_is_recomputed(
    checkpoint: str, inside: bool
) -> None:
    module = six_wide("bounded")
    with Pipe(module, [2, 3], devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint) as pipe:
        with pytest.raises(RecomputationError, match="checkpoint='never'"):
            with parametrize.cached():
                loss = pipe(next(batches(1))[0]).sum()
                if inside:
                    loss.backward()
            loss.backward()
