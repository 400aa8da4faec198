"""Tests that random layers draw the same numbers under any timing, and in a recomputation.

The CPU's generator is one for the process, so each test here is about what the workers leave in it
or take out of it. *Moved by one draw* means: as far as by any other call of a pipe with a random
layer, however much that layer draws.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
from torch import Tensor, nn

from pipert.layers.random_numbers import _DETERMINISTIC, may_draw
from tests.helpers.pipes import pipe_of_layers
from tests.layers import Apply

TIMEOUT = 3.0  # s

pipe_of = partial(pipe_of_layers, chunks=4)


# Timing -------------------------------------------------------------------------------------------


def noisy_layers() -> list[nn.Module]:
    return [
        nn.Dropout(),
        Apply(lambda x: x + torch.rand(x.shape)),
        Apply(lambda x: F.dropout(x, 0.3)),
        Apply(lambda x: x * torch.empty_like(x).bernoulli_(0.7)),
        Apply(lambda x: x + torch.randn_like(x)),
    ]


def test_draws_of_the_workers_leave_the_caller_s_sequence_alone() -> None:
    with pipe_of(*noisy_layers()) as pipe:
        torch.manual_seed(1)
        pipe(torch.ones(4, 8))
        after_one = torch.rand(4)
        torch.manual_seed(1)
        pipe(torch.ones(1, 8))
        assert torch.equal(torch.rand(4), after_one)


# What differs, what does not ----------------------------------------------------------------------


def test_partitions_draw_different_numbers() -> None:
    drawn: list[Tensor] = []

    def draw(x: Tensor) -> Tensor:
        drawn.append(torch.rand(8))
        return x

    with pipe_of(*[Apply(draw) for _ in range(4)], chunks=4) as pipe:
        pipe(torch.ones(4, 1))
    assert len({tuple(numbers.tolist()) for numbers in drawn}) == 16


def test_two_calls_at_once_draw_different_numbers() -> None:
    drawn: list[Tensor] = []

    def draw(x: Tensor) -> Tensor:
        drawn.append(torch.rand(8))
        return x

    both = threading.Barrier(2)

    def call() -> None:
        with pipe_of(Apply(draw), chunks=1) as pipe:
            both.wait(TIMEOUT)
            pipe(torch.ones(1))

    calls = [threading.Thread(target=call) for _ in range(2)]
    for thread in calls:
        thread.start()
    for thread in calls:
        thread.join(TIMEOUT)
    assert len(drawn) == 2 and not torch.equal(*drawn)


# Recomputation ------------------------------------------------------------------------------------


def test_a_recomputation_of_an_inner_pipe_draws_the_numbers_of_its_forward() -> None:
    x = torch.ones(4, 64, requires_grad=True)
    inner = pipe_of(nn.Dropout(), nn.Identity(), chunks=2, checkpoint="never")
    layer = nn.Sequential(inner, Apply(torch.square))  # whose backward reads what inner computes
    with inner, pipe_of(layer, nn.Identity(), chunks=2, checkpoint="always") as outer:
        y = outer(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, 2 * y)


@pytest.mark.parametrize("k", range(5))
@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_gradients_with_checkpointing_are_those_without_it_bit_for_bit(
    checkpoint: str, k: int
) -> None:
    layers = nn.Linear(8, 8), noisy_layers()[k], nn.Tanh(), nn.Linear(8, 8), noisy_layers()[k]
    x = torch.randn(6, 8)
    results = []
    with pipe_of(*layers, chunks=3) as pipe:
        for mode in [checkpoint, "never"]:
            pipe.checkpoint = mode
            torch.manual_seed(7)
            y = pipe(x)
            results.append((y, *torch.autograd.grad(y.pow(2).sum(), list(pipe.parameters()))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_recomputation_leaves_the_generator_alone() -> None:
    with pipe_of(nn.Linear(8, 8), nn.Dropout(), checkpoint="always") as pipe:
        y = pipe(torch.ones(4, 8))
        state = torch.get_rng_state()
        y.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_recomputation_replays_its_numbers_though_the_seed_was_set_meanwhile() -> None:
    x = torch.ones(4, 64, requires_grad=True)
    with pipe_of(nn.Dropout(), chunks=2, checkpoint="always") as pipe:
        y = pipe(x)
        torch.manual_seed(99)
        (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, y)


def test_a_second_recomputation_replays_the_same_numbers() -> None:
    x = torch.ones(4, 64, requires_grad=True)
    with pipe_of(nn.Dropout(), chunks=2, checkpoint="always") as pipe:
        y = pipe(x)
        (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        (second,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(first, second)


# The generator ------------------------------------------------------------------------------------


def state_after(layer: nn.Module, x: Tensor | None = None) -> bytes:
    """Returns the CPU generator's state after a call of a pipe of ``layer``, from a fixed seed."""
    torch.manual_seed(0)
    with pipe_of(layer, chunks=1) as pipe:
        pipe(torch.ones(4, 4) if x is None else x)
    return bytes(torch.get_rng_state().tolist())


@pytest.fixture(scope="module")
def unmoved() -> bytes:
    torch.manual_seed(0)
    return bytes(torch.get_rng_state().tolist())


@pytest.fixture(scope="module")
def one_draw() -> bytes:
    return state_after(Apply(lambda x: x + torch.rand(())))


def test_a_model_without_randomness_leaves_the_generator_alone(unmoved: bytes) -> None:
    assert state_after(nn.Sequential(nn.Linear(4, 4), Apply(torch.tanh))) == unmoved


def test_a_function_that_could_draw_but_does_not_leaves_the_generator_alone(
    unmoved: bytes,
) -> None:
    assert state_after(Apply(lambda x: F.dropout(x, training=False))) == unmoved


given: dict[str, Callable[[torch.Generator | None], Tensor]] = {
    "by name": lambda generator: torch.rand(3, generator=generator),
    "by position": lambda generator: torch.ops.aten.poisson(torch.ones(3), generator),
}


@pytest.mark.parametrize("how", given)
def test_an_explicit_generator_is_used_unchanged(how: str, unmoved: bytes) -> None:
    own = torch.Generator().manual_seed(5)
    drawn: list[Tensor] = []

    def draw(x: Tensor) -> Tensor:
        drawn.append(given[how](own))
        return x

    assert state_after(Apply(draw)) == unmoved
    assert torch.equal(drawn[0], given[how](torch.Generator().manual_seed(5)))


# What draws ---------------------------------------------------------------------------------------


functions: dict[str, Callable[[Tensor], Any]] = {
    "rand": lambda x: torch.rand(3),
    "bernoulli_": lambda x: x.bernoulli_(0.5),
    "F.dropout": F.dropout,
    "a distribution": lambda x: D.Normal(x, x).sample(),  # type: ignore[no-untyped-call]
    "a new layer": lambda x: nn.Linear(4, 4).weight.detach(),
}


@pytest.mark.parametrize("name", functions)
def test_a_function_that_draws_moves_the_generator_by_one_draw(name: str, one_draw: bytes) -> None:
    assert state_after(Apply(lambda x: functions[name](x.clone()))) == one_draw


def test_a_subclass_of_a_deterministic_layer_may_draw(one_draw: bytes) -> None:
    class NoisyLinear(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.randn(4)

    torch.manual_seed(1)
    assert state_after(NoisyLinear(4, 4)) == one_draw


def test_a_forward_hook_of_a_deterministic_layer_may_draw(one_draw: bytes) -> None:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda module, args, y: y + torch.randn(4))
    assert state_after(layer) == one_draw


def test_a_deterministic_layer_whose_forward_was_replaced_may_draw(one_draw: bytes) -> None:
    layer = nn.Linear(4, 4)
    layer.forward = F.dropout  # type: ignore[method-assign]
    assert state_after(layer) == one_draw


# What does not draw -------------------------------------------------------------------------------

deterministic: dict[type[nn.Module], tuple[tuple[Any, ...], tuple[int, ...]]] = {
    nn.Identity: ((), (2, 4)),
    nn.Linear: ((4, 4), (2, 4)),
    nn.Flatten: ((), (2, 4, 4)),
    nn.Unflatten: ((1, (2, 2)), (2, 4)),
    nn.Conv1d: ((4, 4, 1), (2, 4, 4)),
    nn.Conv2d: ((4, 4, 1), (2, 4, 4, 4)),
    nn.Conv3d: ((4, 4, 1), (2, 4, 4, 4, 4)),
    nn.ConvTranspose1d: ((4, 4, 1), (2, 4, 4)),
    nn.ConvTranspose2d: ((4, 4, 1), (2, 4, 4, 4)),
    nn.ConvTranspose3d: ((4, 4, 1), (2, 4, 4, 4, 4)),
    nn.BatchNorm1d: ((4,), (2, 4)),
    nn.BatchNorm2d: ((4,), (2, 4, 4, 4)),
    nn.BatchNorm3d: ((4,), (2, 4, 4, 4, 4)),
    nn.GroupNorm: ((2, 4), (2, 4)),
    nn.LayerNorm: ((4,), (2, 4)),
    nn.RMSNorm: ((4,), (2, 4)),
    nn.InstanceNorm1d: ((4,), (2, 4, 4)),
    nn.InstanceNorm2d: ((4,), (2, 4, 4, 4)),
    nn.InstanceNorm3d: ((4,), (2, 4, 4, 4, 4)),
    nn.LocalResponseNorm: ((2,), (2, 4, 4)),
    nn.MaxPool1d: ((2,), (2, 4, 4)),
    nn.MaxPool2d: ((2,), (2, 4, 4, 4)),
    nn.MaxPool3d: ((2,), (2, 4, 4, 4, 4)),
    nn.AvgPool1d: ((2,), (2, 4, 4)),
    nn.AvgPool2d: ((2,), (2, 4, 4, 4)),
    nn.AvgPool3d: ((2,), (2, 4, 4, 4, 4)),
    nn.AdaptiveAvgPool1d: ((2,), (2, 4, 4)),
    nn.AdaptiveAvgPool2d: ((2,), (2, 4, 4, 4)),
    nn.AdaptiveAvgPool3d: ((2,), (2, 4, 4, 4, 4)),
    nn.AdaptiveMaxPool1d: ((2,), (2, 4, 4)),
    nn.AdaptiveMaxPool2d: ((2,), (2, 4, 4, 4)),
    nn.AdaptiveMaxPool3d: ((2,), (2, 4, 4, 4, 4)),
    nn.Upsample: ((None, 2), (2, 4, 4)),
    nn.PixelShuffle: ((2,), (2, 4, 4, 4)),
    nn.PixelUnshuffle: ((2,), (2, 4, 4, 4)),
    nn.ZeroPad2d: ((1,), (2, 4, 4, 4)),
    nn.ReflectionPad2d: ((1,), (2, 4, 4, 4)),
    nn.Threshold: ((0.1, 2.0), (2, 4)),
    nn.Embedding: ((4, 4), (2, 4)),
    nn.EmbeddingBag: ((4, 4), (2, 4)),
    nn.Bilinear: ((4, 4, 4), (2, 4)),
    nn.Softmax: ((-1,), (2, 4)),
    nn.LogSoftmax: ((-1,), (2, 4)),
    nn.Softmin: ((-1,), (2, 4)),
    nn.Softmax2d: ((), (2, 4, 4, 4)),
    nn.UpsamplingNearest2d: ((None, 2), (2, 4, 4, 4)),
    nn.UpsamplingBilinear2d: ((None, 2), (2, 4, 4, 4)),
    nn.FractionalMaxPool2d: ((2, 2), (2, 4, 4)),
    nn.RReLU: ((), (2, 4)),
}
INDICES = {nn.Embedding, nn.EmbeddingBag}


def can_be_made(kind: Any) -> bool:
    return not kind.__name__.startswith("Lazy") and all(
        parameter.default is not parameter.empty or parameter.kind is parameter.VAR_POSITIONAL
        for parameter in inspect.signature(kind).parameters.values()
    )


kinds = [kind for kind in vars(nn).values() if getattr(kind, "__module__", "") in _DETERMINISTIC]


@pytest.mark.parametrize("kind", [k for k in kinds if k in deterministic or can_be_made(k)])
def test_layers_taken_for_deterministic_do_not_draw(kind: type[nn.Module]) -> None:
    """Each is called in training mode, with arguments from the table above if it needs any."""
    args, shape = deterministic.get(kind, ((), (2, 4)))
    layer = kind(*args)
    x = -torch.ones(shape)
    if kind in INDICES:
        x = torch.ones(shape, dtype=torch.long)
    state = torch.get_rng_state()
    layer(x, x) if kind is nn.Bilinear else layer(x)
    assert torch.equal(torch.get_rng_state(), state) is not may_draw(layer)


INNER = [nn.ModuleList, partial(nn.LSTM, 4, 4), partial(nn.MultiheadAttention, 4, 2)]


@pytest.mark.parametrize("make", INNER)
def test_a_layer_with_inner_layers_might_draw(make: Callable[[], nn.Module]) -> None:
    assert may_draw(make())


def test_a_layer_that_was_switched_to_training_after_it_was_piped_draws() -> None:
    dropout = nn.Dropout().eval()
    with pipe_of(dropout, chunks=2) as pipe:
        x = torch.ones(2, 64)
        pipe(x)
        dropout.train()
        assert bool((pipe(x) == 0).any())


# torch.utils.checkpoint inside of a layer ---------------------------------------------------------


class Dropping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x)


def compiled(layer: nn.Module) -> nn.Module:
    wrapper: Any = torch.compile(layer, backend="eager")
    assert isinstance(wrapper, nn.Module)
    return wrapper


def compiled_in_place(layer: nn.Module) -> nn.Module:
    layer.compile(backend="eager")
    return layer


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore")  # of dynamo and of torch.jit
@pytest.mark.parametrize(
    "layer",
    [
        lambda: compiled_in_place(nn.Dropout()),
        lambda: compiled_in_place(Dropping()),
        lambda: compiled(Dropping()),
        lambda: nn.Sequential(nn.Identity(), compiled(Dropping())),
        lambda: torch.jit.script(nn.Sequential(nn.Dropout())),
    ],
    ids=["dropout in place", "module in place", "wrapper", "inside a layer", "scripted"],
)
def test_compiled_layers_draw_the_same_in_a_recomputation(
    layer: Callable[[], nn.Module],
) -> None:
    x = torch.ones(8, 4, requires_grad=True)
    with pipe_of(layer(), nn.Identity(), chunks=2, checkpoint="always") as pipe:
        y = pipe(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, y)
    assert 0 < (y == 0).sum() < y.numel()
