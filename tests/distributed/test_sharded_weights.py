"""Partitions that ``fully_shard`` treats as one unit, or only in parts, also with tied weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from pipert import distributed
from tests.distributed.launcher import run
from tests.distributed.test_rank_faults import batch, caught

# fully_shard warns that layers must not change the output of a partition in place.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")


class Shared(nn.Module):
    """A layer with a weight that others have, too."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def layers(tied: bool) -> nn.Sequential:
    torch.manual_seed(0)
    linears = [nn.Linear(4, 4) for _ in range(4)]
    if tied:
        return nn.Sequential(*[one for k in range(4) for one in (Shared(linears[0]), linears[k])])
    return nn.Sequential(*linears)


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
        assert isinstance(p.grad, DTensor)
        torch.testing.assert_close(p.grad.full_tensor(), named[name].grad)
    gradients = [p.grad for p in plain.parameters() if p.grad is not None]
    torch.testing.assert_close(pipe.grad_norm(), get_total_norm(gradients))


def whole(part: nn.Sequential) -> Iterable[nn.Module]:
    return [part]


def each_layer(part: nn.Sequential) -> Iterable[nn.Module]:
    return part


def accumulates(rank: int, tied: bool, shards: Any) -> None:
    """Steps of new shapes, with evaluations in between."""
    plain, pipe = layers(tied), pipe_of(layers(tied), shards)
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


@pytest.mark.parametrize("tied, shards", [(False, whole), (True, whole), (False, each_layer)])
def test_gradients_accumulate_over_new_shapes(tied: bool, shards: Any) -> None:
    run(4, accumulates, tied, shards)


def one_shards(rank: int) -> tuple[Any, str]:
    return caught(
        partial(pipe_of, layers(True), lambda part: [part] * ("0" in dict(part.named_children())))
    )


def test_a_weight_that_only_some_ranks_shard_is_refused() -> None:
    for kind, text in run(4, one_shards):
        assert kind is ValueError and "sharded alike" in text, text
