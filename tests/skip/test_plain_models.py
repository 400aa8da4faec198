"""Tests skips of plain models, which no pipe routes."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert.skip import skippable, stash
from pipert.skip.store import current_store
from tests.helpers.skip_layers import PopAdd
from tests.layers import Apply

Forward = Generator[Any, Any, Any]

same = torch.testing.assert_close
same(0, 0)  # the first call imports for half a second, which is no test's fault

CHANGED = "the skip 'a' was modified in place after it was stashed"


@skippable(stash=["a"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Forward:
        yield stash("a", x)
        return x + 1


def fail(_: Tensor) -> Tensor:
    raise ValueError("the layer in between")


def test_a_plain_model_leaves_nothing_behind(no_gc: None) -> None:
    model, x = nn.Sequential(Stash(), PopAdd()), torch.ones(1)
    gone = weakref.ref(x)
    model(x)
    del x
    assert gone() is None and repr(current_store()) == "<Store of nothing>"


def test_a_value_left_by_a_failed_forward_is_replaced_by_the_next(no_gc: None) -> None:
    x = torch.ones(1)
    gone = weakref.ref(x)
    with pytest.raises(ValueError):
        nn.Sequential(Stash(), Apply(fail))(x)
    del x
    assert nn.Sequential(Stash(), PopAdd())(torch.tensor([2.0])).item() == 5
    assert gone() is None


def test_a_skip_modified_in_place_is_refused_in_a_plain_model() -> None:
    model = nn.Sequential(nn.Identity(), Stash(), PopAdd())
    model[1].register_forward_hook(lambda layer, args, output: args[0].add_(1) * 0 + output)
    with pytest.raises(RuntimeError, match=CHANGED):
        model(torch.ones(1))


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Sequential(Stash()), nn.Sequential(nn.Sequential(PopAdd()))),
        nn.Sequential(nn.Sequential(Stash(), Apply(torch.neg), Apply(torch.neg), PopAdd())),
        Apply(nn.Sequential(Stash(), PopAdd())),
        nn.Sequential(Apply(Stash()), Apply(PopAdd())),
    ],
    ids=["two Sequentials", "one in another", "in a module", "in modules"],
)
def test_nested_layers_find_each_other(model: nn.Module) -> None:
    assert model(torch.ones(1)).item() == 3


def test_a_model_that_stashed_on_one_thread_does_not_pop_on_another() -> None:
    Stash()(torch.ones(1))
    caught: list[Exception] = []

    def run() -> None:
        try:
            PopAdd()(torch.ones(1))
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(3.0)
    assert "no skip 'a'" in str(caught[0])


def test_a_gradient_goes_through_a_skip_of_a_plain_model() -> None:
    x = torch.ones(1, requires_grad=True)
    nn.Sequential(Stash(), Apply(lambda y: y * 5), PopAdd())(x).backward()
    assert x.grad is not None and x.grad.item() == 6


@pytest.mark.slow  # torch.utils.checkpoint imports a lot
def test_a_plain_model_may_be_checkpointed_by_torch_as_a_whole() -> None:
    x = torch.ones(1, requires_grad=True)
    model = nn.Sequential(Stash(), Apply(torch.exp), PopAdd())
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).backward()
    assert x.grad is not None
    assert x.grad.item() == pytest.approx(1 + math.exp(2))
