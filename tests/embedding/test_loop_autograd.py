"""Tests uses of autograd in a loop: anomalies, saved tensors, several uses of an output."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from pipert import Pipe

mse_loss: Any = F.mse_loss  # torch does not type Tensor.backward

Agree = Callable[..., None]

modes = pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(count):
        yield torch.randn(7, 6, dtype=torch.double), torch.randn(7, 3, dtype=torch.double)


def loss_of(model: nn.Module, x: Tensor, target: Tensor) -> Any:
    y = model(x)
    return mse_loss(y, target.to(y.device))


def train(model: nn.Module, steps: int = 3) -> list[float]:
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for x, target in batches(steps):
        optimizer.zero_grad()
        loss = loss_of(model, x, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# Anomaly detection --------------------------------------------------------------------------------


class RootOfZero(nn.Module):
    """A layer with a gradient of infinity times zero."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x * 0)  # the line that anomaly detection has to find


@pytest.fixture
def anomalies() -> Iterator[list[str]]:
    """Turns anomaly detection on, and yields the list of warnings."""
    found: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: found.append(str(message))
        with torch.autograd.detect_anomaly():
            yield found


@modes
def test_an_anomaly_is_traced_to_the_line_of_the_layer(
    anomalies: list[str], devices: list[str], checkpoint: str
) -> None:
    module = nn.Sequential(nn.Linear(6, 6), RootOfZero(), nn.Linear(6, 3)).double()
    with Pipe(module, [2, 1], devices=devices, chunks=3, checkpoint=checkpoint) as pipe:
        with pytest.raises(RuntimeError, match="'MulBackward0' returned nan values"):
            loss_of(pipe, *next(batches(1))).backward()
    line = "return torch.sqrt(x * 0)  # the line that anomaly detection has"
    assert any("Traceback of forward call" in each and line in each for each in anomalies)


@modes
def test_training_under_anomaly_detection_is_the_modules(
    anomalies: list[str], agree: Agree, checkpoint: str
) -> None:
    agree(train, checkpoint=checkpoint)


# Saved tensors ------------------------------------------------------------------------------------


@modes
def test_training_with_activations_saved_on_cpu_is_the_modules(
    agree: Agree, checkpoint: str
) -> None:
    def loop(model: nn.Module) -> list[float]:
        with torch.autograd.graph.save_on_cpu():
            return train(model)

    agree(loop, checkpoint=checkpoint)


# Outputs that are used in several ways -----------------------------------------------------------


@modes
def test_gradients_by_autograd_grad_can_be_applied_by_hand(agree: Agree, checkpoint: str) -> None:
    def loop(model: nn.Module) -> list[tuple[Tensor, ...]]:
        steps = []
        for x, target in batches(3):
            grads = torch.autograd.grad(loss_of(model, x, target), list(model.parameters()))
            steps.append(grads)
            with torch.no_grad():
                for parameter, grad in zip(model.parameters(), grads, strict=True):
                    parameter.sub_(0.2 * grad)
        assert all(p.grad is None for p in model.parameters())
        return steps

    agree(loop, checkpoint=checkpoint)


# Evaluation between steps -------------------------------------------------------------------------

WITHOUT_GRAD: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


class DoubleInTraining(nn.Module):
    """Like dropout, gives other numbers in train and eval; unlike it, the plain model's."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.training else x


@modes
@pytest.mark.parametrize("mode", WITHOUT_GRAD)
def test_evaluation_between_steps_disturbs_neither(
    agree: Agree, mode: str, checkpoint: str
) -> None:
    module = nn.Sequential(nn.Linear(6, 8), DoubleInTraining(), nn.Linear(8, 3)).double()

    def loop(model: nn.Module) -> list[Any]:
        outcomes: list[Any] = []
        for _ in range(2):
            outcomes.append(train(model, 1))
            model.eval()
            with WITHOUT_GRAD[mode]():
                y = model(next(batches(1))[0])
                assert not y.requires_grad and y.is_inference() == (mode == "inference_mode")
                outcomes.append(y.clone())
            model.train()
        return outcomes

    agree(loop, module, checkpoint=checkpoint)
