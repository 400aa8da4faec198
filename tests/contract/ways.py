"""One training step of a pipe, by a call or by ``forward_backward``, beside the plain module's."""

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
same(0, 0)  # the first call imports for half a second, which is no test's fault


class Way(NamedTuple):
    """How a step is done; the result is to be the same in all."""

    schedule: str  # or CALL
    checkpoint: str


WAYS = [Way(schedule, mode) for schedule in SCHEDULES for mode in MODES]
ways = pytest.mark.parametrize("way", WAYS, ids=["-".join(way) for way in WAYS])
"""Lets a test be about all of them."""

CALL = "call"
CALLS = [*[Way(CALL, mode) for mode in MODES], *WAYS]
each_way = pytest.mark.parametrize("way", CALLS, ids=["-".join(way) for way in CALLS])
"""About these and a call with a backward of one's own as well: one contract holds for all."""


def linear(inputs: int, outputs: int) -> Any:
    return nn.Linear(inputs, outputs, dtype=torch.float64)


def batch(rows: int, requires_grad: bool = False) -> Any:
    return torch.randn(rows, 3, dtype=torch.float64, requires_grad=requires_grad)


def seven_layers() -> Any:
    """With a layer that works in place, and a normalisation."""
    norm = nn.LayerNorm(4, dtype=torch.float64)
    return nn.Sequential(
        linear(3, 4), nn.Tanh(), linear(4, 4), nn.ReLU(inplace=True), linear(4, 4), norm,
        linear(4, 2),
    )  # fmt: skip


def mean(output: Any, target: Any) -> Any:  # torch does not type Tensor.backward
    """The mean of the squares over the rows, in which each entry counts differently."""
    columns = torch.arange(1, output[0].numel() + 1, dtype=torch.float64).view(output[0].shape)
    return (output * columns).square().flatten(1).sum(1).mean()


def grads_of(module: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()
    }


def inputs(values: Any) -> Any:
    """A copy of a call's arguments whose tensors are leaves."""
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
    """The loss of a step, and what the pipe returned if asked for, without their graph."""
    if way.schedule == CALL:
        output = pipe(*args, **kwargs)
        loss = _backward(loss_fn(output, target))
        return (loss, output.detach()) if return_outputs else loss
    kwargs |= {"schedule": way.schedule, "return_outputs": return_outputs}
    return pipe.forward_backward(*args, loss_fn=loss_fn, target=target, **kwargs)


def _backward(loss: Any) -> Any:
    """Of what is frozen there is none."""
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
    """Loss and gradients of ``steps`` steps are those of the plain module; returns the pipe."""
    plain = copy.deepcopy(module)
    own, given = (inputs((args, kwargs)) for _ in range(2))
    with piped(module, balance, way, chunks) as pipe:
        for _ in range(steps):
            loss = take_step(pipe, way, *given[0], loss_fn=loss_fn, target=target, **given[1])
            expected = _backward(loss_fn(call(plain, *own[0], **own[1]), target))
            same(loss.reshape(()), expected.reshape(()))
    same(grads_of(module), grads_of(plain))
    wanted = [leaf.requires_grad for leaf in _tensors((args, kwargs))]  # before a layer changed it
    found = [_grads_of_some(values, wanted) for values in (given, own)]
    same(*found)
    return pipe


def call(module: nn.Sequential, *args: Any, **kwargs: Any) -> Any:
    """A plain module, whose first layer may take any arguments."""
    first, *others = module
    value = first(*args, **kwargs)
    for layer in others:
        value = layer(value)
    return value


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _grads_of_some(values: Any, wanted: list[bool]) -> list[Tensor | None]:
    return [x.grad for x, wants in zip(_tensors(values), wanted, strict=True) if wants]
