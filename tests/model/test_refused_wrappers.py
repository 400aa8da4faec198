"""Tests that modules which are data-parallel themselves are refused inside a pipe."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pipert import pipeline
from pipert.pipes.base import PipeBase
from tests.helpers.pipes import pipe_of_layers

pytestmark = pytest.mark.usefixtures("one_rank")


class FullyShardedDataParallel(nn.Sequential):
    """Stands for torch's, which needs a GPU; fairscale's is named alike."""


def wrapped(kind: str) -> nn.Module:
    layer = nn.Linear(4, 4)
    if kind == "FSDPModule":
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        return layer
    kinds: list[Callable[[nn.Module], nn.Module]] = [
        DataParallel, DistributedDataParallel, FullyShardedDataParallel,
    ]  # fmt: skip
    return {each.__name__: each for each in kinds}[kind](layer)


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("DataParallel", "put its .module in its place"),
        ("DistributedDataParallel", "wrap the pipe, or the model"),
        ("FullyShardedDataParallel", "Use FSDP alone"),
        ("FSDPModule", "Use FSDP alone, or pipert.distributed"),
    ],
)
def test_a_data_parallel_module_is_refused_with_a_remedy(kind: str, remedy: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(wrapped(kind)))
    message = f"layer '1.0' is a {kind}, .*{remedy}"
    with pytest.raises(TypeError, match=message):
        pipeline(model, ["1"], devices=["cpu", "cpu"])
    with pytest.raises(TypeError, match=message):
        pipe_of_layers(*model)
    with pytest.raises(TypeError, match=f"the model is a {kind}"):
        pipeline(wrapped(kind), ["module"], devices=["cpu", "cpu"])


@pytest.mark.parametrize("kind", ["Pipe", "any model"])
@pytest.mark.parametrize("has_run", [False, True])
def test_layers_that_are_sharded_after_the_pipe_was_made_are_refused(
    kind: str, has_run: bool
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.ones(4, 4)
    makes: dict[str, Callable[[], PipeBase]] = {
        "Pipe": lambda: pipe_of_layers(*model),
        "any model": lambda: pipeline(model, ["1"], devices=["cpu", "cpu"]),
    }
    with makes[kind]() as pipe:
        if has_run:
            pipe(x)
        fully_shard(model[1], mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match="layer '1' is a FSDPModule"):
            pipe.forward_backward(x, loss_fn=lambda y, _: y.sum())
        with pytest.raises(TypeError, match="layer '1' is a FSDPModule"):
            pipe(x)
