"""Runs a training loop with the plain model and in two pipes, for the tests of loops."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe

same = torch.testing.assert_close
same(0, 0)  # the first call imports for half a second, which would count against a test

Loop = Callable[[nn.Module], Any]


class Agree(Protocol):
    """Asserts that a loop does the same with the plain model and with a pipe."""

    def __call__(self, loop: Loop, module: nn.Sequential | None = None, **options: Any) -> None: ...


@pytest.fixture(
    params=[
        pytest.param(["cpu", "cpu"], id="cpu"),
        pytest.param(["cuda:0", "cuda:0"], id="cuda", marks=pytest.mark.cuda),
        pytest.param(["cuda:0", "cpu"], id="cuda,cpu", marks=pytest.mark.cuda),
        pytest.param(["cuda:0", "cuda:1"], id="cuda,cuda", marks=pytest.mark.multi_gpu),
    ]
)
def devices(request: pytest.FixtureRequest) -> list[str]:
    """Returns the devices of the two partitions of a test's pipe."""
    found: list[str] = request.param
    return found


@pytest.fixture(scope="session", autouse=True)
def _first_optimizer() -> None:
    """Makes the process's first optimizer, whose imports take seconds, before any test."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()


@pytest.fixture
def agree(devices: list[str]) -> Agree:
    """Runs ``loop(model)`` with the plain model, and with two pipes of copies of it.

    Its result and the parameters, buffers and gradients afterwards must be close to the plain
    model's in the first pipe, and equal in both pipes bit for bit.
    """

    def check(loop: Loop, module: nn.Sequential | None = None, **options: Any) -> None:
        plain = perceptron() if module is None else module
        copies = [copy.deepcopy(plain) for _ in range(2)]
        expected = [outcome(loop, plain, plain)]
        for piped in copies:
            with piped_in_two(piped, devices, **options) as pipe:
                expected.append(outcome(loop, pipe, piped))
        same(expected[1], expected[0], equal_nan=True)
        same(expected[2], expected[1], rtol=0.0, atol=0.0, equal_nan=True)

    return check


def piped_in_two(module: nn.Sequential, devices: list[str], **options: Any) -> Pipe:
    """Makes a pipe with two partitions and, by default, three micro-batches."""
    first = len(module) // 2
    options.setdefault("chunks", 3)
    return Pipe(module, [first, len(module) - first], devices=devices, **options)


def outcome(loop: Loop, model: nn.Module, module: nn.Module) -> dict[str, Any]:
    """Returns, on the CPU, the loop's result and the module's state and gradients after it."""
    torch.manual_seed(7)
    returned = loop(model)
    found = {"returned": torch.utils._pytree.tree_map_only(Tensor, at_home, returned)}
    found |= {name: at_home(tensor) for name, tensor in module.state_dict().items()}
    for name, parameter in module.named_parameters():
        assert parameter.grad is None or parameter.grad.device == parameter.device
        found[f"grad of {name}"] = None if parameter.grad is None else at_home(parameter.grad)
    return found


def at_home(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()


def perceptron() -> nn.Sequential:
    """Makes a model in double precision, so that the order of summation hardly matters."""
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()
