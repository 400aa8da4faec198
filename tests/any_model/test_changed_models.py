"""Models whose modules are replaced or added after their pipe was made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipert
from tests.any_model.family import ROWS, Family, Made
from tests.any_model.piped import pipeline
from tests.helpers.ways import grads_of

each_schedule = pytest.mark.parametrize("schedule", ["", "1f1b"], ids=["call", "step"])


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            x = layer(x)
        return x


class Adapted(nn.Module):
    """A layer with an adapter beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.beside = base, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + self.beside(x)


def replace_cut(model: Any) -> None:
    model.blocks[2] = block()


def delete_before_cut(model: Any) -> None:
    del model.blocks[0]


def compile_cut(model: Any) -> None:
    model.blocks[2].compile(backend="eager")


def change_inside(model: Any) -> None:
    model.blocks[1][0] = nn.Linear(4, 4)
    model.metric = nn.MSELoss()
    del model.blocks[3]


def replace_layer(model: Any) -> None:
    model.blocks[1] = block()


def adapt_layer(model: Any) -> None:
    model.blocks[3] = Adapted(model.blocks[3])


def append_layer(model: Any) -> None:
    model.blocks.append(block())


def total(output: Any, _: Any = None) -> Any:
    return output.square().sum()


def run(pipe: Any, x: Tensor, schedule: str) -> None:
    if schedule:
        pipe.forward_backward(x, loss_fn=total, reduction="sum", schedule=schedule)
    else:
        total(pipe(x)).backward()


def own(model: Any) -> Family:
    batch = {"x": torch.randn(ROWS, 4)}
    return Family("changed", lambda: Made(model, batch), ("blocks.2",))


@each_schedule
@pytest.mark.parametrize("change", [replace_cut, delete_before_cut, compile_cut])
def test_cuts_changed_after_the_pipe_was_made_are_refused_by_name(
    change: Callable[[Any], None], schedule: str
) -> None:
    model = Model()
    x = torch.randn(ROWS, 4)
    pipe = pipeline(model, own(model), "always")
    with pipe, copy.deepcopy(pipe) as other:
        pipe(x)
        for one in (pipe, other):  # which has not been called
            change(one.module)
            with pytest.raises(RuntimeError, match=r"blocks\.2'.*pipe again"):
                run(one, x, schedule)
    if change is replace_cut:
        with pipeline(model, own(model), "never") as pipe:
            torch.testing.assert_close(pipe(x), model(x))


@each_schedule
@pytest.mark.parametrize("change", [change_inside, replace_layer, adapt_layer, append_layer])
def test_other_changes_are_accepted(change: Callable[[Any], None], schedule: str) -> None:
    model: Any = Model()
    x = torch.randn(ROWS, 4)
    with pipeline(model, own(model), "always") as pipe:
        pipe(x)
        change(model)
        plain = copy.deepcopy(model)
        run(pipe, x, schedule)
    total(plain(x)).backward()
    torch.testing.assert_close(grads_of(model), grads_of(plain))


class LeavingOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.second.forward(self.first(x))


def test_a_cut_that_no_call_reaches_is_named_after_the_first_run() -> None:
    with pipert.pipeline(LeavingOut(), ["second"], devices=["cpu"] * 2) as pipe:
        with pytest.warns(UserWarning, match="no partition begins at layer 'second'"):
            pipe(torch.ones(2, 4))
        pipe(torch.ones(2, 4))  # here, a warning is an error
