"""Tests data loading beside a pipe: processes are forked or spawned while its threads work.

A forked child inherits locks but no threads. What a child does with the pipe itself is tested in
test_fork.py; here it does what a data loader's worker does, and the parent goes on training.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset

from pipert import Pipe

pytestmark = [
    pytest.mark.slow,
    # Python warns of forks in a process with threads; that they are harmless is what is tested.
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

mse_loss: Any = F.mse_loss  # torch does not type Tensor.backward

WAIT = 30.0  # s; what should happen at once is given up after it


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """A data set whose rows are computed in the worker, with torch and its own random numbers."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(k)
        x = torch.randn(6, generator=generator, dtype=torch.double)
        return x, (x[:3] * 2).softmax(0)


def perceptron() -> nn.Sequential:
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def pipe_of(module: nn.Sequential, devices: list[str], **options: Any) -> Pipe:
    return Pipe(module, [2, 3], devices=devices, chunks=2, **options)


def loader(context: str | None, **options: Any) -> DataLoader[Any]:
    if context is not None:
        # A spawned one imports torch first, which takes long.
        workers = 2 if context == "fork" else 1
        options |= {"num_workers": workers, "multiprocessing_context": context, "timeout": WAIT}
    return DataLoader(Rows(), batch_size=4, **options)


def train(model: nn.Module, batches: Iterable[Any], epochs: int = 2) -> list[Tensor]:
    """Trains; returns the parameters afterwards."""
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.9)
    for _ in range(epochs):
        for x, target in batches:
            optimizer.zero_grad()
            y = model(x)
            mse_loss(y, target.to(y.device)).backward()
            optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize(
    "context, persistent",
    [("fork", False), ("fork", True), ("spawn", True)],
    ids=["new forked workers", "persistent forked workers", "persistent spawned workers"],
)
def test_training_with_worker_processes_is_that_of_the_module_without(
    devices: list[str], context: str, persistent: bool
) -> None:
    plain = perceptron()
    module = copy.deepcopy(plain)
    expected = train(plain, loader(None))
    with pipe_of(module, devices) as pipe:
        pipe(next(iter(loader(None)))[0])  # its threads are there before the first fork
        actual = train(pipe, loader(context, persistent_workers=persistent))
    torch.testing.assert_close(actual, expected)


# Where the input comes from -----------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("non_blocking", [False, True])
@pytest.mark.parametrize("kind", ["pageable", "pinned", "on the GPU", "on the GPU, from pinned"])
def test_an_input_may_come_from_anywhere(
    devices: list[str], kind: str, non_blocking: bool
) -> None:
    plain = perceptron()
    with pipe_of(copy.deepcopy(plain), devices) as pipe:
        for _ in range(3):
            x = torch.randn(64, 6, dtype=torch.double)
            expected = plain(x)
            given = x.pin_memory() if "pinned" in kind else x
            if "GPU" in kind:
                given = given.to("cuda:0", non_blocking=non_blocking)
            torch.testing.assert_close(pipe(given).cpu(), expected)
