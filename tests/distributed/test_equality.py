"""Tests that outputs, losses, gradients and keys over several ranks are the plain model's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from pipert import distributed
from tests.distributed.launcher import in_sweep, run
from tests.distributed.own_models import MODELS, build


def layers() -> nn.Sequential:
    """Makes six layers, one of which works in place."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 4),
        nn.Tanh(),
    )  # fmt: skip


def batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 4, generator=generator)


BALANCES = {1: [6], 2: [3, 3], 4: [2, 2, 1, 1]}


def given(name: str, rows: int, rank: int = 0) -> tuple[Any, dict[str, Any]]:
    """Returns positional arguments and others of a mini-batch, for any model on the first rank."""
    if name == "chain":
        return batch(rows)[:1], {}
    return (), MODELS[name][1](rows) if rank == 0 else {}


def loss_of(name: str, rows: int) -> dict[str, Any]:
    if name == "chain":
        return {"loss_fn": F.mse_loss, "target": batch(rows)[1]}
    return {"loss_fn": MODELS[name][3]}


def step(
    rank: int, name: str, n: int, schedule: str, checkpoint: str, rows: list[int]
) -> tuple[list[Tensor], dict[str, Tensor | None], Any]:
    """A loss for each mini-batch of so many rows, the gradients, and the outputs of the last."""
    settings: dict[str, Any] = dict(chunks=4, schedule=schedule, checkpoint=checkpoint)
    pipe: Any
    if name == "chain":
        pipe = distributed.Pipe(layers(), BALANCES[n], **settings)
    else:
        _, make, cuts, _ = MODELS[name]
        cuts = cuts if n == 4 else [cuts[1]]
        pipe = distributed.pipeline(build(name), cuts, example=make(2), **settings)
    losses = []
    for number in rows:
        args, more = given(name, number, rank)
        losses.append(pipe.forward_backward(*args, **more, **loss_of(name, number)))
    gradients = {key: p.grad for key, p in pipe.named_parameters(remove_duplicate=False)}
    assert pipe.state_dict().keys() >= gradients.keys()
    pipe.eval()
    args, more = given(name, rows[-1], rank)
    return losses, gradients, pipe(*args, **more)


def check(name: str, found: list[Any], rows: list[int]) -> None:
    plain = layers() if name == "chain" else build(name)
    for k, number in enumerate(rows):
        args, more = given(name, number)
        how = loss_of(name, number)
        loss = how["loss_fn"](plain(*args, **more), how.get("target"))
        torch.autograd.backward(loss)
        for losses, _, _ in found:
            torch.testing.assert_close(losses[k], loss.detach())
    named = dict(plain.named_parameters(remove_duplicate=False))
    seen = set()
    for _, gradients, _ in found:
        for key, gradient in gradients.items():
            torch.testing.assert_close(gradient, named[key].grad)
            seen.add(key)
    assert seen == set(named)
    (output,) = [output for _, _, output in found if output is not None]
    with torch.no_grad():
        args, more = given(name, rows[-1])
        expected = plain.eval()(*args, **more)
    if name != "chain":  # of other outputs there is one for each micro-batch
        output, expected = [y["y" if name == "unet" else "logits"] for y in (output, expected)]
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", ["chain", *MODELS])
def test_a_step_on_two_ranks_equals_the_plain_models(
    name: str, schedule: str, checkpoint: str
) -> None:
    rows = [8, 10, 3, 8] if name != "tied" else [8, 4]  # alike, ragged, fewer than chunks, known
    check(name, run(2, step, name, 2, schedule, checkpoint, rows), rows)


@pytest.mark.parametrize("name", ["chain", "unet", in_sweep("tied")])
def test_a_step_on_four_ranks_equals_the_plain_models(name: str) -> None:
    rows = [8, 10, 2] if name == "chain" else [8, 6]
    check(name, run(4, step, name, 4, "1f1b", "except_last", rows), rows)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("name", ["chain", *MODELS])
def test_interleaved_partitions(name: str, checkpoint: str) -> None:
    check(name, run(2, step, name, 4, "interleaved", checkpoint, [8, 10]), [8, 10])


@pytest.mark.parametrize("ranks, schedule", [(1, "1f1b"), (2, "interleaved")])
def test_one_partition_on_a_rank(ranks: int, schedule: str) -> None:
    check("chain", run(ranks, step, "chain", ranks, schedule, "always", [8, 10]), [8, 10])


def evaluate_first(rank: int) -> list[Any]:
    pipe = distributed.Pipe(layers(), [3, 3], chunks=4, deferred_batch_norm=False)
    first = pipe(batch(8)[0])
    x, y = batch(8)
    loss = pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)
    pipe.chunks = 2
    again = pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)
    return [first, loss, again, pipe(batch(5)[0])]


def test_evaluation_may_come_before_training_with_other_chunks() -> None:
    plain = layers()
    x, y = batch(8)
    loss = F.mse_loss(plain(x), y).detach()
    for rank, found in enumerate(run(2, evaluate_first)):
        first, *losses, last = found
        torch.testing.assert_close(losses, [loss, loss])
        if rank == 0:
            assert first is last is None
        else:
            expected = [plain(x).detach(), plain(batch(5)[0]).detach()]
            torch.testing.assert_close([first, last], expected)


def thaws(rank: int) -> list[Any]:
    """Layers are frozen, thawed, and brought to another dtype, at a shape that the pipe knows."""
    pipe = distributed.Pipe(layers(), [3, 3], chunks=2)
    x, y = batch(8)
    pipe.requires_grad_(rank == 1)
    pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)
    pipe.requires_grad_(True).zero_grad()
    pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)
    gradients = {name: p.grad for name, p in pipe.named_parameters()}
    pipe.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)
    with torch.autocast("cpu", torch.float16):
        pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)
    loss = pipe.double().forward_backward(x.double(), target=y.double(), loss_fn=F.mse_loss)
    return [gradients, loss]


def test_requires_grad_and_dtypes_may_change_between_steps() -> None:
    plain = layers()
    x, y = batch(8)
    torch.autograd.backward(F.mse_loss(plain(x), y))
    named = dict(plain.named_parameters())
    plain = layers()
    expected = F.mse_loss(plain.double()(x.double()), y.double()).detach()
    seen = set()
    for gradients, loss in run(2, thaws):
        torch.testing.assert_close(loss, expected)  # of the same dtype
        for name, gradient in gradients.items():
            assert gradient is not None
            torch.testing.assert_close(gradient, named[name].grad)
            seen.add(name)
    assert seen == set(named)


def sharing() -> nn.Sequential:
    """Of three layers, whose second has the weight of the first and a bias of the third."""
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    module[1].weight, module[1].bias = module[0].weight, module[2].bias
    return module


def shares(rank: int) -> list[dict[str, Tensor | None]]:
    found = []
    for _ in range(2):
        pipe = distributed.Pipe(sharing(), [1, 1, 1], chunks=2)
        pipe.forward_backward(torch.ones(4, 4), target=torch.zeros(4, 4), loss_fn=F.mse_loss)
        found.append({name: p.grad for name, p in pipe.named_parameters()})
        dist.new_group([0])
    return found


def test_some_ranks_of_a_pipe_may_share_weights() -> None:
    plain = sharing()
    torch.autograd.backward(F.mse_loss(plain(torch.ones(4, 4)), torch.zeros(4, 4)))
    named = dict(plain.named_parameters(remove_duplicate=False))
    for found in run(3, shares, group=5):
        for grads in found:
            for name, grad in grads.items():
                torch.testing.assert_close(grad, named[name].grad)
