"""Tests that any model over several ranks has the plain model's losses, gradients and keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pipert import distributed
from tests.distributed.launcher import in_sweep, run
from tests.distributed.own_models import MODELS, build


def cuts_for(name: str, n: int) -> list[str]:
    cuts = MODELS[name][2]
    return cuts if n == 4 else [cuts[1]]


def step(
    rank: int, name: str, n: int, schedule: str, checkpoint: str, rows: list[int]
) -> tuple[list[Tensor], dict[str, Tensor | None], Any]:
    """A loss for each mini-batch of so many rows, the gradients, and the outputs of the last."""
    _, batch, _, loss_fn = MODELS[name]
    pipe = distributed.pipeline(
        build(name), cuts_for(name, n), example=batch(2), chunks=4, schedule=schedule,
        checkpoint=checkpoint,
    )  # fmt: skip
    losses = []
    for number in rows:
        given: dict[str, Any] = batch(number) if rank == 0 else {}
        losses.append(pipe.forward_backward(**given, loss_fn=loss_fn))
    gradients = {name: p.grad for name, p in pipe.named_parameters(remove_duplicate=False)}
    assert pipe.state_dict().keys() >= gradients.keys()
    pipe.eval()
    return losses, gradients, pipe(**batch(rows[-1]))


def check(name: str, found: list[Any], rows: list[int]) -> None:
    plain = build(name)
    _, batch, _, loss_fn = MODELS[name]
    for k, number in enumerate(rows):
        loss = loss_fn(plain(**batch(number)), None)
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
    outputs = [output for _, _, output in found if output is not None]
    assert len(outputs) == 1
    expected = plain.eval()(**batch(rows[-1]))
    key = "y" if name == "unet" else "logits"
    torch.testing.assert_close(outputs[0][key], expected[key].detach())


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_on_two_ranks_equals_the_plain_models(
    name: str, schedule: str, checkpoint: str
) -> None:
    rows = [8, 10, 3] if name == "unet" else [8, 4]
    check(name, run(2, step, name, 2, schedule, checkpoint, rows), rows)


FOUR = [
    ("interleaved", "never"), ("interleaved", "always"), ("InterleavedZeroBubble", "never"),
    ("ZBVZeroBubble", "never"),
]  # fmt: skip


@pytest.mark.parametrize("schedule, checkpoint", FOUR)
@pytest.mark.parametrize("name", MODELS)
def test_several_partitions_on_a_rank(name: str, schedule: str, checkpoint: str) -> None:
    rows = [8, 10]
    check(name, run(2, step, name, 4, schedule, checkpoint, rows), rows)


@pytest.mark.parametrize("name", ["unet", in_sweep("tied")])
def test_four_ranks(name: str) -> None:
    check(name, run(4, step, name, 4, "1f1b", "except_last", [8, 6]), [8, 6])
