"""Tests that a state saved over several ranks is the plain module's, wherever it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_into
from torch.distributed.checkpoint.state_dict_saver import save as save_as

import pipert
from pipert import distributed
from tests.distributed.launcher import in_sweep, run


class Head(nn.Linear):
    """Shares the weight of the first layer."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__(4, 4)
        self.weight = weight


def layers(seed: int, tied: bool) -> nn.Sequential:
    """Eight layers, with buffers, and a weight that the first and the last may share."""
    torch.manual_seed(seed)
    first = nn.Linear(4, 4)
    assert isinstance(first.weight, nn.Parameter)
    return nn.Sequential(
        first, nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Tanh(),
        nn.Linear(4, 4), Head(first.weight) if tied else nn.Linear(4, 4),
    )  # fmt: skip


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator)


# How many ranks, the balance, the schedule; of a plain module, a pipe, and one over ranks.
WAYS: dict[str, tuple[int, list[int] | None, str]] = {
    "plain": (1, None, ""),
    "one process": (1, [4, 4], "pipert"),
    "one rank": (1, [8], "1f1b"),
    "two ranks": (2, [3, 5], "1f1b"),
    "four ranks": (4, [2, 2, 2, 2], "1f1b"),
    "interleaved": (2, [2, 1, 3, 2], "interleaved"),
    "any model": (2, [3, 5], "any model"),
}


def make(way: str, seed: int, tied: bool) -> Any:
    _, balance, schedule = WAYS[way]
    model = layers(seed, tied)
    if balance is None:
        return model
    if schedule == "pipert":
        return pipert.Pipe(model, balance, devices=["cpu"] * len(balance))
    if schedule == "any model":
        return distributed.pipeline(model, ["3"], example=batch()[0])
    return distributed.Pipe(model, balance, schedule=schedule)


def train(model: Any, optimizer: torch.optim.Optimizer) -> Tensor:
    """One step; batch norm sees the whole batch, which is one micro-batch."""
    x, y = batch()
    optimizer.zero_grad()
    if isinstance(model, distributed.Pipe | distributed.ModulePipe):
        loss: Tensor = model.forward_backward(x, target=y, loss_fn=F.mse_loss)
    else:
        loss = F.mse_loss(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()


# Else each rank would save a list of groups, of its own parameters, by the same key.
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def state_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
    }


def save(rank: int, way: str, tied: bool, path: str) -> list[Tensor]:
    """Train, save, train on: the losses that whoever goes on must have."""
    model = make(way, 0, tied)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, optimizer)
    save_as(state_of(model, optimizer), checkpoint_id=path)
    return [train(model, optimizer) for _ in range(3)]


def load(rank: int, way: str, tied: bool, path: str) -> list[Tensor]:
    """Load into another model, which has trained; train on."""
    model = make(way, 1, tied)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    state = state_of(model, optimizer)
    own = state["optimizer"]
    # A rank with a copy of a tied weight has its state by the name that the weight has there; the
    # plain module, by the first alone.
    firsts = {key: key.replace("7.weight", "0.weight") if tied else key for key in own}
    state["optimizer"] = {firsts[key]: value for key, value in own.items()}
    load_into(state, checkpoint_id=path)
    found = {key: state["optimizer"][first] for key, first in firsts.items()}
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, found, options=FLAT)
    return [train(model, optimizer) for _ in range(3)]


@pytest.mark.parametrize(
    "saver, loader, tied",
    [
        ("two ranks", "four ranks", True), in_sweep("four ranks", "two ranks", False),
        in_sweep("two ranks", "interleaved", False), ("interleaved", "two ranks", True),
        in_sweep("two ranks", "one rank", True), in_sweep("one rank", "two ranks", False),
        ("two ranks", "one process", False), in_sweep("one process", "four ranks", True),
        in_sweep("two ranks", "plain", True), ("plain", "two ranks", True),
        ("any model", "four ranks", True), ("plain", "any model", False),
    ],
)  # fmt: skip
def test_training_goes_on(saver: str, loader: str, tied: bool, tmp_path: Path) -> None:
    saved = run(WAYS[saver][0], save, saver, tied, str(tmp_path))
    loaded = run(WAYS[loader][0], load, loader, tied, str(tmp_path))
    for losses in (*saved, *loaded):
        torch.testing.assert_close(losses, saved[0])


def states(rank: int, tied: bool) -> tuple[list[str], list[str]]:
    """The whole state is loaded on each rank, as far as it is there."""
    pipe = make("two ranks", 0, tied)
    whole = layers(1, tied).state_dict()
    pipe.load_state_dict(whole)
    own = pipe.state_dict()
    assert all(torch.equal(value, whole[key]) for key, value in own.items())
    del whole["2.weight"]  # on the first rank
    whole["8.weight"] = torch.ones(1)  # on none
    for rank_of, missing in enumerate((["2.weight"], [])):
        if rank == rank_of:
            found = pipe.load_state_dict(whole, strict=False)
            assert found.missing_keys == missing and found.unexpected_keys == ["8.weight"]
    with pytest.raises(RuntimeError, match="8.weight"):
        pipe.load_state_dict(whole)
    return list(own), [name for name, _ in pipe.named_parameters()]


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_keys_are_the_plain_modules(tied: bool) -> None:
    plain = layers(0, tied)
    found = run(2, states, tied)
    assert sum([keys for keys, _ in found], []) == list(plain.state_dict())
    expected = [name for name, _ in plain.named_parameters(remove_duplicate=False)]
    assert sum([names for _, names in found], []) == expected


def from_meta(rank: int, path: str) -> list[Tensor]:
    with torch.device("meta"):
        model = layers(0, False)
    pipe = distributed.Pipe(model, [3, 5])
    assert not any(p.is_meta for p in pipe.parameters())
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.1)
    state = state_of(pipe, optimizer)
    load_into(state, checkpoint_id=path)
    set_model_state_dict(pipe, state["model"])
    set_optimizer_state_dict(pipe, optimizer, state["optimizer"], options=FLAT)
    return [train(pipe, optimizer) for _ in range(3)]


def test_a_model_on_the_meta_device_gets_its_values_from_a_checkpoint(tmp_path: Path) -> None:
    (saved,) = run(1, save, "plain", False, str(tmp_path))
    for losses in run(2, from_meta, str(tmp_path)):
        torch.testing.assert_close(losses, saved)
