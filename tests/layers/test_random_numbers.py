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
from torch.nn.modules.module import register_module_forward_hook

from pipert import is_recomputing
from pipert.layers.random_numbers import _DETERMINISTIC, may_draw
from tests.helpers.pipes import pipe_of_layers
from tests.helpers.torchscript import uses_torchscript
from tests.layers import Apply

TIMEOUT = 3.0  # s

pipe_of = partial(pipe_of_layers, chunks=4)
Function = Callable[[Tensor], Tensor]


# What differs, what does not ----------------------------------------------------------------------


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
    return state()


def state() -> bytes:
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


def outcome(*layers: nn.Module) -> tuple[Tensor, Tensor, bytes]:
    """From one seed: the output, the gradient of a sum, and the state of the generator after it."""
    x = torch.ones(4, 16, requires_grad=True)
    torch.manual_seed(0)
    with pipe_of(*layers, chunks=2, checkpoint="always") as pipe:
        y = pipe(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
    return y, gradient, state()


def scripted() -> Function:
    def drop(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, True)

    found: Function = torch.jit.script(drop)
    return found


def vmapped(function: Function, randomness: str) -> Function:
    return lambda x: torch.func.vmap(function, randomness=randomness)(x)


def noise(x: Tensor) -> Tensor:
    return x * torch.rand(16)


def tangent(x: Tensor) -> Tensor:
    found: Tensor = torch.func.jvp(noise, (x,), (torch.ones_like(x),))[1]
    return x * found


WAYS: dict[str, Callable[[], Function]] = {
    "a distribution": lambda: lambda x: x * D.Uniform(0.5, x + 1).sample(),
    "a new layer": lambda: lambda x: x * nn.Linear(16, 1).weight.detach(),
    "scripted": scripted,
    "vmap, the same": lambda: vmapped(F.dropout, "same"),
    "vmap, different": lambda: vmapped(F.dropout, "different"),
    "jvp": lambda: tangent,
}


@uses_torchscript
@pytest.mark.parametrize("way", WAYS)
def test_a_recomputation_draws_the_same_and_the_generator_moves_by_one_draw(
    way: str, one_draw: bytes
) -> None:
    layers = Apply(WAYS[way]()), nn.Identity()
    y, gradient, after = outcome(*layers)
    assert torch.equal(gradient, y) and len(set(y.flatten().tolist())) > 1
    assert after == one_draw
    assert torch.equal(outcome(*layers)[0], y)


def test_a_hook_of_all_modules_may_draw(one_draw: bytes) -> None:
    def double_some(module: nn.Module, args: Any, y: Tensor) -> Any:
        return F.dropout(y) if isinstance(module, nn.Identity) else None

    handle = register_module_forward_hook(double_some)
    try:
        y, gradient, after = outcome(nn.Identity(), nn.Identity())
    finally:
        handle.remove()
    assert torch.equal(gradient, y) and after == one_draw and len(set(y.flatten().tolist())) > 1


class Noisy(torch.autograd.Function):
    """A function that draws in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * torch.rand_like(dy)


def add_noise(module: nn.Module, gradients: Any, _: Any) -> Any:
    return tuple(gradient * torch.rand_like(gradient) for gradient in gradients)


def with_hook() -> nn.Module:
    layer = nn.Linear(8, 8)
    layer.register_full_backward_hook(add_noise)
    return layer


BACKWARDS: dict[str, Callable[[], nn.Module]] = {
    "nothing": nn.Identity,
    "custom function": lambda: Apply(Noisy.apply),
    "hook": with_hook,
}


def step(
    make: Callable[[], nn.Module], loss: Any = F.mse_loss, schedule: str = "gpipe"
) -> tuple[list[Tensor], Tensor, bytes]:
    """From one seed: the gradients, what the last partition drew in its forwards, the generator."""
    torch.manual_seed(1)
    drawn: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        factors = torch.rand(8)
        if not is_recomputing():
            drawn.append(factors)
        return x * factors

    layers = nn.Linear(8, 8), make(), Apply(note), nn.Linear(8, 8)
    x = torch.randn(6, 8)
    torch.manual_seed(0)
    with pipe_of(*layers, chunks=3) as pipe:
        pipe.forward_backward(x, target=x, loss_fn=loss, schedule=schedule)
        gradients = [p.grad for p in pipe.parameters() if p.grad is not None]
    return gradients, torch.stack(drawn), state()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("kind", ["custom function", "hook"])
def test_random_numbers_of_a_steps_backward_follow_from_the_seed(kind: str, schedule: str) -> None:
    first, again = (step(BACKWARDS[kind], schedule=schedule) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first[0], again[0], strict=True))
    assert torch.equal(first[1], again[1]) and first[2] == again[2]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_draws_in_a_backward_change_no_forward(schedule: str) -> None:
    quiet = step(BACKWARDS["nothing"], schedule=schedule)
    noisy = step(BACKWARDS["custom function"], schedule=schedule)
    assert torch.equal(quiet[1], noisy[1]) and quiet[2] == noisy[2]
    assert not torch.equal(quiet[0][0], noisy[0][0])


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

Made = tuple[tuple[Any, ...], tuple[int, ...]]

deterministic: dict[Any, Made] = {
    nn.Identity: ((), (2, 4)),
    nn.Linear: ((4, 4), (2, 4)),
    nn.Flatten: ((), (2, 4, 4)),
    nn.Unflatten: ((1, (2, 2)), (2, 4)),
    nn.GroupNorm: ((2, 4), (2, 4)),
    nn.LayerNorm: ((4,), (2, 4)),
    nn.RMSNorm: ((4,), (2, 4)),
    nn.LocalResponseNorm: ((2,), (2, 4, 4)),
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
}
OF_DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "Conv{}d": (4, 4, 1), "ConvTranspose{}d": (4, 4, 1), "BatchNorm{}d": (4,),
    "InstanceNorm{}d": (4,), "MaxPool{}d": (2,), "AvgPool{}d": (2,), "AdaptiveAvgPool{}d": (2,),
    "AdaptiveMaxPool{}d": (2,),
}  # fmt: skip
for name, arguments in OF_DIMENSIONS.items():
    for dim in (1, 2, 3):
        deterministic[getattr(nn, name.format(dim))] = arguments, (2, 4, *[4] * dim)
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


# Compiled and scripted layers ---------------------------------------------------------------------


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


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("backend", "deferred"),
    [
        ("eager", True), ("aot_eager", False),
        pytest.param("eager", False, marks=pytest.mark.sweep),
        pytest.param("aot_eager", True, marks=pytest.mark.sweep),
        # It generates C++, of what the one before it makes.
        pytest.param("inductor", False, marks=pytest.mark.sweep),
        pytest.param("inductor", True, marks=pytest.mark.sweep),
    ],
)  # fmt: skip
def test_statistics_of_compiled_norms_are_updated_once(backend: str, deferred: bool) -> None:
    torch._dynamo.reset()  # or it would take code that it has compiled for another one
    norm, expected = nn.BatchNorm1d(16), nn.BatchNorm1d(16)
    x = torch.randn(4, 16, requires_grad=True)
    layer: Any = torch.compile(norm, backend=backend)
    with pipe_of(
        layer, nn.Identity(), chunks=2, checkpoint="always", deferred_batch_norm=deferred
    ) as pipe:
        pipe(x).sum().backward()
    for part in x.chunk(1 if deferred else 2):
        expected(part)
    for found, wanted in zip(norm.buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(found, wanted)
