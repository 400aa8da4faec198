"""Tests data-parallel replicas of a pipeline, by DDP or sharded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from pipert import distributed
from tests.distributed.launcher import in_sweep, run
from tests.distributed.test_rank_faults import (
    Oops,
    Trap,
    batch,
    caught,
    fail,
    grads,
    trap_of,
    trapped,
)

Wrapper = Callable[[DeviceMesh], Callable[[nn.Sequential], nn.Module | None]]


def ddp(mesh: DeviceMesh) -> Callable[[nn.Sequential], nn.Module]:
    def replicated(part: nn.Sequential) -> nn.Module:
        if not any(True for _ in part.parameters()):
            return part
        return DistributedDataParallel(part, process_group=mesh["dp"].get_group())

    return replicated


def ddp_of_views(mesh: DeviceMesh) -> Callable[[nn.Sequential], nn.Module]:
    group = mesh["dp"].get_group()
    return lambda part: DistributedDataParallel(
        part, process_group=group, gradient_as_bucket_view=True
    )


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
    losses: list[Tensor] = []
    for k, mine in enumerate((rows[0], *rows)):
        if k == 1:  # DDP makes new buckets after its first step
            pipe.zero_grad()
            losses.clear()
        x, y = batch(mine[mesh["dp"].get_local_rank()])
        losses.append(pipe.forward_backward(x, target=y, loss_fn=F.mse_loss))
    found = {name: whole(p.grad) for name, p in pipe.named_parameters()}
    x, _ = batch(8)
    return losses, found, pipe(x), pipe.grad_norm()


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
    expected_grads = [p.grad for p in named.values() if p.grad is not None]
    seen = set()
    for rank, (losses, gradients, output, norm) in enumerate(found):
        for loss, of_step in zip(losses, expected, strict=True):
            torch.testing.assert_close(loss, of_step[rank % 2])
        for name, grad in gradients.items():
            torch.testing.assert_close(grad, named[name].grad)
            seen.add(name)
        torch.testing.assert_close(norm, get_total_norm(expected_grads))
        if rank >= 2:
            torch.testing.assert_close(output, plain(batch(8)[0]).detach())
    assert seen == set(named)


@pytest.mark.parametrize(
    "settings",
    [
        in_sweep({"schedule": "1f1b"}), in_sweep({"schedule": "gpipe"}), {"checkpoint": "always"},
        in_sweep({"schedule": "interleaved", "balance": [1, 2, 1, 2]}),
    ],
    ids=lambda settings: ",".join(map(str, settings.values())),
)  # fmt: skip
def test_gradients_of_replicas_are_averaged(settings: dict[str, Any]) -> None:
    rows = [(8, 4), (8, 4), (6, 6), (5, 2)]
    check(run(4, steps, ddp, rows, settings), rows)


def test_gradients_may_be_views_of_a_bucket() -> None:
    rows = [(8, 4), (6, 6), (5, 2)]
    check(run(4, steps, ddp_of_views, rows, {}), rows)


@pytest.mark.parametrize(
    "settings",
    [
        in_sweep({}), in_sweep({"checkpoint": "always"}),
        {"schedule": "interleaved", "balance": [1, 2, 1, 2]},
    ],
    ids=lambda settings: ",".join(map(str, settings.values())),
)
def test_replicas_may_be_sharded(settings: dict[str, Any]) -> None:
    rows = [(8, 8), (8, 8), (6, 4)]
    check(run(4, steps, sharded, rows, settings), rows)


def kept(y: Tensor, target: Tensor) -> Tensor:
    """Returns the sum of squares over the rows with a positive target."""
    return (y - target)[target[:, 0] > 0].square().sum()


def counting(rank: int, schedule: str) -> None:
    pipe, mesh = pipe_of(ddp, schedule=schedule, checkpoint="never")
    rows = (8, 12)
    x, y = batch(rows[mesh["dp"].get_local_rank()])
    pipe.forward_backward(x, target=y, loss_fn=kept, denominator=(y[:, 0] > 0).sum())
    plain = trapped(2)
    for number in rows:
        x, y = batch(number)
        (kept(plain(x), y) / (y[:, 0] > 0).sum() / 2).backward()  # type: ignore[no-untyped-call]
    named = dict(plain.named_parameters())
    for name, p in pipe.named_parameters():
        torch.testing.assert_close(p.grad, named[name].grad)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_denominators_of_replicas_are_their_own(schedule: str) -> None:
    run(4, counting, schedule)


def faults(rank: int) -> None:
    """A layer raises in F, in each place and replica: no rank hangs, and all go on."""
    pipe, _ = pipe_of(ddp)
    trap = trap_of(pipe)
    x, y = batch(8)

    def step() -> Tensor:
        loss: Tensor = pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)
        return loss

    first = step()
    before = grads(pipe)
    for bad in range(4):
        for i in range(2):
            if rank == bad:
                trap.set_to("F", i, fail)
            kind, text = caught(step)
            assert kind is (Oops if rank == bad else distributed.RankError), (kind, text)
            assert f"F[{i},{bad // 2}]" in text, text
            assert rank == bad or text.startswith(f"rank {bad} failed"), text
            assert all(torch.equal(now, then) for now, then in zip(grads(pipe), before))
    pipe.zero_grad()
    assert torch.equal(step(), first)
    assert all(torch.equal(now, then) for now, then in zip(grads(pipe), before))


def test_a_failing_replica_causes_no_hang() -> None:
    run(4, faults)


def faults_that_end_it(
    rank: int, wrap: Wrapper, phase: str
) -> list[tuple[type[BaseException], str]]:
    pipe, _ = pipe_of(wrap)
    x, y = batch(8)

    def step() -> Tensor:
        loss: Tensor = pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)
        return loss

    step()
    if rank == 2:
        trap_of(pipe).set_to(phase, 0, fail)
    first, second = caught(step), caught(step)
    assert second[0] is distributed.RankError and "start all ranks anew" in second[1]
    return [first, second]


@pytest.mark.parametrize(
    "wrap, phase", [in_sweep(ddp, "B"), in_sweep(sharded, "F"), (sharded, "B")]
)
def test_a_replica_fails_where_others_wait_for_its_gradients(wrap: Wrapper, phase: str) -> None:
    """A collective of the wrapper is left out, so the pipe ends: within the time limit."""
    (zero, _), (one, _), (two, _), (three, says) = (
        each[0] for each in run(4, faults_that_end_it, wrap, phase, group=3)
    )
    assert zero is one is distributed.RankError and two is Oops
    # Its replica is told by the wrapper's collective, in a layer or a backward.
    assert three in (distributed.RankError, RuntimeError) and "Connection closed" in says, says


def uneven(rank: int, wrap: Wrapper) -> None:
    """Replicas whose micro-batches are of other kinds, or fewer; DDP brings buffers around."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    trap = Trap()
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), trap, nn.Linear(4, 4), nn.Tanh())
    pipe = distributed.Pipe(model, [3, 2], mesh=mesh, chunks=4, wrap=wrap(mesh))
    trap.set_to("F", 0, fail if rank == 1 and wrap is ddp else _nothing)
    for rows, says in [
        ((16, 16), "on purpose" if wrap is ddp else ""),
        ((16, 14), ""),
        ((16, 3), "as many micro-batches, but have 4 and 3"),
        ((16, 14), ""),
    ]:
        x, y = batch(rows[mesh["dp"].get_local_rank()])
        step = partial(pipe.forward_backward, x, target=y, loss_fn=F.mse_loss)
        if says:
            assert says in caught(step)[1]
        else:
            step()


def _nothing() -> None:
    pass


@pytest.mark.parametrize("wrap", [ddp, sharded])
def test_replicas_with_buffers_may_be_uneven(wrap: Wrapper) -> None:
    run(4, uneven, wrap, group=3, seconds=10)
