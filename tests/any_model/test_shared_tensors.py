"""Tests what happens to parameters and buffers that one partition changes and another one uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pipert
from pipert import SharedStateWarning

CPUS, GPUS = ["cpu"] * 2, ["cuda:0", "cuda:1"]
cuda = [pytest.mark.cuda, pytest.mark.multi_gpu]


def in_place(old: Tensor, new: Tensor) -> None:
    with torch.no_grad():
        old.mul_(0.9).add_(new.to(old.device), alpha=0.1)


def other_memory(old: Tensor, new: Tensor) -> None:
    old.data = old.data * 0.9 + new.data.to(old.device) * 0.1


def by_data(old: Tensor, new: Tensor) -> None:
    old.data.mul_(0.9).add_(new.data.to(old.device), alpha=0.1)


class TwoEncoders(nn.Module):
    """Its own code lets the weights of one encoder follow those of the other."""

    def __init__(self, change: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)
        self.key.requires_grad_(False)
        self.last = nn.Linear(4, 4)
        self.change = change

    def follow(self) -> None:
        for new, old in zip(self.query.parameters(), self.key.parameters(), strict=True):
            self.change(old, new)


class Before(TwoEncoders):
    def forward(self, x: Tensor) -> Any:
        query = self.query(x)
        self.follow()  # in partition 0, which the key's encoder is not in
        return self.last(query * self.key(x))


class After(TwoEncoders):
    def forward(self, x: Tensor) -> Any:
        key = self.key(x)
        query = self.query(x)
        self.follow()  # in partition 1, when micro-batches are in partition 0 again
        return self.last(query * key)


def piped(model: nn.Module, cut: str, devices: list[str] = CPUS, chunks: int = 4) -> Any:
    return pipert.pipeline(model, cuts=[cut], devices=devices, chunks=chunks)


def step(pipe: Any) -> None:
    x = torch.rand(8, 4)
    pipe.forward_backward(x, target=x, loss_fn=mse_loss)


@pytest.mark.parametrize("change", [in_place, other_memory])
def test_weights_of_another_partition_s_layer_are_named(change: Any) -> None:
    with piped(Before(change), "key") as pipe:
        with pytest.warns(SharedStateWarning, match=r"sets 'key\.weight', 'key\.bias' of the"):
            step(pipe)


@pytest.mark.parametrize("kind, cut", [(Before, "key"), (After, "query")])
@pytest.mark.parametrize("change", [in_place, other_memory, by_data])
@pytest.mark.parametrize("devices", [pytest.param(GPUS, marks=cuda)])
def test_changes_that_a_copy_would_get_are_refused(
    kind: type[TwoEncoders], cut: str, change: Any, devices: list[str]
) -> None:
    with piped(kind(change), cut, devices) as pipe:
        for run in (step, lambda pipe: pipe(torch.rand(8, 4))):
            with pytest.raises(RuntimeError, match="it would change a copy, and be lost"):
                run(pipe)


def test_one_micro_batch_and_one_partition_cause_no_warning() -> None:
    with piped(Before(in_place), "key", chunks=1) as pipe:
        step(pipe)
    with pipert.pipeline(Before(in_place), cuts=[], devices=["cpu"], chunks=4) as pipe:
        step(pipe)
    with piped(Before(in_place), "last") as pipe:  # both encoders are in partition 0
        step(pipe)


class Prepares(TwoEncoders):
    """Its own code fills in what a later layer needs, once."""

    is_ready = False

    def forward(self, x: Tensor) -> Any:
        query = self.query(x)
        if not self.is_ready:
            self.follow()
            self.is_ready = True
        return self.last(query * self.key(x))


def test_what_is_prepared_once_causes_no_warning() -> None:
    with piped(Prepares(in_place), "key") as pipe:
        for _ in range(3):
            step(pipe)


class Features(nn.Module):
    """Calls the method of a module with a norm, which is no layer then."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        features: Any = self.first.forward
        return self.last(features(x))


def test_norms_that_count_batches_cause_no_warning() -> None:
    model = Features()
    with pipert.pipeline(
        model, cuts=["last"], devices=CPUS, chunks=4, deferred_batch_norm=False
    ) as pipe:
        for _ in range(2):
            step(pipe)  # warnings are errors


class Counting(nn.Module):
    """A layer that changes a parameter and buffers of its own."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))
        self.codebook = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        self.calls.add_(1)
        with torch.no_grad():
            self.codebook.lerp_(x.mean(0), 0.1)
        return self.norm(x)


class Countings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Counting(), Counting(), Counting()

    def forward(self, x: Tensor) -> Any:
        return self.c(self.b(self.a(x * 2)))


@pytest.mark.parametrize("devices", [CPUS, pytest.param(GPUS, marks=cuda)], ids=["CPU", "GPUs"])
def test_what_a_layer_changes_itself_is_its_own_affair(devices: list[str]) -> None:
    pipe = pipert.pipeline(
        Countings(), cuts=["b"], devices=devices, chunks=4, deferred_batch_norm=False
    )
    with pipe:
        for _ in range(4):
            step(pipe)
        assert pipe.module.get_buffer("c.calls") == 16


class Queue(nn.Module):
    """Its own code changes a buffer that no layer has, before or behind the last layer."""

    queue: Tensor

    def __init__(self, place: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("queue", torch.zeros(4))
        self.place = place

    def forward(self, x: Tensor) -> Any:
        x = self.a(x)
        if self.place == "before":
            self.queue.add_(1)
        x = self.b(x)
        if self.place == "behind":
            self.queue.add_(1)
        return x + self.queue.detach().clone()


def test_a_buffer_that_no_layer_has_causes_the_warning() -> None:
    with piped(Queue("before"), "b") as pipe:
        with pytest.warns(SharedStateWarning, match="forward sets 'queue' of the model before a"):
            step(pipe)
        step(pipe)  # once
    with piped(Queue("behind"), "b") as pipe:  # nobody else uses it
        step(pipe)


@pytest.mark.parametrize("devices", [pytest.param(GPUS, marks=cuda)])
def test_a_buffer_of_another_device_is_not_changed_in_a_copy(devices: list[str]) -> None:
    with piped(Queue("behind"), "b", devices) as pipe:
        for run in (step, lambda pipe: pipe(torch.rand(8, 4))):
            with pytest.raises(RuntimeError, match="it would change a copy, and be lost"):
                run(pipe)
    with piped(Queue("never"), "b", devices) as pipe:
        step(pipe)


class Gated(nn.Module):
    """A layer that multiplies by a tensor that the model sets on it."""

    gate: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.gate
        return y


class HalfBeside(nn.Module):
    """One half of an output is the layer's argument, the other half reaches it as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gated, self.last = nn.Linear(4, 8), Gated(), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        half, self.gated.gate = self.first(x).chunk(2, -1)
        y: Tensor = self.last(self.gated(half))
        return y


@pytest.mark.parametrize("is_step", [False, True])
def test_what_reaches_a_recomputed_layer_beside_its_argument_keeps_its_gradient(
    is_step: bool,
) -> None:
    model, x = HalfBeside(), torch.randn(6, 4)
    model(x).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    del model.gated.gate
    options: dict[str, Any] = {"devices": ["cpu"] * 2, "chunks": 1, "checkpoint": "always"}
    with pipert.pipeline(model, ["last"], **options) as pipe:
        if is_step:
            pipe.forward_backward(x, loss_fn=lambda y, _: y.sum(), reduction="sum")
        else:
            pipe(x).sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
