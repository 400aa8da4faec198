"""Tests that any value stashed in a Pipe arrives as it was stashed, wherever it is popped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert.skip import skippable, stash
from tests.helpers.pipes import pipe_of
from tests.helpers.skip_layers import Forward, identity, popping, stashing
from tests.helpers.ways import Way, assert_equal, each_way, same
from tests.layers import Apply

MODES = ["always", "except_last", "never"]
modes = pytest.mark.parametrize("checkpoint", MODES)
CHANGED = "the skip 'a' was modified in place after it was stashed"


def linear() -> nn.Linear:
    return nn.Linear(3, 3, dtype=torch.float64)


def stashed(function: Callable[[Tensor], Any]) -> nn.Module:
    """A layer; stashes what a function makes of its output."""
    return stashing("a", make=function, before=linear())


def taken(function: Callable[[Tensor, Any], Any]) -> nn.Module:
    """Returns what a function makes of its input and the skip."""
    return popping("a", take=function)


def batch(rows: int = 5) -> Tensor:
    return torch.randn(rows, 3, dtype=torch.float64)


# Any value ----------------------------------------------------------------------------------------

VALUES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor, Any], Tensor]]] = {
    "None": (lambda y: None, lambda x, skip: x if skip is None else x * 0),
    "a number": (lambda y: 3, lambda x, skip: x * skip),
    "a string": (lambda y: "tanh", lambda x, skip: getattr(x, skip)()),
    "a float tensor": (lambda y: y * 2, lambda x, skip: x * skip),
    "the output itself": (identity, lambda x, skip: x * skip),
    "a view": (lambda y: y[:, :1], lambda x, skip: x * skip),
    "an int tensor": (lambda y: y.argmax(1), lambda x, skip: x * skip[:, None]),
    "a bool tensor": (lambda y: y > 0, lambda x, skip: x.masked_fill(skip, 0)),
    "a detached tensor": (lambda y: y.detach(), lambda x, skip: x * skip),
    "a 0-dimensional tensor": (lambda y: (y * 0).sum() + 2, lambda x, skip: x * skip),
    "an unused tensor": (lambda y: y * 2, lambda x, skip: x),
    "a dict": (
        lambda y: {"x": y * 2, "mask": y > 0, "none": None, "list": [1, (y, y.detach())]},
        lambda x, skip: x * skip["x"].where(skip["mask"], skip["list"][1][0]) * skip["list"][0],
    ),
    "one tensor twice": (lambda y: (y, y), lambda x, skip: x * skip[0] + skip[1]),
    "nothing": (lambda y: (), lambda x, skip: x * (1 + len(skip))),
}
values = pytest.mark.parametrize(("put", "take"), VALUES.values(), ids=VALUES)


@pytest.mark.pairwise
@each_way
@values
@pytest.mark.parametrize("balance", [[4], [1, 1, 1, 1], [2, 2]], ids=str)
def test_a_step_is_that_of_the_plain_model_with(
    put: Callable[[Tensor], Any],
    take: Callable[[Tensor, Any], Tensor],
    way: Way,
    balance: list[int],
) -> None:
    model = nn.Sequential(stashed(put), linear(), taken(take), linear())
    assert_equal(model, balance, way, batch().requires_grad_(), chunks=2)


@values
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_output_without_grad_is_that_of_the_plain_model_with(
    put: Callable[[Tensor], Any],
    take: Callable[[Tensor, Any], Tensor],
    mode: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:
    model, x = nn.Sequential(stashed(put), linear(), taken(take)), batch()
    with mode(), pipe_of(model, [1, 1, 1], chunks=2) as pipe:
        same(pipe(x), model(x))


@each_way
def test_a_parameter_may_be_stashed(way: Way) -> None:
    @skippable(stash=["a"])
    class StashWeight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, x: Tensor) -> Forward:
            yield stash("a", self.layer.weight)
            return self.layer(x)

    model = nn.Sequential(StashWeight(), nn.Tanh(), taken(lambda x, skip: x @ skip))
    assert_equal(model, [1, 1, 1], way, batch().requires_grad_(), chunks=2)


# Modified in place afterwards ---------------------------------------------------------------------

BALANCES: list[list[int]] = [[3], [1, 1, 1], [1, 2], [2, 1]]
balances = pytest.mark.parametrize("balance", BALANCES, ids=str)


def modifying() -> nn.Sequential:
    """The layer between changes the output of the first, which is stashed, too."""
    last = taken(lambda x, skip: x * 10 + skip)
    return nn.Sequential(stashed(identity), nn.ReLU(inplace=True), last)


def unmodified(model: nn.Sequential, x: Tensor) -> Tensor:
    """Computes the model's output as if its second layer worked on a copy."""
    first: Any = model[0]
    y: Tensor = first.before(x)
    return y.relu() * 10 + y


@balances
@modes
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_skip_modified_in_place_is_refused_or_popped_as_it_was_stashed(
    balance: list[int], checkpoint: str, chunks: int
) -> None:
    """The latter only where the next partition works on a copy, as a checkpointed one does."""
    model, x = modifying(), batch()
    with pipe_of(model, balance, chunks=chunks, checkpoint=checkpoint) as pipe:
        if balance == [1, 1, 1] and checkpoint == "always":
            same(pipe(x), unmodified(model, x))
        else:
            with pytest.raises(RuntimeError, match=CHANGED):
                pipe(x)


@balances
def test_in_inference_mode_a_skip_is_popped_as_it_was_stashed(balance: list[int]) -> None:
    model, x = modifying(), batch()
    with torch.inference_mode(), pipe_of(model, balance, chunks=2) as pipe:
        same(pipe(x), unmodified(model, x))
        same(model(x), unmodified(model, x))


@modes
def test_a_skip_that_is_modified_between_a_forward_and_its_recomputation_is_refused(
    checkpoint: str,
) -> None:
    skips: list[Tensor] = []

    def keep(y: Tensor) -> Tensor:
        skips.append(y.exp())
        return skips[-1]

    model = nn.Sequential(stashed(keep), taken(lambda x, skip: x * skip))
    with pipe_of(model, [1, 1], checkpoint=checkpoint) as pipe:
        output = pipe(batch())
        skips[0].detach().add_(1)
        with pytest.raises(RuntimeError, match="modified (in place|by an inplace)"):
            output.sum().backward()


# A container that is changed afterwards -----------------------------------------------------------


def set_to_zero(d: dict[str, Tensor]) -> Tensor:
    x, d["x"] = d["x"], torch.zeros(())
    return x


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@balances
def test_a_container_that_is_changed_later_is_popped_as_it_was_stashed(
    balance: list[int], mode: Callable[[], contextlib.AbstractContextManager[None]]
) -> None:
    """So the result depends neither on the balance nor on whether there is a graph."""

    @skippable(stash=["a"])
    class StashDict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, x: Tensor) -> Forward:
            d = {"x": self.layer(x)}
            yield stash("a", d)
            return d

    model = nn.Sequential(StashDict(), Apply(set_to_zero), taken(lambda x, skip: x + skip["x"]))
    x = batch()
    layer: Any = model[0]
    with mode(), pipe_of(model, balance, chunks=2) as pipe:
        same(pipe(x), 2 * layer.layer(x))
