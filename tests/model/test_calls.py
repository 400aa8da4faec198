"""Tests a dry run: it finds the order in which a model calls its modules, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import pipeline
from pipert.layers.intercepted import intercept
from pipert.model.calls import order_of_calls
from pipert.model.cuts import homes, layers_of


class Backwards(nn.Module):
    """A model that calls its modules in reverse, the first of them twice, and one never."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(4, 4))
        self.b = nn.BatchNorm1d(4)
        self.never = nn.Linear(4, 4)
        self.c = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))
        self.seen: list[Any] = []

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.seen.append((x.device, torch.is_grad_enabled(), self.training))
        self.count = self.count + 1
        self.register_buffer("late", torch.ones(1))
        x = self.c(x * scale)
        y: Tensor = self.a(self.b(self.a(x)))
        return y


CALLED = ["c", "a", "b"]
X = torch.ones(3, 4)


def order(model: nn.Module, example: Any, cuts: tuple[str, ...] = ("b",)) -> list[str]:
    return order_of_calls(model, example, layers_of(model, cuts))


def test_layers_are_ordered_by_their_first_calls() -> None:
    assert order(Backwards(), X) == CALLED


def test_homes_follow_the_calls() -> None:
    model = Backwards()
    layers = layers_of(model, ["a"])
    assert homes(layers, ["a"], order(model, X)) == {"a": 1, "b": 1, "never": 1, "c": 0}


class Lent(nn.Module):
    """Lends a module to a layer, which calls it, and calls it itself at the end if ``again``."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.lent, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.borrower = Borrower()
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.borrower(x, self.lent))
        return self.lent(y) if self.again else y


class Borrower(nn.Module):
    def forward(self, x: Tensor, lent: nn.Module) -> Any:
        return lent(x)


def test_a_call_inside_another_layer_begins_no_partition() -> None:
    again, model = Lent(again=True), Lent(again=False)
    layers = layers_of(model, ["lent"])
    assert order_of_calls(model, X, layers) == ["borrower", "lent", "head"]
    assert order_of_calls(model, X, layers, ["lent"]) == ["borrower", "head"]
    layers = layers_of(again, ["lent"])
    assert order_of_calls(again, X, layers, ["lent"]) == ["borrower", "head", "lent"]


def test_a_cut_that_is_only_called_inside_another_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="were not called, or only inside other layers"):
        pipeline(Lent(again=False), ["lent"], devices=["cpu"] * 2, example=X)


def test_a_cut_that_is_never_called_is_warned_of_once() -> None:
    with pipeline(Backwards().eval(), ["never"], devices=["cpu"] * 2) as pipe:
        with pytest.warns(UserWarning, match="no partition begins at layer 'never'"):
            pipe(X)
        pipe(X)


def test_the_model_runs_once_in_its_mode_without_gradients() -> None:
    for mode in (True, False):
        model = Backwards().train(mode)
        order(model, X)
        assert model.seen == [(torch.device("cpu"), False, mode)]
        assert model.training == model.b.training == mode


def test_a_dry_run_leaves_buffers_and_random_numbers_unchanged() -> None:
    model = Backwards()
    count = model.count
    before = {name: (b, b.clone()) for name, b in model.named_buffers()}
    state = torch.get_rng_state()
    order(model, X)
    assert dict(model.named_buffers()).keys() == before.keys()
    assert all(model.get_buffer(name) is b and b.equal(old) for name, (b, old) in before.items())
    assert model.count is count
    assert torch.get_rng_state().equal(state)


def test_changes_by_a_failing_forward_are_undone() -> None:
    model = Backwards()
    with pytest.raises(TypeError, match="scales"):
        order(model, {"x": X, "scales": 2})
    broken = Backwards()
    broken.a = nn.Sequential(nn.Linear(5, 4))
    with pytest.raises(RuntimeError, match="shapes"):
        order(broken, X)
    assert broken.count == 0
    assert not any("_compiled_call_impl" in vars(module) for module in broken.modules())


def test_a_compiled_layer_is_called_as_it_was_compiled() -> None:
    model = Backwards()
    calls: list[str] = []

    def compiled(x: Tensor) -> Tensor:
        calls.append("compiled")
        return x

    model.b._compiled_call_impl = compiled
    assert order(model, X) == CALLED
    assert calls == ["compiled"]
    assert model.b._compiled_call_impl is compiled


def test_a_dry_run_calls_layers_of_a_pipe_as_usual() -> None:
    model = Backwards()
    intercept([model.b])  # as a pipe does
    before = model.b._compiled_call_impl
    assert order_of_calls(model, X, {"a": model.a}) == ["a"]
    assert order(model, X) == CALLED
    assert model.b._compiled_call_impl is before


@pytest.mark.cuda
def test_the_example_goes_where_the_model_is() -> None:
    model = Backwards().cuda()
    state = torch.cuda.get_rng_state()
    order(model, X)
    assert model.seen == [(torch.device("cuda", 0), False, True)]
    assert torch.cuda.get_rng_state().equal(state)
