"""Tests the paper's models: their sizes, their outputs beside nested forms, training in a Pipe."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from models.amoebanet import Cell, amoebanet_d
from models.resnet import resnet
from models.unet import unet
from torch import Tensor, nn

from pipert import Pipe

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


def amoebanet_cell(name: str) -> Cell:
    cell = amoebanet_d(6, 16).double().get_submodule(name)
    assert isinstance(cell, Cell)
    return cell


def test_a_normal_cell_computes_what_its_table_says() -> None:
    cell = amoebanet_cell("cell3_normal")
    output, before = (torch.randn(2, k, 6, 8, dtype=torch.float64) for k in (64, 48))
    own, last = cell((output, before))

    convolve = cell.operations  # the others are written out
    s0, s1 = cell.fit_output(output), cell.fit_before(before)
    s2 = convolve[0](s1) + F.max_pool2d(s1, 3, 1, 1)
    s3 = s1 + convolve[3](s0)
    s4 = convolve[4](s0) + convolve[5](s0)
    s5 = F.max_pool2d(s2, 3, 1, 1) + s2
    s6 = F.avg_pool2d(s1, 3, 1, 1, count_include_pad=False) + convolve[9](s5)
    torch.testing.assert_close(own, torch.cat([s0, s3, s4, s6], dim=1))
    assert last is output


def test_a_reduction_cell_computes_what_its_table_says() -> None:
    cell = amoebanet_cell("cell4_reduction")
    output, before = (torch.randn(2, 64, 6, 8, dtype=torch.float64) for _ in range(2))
    own, last = cell((output, before))

    convolve = cell.operations
    s0, s1 = cell.fit_output(output), cell.fit_before(before)
    s2 = F.max_pool2d(s0, 2, 2) + F.max_pool2d(s0, 3, 2, 1)
    s3 = s2 + convolve[3](s1)
    s4 = convolve[4](s2) + F.max_pool2d(s2, 3, 1, 1)
    s5 = s3 + F.max_pool2d(s1, 2, 2)
    s6 = F.avg_pool2d(s2, 3, 1, 1, count_include_pad=False) + convolve[9](s3)
    torch.testing.assert_close(own, torch.cat([s4, s5, s6], dim=1))
    assert own.shape[2:] == (3, 4)
    assert last is output


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


class Outcome(NamedTuple):
    """The output of a model for a mini-batch, and the model's state and gradients after it."""

    output: Tensor
    input_grad: Tensor
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]


def mini_batch() -> Tensor:
    return torch.randn(ROWS, 3, 64, 64, dtype=torch.float64)


def outcome(model: nn.Module, images: Tensor, chunks: int = 1) -> Outcome:
    """Takes a step; with ``chunks``, gradients are accumulated over as many micro-batches."""
    images = images.detach().requires_grad_()
    outputs = []
    for part in images.tensor_split(chunks):
        outputs.append(model(part))
        outputs[-1].square().sum().backward()
    assert images.grad is not None
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(grads) == len(list(model.parameters()))
    buffers = dict(model.named_buffers())
    return Outcome(torch.cat(outputs).detach(), images.grad, grads, buffers)


def even_balance(model: nn.Sequential, partitions: int) -> list[int]:
    cuts = [len(model) * j // partitions for j in range(partitions + 1)]
    return [end - start for start, end in pairwise(cuts)]


def pipe_of(
    model: nn.Sequential, balance: list[int], chunks: int, checkpoint: str = "except_last"
) -> Pipe:
    devices = ["cpu"] * len(balance)
    return Pipe(
        model,
        balance,
        devices=devices,
        chunks=chunks,
        checkpoint=checkpoint,
        deferred_batch_norm=False,
    )


def assert_trains_like_the_plain_model(
    name: str, balance: list[int], chunks: int, checkpoint: str = "except_last"
) -> None:
    """The U-Net is compared whole; BatchNorm normalises each micro-batch, as does the reference."""
    piped = MODELS[name]().double()
    plain, images = copy.deepcopy(piped), mini_batch()
    with pipe_of(piped, balance, chunks, checkpoint) as pipe:
        actual = outcome(pipe, images)
    torch.testing.assert_close(actual, outcome(plain, images, 1 if name == "unet" else chunks))


@pytest.mark.pairwise
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("partitions", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_model_in_a_pipe_trains_like_the_plain_one(
    name: str, partitions: int, checkpoint: str
) -> None:
    balance = even_balance(MODELS[name](), partitions)
    assert_trains_like_the_plain_model(name, balance, 2, checkpoint)
