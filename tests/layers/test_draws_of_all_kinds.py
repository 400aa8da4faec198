"""Tests that draws are repeated and follow from the seed, whoever draws, forward or backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from pipert import is_recomputing
from tests.helpers.pipes import pipe_of_layers
from tests.helpers.torchscript import uses_torchscript
from tests.layers import Apply

Function = Callable[[Tensor], Tensor]


def state() -> bytes:
    return bytes(torch.get_rng_state().tolist())


@pytest.fixture(scope="module")
def one_draw() -> bytes:
    torch.manual_seed(0)
    with pipe_of_layers(nn.Dropout(), chunks=1) as pipe:
        pipe(torch.ones(4, 4))
    return state()


def outcome(*layers: nn.Module) -> tuple[Tensor, Tensor, bytes]:
    """From one seed: the output, the gradient of a sum, and the state of the generator after it."""
    x = torch.ones(4, 16, requires_grad=True)
    torch.manual_seed(0)
    with pipe_of_layers(*layers, chunks=2, checkpoint="always") as pipe:
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
    with pipe_of_layers(*layers, chunks=3) as pipe:
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


# Running statistics -------------------------------------------------------------------------------


@uses_torchscript
@pytest.mark.parametrize("is_scripted", [False, True])
def test_running_statistics_are_updated_once_by_each_micro_batch(is_scripted: bool) -> None:
    norm = nn.BatchNorm1d(16)
    expected = nn.BatchNorm1d(16)
    layer: Any = torch.jit.script(norm) if is_scripted else norm
    x = torch.randn(4, 16, requires_grad=True)
    with pipe_of_layers(
        layer, nn.Identity(), chunks=2, checkpoint="always", deferred_batch_norm=False
    ) as pipe:
        pipe(x).sum().backward()
    for part in x.chunk(2):
        expected(part)
    for found, wanted in zip(layer.buffers(), expected.buffers(), strict=True):
        assert torch.equal(found, wanted)


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
    with pipe_of_layers(
        layer, nn.Identity(), chunks=2, checkpoint="always", deferred_batch_norm=deferred
    ) as pipe:
        pipe(x).sum().backward()
    for part in x.chunk(1 if deferred else 2):
        expected(part)
    for found, wanted in zip(norm.buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(found, wanted)
