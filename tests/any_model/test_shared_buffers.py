"""Tests buffers that layers on several devices share, as VeRA's and RandLoRA's frozen matrices."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import pipeline
from tests.helpers.ways import grads_of

WAYS: list[Callable[[Any, Tensor], Any]] = [
    lambda pipe, x: pipe(x).square().mean().backward(),
    lambda pipe, x: pipe.forward_backward(x, loss_fn=lambda y, _: y.square().mean()),
]


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("values", torch.randn(4, 4, dtype=torch.float64))


class Layer(nn.Module):
    def __init__(self, table: Table, writes: bool) -> None:
        super().__init__()
        self.table, self.writes = table, writes
        self.scale = nn.Parameter(torch.randn(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        values: Any = self.table.values
        if self.writes:
            values.mul_(2)
        return torch.tanh(x @ values) * self.scale


class Model(nn.Module):
    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.table = Table()
        self.layers = nn.ModuleList(Layer(self.table, writes) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.multi_gpu
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("way", WAYS, ids=["call", "step"])
def test_a_buffer_that_layers_on_two_gpus_share_is_copied(
    way: Callable[[Any, Tensor], Any], checkpoint: str
) -> None:
    model, x = Model(), torch.randn(6, 4, dtype=torch.float64)
    model(x).square().mean().backward()
    expected = grads_of(model)
    model.zero_grad()
    devices = ["cuda:0", "cuda:1"]
    with pipeline(model, ["layers.2"], devices=devices, chunks=3, checkpoint=checkpoint) as pipe:
        for _ in range(2):  # what is copied is the buffer of this run
            model.zero_grad()
            way(pipe, x)
        assert model.table.values.device == torch.device("cuda:0")
    torch.testing.assert_close(grads_of(model), expected, check_device=False)


class Slopes(nn.Module):
    """Makes a bias, which ``kept`` keeps in a buffer for the next call."""

    slopes: Tensor
    bias: Tensor | None

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.kept = kept
        self.register_buffer("slopes", torch.randn(4, dtype=torch.float64))
        self.register_buffer("bias", None)

    def forward(self, places: int) -> Any:
        if self.bias is not None:
            return self.bias
        bias = torch.arange(places, device=self.slopes.device) * self.slopes
        if self.kept:
            self.register_buffer("bias", bias)
        return bias


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor, bias: nn.Module) -> Any:
        return torch.tanh(self.linear(x) + bias(4))


class Lending(nn.Module):
    """Gives its layers the module that makes their bias."""

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Biased() for _ in range(4))
        self.slopes = Slopes(kept)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.slopes)
        return x


@pytest.mark.multi_gpu
@pytest.mark.parametrize("cut", ["layers.2", "layers.2.linear"])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("example", [None, torch.zeros(2, 4, dtype=torch.float64)])
@pytest.mark.parametrize("way", WAYS, ids=["call", "step"])
def test_buffers_of_a_module_that_layers_on_two_gpus_are_given_are_copied(
    way: Callable[[Any, Tensor], Any], example: Any, kept: bool, cut: str
) -> None:
    model, x = Lending(kept), torch.randn(6, 4, dtype=torch.float64)
    model(x)  # so that the bias is there
    plain = copy.deepcopy(model)
    plain(x).square().mean().backward()
    devices = ["cuda:0", "cuda:1"]
    with pipeline(model, [cut], devices=devices, chunks=3, example=example) as pipe:
        for _ in range(2):
            model.zero_grad()
            way(pipe, x)
    torch.testing.assert_close(grads_of(model), grads_of(plain), check_device=False)


class Counting(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.tanh()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counting = Counting()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.double()

    def forward(self, x: Tensor) -> Any:
        return self.counting(self.second(self.counting(self.first(x))))


@pytest.mark.multi_gpu
@pytest.mark.parametrize("way", WAYS, ids=["call", "step"])
def test_a_layer_that_is_called_on_two_gpus_may_count_in_a_buffer(
    way: Callable[[Any, Tensor], Any],
) -> None:
    model = Twice()
    with pipeline(model, ["second"], devices=["cuda:0", "cuda:1"], chunks=3) as pipe:
        way(pipe, torch.randn(6, 4, dtype=torch.float64))
    assert int(model.counting.calls) == 6


@pytest.mark.multi_gpu
@pytest.mark.parametrize("way", WAYS, ids=["call", "step"])
def test_a_layer_that_writes_to_a_buffer_of_another_gpu_is_refused(
    way: Callable[[Any, Tensor], Any],
) -> None:
    with pipeline(Model(writes=True), ["layers.2"], devices=["cuda:0", "cuda:1"]) as pipe:
        with pytest.raises(RuntimeError, match="parameter or buffer that layers on several"):
            way(pipe, torch.randn(6, 4, dtype=torch.float64))
