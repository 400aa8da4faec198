"""Tests tied weights: one parameter that layers of several partitions use.

There is one real device here that can compute, so for most of these tests each partition counts as
a device of its own, and what copies between devices is replaced by a function that copies on the
CPU and counts. That the right tensors are copied between real devices is shown with ``meta``, and
on GPUs in ``tests/cuda``.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from pipert import Pipe
from pipert.layers.parameter_copies import ParameterCopies, Weights, weights_elsewhere
from pipert.model import split as partition_module
from pipert.stage import assembly
from pipert.stage.copies import Copies as StageCopies
from tests.helpers.activations import until
from tests.helpers.pipes import pipe_of
from tests.helpers.torchscript import uses_torchscript

MODES = ["always", "except_last", "never"]
TOKENS = torch.arange(24).reshape(8, 3) % 7

modes = pytest.mark.parametrize("checkpoint", MODES)


class Head(nn.Module):
    """A linear layer without a weight of its own."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        assert isinstance(weight, nn.Parameter)
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def language_model() -> nn.Sequential:
    torch.manual_seed(1)
    embedding = nn.Embedding(7, 4)
    return nn.Sequential(embedding, nn.Linear(4, 4), nn.GELU(), Head(embedding.weight))


class Copies:
    """What copies between devices here; counts both ways."""

    def __init__(self) -> None:
        self.forward = 0
        self.back = 0
        self.made: list[weakref.ref[Tensor]] = []

    def __call__(self, weight: Tensor) -> Tensor:
        self.forward += 1
        if weight.requires_grad and torch.is_grad_enabled():
            made: Tensor = _Copy.apply(weight, self)  # type: ignore[no-untyped-call]
        else:
            made = weight.detach().clone()
        self.made.append(weakref.ref(made))
        return made


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return weight.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.copies.back += 1
        return grad.clone(), None


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    """Lets every partition count as a device of its own."""
    counting = Copies()
    bring = StageCopies.bring

    def apart(partitions: Any, devices: Any) -> tuple[Weights, ...]:
        return weights_elsewhere(partitions, [torch.device("cuda", j) for j in range(len(devices))])

    def copy_weights(of_stage: StageCopies, i: int, x: Any, origin: int | None) -> Any:
        if type(x) is tuple and x and isinstance(x[0], nn.Parameter):
            return tuple(counting(weight) for weight in x)
        return bring(of_stage, i, x, origin)

    monkeypatch.setattr(assembly, "weights_elsewhere", apart)
    monkeypatch.setattr(partition_module, "weights_elsewhere", apart)
    monkeypatch.setattr(StageCopies, "bring", copy_weights)
    return counting


def weight_of(module: nn.Sequential | Pipe) -> nn.Parameter:
    weight = module[0].weight
    assert isinstance(weight, nn.Parameter)
    return weight


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def step(model: Callable[[Tensor], Tensor], tokens: Tensor = TOKENS) -> Tensor:
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


# On several.


@pytest.mark.parametrize("chunks", [1, 2, 8])
def test_a_tied_parameter_is_copied_once_a_run_and_its_gradient_once_back(
    copies: Copies, chunks: int
) -> None:
    with pipe_of(language_model(), [2, 2], chunks=chunks) as pipe:
        step(pipe)
    assert (copies.forward, copies.back) == (1, 1)


@modes
def test_training_gives_the_plain_modules_weights(copies: Copies, checkpoint: str) -> None:
    plain = language_model()
    with pipe_of(copy.deepcopy(plain), [2, 2], chunks=4, checkpoint=checkpoint) as pipe:
        for model in (plain, pipe):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for _ in range(5):
                optimizer.zero_grad()
                step(model)
                optimizer.step()
        torch.testing.assert_close(dict(pipe.named_parameters()), dict(plain.named_parameters()))


def test_a_recomputation_after_the_parameter_was_changed_is_refused(copies: Copies) -> None:
    with pipe_of(language_model(), [2, 2], checkpoint="always") as pipe:
        loss = pipe(TOKENS).sum()
        with torch.no_grad():
            weight_of(pipe).mul_(2.0)
        with pytest.raises(RuntimeError, match="was modified"):
            loss.backward()


class Last(nn.Module):
    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.rnn(x)[0]
        return y


@pytest.mark.parametrize(
    "make",
    [
        lambda: Last(nn.LSTM(4, 4, batch_first=True)),
        lambda: Last(nn.GRU(4, 4, num_layers=2, batch_first=True)),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
        lambda: nn.Conv1d(3, 3, 1),
        lambda: nn.LayerNorm(4),
        lambda: nn.Bilinear(4, 4, 4),
    ],
    ids=["LSTM", "GRU", "transformer", "weight_norm", "conv", "layer_norm", "bilinear"],
)
@pytest.mark.parametrize("training", [True, False])
def test_layers_of_torch_find_their_copies(
    copies: Copies, make: Callable[[], nn.Module], training: bool
) -> None:
    torch.manual_seed(0)
    layer = make()
    call = layer if not isinstance(layer, nn.Bilinear) else _Twice(layer)
    plain = nn.Sequential(call, nn.Tanh(), call).train(training)
    x = torch.randn(4, 3, 4)
    with pipe_of(copy.deepcopy(plain), [2, 1], chunks=2) as pipe:
        ours, theirs = pipe(x), plain(x)
        torch.testing.assert_close(ours, theirs)
        ours.square().sum().backward()
        theirs.square().sum().backward()
        torch.testing.assert_close(gradients(pipe), gradients(plain))
    assert copies.back == copies.forward == len(list(layer.parameters()))


class _Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x, x)
        return y


@modes
def test_the_copy_is_gone_with_the_graph(copies: Copies, checkpoint: str, no_gc: None) -> None:
    with pipe_of(language_model(), [2, 2], chunks=2, checkpoint=checkpoint) as pipe:
        step(pipe)
        assert len(copies.made) == 1 and until(lambda: copies.made[0]() is None)


class Clamp(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(0.0, 1.0)
        return x @ self.weight


class ByData(Clamp):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(0.0, 1.0)
        return x @ self.weight


@pytest.mark.parametrize("layer", [Clamp, ByData])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_changes_in_place_are_refused_in_every_mode(
    copies: Copies, layer: type[Clamp], mode: Callable[[], Any]
) -> None:
    weight = nn.Parameter(torch.eye(3))
    with pipe_of(nn.Sequential(Head(weight), layer(weight)), [1, 1]) as pipe, mode():
        with pytest.raises(RuntimeError, match="was modified in place"):
            pipe(torch.ones(2, 3))


# Compiled and scripted layers.


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["compiled", "compiled in place", "scripted"])
@uses_torchscript
def test_layers_that_cannot_be_handed_a_copy_are_refused(kind: str) -> None:
    last, copies = nn.Linear(2, 2), ParameterCopies()
    copies.copy_of(last.weight, 1, torch.clone)
    layer: Any = last
    if kind == "compiled":
        layer = torch.compile(last, backend="eager")
    elif kind == "scripted":
        layer = torch.jit.script(last)
    else:
        last.compile(backend="eager")
    with pytest.raises(ValueError, match="a layer is compiled or scripted and uses a parameter"):
        copies.wrap(1, [layer], layer)
