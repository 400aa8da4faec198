"""Tests models of the families that one process takes, over several ranks.

One launch goes through many models, since each rank imports their libraries.
"""

from __future__ import annotations

import copy
import re
import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

import pipert
from pipert import distributed
from tests.any_model.family import Family
from tests.any_model.piped import CHUNKS
from tests.any_model.reference import detached, first_rows, reference
from tests.any_model.same import tolerance_of
from tests.any_model.zoo import ZOO
from tests.distributed.launcher import in_sweep, run

WITHOUT = {
    "mixtral with auxiliary loss": "that was made unseen",
}
"""Why some are refused."""
FAMILIES = {family.name: family for family in ZOO if not family.why_not}


def on_meta(model: nn.Module) -> dict[str, torch.Tensor]:
    """Takes the parameters' values away, as if it had been built without; returns them by name."""
    values, new = {}, dict[nn.Parameter, nn.Parameter]()
    for name, p in model.named_parameters(remove_duplicate=False):
        values[name] = p.detach().clone()
        new.setdefault(p, nn.Parameter(p.detach().to("meta"), p.requires_grad))
    for module in model.modules():
        table = module._parameters
        table.update({k: new[p] for k, p in table.items() if p is not None})
    return values


def differences(rank: int, family: Family, schedule: str, rows: int, **more: Any) -> list[str]:
    """Compares a step and an evaluation over ranks with the plain model's."""
    torch.manual_seed(0)
    model, batch = family.make()
    batch = first_rows(batch, rows)
    plain = copy.deepcopy(model)
    expected = reference(plain, batch, family.loss, CHUNKS)
    values = on_meta(model)
    given = tree_map(
        lambda leaf: pipert.Replicate(leaf.value) if hasattr(leaf, "value") else leaf, batch
    )
    example = tree_map(lambda leaf: getattr(leaf, "value", leaf), first_rows(batch, 2))
    pipe = distributed.pipeline(
        model, family.cuts, example=example, chunks=CHUNKS, schedule=schedule, load=values.get,
        deferred_batch_norm=False, **more,
    )  # fmt: skip
    loss, outputs = pipe.forward_backward(
        **given, loss_fn=lambda y, _: family.loss(y), return_outputs=True
    )
    found = []
    tolerance = tolerance_of(expected.loss)

    def compare(what: str, one: Any, other: Any) -> None:
        try:
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        except AssertionError as error:
            found.append(f"{what}: {str(error)[:200]}")

    compare("loss", loss, expected.loss.to(loss.dtype))
    grads = dict(plain.named_parameters(remove_duplicate=False))
    for name, p in pipe.named_parameters(remove_duplicate=False):
        other = grads[name].grad
        if p.grad is None or other is None:
            given_one = p.grad if other is None else other
            if given_one is not None and given_one.abs().max() > 0:
                found.append(f"one gradient of {name} is None")
        else:
            compare(f"gradient of {name}", p.grad, other)
    keys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(keys, [*pipe.state_dict()])
    if set().union(*keys) != set(plain.state_dict()):
        found.append("keys differ")
    for name, buffer in pipe.named_buffers():
        compare(f"buffer {name}", buffer, plain.get_buffer(name))
    if outputs is not None:
        leaves = torch.utils._pytree.tree_leaves
        compare("outputs", leaves(detached(outputs)), leaves(expected.output))
    return found


def all_differences(
    rank: int, names: list[str], schedule: str, rows: int, more: dict[str, Any]
) -> dict[str, list[str]]:
    found = {}
    for name in names:
        try:
            found[name] = differences(rank, FAMILIES[name], schedule, rows, **more)
        except pytest.skip.Exception:
            continue
        except Exception as error:
            found[name] = ["".join(traceback.format_exception(error))[-3000:]]
    return found


def check(ranks: int, names: list[str], schedule: str, rows: int = 8, **more: Any) -> None:
    found = run(ranks, all_differences, names, schedule, rows, more, seconds=170, group=50)
    wrong = {
        name: [text for of_rank in found for text in of_rank.get(name, ())] for name in names
    }
    ran = {name for of_rank in found for name in of_rank}  # others lack their libraries
    refused = {name: WITHOUT[name] for name in names if name in WITHOUT}
    for name, why in refused.items():
        assert name not in ran or re.search(why, " ".join(wrong[name]))
        wrong.pop(name)
    assert not {name: texts for name, texts in wrong.items() if texts}
    if not any(set(of_rank) - set(refused) for of_rank in found):
        pytest.skip("the libraries of these models are missing")


OFTEN = [
    "llama, tied, with labels", "gpt2", "bert", "t5", "whisper", "mixtral", "gemma3", "mamba",
    "segformer", "vit", "convnext", "unet (diffusers)", "llama with lora (peft)", "qwen3",
    "qwen2-moe", "mixtral with auxiliary loss", "fnet", "swin",
]  # fmt: skip


def named(partitions: int, often: bool) -> list[str]:
    return [
        name for name, family in FAMILIES.items()
        if len(family.cuts) + 1 == partitions and (name in OFTEN) is often
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("schedule", ["1f1b", in_sweep("gpipe")])
def test_models_on_two_ranks(schedule: str) -> None:
    check(2, named(2, True), schedule)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "schedule, checkpoint", [("1f1b", "always"), in_sweep("gpipe", "never")]
)
def test_models_on_three_ranks(schedule: str, checkpoint: str) -> None:
    check(3, named(3, True), schedule, checkpoint=checkpoint)


@pytest.mark.sweep
@pytest.mark.timeout(200)
@pytest.mark.parametrize("ranks", [2, 3])
def test_rarer_models(ranks: int) -> None:
    check(ranks, named(ranks, False), "1f1b")
