"""A saved and resumed run continues as if it had never stopped.

Saved by a pipe or by the plain module, resumed by a pipe of another balance, other chunks and
another checkpoint mode, or by the plain module: in each of torch's ways of saving. The tests
compare not the loaded weights but the losses of the following steps, which also need the
optimizer's moments, its groups and the schedule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from pipert import Pipe

# What it says is what is wanted, and what no_dist=True asks for: to save in a single process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

BEFORE, AFTER = 3, 3  # steps
ROWS = 7

same = torch.testing.assert_close
same(0, 0)  # the first call imports for half a second, which is no test's fault


class Place(NamedTuple):
    """How a pipe runs the model."""

    balance: list[int]
    chunks: int
    checkpoint: str


PLACES: dict[str, Place | None] = {
    "plain": None,
    "one device": Place([6], 2, "never"),
    "two devices": Place([2, 4], 3, "except_last"),
    "two others": Place([5, 1], 3, "always"),
}


class Training(NamedTuple):
    """The objects to save: model, optimizer and schedule."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, dtype=torch.float64)


def six_layers(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    norm = nn.LayerNorm(4, dtype=torch.float64)
    return nn.Sequential(linear(3, 4), nn.Tanh(), linear(4, 4), norm, nn.GELU(), linear(4, 2))


@contextlib.contextmanager
def placed(module: nn.Sequential, place: Place | None) -> Iterator[nn.Module]:
    """The module itself, or in a pipe that is closed at the end."""
    if place is None:
        yield module
        return
    devices = ["cpu"] * len(place.balance)
    with Pipe(
        module, place.balance, devices=devices, chunks=place.chunks, checkpoint=place.checkpoint
    ) as pipe:
        yield pipe


def training(model: nn.Module) -> Training:
    """Makes AdamW with two groups, as is usual, and a schedule that changes in each step."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9))
    return Training(model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7))


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(ROWS, 3, dtype=torch.float64, generator=generator)
        for _ in range(BEFORE + AFTER)
    ]


def train(run: Training, xs: list[Tensor]) -> list[float]:
    losses = []
    for x in xs:
        run.optimizer.zero_grad()
        loss = run.model(x).square().sum()
        loss.backward()
        run.optimizer.step()
        run.schedule.step()
        losses.append(loss.item())
    return losses


def uninterrupted(place: Place | None) -> list[float]:
    with placed(six_layers(0), place) as model:
        return train(training(model), batches())[BEFORE:]


# The ways to save and to load.


class Way(NamedTuple):
    save: Callable[[Path, Training], None]
    load: Callable[[Path, Training], None]


def save_file(path: Path, run: Training) -> None:
    parts = (run.model, run.optimizer, run.schedule)
    torch.save([part.state_dict() for part in parts], path)


def load_file(path: Path, run: Training) -> None:
    model, optimizer, schedule = torch.load(path, weights_only=True)
    run.model.load_state_dict(model, strict=True)
    run.optimizer.load_state_dict(optimizer)
    run.schedule.load_state_dict(schedule)


def distributed_state(run: Training) -> dict[str, Any]:
    model, optimizer = get_state_dict(run.model, run.optimizer)
    return {"model": model, "optimizer": optimizer, "schedule": run.schedule.state_dict()}


def save_distributed(path: Path, run: Training) -> None:
    save(distributed_state(run), checkpoint_id=path, no_dist=True)


def save_distributed_meanwhile(path: Path, run: Training) -> None:
    saving: Any = async_save(distributed_state(run), checkpoint_id=path, no_dist=True)
    train(run, batches())  # what is saved is what there was before
    saving.result()


def load_distributed(path: Path, run: Training) -> None:
    state = distributed_state(run)
    load(state, checkpoint_id=path, no_dist=True)
    set_state_dict(
        run.model, run.optimizer, model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )  # fmt: skip
    run.schedule.load_state_dict(state["schedule"])


WAYS = {
    "torch.save": Way(save_file, load_file),
    "dcp": Way(save_distributed, load_distributed),
    "async_save": Way(save_distributed_meanwhile, load_distributed),
}


def resumed(path: Path, way: str, before: Place | None, after: Place | None) -> list[float]:
    """Returns the losses after a run was saved in one place and resumed in another."""
    with placed(six_layers(0), before) as model:
        run = training(model)
        train(run, batches()[:BEFORE])
        WAYS[way].save(path, run)
    with placed(six_layers(9), after) as model:  # would compute something else
        run = training(model)
        WAYS[way].load(path, run)
        return train(run, batches()[BEFORE:])


@pytest.mark.pairwise
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("after", PLACES)
@pytest.mark.parametrize("before", PLACES)
def test_a_run_goes_on_wherever_it_is_taken_up(
    tmp_path: Path, before: str, after: str, way: str
) -> None:
    """Bit for bit, with the same chunks."""
    places = PLACES[before], PLACES[after]
    losses = resumed(tmp_path / "run", way, *places)
    same(losses, uninterrupted(None))
    if len({place.chunks if place else 1 for place in places}) == 1:
        assert losses == uninterrupted(places[0])
