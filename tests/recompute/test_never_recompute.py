"""Tests layers that are exempt from recomputation, while all others are recomputed."""

from __future__ import annotations

import copy
import gc
import pickle
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pipert import (
    Pipe,
    RecomputationError,
    is_checkpointing,
    is_recomputing,
    never_recompute,
    pipeline,
)
from pipert.recompute.segment import Segment
from tests.helpers.skip_layers import popping, stashing
from tests.helpers.ways import Way, batch, grads_of, linear, mean, same, take_step
from tests.layers import Apply

# Layers count their calls, which is seen.
pytestmark = pytest.mark.filterwarnings("ignore::pipert.SharedStateWarning")

M = 4
WAYS = ["call", "gpipe", "1f1b"]
ways = pytest.mark.parametrize("way", WAYS)
kinds = pytest.mark.parametrize("kind", ["Pipe", "pipeline"])


class Count(nn.Module):
    """A recomputed layer that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor) -> Any:
        self.calls.append((is_checkpointing(), is_recomputing()))
        return x.sin()


class Parametrizing(nn.Module):
    """Parametrizes its parameter while it computes, which changes its version and no value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        parametrize.register_parametrization(self, "weight", nn.Tanh())
        y = x * self.weight
        parametrize.remove_parametrizations(self, "weight", leave_parametrized=False)
        return y


@kinds
def test_a_layer_that_parametrizes_for_a_moment_is_refused_or_exempt(kind: str) -> None:
    module = nn.Sequential(linear(3, 4), Parametrizing())
    plain = copy.deepcopy(module)
    x = batch(M)
    mean(plain(x), None).backward()
    options: Any = {"devices": ["cpu", "cpu"], "chunks": 2, "checkpoint": "always"}
    with Pipe(module, [1, 1], **options) if kind == "Pipe" else pipeline(
        module, ["1"], **options
    ) as pipe:
        with pytest.raises(RuntimeError, match="never_recompute .*parametrizes it for a moment"):
            pipe.forward_backward(x, loss_fn=mean)
        never_recompute(module[1])
        pipe.forward_backward(x, loss_fn=mean)
    same(grads_of(module), grads_of(plain))


class Codebook(nn.Module):
    """A vector quantisation whose codebook follows its inputs; also draws from Python's random."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, 4, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.calls: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor) -> Any:
        self.calls.append((is_checkpointing(), is_recomputing()))
        with torch.no_grad():
            nearest = torch.cdist(x, self.codes).argmin(1)
            self.codes.index_add_(0, nearest, 0.1 * (x - self.codes[nearest]))
            quantised = self.codes[nearest]
        return (x + (quantised - x).detach() * random.random()) * self.scale.exp()


class Lookup(nn.Embedding):
    """Adds an embedding whose weight it normalises."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(torch.arange(len(x)))


def model(middle: nn.Module) -> nn.Sequential:
    """Makes a model whose second partition, of four layers, saves more tensors than a few."""
    deep = nn.Sequential(*[nn.Tanh() for _ in range(40)])
    return nn.Sequential(
        linear(3, 4), deep, middle, nn.LeakyReLU(inplace=True), Count(), linear(4, 4), linear(4, 2)
    )


CPUS = ("cpu", "cpu", "cpu")
GPUS = pytest.param(("cuda:0", "cuda:1", "cuda:0"), marks=[pytest.mark.cuda, pytest.mark.multi_gpu])


def piped(kind: str, layers: nn.Sequential, devices: Sequence[str] = CPUS) -> Any:
    options: Any = {"devices": devices, "chunks": M, "checkpoint": "always"}
    if kind == "Pipe":
        return Pipe(layers, [1, 4, 2], **options)
    return pipeline(layers, ["1", "5"], **options)


def plain_step(plain: nn.Module, x: Tensor) -> Any:
    """Takes the step with the plain module, which gets the micro-batches one by one."""
    loss = torch.stack([mean(plain(part), None) for part in x.chunk(M)]).mean()
    torch.autograd.backward(loss)
    return loss.detach()


@kinds
@ways
def test_a_step_is_the_plain_modules_though_a_layer_changes_what_it_depends_on(
    kind: str, way: str
) -> None:
    codebook, x = Codebook(), batch(2 * M)
    layers = model(never_recompute(codebook))
    plain = copy.deepcopy(layers)
    random.seed(0)
    expected = plain_step(plain, x)
    random.seed(0)
    with piped(kind, layers) as pipe:
        loss = take_step(pipe, Way(way, "always"), x)
    same(loss, expected, rtol=1e-12, atol=1e-12)
    same(grads_of(layers), grads_of(plain), rtol=1e-12, atol=1e-12)
    same(codebook.codes, plain.get_buffer("2.codes"))
    count: Any = layers[4]
    assert codebook.calls == M * [(False, False)]
    assert sorted(count.calls) == M * [(False, True)] + M * [(True, False)]


@kinds
def test_without_the_mark_such_a_step_is_refused(kind: str) -> None:
    with piped(kind, model(Codebook())) as pipe, pytest.raises(RecomputationError, match="values"):
        take_step(pipe, Way("gpipe", "always"), batch(2 * M))


@pytest.mark.parametrize("devices", [CPUS, GPUS])
@kinds
@ways
def test_layers_behind_an_exempt_one_draw_the_same_numbers_again(
    kind: str, way: str, devices: Sequence[str]
) -> None:
    layers = model(never_recompute(nn.Dropout()))
    layers[3] = nn.Dropout()
    with piped(kind, layers, devices) as pipe:  # which compares recomputations with their forwards
        take_step(pipe, Way(way, "always"), batch(2 * M), loss_fn=lambda y, _: y.square().sum())
    count: Any = layers[4]
    assert len(count.calls) == 2 * M


@kinds
def test_a_layer_is_exempt_if_a_module_around_or_inside_it_was_marked(kind: str) -> None:
    inner, outer = Count(), Count()
    layers = model(nn.Sequential(never_recompute(nn.SiLU()), inner))
    layers[4] = outer
    with piped(kind, layers) as pipe:
        never_recompute(nn.ModuleList([outer]))  # also when the pipe has been made
        pipe(batch(2 * M)).sum().backward()
    assert (len(inner.calls), len(outer.calls)) == (M, M)


class Named(nn.Module):
    """Takes arguments whose names pipert uses itself."""

    def __init__(self, marked: bool) -> None:
        super().__init__()
        self.inner = linear(3, 3)
        if marked:
            never_recompute(self)
        self.register_buffer("buffer", torch.zeros(1))

    def forward(self, x: Tensor, name: Tensor, call: Tensor, effect: Tensor) -> Tensor:
        y: Tensor = self.inner(x + name) + call * effect
        return y


@kinds
@pytest.mark.parametrize("marked", [True, False])
def test_arguments_may_have_any_name(kind: str, marked: bool) -> None:
    layers = nn.Sequential(Named(marked), linear(3, 3), linear(3, 3))
    x = torch.randn(2 * M, 3, dtype=torch.float64)
    given = {name: x.clone() for name in ("name", "call", "effect")}
    options: Any = {"devices": ["cpu"] * 2, "chunks": M, "checkpoint": "always"}
    if kind == "Pipe":
        pipe: Any = Pipe(layers, [1, 2], **options)
    else:
        pipe = pipeline(Around(layers), ["layers.1"], **options)
    with pipe:
        y = pipe(x, **given)
        torch.testing.assert_close(y, layers[1:](layers[0](x, **given)))
        y.sum().backward()


class Around(nn.Module):
    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, **given: Tensor) -> Any:
        return self.layers[2](self.layers[1](self.layers[0](x, **given)))


def test_the_mark_is_copied_and_pickled_and_the_state_and_forward_stay_as_they_are() -> None:
    layers = model(Codebook())
    keys, forward = [*layers.state_dict()], layers[2].forward
    assert never_recompute(layers[2]) is layers[2]
    assert ([*layers.state_dict()], layers[2].forward) == (keys, forward)
    for copied in (copy.deepcopy(layers), pickle.loads(pickle.dumps(layers))):
        with piped("Pipe", copied) as pipe:
            pipe(batch(2 * M)).sum().backward()
        codebook: Any = copied[2]
        assert len(codebook.calls) == M


def test_a_backward_may_be_repeated() -> None:
    layers, x = model(never_recompute(nn.SiLU())), batch(2 * M)
    plain = copy.deepcopy(layers)
    found = []
    with piped("Pipe", layers) as pipe:
        for each in (plain, pipe):
            loss = mean(each(x), None)
            weights = [*each.parameters()]
            once = torch.autograd.grad(loss, weights, retain_graph=True)
            found.append((*once, *torch.autograd.grad(loss, weights)))
    same(*found, rtol=1e-12, atol=1e-12)


@ways
def test_what_comes_before_an_exempt_layer_is_checked_too(way: str) -> None:
    factors = iter(range(1, 100))
    layers = model(never_recompute(nn.SiLU()))
    layers[1] = Apply(lambda x: x * next(factors))
    with piped("Pipe", layers) as pipe, pytest.raises(RecomputationError, match="of layer .2."):
        take_step(pipe, Way(way, "always"), batch(2 * M))


@kinds
@ways
def test_an_exempt_layer_may_change_its_parameters(kind: str, way: str) -> None:
    lookup = never_recompute(Lookup(2, 4, max_norm=0.1, dtype=torch.float64))
    with piped(kind, model(lookup)) as pipe:
        take_step(pipe, Way(way, "always"), batch(2 * M))
    assert lookup.weight.grad is not None and lookup.weight.norm(dim=1).max() < 0.11


@pytest.mark.parametrize("balance", [[4, 1], [2, 3]])
@pytest.mark.parametrize("exempt", [1, 2, 3])
@ways
def test_an_exempt_layer_may_stash_and_pop_skips(
    way: str, exempt: int, balance: list[int]
) -> None:
    layers = nn.Sequential(linear(3, 4), stashing("x"), linear(4, 4), popping("x"), linear(4, 2))
    never_recompute(layers[exempt])
    plain, x = copy.deepcopy(layers), batch(2 * M)
    expected = plain_step(plain, x)
    with Pipe(layers, balance, devices=CPUS[:2], chunks=M, checkpoint="always") as pipe:
        same(take_step(pipe, Way(way, "always"), x), expected)
    same(grads_of(layers), grads_of(plain))


@ways
def test_what_is_kept_for_a_micro_batch_goes_with_it(way: str) -> None:
    kept: list[int] = []

    def loss_fn(output: Tensor, target: None) -> Any:
        kept.append(sum(type(each) is Segment for each in gc.get_objects()))
        return mean(output, target)

    with piped("Pipe", model(never_recompute(nn.SiLU()))) as pipe:
        take_step(pipe, Way(way, "always"), batch(4 * M), loss_fn=loss_fn)
        assert max(kept) <= {"1f1b": 8, "gpipe": 4 * M, "call": 4 * M}[way]
        assert not any(type(each) is Segment for each in gc.get_objects())


class Jagged(nn.Module):
    """Computes on rows of two lengths, to which torch gives a size of their own in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(4, 4), linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        offsets = torch.tensor([0, 1, len(x)])
        rows = torch.nested.nested_tensor_from_jagged(self.first(x), offsets)
        y: Tensor = self.second(rows).values()
        return y.clone()  # what follows works in place


@ways
@kinds
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_layer_with_jagged_tensors_is_right_if_it_is_exempt(kind: str, way: str) -> None:
    layers, x = model(never_recompute(Jagged())), batch(2 * M)
    plain = copy.deepcopy(layers)
    expected = plain_step(plain, x)
    with piped(kind, layers) as pipe:
        same(take_step(pipe, Way(way, "always"), x), expected)
    same(grads_of(layers), grads_of(plain))
