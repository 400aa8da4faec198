"""Tests when the backward of a call recomputes partitions on several GPUs."""

from __future__ import annotations

import copy
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipert
from pipert.layers import call
from pipert.layers.default_generators import DefaultGenerator
from pipert.recompute.segment import Segment
from pipert.recompute.snapshot import ParameterVersions
from tests.any_model.piped import CHUNKS
from tests.helpers.ways import grads_of

pytestmark = [pytest.mark.cuda, pytest.mark.multi_gpu]

WAIT = 10.0  # s; what should happen at once is given up after it


class Passing(nn.Module):
    """A model in which a partition uses all outputs of the previous one, and the last one an input.

    Args:
        pairs: the pairs of modules in a layer; with many, each layer is one node of the graph.
    """

    def __init__(self, pairs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(*[nn.Linear(4, 4), nn.Tanh()] * pairs) for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        first = x = x * 1
        for k in range(0, 6, 2):
            x = self.layers[k](x)
            x = self.layers[k + 1](x) + x
        return x + first


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("pairs", [1, 20])
def test_each_partition_is_recomputed_once_for_each_backward(pairs: int, backwards: int) -> None:
    model, x = Passing(pairs).double(), torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    plain, own = copy.deepcopy(model), x.detach().clone().requires_grad_()
    options: dict[str, Any] = {"devices": ["cuda:0", "cuda:1", "cuda:0"], "chunks": CHUNKS}
    with pipert.pipeline(model, ["layers.2", "layers.5"], checkpoint="always", **options) as pipe:
        loss: Any = pipe(x).square().sum()
        expected: Any = plain(own).square().sum()
        for k in range(backwards):
            loss.backward(retain_graph=k + 1 < backwards)
            expected.backward(retain_graph=k + 1 < backwards)
        assert pipe.statistics().recomputations == 3 * CHUNKS * backwards
    for one, other in zip((x, *model.parameters()), (own, *plain.parameters()), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad.cpu(), other.grad)


class TiedHead(nn.Module):
    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.sin(), self.weight).exp()


@pytest.mark.parametrize("kind", ["Pipe", "pipeline"])
def test_a_copy_of_a_tied_weight_is_an_input_of_the_segment(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = list[object]()
    monkeypatch.setattr(Segment, "fill", filled.append)
    first = nn.Linear(4, 4).double()
    module = nn.Sequential(first, nn.Linear(4, 4).double(), TiedHead(first.weight))
    plain, x = copy.deepcopy(module), torch.randn(8, 4, dtype=torch.float64)
    options: Any = {"devices": ["cuda:0", "cuda:1"], "chunks": CHUNKS, "checkpoint": "always"}
    make = partial(pipert.Pipe, module, [1, 2]) if kind == "Pipe" else (
        partial(pipert.pipeline, module, ["1"])
    )
    with make(**options) as pipe:
        for _ in range(2):
            pipe(x).square().sum().backward()
            plain(x).square().sum().backward()
    assert not filled
    torch.testing.assert_close(grads_of(module), grads_of(plain), check_device=False)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_partition_takes_its_generator_once_and_a_recomputation_once_a_layer(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = list[object]()
    enter = DefaultGenerator.enter

    def counted(self: DefaultGenerator, user: Any) -> None:
        if self.generator.device.type == "cuda":
            entered.append(user)
        enter(self, user)

    monkeypatch.setattr(DefaultGenerator, "enter", counted)
    model, x = Passing(1), torch.randn(8, 4)
    for layer in model.layers:
        layer.append(nn.Dropout(0.5))  # type: ignore[operator]
    options: dict[str, Any] = {"devices": ["cuda:0", "cuda:1"], "chunks": CHUNKS}
    with pipert.pipeline(model, ["layers.3"], checkpoint=checkpoint, **options) as pipe:
        loss: Any = pipe(x).sum()
        assert len(entered) == 2 * CHUNKS
        loss.backward()
        assert len(entered) == (2 if checkpoint == "never" else 2 + 6) * CHUNKS


class Away(nn.Module):
    """A layer of the first partition with a buffer, called in the second."""

    table: Tensor

    def __init__(self, moved: threading.Event) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4))
        self.moved = moved

    def forward(self, x: Tensor) -> Tensor:
        self.moved.set()
        y: Tensor = x * self.table
        return y


class Early(nn.Linear):
    """A layer whose recomputation lasts until the other layer has been moved."""

    def __init__(self, begun: threading.Event, moved: threading.Event) -> None:
        super().__init__(4, 4)
        self.begun, self.moved = begun, moved

    def forward(self, x: Tensor) -> Tensor:
        if pipert.is_recomputing() and not self.begun.is_set():
            self.begun.set()
            assert self.moved.wait(WAIT)
        return super().forward(x)


class Second(nn.Linear):
    def __init__(self, begun: threading.Event) -> None:
        super().__init__(4, 4)
        self.begun = begun

    def forward(self, x: Tensor) -> Tensor:
        assert self.begun.wait(WAIT)
        return super().forward(x)


class MovedMeanwhile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        begun, moved = threading.Event(), threading.Event()
        self.early, self.away = Early(begun, moved), Away(moved)
        self.second = Second(begun)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.away(self.second(self.early(x)))
        return y


def test_a_buffer_may_move_while_the_previous_partition_is_recomputed() -> None:
    x = torch.ones(8, 4)
    model = MovedMeanwhile()
    devices = ["cuda:0", "cuda:1"]
    with pipert.pipeline(
        model, ["second"], devices=devices, chunks=4, checkpoint="always"
    ) as pipe:
        pipe.forward_backward(x, target=x, loss_fn=nn.functional.mse_loss)
    assert model.away.table.device == torch.device("cuda:1")


class Rotary(nn.Module):
    """A layer that is registered last and called first; its recomputation waits for a snapshot."""

    table: Tensor

    def __init__(self, begun: threading.Event, taken: threading.Event) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4))
        self.scale = nn.Parameter(torch.ones(4))  # what needs no gradient is not recomputed
        self.begun, self.taken = begun, taken

    def forward(self, x: Tensor) -> Tensor:
        if pipert.is_recomputing() and not self.begun.is_set():
            self.begun.set()
            assert self.taken.wait(WAIT)
        y: Tensor = x * self.table * self.scale
        return y


def test_the_copy_of_a_buffer_that_is_recomputed_with_is_read_by_its_own_partition_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, taken = threading.Event(), threading.Event()
    rotary = Rotary(begun, taken)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = [nn.Linear(4, 4) for _ in range(3)]
            self.rotary = rotary

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.third(self.second(self.first(self.rotary(x))))
            return y

    def snapshot(partition: nn.Module) -> ParameterVersions:
        if rotary not in partition.children():
            return ParameterVersions(partition)
        assert begun.wait(WAIT)
        found = ParameterVersions(partition)
        taken.set()
        return found

    monkeypatch.setattr(call, "ParameterVersions", snapshot)
    x, devices = torch.ones(8, 4), ["cuda:0", "cuda:1", "cpu"]
    with pipert.pipeline(
        Model(), ["second", "third"], devices=devices, chunks=4, checkpoint="always"
    ) as pipe:
        pipe.forward_backward(x, target=x, loss_fn=nn.functional.mse_loss)
    assert taken.is_set() and rotary.table.device == torch.device("cuda:0")
