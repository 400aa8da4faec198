"""Loss scaling and clipping over several ranks are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_

from pipert import distributed
from tests.distributed.ranks import run
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
