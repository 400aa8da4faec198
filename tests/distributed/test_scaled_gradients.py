"""Tests that scaled, clipped or divided gradients over several ranks equal one process's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from pipert import distributed
from tests.distributed.launcher import run
from tests.distributed.test_saved_state import batch, layers


def train(model: Any, scaler: Any, overflows: list[bool], norm_type: float) -> Any:
    """Losses, scales and norms of steps, of which some overflow in one layer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch()
    weight = dict(model.named_parameters()).get("2.weight")
    found = []
    for overflow in overflows:
        if overflow and weight is not None:
            handle = weight.register_hook(lambda grad: grad * torch.inf)
        optimizer.zero_grad()
        if isinstance(model, distributed.Pipe):
            loss = model.forward_backward(x, target=y, loss_fn=F.mse_loss, loss_scale=scaler)
        else:
            loss = F.mse_loss(model(x), y)
            scaler.scale(loss).backward()
        if overflow and weight is not None:
            handle.remove()
        scaler.unscale_(optimizer)
        if isinstance(model, distributed.Pipe):
            norm = model.grad_norm(norm_type)
            clip_grads_with_norm_(model.parameters(), 0.5, norm)
        else:
            norm = clip_grad_norm_(model.parameters(), 0.5, norm_type)
        scaler.step(optimizer)
        scaler.update()
        found.append((loss.detach(), norm, scaler.get_scale()))
    return found, {name: p.detach() for name, p in model.named_parameters()}


def over_ranks(rank: int, overflows: list[bool], norm_type: float) -> Any:
    scaler = ShardedGradScaler("cpu", init_scale=1024.0, growth_interval=2)
    pipe = distributed.Pipe(layers(0, True), [3, 5])
    return train(pipe, scaler, overflows, norm_type)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, torch.inf])
def test_steps_are_those_of_one_process(norm_type: float) -> None:
    overflows = [False, True, False, False]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    expected, parameters = train(layers(0, True), scaler, overflows, norm_type)
    assert [scale for *_, scale in expected] == [1024.0, 512.0, 512.0, 1024.0]
    for found, own in run(2, over_ranks, overflows, norm_type):
        for each, (loss, norm, scale) in zip(found, expected, strict=True):
            torch.testing.assert_close(each[0], loss)
            torch.testing.assert_close(each[1], norm, equal_nan=True)
            assert each[2] == scale
        for name, value in own.items():
            torch.testing.assert_close(value, parameters.get(name, parameters["0.weight"]))


DTYPES = [  # of the gradients of each rank, which may have none
    (None, torch.float64), (torch.bfloat16, None), (torch.float32, torch.bfloat16), (None, None),
    (torch.float16, torch.float16),
]  # fmt: skip


def gradients_of(rank: int, dtypes: tuple[torch.dtype | None, ...]) -> list[Tensor]:
    """A norm of two ranks' whose square is more than a half can be."""
    dtype = dtypes[rank]
    return [] if dtype is None else [torch.full((4,), 150.0 * (rank + 1), dtype=dtype)]


def norms(rank: int) -> list[Tensor]:
    found = []
    for dtypes in DTYPES:
        pipe = distributed.Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1])
        for gradient in gradients_of(rank, dtypes):
            pipe.to(gradient.dtype)
            list(pipe.parameters())[1].grad = gradient
        found += [pipe.grad_norm(norm_type) for norm_type in (2.0, 1.0, torch.inf)]
    return found


def test_a_norm_is_that_of_one_process_whatever_dtypes_ranks_have() -> None:
    expected = []
    for dtypes in DTYPES:
        gradients = [gradient for rank in range(2) for gradient in gradients_of(rank, dtypes)]
        expected += [get_total_norm(gradients, norm_type) for norm_type in (2.0, 1.0, torch.inf)]
    for found in run(2, norms):
        torch.testing.assert_close(found, expected)


def norms_of_nan(rank: int) -> list[bool]:
    pipe = distributed.Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1])
    found = []
    for bad in range(2):
        for p in pipe.parameters():
            p.grad = torch.full_like(p, torch.nan if rank == bad else 1.0)
        for norm_type in (2.0, 1.0, torch.inf):
            found.append(bool(pipe.grad_norm(norm_type).isnan()))
    for norm_type in (0.0, -1.0, -torch.inf, torch.nan):
        with pytest.raises(ValueError, match="norm_type must be positive"):
            pipe.grad_norm(norm_type)
    return found


def test_a_norm_with_a_nan_on_one_rank_is_nan() -> None:
    for found in run(2, norms_of_nan):
        assert all(found)
