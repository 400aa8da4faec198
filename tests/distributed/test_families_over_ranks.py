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
from tests.any_model.all_families import ZOO
from tests.any_model.family import ROWS, Family, Made, library, own_loss
from tests.any_model.piped import CHUNKS
from tests.any_model.reference import detached, first_rows, reference
from tests.any_model.same import tolerance_of
from tests.distributed.launcher import in_sweep, run

WITHOUT = {
    "mixtral with auxiliary loss": "that was made unseen",
}
"""Why some are refused."""


def timm_vit() -> Made:
    model = library("timm.models.vision_transformer").VisionTransformer(
        img_size=32, patch_size=8, embed_dim=16, depth=4, num_heads=2, num_classes=3
    )
    return Made(model, {"x": torch.randn(ROWS, 3, 32, 32)})


def timm_convnext() -> Made:
    model = library("timm.models.convnext").ConvNeXt(
        depths=(1, 1, 1, 1), dims=(4, 8, 12, 16), num_classes=3
    )
    return Made(model, {"x": torch.randn(ROWS, 3, 64, 64)})


MORE = [
    Family("vit (timm)", timm_vit, ("blocks.2",), "timm"),
    Family("convnext (timm)", timm_convnext, ("stages.1", "stages.2"), "timm"),
]
FAMILIES = {family.name: family for family in (*ZOO, *MORE) if not family.why_not}


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
    "qwen2-moe", "vit (timm)", "convnext (timm)", "mixtral with auxiliary loss", "fnet", "swin",
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


# Images and words, of which no two micro-batches have equally many ------------------------------


def qwen() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    words = dict(
        vocab_size=40, hidden_size=16, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=24, pad_token_id=0, use_cache=False,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 0]),
    )  # fmt: skip
    images = dict(
        depth=2, hidden_size=16, num_heads=2, intermediate_size=24, patch_size=4,
        spatial_merge_size=2, out_hidden_size=16, window_size=16, fullatt_block_indexes=[1],
    )  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(
        text_config=words, vision_config=images, image_token_id=30, video_token_id=31,
        vision_start_token_id=32, vision_end_token_id=33, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model: nn.Module = transformers.Qwen2_5_VLForConditionalGeneration(config)
    return model


def questions(rows: int, images: int) -> dict[str, torch.Tensor]:
    """Rows of twelve tokens, the first of which begin with an image of four."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(1, 29, (rows, 12), generator=generator)
    ids[:images, 2:8] = torch.tensor([32, 30, 30, 30, 30, 33])
    return {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone(),
        "mm_token_type_ids": (ids == 30).int(),
        "pixel_values": torch.randn(images * 16, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * images),
    }  # fmt: skip


def asks(rank: int) -> Any:
    batches = [questions(rows, images) for rows, images in ((2, 2), (3, 3), (2, 1), (1, 1))]
    pipe = distributed.pipeline(
        qwen(), ["model.language_model.layers.2"], example=batches[0], chunks=4
    )
    loss = pipe.forward_backward(microbatches=batches, loss_fn=lambda y, _: own_loss(y))
    return loss, {name: p.grad for name, p in pipe.named_parameters(remove_duplicate=False)}


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_images_and_words() -> None:
    plain = qwen()
    batches = [questions(rows, images) for rows, images in ((2, 2), (3, 3), (2, 1), (1, 1))]
    loss = torch.stack([own_loss(plain(**each)) for each in batches]).mean()
    torch.autograd.backward(loss)
    named = dict(plain.named_parameters(remove_duplicate=False))
    for other, grads in run(2, asks, seconds=170, group=50):
        torch.testing.assert_close(other, loss.detach())
        for name, grad in grads.items():
            torch.testing.assert_close(grad, named[name].grad, rtol=1e-4, atol=1e-6)
