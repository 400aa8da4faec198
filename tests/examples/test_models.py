"""Tests the paper's models: their sizes, their outputs beside nested forms, training in a Pipe."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models.amoebanet import amoebanet_d
from models.resnet import resnet
from models.unet import unet
from torch import Tensor, nn

from tests.helpers.pipes import pipe_of

# --- sizes, as published --------------------------------------------------------------------------


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("blocks", "channels", "layers", "parameters"),
    [
        (5, 64, 241, 232_687_328),
        (6, 72, 285, 362_157_516),
        (11, 128, 505, 2_213_834_176),
        (24, 128, 1077, 4_993_859_008),
        (24, 160, 1077, 7_802_903_600),
        (48, 160, 2133, 15_822_206_000),
    ],
)
def test_unet_has_the_published_size(
    blocks: int, channels: int, layers: int, parameters: int
) -> None:
    with torch.device("meta"):
        model = unet(blocks, channels)
    assert (len(model), parameters_of(model)) == (layers, parameters)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("filters", "parameters"), [(208, 81_505_540), (256, 122_470_120), (416, 319_024_120)]
)
def test_amoebanet_has_the_published_size(filters: int, parameters: int) -> None:
    with torch.device("meta"):
        model = amoebanet_d(18, filters)
    assert (len(model), parameters_of(model)) == (24, parameters)


# --- the nested forms -----------------------------------------------------------------------------


def reference_unet(flat: nn.Sequential, blocks: int, image: Tensor) -> Tensor:
    """Computes a U-Net, written with its skips as local variables."""

    def cell(name: str, x: Tensor) -> Tensor:
        for index in range(blocks):
            x = F.conv2d(x, flat.get_parameter(f"{name}_{index}_conv.weight"), padding=1)
            x = F.leaky_relu(F.instance_norm(x), 0.01)
        return x

    def from_level(level: int, x: Tensor) -> Tensor:
        skip = cell(f"encoder{level}", x)
        x = F.max_pool2d(skip, 2)
        x = cell("bottleneck", x) if level == 4 else from_level(level + 1, x)
        x = F.interpolate(x, scale_factor=2.0)
        joined = skip.new_zeros(len(skip), skip.shape[1] + x.shape[1], *skip.shape[2:])
        joined[:, : skip.shape[1]] = skip
        joined[:, skip.shape[1] :, : x.shape[2], : x.shape[3]] = x
        return cell(f"decoder{level}", joined)

    return F.conv2d(from_level(0, image), flat.get_parameter("head.weight"))


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("size", [(64, 64), (70, 95)], ids=["even", "odd"])
def test_the_flat_unet_computes_what_the_nested_one_does(
    blocks: int, size: tuple[int, int]
) -> None:
    flat = unet(blocks, 2, dropout=0.0).double()
    image = torch.randn(2, 3, *size, dtype=torch.float64)
    actual, expected = flat(image), reference_unet(flat, blocks, image)
    torch.testing.assert_close(actual, expected)
    actual_grads = torch.autograd.grad(actual.square().sum(), list(flat.parameters()))
    expected_grads = torch.autograd.grad(expected.square().sum(), list(flat.parameters()))
    torch.testing.assert_close(actual_grads, expected_grads)


# --- in a Pipe ------------------------------------------------------------------------------------

MODELS: dict[str, Callable[[], nn.Sequential]] = {
    "unet": lambda: unet(1, 2, dropout=0.0),
    "amoebanet": lambda: amoebanet_d(3, 8, num_classes=4),
    "resnet": lambda: resnet((1, 1, 2, 1), channels=2, num_classes=4),
}
MODES = ["always", "except_last", "never"]
# AmoebaNet has few layers, but its cells hundreds of operations.
NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name == "amoebanet")) for name in MODELS]
ROWS = 5  # which no number of chunks but one and five divides


def take_step(model: nn.Module, images: Tensor, chunks: int = 1) -> list[Tensor]:
    """Accumulates gradients over micro-batches; returns them, the outputs and the buffers."""
    outputs = [model(part) for part in images.tensor_split(chunks)]
    torch.autograd.backward([output.square().sum() for output in outputs])
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(grads) == len(list(model.parameters()))
    return [torch.cat(outputs).detach(), *grads, *model.buffers()]


@pytest.mark.pairwise
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("partitions", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_model_in_a_pipe_trains_like_the_plain_one(
    name: str, partitions: int, checkpoint: str
) -> None:
    """The U-Net is compared whole; BatchNorm normalises each micro-batch, as does the reference."""
    model = MODELS[name]().double()
    plain, images = copy.deepcopy(model), torch.randn(ROWS, 3, 64, 64, dtype=torch.float64)
    cuts = [len(model) * j // partitions for j in range(partitions + 1)]
    balance, chunks = [end - start for start, end in pairwise(cuts)], 2
    options: Any = {"checkpoint": checkpoint, "deferred_batch_norm": False}
    with pipe_of(model, balance, chunks=chunks, **options) as pipe:
        found = take_step(pipe, images)
    torch.testing.assert_close(found, take_step(plain, images, 1 if name == "unet" else chunks))
