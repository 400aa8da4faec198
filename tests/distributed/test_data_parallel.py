"""Pipelines beside one another: data-parallel replicas, by DDP or sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pipert import distributed
from tests.distributed.ranks import run
from tests.distributed.test_rank_faults import Oops, Trap, batch, caught, fail, trapped

Wrapper = Callable[[DeviceMesh], Callable[[nn.Sequential], nn.Module | None]]


def ddp(mesh: DeviceMesh) -> Callable[[nn.Sequential], nn.Module]:
    def replicated(part: nn.Sequential) -> nn.Module:
        if not any(True for _ in part.parameters()):
            return part
        return DistributedDataParallel(part, process_group=mesh["dp"].get_group())

    return replicated


def sharded(mesh: DeviceMesh) -> Callable[[nn.Sequential], None]:
    def shard(part: nn.Sequential) -> None:
        for layer in part:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh["dp"])
        fully_shard(part, mesh=mesh["dp"])

    return shard


def pipe_of(
    wrap: Wrapper, balance: list[int] | None = None, **settings: Any
) -> tuple[distributed.Pipe, DeviceMesh]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pipe = distributed.Pipe(
        trapped(2), balance or [3, 3], mesh=mesh, chunks=2, wrap=wrap(mesh), **settings
    )
    return pipe, mesh


def whole(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def steps(rank: int, wrap: Wrapper, rows: list[tuple[int, int]], settings: dict[str, Any]) -> Any:
    """The losses of mini-batches, and the sums of gradients."""
    pipe, mesh = pipe_of(wrap, **settings)
    losses = []
    for mine in rows:
        x, y = batch(mine[mesh["dp"].get_local_rank()])
        losses.append(pipe.forward_backward(x, target=y, loss_fn=F.mse_loss))
    grads = {name: whole(p.grad) for name, p in pipe.named_parameters()}
    x, _ = batch(8)
    return losses, grads, pipe(x)


def check(found: list[Any], rows: list[tuple[int, int]]) -> None:
    plain = trapped(2)
    expected = []
    for each in rows:
        of_step = []
        for number in each:
            x, y = batch(number)
            loss = F.mse_loss(plain(x), y)
            (loss / 2).backward()  # type: ignore[no-untyped-call]
            of_step.append(loss.detach())
        expected.append(of_step)
    named = dict(plain.named_parameters())
    seen = set()
    for rank, (losses, grads, output) in enumerate(found):
        for loss, of_step in zip(losses, expected, strict=True):
            torch.testing.assert_close(loss, of_step[rank % 2])
        for name, grad in grads.items():
            torch.testing.assert_close(grad, named[name].grad)
            seen.add(name)
        if rank >= 2:
            torch.testing.assert_close(output, plain(batch(8)[0]).detach())
    assert seen == set(named)


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": "1f1b"}, {"schedule": "gpipe"}, {"checkpoint": "always"},
        {"schedule": "interleaved", "balance": [1, 2, 1, 2]},
    ],
    ids=lambda settings: ",".join(map(str, settings.values())),
)  # fmt: skip
def test_gradients_are_the_mean(settings: dict[str, Any]) -> None:
    rows = [(8, 4), (8, 4), (6, 6), (5, 1)]  # the last of other micro-batches, and fewer
    check(run(4, steps, ddp, rows, settings), rows)


@pytest.mark.parametrize(
    "settings",
    [{}, {"checkpoint": "always"}, {"schedule": "interleaved", "balance": [1, 2, 1, 2]}],
    ids=lambda settings: ",".join(map(str, settings.values())),
)
def test_sharded(settings: dict[str, Any]) -> None:
    rows = [(8, 8), (8, 8), (6, 4)]
    check(run(4, steps, sharded, rows, settings), rows)
