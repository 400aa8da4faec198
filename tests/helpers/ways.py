"""Takes a training step, by a call or a schedule, and compares it with the plain module's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipert import Pipe

__all__ = [
    "CALL", "MODES", "SCHEDULES", "Way", "assert_equal", "batch", "call", "each_way", "grads_of",
    "inputs", "linear", "mean", "piped", "same", "seven_layers", "take_step", "ways",
]  # fmt: skip

MODES = ["always", "except_last", "never"]
SCHEDULES = ["gpipe", "1f1b"]

same = torch.testing.assert_close
same(0, 0)  # the first call imports for half a second, which no test should be charged with


class Way(NamedTuple):
    """A way to take a step; all ways must have the same result."""

    schedule: str  # or CALL
    checkpoint: str


def _cases(schedules: list[str]) -> list[Any]:
    """Makes a case of each schedule and mode; a call and 1F1B alone have all modes by default."""
    every = [Way(schedule, mode) for schedule in schedules for mode in MODES]
    return [
        pytest.param(
            way, id="-".join(way),
            marks=[pytest.mark.sweep] * (
                way.schedule in ("gpipe", "zb-h1") and way.checkpoint != "except_last"
            ),
        )
        for way in every
    ]  # fmt: skip


WITH_W = [*SCHEDULES, "zb-h1"]
ways = pytest.mark.parametrize("way", _cases(WITH_W))
"""Runs a test with a step under each schedule and checkpoint mode."""

CALL = "call"
each_way = pytest.mark.parametrize("way", _cases([CALL, *WITH_W]))
"""Runs a test with these steps and with a call followed by the caller's own backward."""


def linear(inputs: int, outputs: int) -> Any:
    return nn.Linear(inputs, outputs, dtype=torch.float64)


def batch(rows: int, requires_grad: bool = False) -> Any:
    return torch.randn(rows, 3, dtype=torch.float64, requires_grad=requires_grad)


def seven_layers() -> Any:
    """Builds seven layers, one of which works in place and one of which normalises."""
    norm = nn.LayerNorm(4, dtype=torch.float64)
    return nn.Sequential(
        linear(3, 4), nn.Tanh(), linear(4, 4), nn.ReLU(inplace=True), linear(4, 4), norm,
        linear(4, 2),
    )  # fmt: skip


def mean(output: Any, target: Any) -> Any:  # torch does not type Tensor.backward
    """Averages weighted squares over the rows; each entry of a row has a different weight."""
    columns = torch.arange(1, output[0].numel() + 1, dtype=torch.float64).view(output[0].shape)
    return (output * columns).square().flatten(1).sum(1).mean()


def grads_of(module: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()
    }


def inputs(values: Any) -> Any:
    """Copies a call's arguments; the tensors of the copy are leaves."""
    if isinstance(values, Tensor):
        return values.detach().clone().requires_grad_(values.requires_grad)
    if isinstance(values, tuple):
        return tuple(map(inputs, values))
    return {k: inputs(v) for k, v in values.items()} if isinstance(values, dict) else values


def piped(
    module: nn.Sequential, balance: list[int], way: Way, chunks: int = 3, **options: Any
) -> Pipe:
    devices = ["cpu"] * len(balance)
    mode = way.checkpoint
    return Pipe(module, balance, devices=devices, chunks=chunks, checkpoint=mode, **options)


def take_step(
    pipe: Pipe,
    way: Way,
    *args: Any,
    loss_fn: Callable[[Any, Any], Any] = mean,
    target: Any = None,
    return_outputs: bool = False,
    **kwargs: Any,
) -> Any:
    """Takes a step; returns the loss, and the outputs on request, without their graph."""
    if way.schedule == CALL:
        output = pipe(*args, **kwargs)
        loss = _backward(loss_fn(output, target))
        return (loss, output.detach()) if return_outputs else loss
    kwargs |= {"schedule": way.schedule, "return_outputs": return_outputs}
    return pipe.forward_backward(*args, loss_fn=loss_fn, target=target, **kwargs)


def _backward(loss: Any) -> Any:
    """Runs the backward unless everything is frozen; returns the detached loss."""
    if loss.requires_grad:
        loss.backward()
    return loss.detach()


def assert_equal(
    module: nn.Sequential,
    balance: list[int],
    way: Way,
    *args: Any,
    loss_fn: Callable[[Any, Any], Any] = mean,
    target: Any = None,
    chunks: int = 3,
    steps: int = 1,
    **kwargs: Any,
) -> Pipe:
    """Asserts that ``steps`` steps have the plain module's loss and gradients; returns the pipe."""
    plain = copy.deepcopy(module)
    for_plain, given = (inputs((args, kwargs)) for _ in range(2))
    with piped(module, balance, way, chunks) as pipe:
        for _ in range(steps):
            loss = take_step(pipe, way, *given[0], loss_fn=loss_fn, target=target, **given[1])
            expected = _backward(loss_fn(call(plain, *for_plain[0], **for_plain[1]), target))
            same(loss.reshape(()), expected.reshape(()))
    same(grads_of(module), grads_of(plain))
    wanted = [leaf.requires_grad for leaf in _tensors((args, kwargs))]  # before a layer changed it
    found = [_grads_of_some(values, wanted) for values in (given, for_plain)]
    same(*found)
    return pipe


def call(module: nn.Sequential, *args: Any, **kwargs: Any) -> Any:
    """Calls a plain module whose first layer may take any arguments."""
    first, *others = module
    value = first(*args, **kwargs)
    for layer in others:
        value = layer(value)
    return value


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _grads_of_some(values: Any, wanted: list[bool]) -> list[Tensor | None]:
    return [x.grad for x, wants in zip(_tensors(values), wanted, strict=True) if wants]
