"""Tests times between the first calls of a model's modules, by a clock that operations advance."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipert.balance import measure
from pipert.balance.calls import measure_calls
from pipert.balance.measure import time_once
from pipert.batch.microbatch import arguments_of
from tests.helpers.virtual_clock import CLOCK, spend

CPU = torch.device("cpu")
X = torch.ones(2, 3)


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "perf_counter", CLOCK)


class Takes(nn.Module):
    """A layer that takes so many seconds, forward and backward."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.takes = forward, backward
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return spend(x * self.weight, *self.takes)


class Calls(nn.Module):
    """A model that calls its modules a, b and c as the test says."""

    def __init__(self, how: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.how = how
        self.a, self.b, self.c = Takes(1, 2), Takes(4, 8), Takes(16, 32)
        self.own = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Any:
        return self.how(self, x)


def times(how: Callable[[Any, Any], Any] | nn.Module, begins: str = "abc", x: Any = X) -> Any:
    model = how if isinstance(how, nn.Module) else Calls(how)
    layers = {name: getattr(model, name) for name in "abc"}
    return block_times(model, layers, begins, arguments_of(x), CPU)


def block_times(
    model: nn.Module, layers: Any, begins: str, example: Any, device: torch.device
) -> dict[str, float]:
    costs = measure_calls(model, layers, begins, example, device, time_once)
    return {name: cost.seconds for name, cost in costs.items()}


def test_a_block_takes_its_forward_and_its_backward() -> None:
    assert times(lambda m, x: m.c(m.b(m.a(x)))) == {"a": 3, "b": 12, "c": 48}


def test_blocks_are_in_the_order_of_first_calls() -> None:
    assert list(times(lambda m, x: m.a(m.c(m.b(m.a(m.c(x))))))) == ["c", "a", "b"]


def test_a_layer_that_begins_no_block_counts_for_the_one_that_is_current() -> None:
    assert times(lambda m, x: m.c(m.b(m.a(x))), "ac") == {"a": 15, "c": 48}


# The model's own code


def test_own_code_counts_for_the_block_before_it_three_times() -> None:
    """Its backward counts as twice its forward."""

    def how(m: Calls, x: Tensor) -> Tensor:
        x = m.a(spend(x * m.own, 100, 0))
        x = m.b(spend(x, 1000, 0))
        return spend(m.c(x), 10000, 0)

    assert times(how) == {"a": 3303, "b": 12, "c": 30048}


# Backwards


def test_a_layer_under_no_grad_has_no_backward() -> None:
    def how(m: Calls, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = m.a(x)
        y: Tensor = m.b(x)
        return y

    assert times(how) == {"a": 1, "b": 12}


def test_a_frozen_layer_has_a_backward_only_if_its_input_needs_one() -> None:
    model = Calls(lambda m, x: m.c(m.b(m.a(x))))
    model.a.requires_grad_(False)
    model.c.requires_grad_(False)
    assert times(model) == {"a": 1, "b": 12, "c": 48}


def test_layers_in_a_checkpoint_compute_once_and_only_the_first_of_them_begins_a_block() -> None:
    def how(m: Calls, x: Tensor) -> Any:
        return m.c(checkpoint(lambda x: m.b(m.a(x)), x, use_reentrant=False))

    assert times(how) == {"a": 15, "c": 48}


# What models do


def test_a_layer_computes_once_for_each_call_since_its_arguments_may_remember_it() -> None:
    class Remembers(Takes):
        def forward(self, x: Tensor, cache: Any = None) -> Tensor:
            cache.kept.append(x * self.weight)
            return super().forward(sum(cache.kept))

    class Cache:
        def __init__(self) -> None:
            self.kept: list[Tensor] = []

    caches = []

    def how(m: Calls, x: Tensor) -> Any:
        caches.append(Cache())
        return m.b(m.a(x, caches[0]), caches[0])

    model = Calls(how)
    model.a, model.b = Remembers(1, 2), Remembers(4, 8)
    # The second uses what the first has kept, whose graph has gone backward.
    assert times(model) == {"a": 3, "b": 12}
    assert len(caches[0].kept) == 2


# What is as before


def test_measuring_leaves_the_model_unchanged() -> None:
    class Norm(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(nn.functional.dropout(x))

    def how(m: Any, x: Tensor) -> Any:
        m.calls.add_(1)
        return m.b(m.a(x) * m.own + torch.rand(3))

    model: Any = Calls(how)
    model.a = Norm(3)
    model.register_buffer("calls", torch.zeros(()))
    model.own.grad = torch.ones(3)
    model.b.eval()
    hooked: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: hooked.append(name))
    tensors = [*model.parameters(), *model.buffers()]
    before, state = [t.clone() for t in tensors], torch.get_rng_state()
    model.b.register_full_backward_hook(lambda *_: hooked.append("b"))
    times(model)
    after = [*model.parameters(), *model.buffers()]
    for tensor, old, new in zip(tensors, before, after, strict=True):
        assert new is tensor
        assert new.equal(old)
    assert model.own.grad.equal(torch.ones(3))
    assert [p.grad for p in (*model.a.parameters(), *model.b.parameters())] == [None] * 3
    assert model.training and not model.b.training
    assert torch.get_rng_state().equal(state)
    assert hooked == []


def test_a_layer_that_fails_is_named_and_calls_go_their_old_way() -> None:
    model = Calls(lambda m, x: m.b(m.a(x)[0], 3))
    with pytest.raises(TypeError) as error:
        times(model)
    assert error.value.__notes__ == ["while layer 'b' (Takes) was measured"]
    assert not any("_compiled_call_impl" in vars(module) for module in model.modules())


def test_copies_are_dropped_one_by_one(no_gc: None) -> None:
    alive: list[weakref.ref[nn.Module]] = []
    most = []

    def look(module: nn.Module, args: Any) -> None:
        alive.append(weakref.ref(module))
        most.append(sum(ref() is not None for ref in alive))

    model = Calls(lambda m, x: m.c(m.b(m.a(x))))
    for name in "abc":
        getattr(model, name).register_forward_pre_hook(look)
    times(model)
    assert most == [1, 1, 1]
    assert not any(ref() for ref in alive)


# On another device than the model's


@pytest.mark.cuda
def test_a_model_is_measured_on_a_device_it_is_not_on() -> None:
    gpu, seen = torch.device("cuda", 0), []

    def how(m: Calls, x: Tensor) -> Tensor:
        mask = torch.ones(3, device=m.own.device) * torch.arange(3)
        x = m.b(spend(m.a(x * m.own + mask), 100, 0))
        x = nn.functional.linear(x, torch.stack([m.a.weight, m.own]))
        seen.append(x.device)
        return spend(x, 1000, 0)

    model = Calls(how)
    layers = {name: getattr(model, name) for name in "abc"}
    assert block_times(model, layers, "ab", arguments_of(X), gpu) == {"a": 303, "b": 3012}
    assert seen == [gpu]
    assert {p.device for p in model.parameters()} == {CPU}
    assert all(p.grad is None for p in model.parameters())
