"""Partitions with sharded weights: by ``fully_shard`` whole or in parts, or tensor-parallel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.utils import get_total_norm

from pipert import Pipe, distributed, pipeline
from tests.distributed.launcher import run
from tests.distributed.test_rank_faults import batch, caught

# fully_shard warns that layers must not change the output of a partition in place.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])


def pipe_of(
    model: nn.Sequential, shards: Callable[[nn.Sequential], Iterable[nn.Module]]
) -> distributed.Pipe:
    """A pipe of two ranks and two replicas, which shards what it is told to."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "copies"))

    def wrap(part: nn.Sequential) -> None:
        for module in shards(part):
            fully_shard(module, mesh=mesh["copies"])

    n = len(model) // 2
    return distributed.Pipe(model, [n, n], mesh=mesh, chunks=2, wrap=wrap)


def check_gradients(pipe: distributed.Pipe, plain: nn.Module) -> None:
    named = dict(plain.named_parameters(remove_duplicate=False))
    for name, p in pipe.named_parameters():
        assert p.grad is not None and isinstance(p.grad, DTensor) == isinstance(p, DTensor)
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(grad, named[name].grad)
    gradients = [p.grad for p in plain.parameters() if p.grad is not None]
    torch.testing.assert_close(pipe.grad_norm(), get_total_norm(gradients))


def whole(part: nn.Sequential) -> Iterable[nn.Module]:
    return [part]


def each_layer(part: nn.Sequential) -> Iterable[nn.Module]:
    return part


def accumulates(rank: int, shards: Any) -> None:
    """Steps of new shapes, with evaluations in between."""
    plain, pipe = layers(), pipe_of(layers(), shards)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, pipe)]
    for k, rows in enumerate((8, 6, 4, 8, 2)):
        x, y = batch(rows)
        loss = F.mse_loss(plain(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        found = pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)
        torch.testing.assert_close(found, loss.detach())
        output = pipe(batch(10 + k % 3)[0])
        if rank >= 2:
            torch.testing.assert_close(output, plain(batch(10 + k % 3)[0]).detach())
        check_gradients(pipe, plain)
        if k % 2:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("shards", [whole, each_layer])
def test_gradients_accumulate_over_new_shapes(shards: Any) -> None:
    run(4, accumulates, shards)


def shards_a_tied_weight(rank: int) -> tuple[Any, str]:
    model = layers()
    model[3].weight = model[0].weight
    return caught(partial(pipe_of, model, whole))


def test_a_weight_that_several_ranks_share_cannot_be_sharded() -> None:
    for kind, text in run(4, shards_a_tied_weight):
        assert kind is ValueError and "use DistributedDataParallel" in text, text


def tensor_parallel() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(4)]
    return nn.Sequential(*blocks)


def is_tensor_parallel(rank: int) -> str:
    """Steps whose layers are tensor-parallel beside plain ones; in one process they are refused."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "parts"))

    def wrap(part: nn.Sequential) -> None:
        for block in part:
            plan = {"1": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(block, mesh["parts"], plan)

    plain, parallel = tensor_parallel(), tensor_parallel()
    pipe = distributed.Pipe(tensor_parallel(), [2, 2], mesh=mesh, chunks=4, wrap=wrap)
    x, y = batch(8)
    loss = F.mse_loss(plain(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    found = pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)
    torch.testing.assert_close(found, loss.detach())
    check_gradients(pipe, plain)
    wrap(parallel)
    with pytest.raises(TypeError) as refused:
        Pipe(parallel, [2, 2], devices=["cpu", "cpu"])
    with pytest.raises(TypeError, match="is a DTensor"):
        pipeline(parallel, ["2"], devices=["cpu", "cpu"])
    return str(refused.value)


def test_tensor_parallel_layers_are_right_over_ranks_and_refused_in_one_process() -> None:
    for text in run(4, is_tensor_parallel):
        assert "'0.1.weight' is a DTensor over 2 processes" in text and "wrap=" in text
