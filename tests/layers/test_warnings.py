"""Tests that making a pipe warns of the layers that micro-batches change, and of no others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import pipert
from pipert import NotBatchFirstWarning, Pipe, WholeBatchWarning

ROWS = 6
DOUBLE = torch.float64

Made = tuple[Callable[[], nn.Module], Tensor]


def normed(norm: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        made: nn.Module = norm(nn.Linear(16, 16))  # more than one iteration finds
    return made


def cases() -> dict[str, Made]:
    """Returns layers to try, with their inputs, by name and settings."""
    x, image = torch.randn(ROWS, 4, dtype=DOUBLE), torch.randn(ROWS, 4, 6, 6, dtype=DOUBLE)
    indices, wide = torch.randint(5, (ROWS, 3)), torch.randn(ROWS, 16, dtype=DOUBLE)
    made: dict[str, Made] = {
        "Linear": (partial(nn.Linear, 4, 3), x),
        "LayerNorm": (partial(nn.LayerNorm, 4), x),
        "GroupNorm": (partial(nn.GroupNorm, 2, 4), image),
        "Conv2d": (partial(nn.Conv2d, 4, 3, 2), image),
        "BatchNorm2d": (partial(nn.BatchNorm2d, 4), image),
        "InstanceNorm2d": (partial(nn.InstanceNorm2d, 4), image),
        "InstanceNorm2d, tracking": (
            partial(nn.InstanceNorm2d, 4, track_running_stats=True), image,
        ),
    }  # fmt: skip
    for kind in (nn.Embedding, nn.EmbeddingBag):
        for option in ({}, {"scale_grad_by_freq": True}, {"padding_idx": 0}, {"max_norm": 0.5}):
            made[f"{kind.__name__} {option}"] = partial(kind, 5, 4, **option), indices
    for norm in (
        spectral_norm, weight_norm, parametrizations.spectral_norm, parametrizations.weight_norm,
        parametrizations.orthogonal,
    ):  # fmt: skip
        made[f"{norm.__module__}.{norm.__name__}"] = partial(normed, norm), wide
    return made


CASES = cases()


def results(layer: nn.Module, x: Tensor, parts: int) -> list[Any]:
    """Returns outputs, gradients and state of a layer that gets its input in so many parts."""
    x = x.clone().requires_grad_(x.is_floating_point())
    outputs = []
    for part in x.chunk(parts):
        y = layer(part)
        places = torch.arange(1, y[0].numel() + 1).view(y[:1].shape)
        torch.autograd.backward((y.square() * places).sum())
        outputs.append(y.detach())
    gradients = [p.grad for p in (x, *layer.parameters())]
    return [torch.cat(outputs), gradients, dict(layer.state_dict())]


def differs(make: Callable[[], nn.Module], x: Tensor) -> bool:
    """Returns whether a layer computes something else from micro-batches than from the whole."""
    found = []
    for parts in (1, 3):
        torch.manual_seed(1)
        found.append(results(make().double(), x, parts))
    try:
        torch.testing.assert_close(found[0], found[1])
    except AssertionError:
        return True
    return False


def warned(layer: nn.Module) -> list[type[Warning]]:
    module = nn.Sequential(layer, nn.Identity())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Pipe(module, [1, 1], devices=["cpu"] * 2, chunks=3).close()
    assert all(warning.filename == __file__ for warning in caught)
    return [warning.category for warning in caught]


@pytest.mark.parametrize("case", CASES)
def test_a_pipe_warns_of_the_layers_that_differ_between_micro_batches_and_batch(case: str) -> None:
    make, x = CASES[case]
    assert bool(warned(make())) == differs(make, x)


def test_the_warning_names_layers_and_reasons() -> None:
    lookup = nn.Embedding(5, 4, scale_grad_by_freq=True)
    model = nn.Sequential(lookup, parametrizations.spectral_norm(nn.Linear(4, 4)))
    with pytest.warns(WholeBatchWarning, match="'0' .scale_grad_by_freq.*'1.param.*' .spectral"):
        pipert.pipeline(model, ["1"], devices=["cpu"] * 2).close()


def test_nothing_is_said_of_a_layer_that_does_not_iterate_or_update_in_eval_mode() -> None:
    for layer in (nn.InstanceNorm1d(4, track_running_stats=True), normed(spectral_norm),
                  parametrizations.spectral_norm(nn.Linear(4, 4))):  # fmt: skip
        assert warned(layer.train()) == [WholeBatchWarning]
        assert warned(layer.eval()) == []


TIME_FIRST: dict[str, Callable[..., nn.Module]] = {
    "LSTM": partial(nn.LSTM, 4, 4),
    "MultiheadAttention": partial(nn.MultiheadAttention, 4, 2),
    "TransformerEncoderLayer": partial(nn.TransformerEncoderLayer, 4, 2, 8),
    "Transformer": partial(nn.Transformer, 4, 2, 1, 1, 8),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("kind", TIME_FIRST)
def test_a_layer_that_takes_time_first_is_named_with_a_remedy(kind: str) -> None:
    model = nn.Sequential(nn.Identity(), TIME_FIRST[kind]())
    with pytest.warns(NotBatchFirstWarning, match=r"'1.*batch_first=True") as caught:
        Pipe(model, [2], devices=["cpu"]).close()
    assert [warning.filename for warning in caught] == [__file__]
    assert NotBatchFirstWarning not in warned(TIME_FIRST[kind](batch_first=True))
