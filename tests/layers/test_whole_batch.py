"""Tries all layers of ``torch.nn`` on a whole batch and on micro-batches.

Those that differ are those that making a pipe warns of.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import pipert
from pipert import Pipe, WholeBatchWarning

ROWS = 6
DOUBLE = torch.float64

Made = tuple[Callable[[], nn.Module], tuple[Tensor, ...]]


def floats(*sizes: int) -> Tensor:
    return torch.randn(ROWS, *sizes, dtype=DOUBLE)


def indices(*sizes: int) -> Tensor:
    return torch.randint(5, (ROWS, *sizes))


def cases() -> dict[str, Made]:
    """Returns the layers to try, by class and difference."""
    x, sequence, image = (floats(4),), floats(5, 4), floats(4, 6, 6)
    made: dict[str, Made] = {}

    def add(case: str, *args: Any, inputs: Any = x, **kwargs: Any) -> None:
        made[case] = partial(getattr(nn, case.split()[0]), *args, **kwargs), inputs

    for name in (
        "CELU ELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh Identity LeakyReLU LogSigmoid "
        "Mish PReLU ReLU ReLU6 SELU SiLU Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink GLU"
    ).split():
        add(name)
    for name in ("Softmax", "Softmin", "LogSoftmax"):
        add(name, dim=1)
    add("Threshold", 0.1, 0.2)
    add("Softmax2d", inputs=(image,))
    add("Linear", 4, 3)
    add("Bilinear", 4, 3, 2, inputs=(*x, floats(3)))
    for name in ("CosineSimilarity", "PairwiseDistance"):
        add(name, inputs=(*x, floats(4)))
    for name in ("Embedding", "EmbeddingBag"):
        for option in ({}, {"scale_grad_by_freq": True}, {"padding_idx": 0}, {"max_norm": 0.5}):
            add(f"{name} {option}", 5, 4, inputs=(indices(3),), **option)
    for mode in ("sum", "max"):
        add(f"EmbeddingBag {mode}", 5, 4, inputs=(indices(3),), mode=mode)
    add("EmbeddingBag sum {'scale_grad_by_freq': True}", 5, 4, inputs=(indices(3),), mode="sum",
        scale_grad_by_freq=True)  # fmt: skip
    for name in ("RNN", "LSTM", "GRU"):
        add(name, 4, 3, inputs=(sequence,), batch_first=True)
        add(f"{name}Cell", 4, 3)
    attending: Any = {"batch_first": True, "dropout": 0.0}
    add("MultiheadAttention", 4, 2, inputs=(sequence,) * 3, **attending)
    add("TransformerEncoderLayer", 4, 2, 8, inputs=(sequence,), **attending)
    add("TransformerDecoderLayer", 4, 2, 8, inputs=(sequence,) * 2, **attending)
    add("Transformer", 4, 2, 1, 1, 8, inputs=(sequence,) * 2, **attending)
    add("LayerNorm", 4)
    add("RMSNorm", 4)
    add("GroupNorm", 2, 4, inputs=(image,))
    add("LocalResponseNorm", 2, inputs=(image,))
    add("CrossMapLRN2d", 2, inputs=(image,))
    add("Flatten", inputs=(image,))
    add("Unflatten", 1, (2, 2))
    add("Fold", (4, 5), (2, 2), inputs=(floats(8, 12),))
    add("Unfold", 2, inputs=(image,))
    for name in ("PixelShuffle", "PixelUnshuffle", "ChannelShuffle"):
        add(name, 2, inputs=(image,))
    for name in ("Upsample", "UpsamplingNearest2d", "UpsamplingBilinear2d"):
        add(name, scale_factor=2, inputs=(image,))
    add("AdaptiveLogSoftmaxWithLoss", 4, 5, [2, 3], div_value=1.0, inputs=(*x, indices()))
    for dims in (1, 2, 3):
        values = (floats(4, *[6] * dims),)
        for name in ("Conv", "ConvTranspose"):
            add(f"{name}{dims}d", 4, 3, 2, inputs=values)
        for name in ("BatchNorm", "InstanceNorm"):
            add(f"{name}{dims}d", 4, inputs=values, track_running_stats=True)
        add(f"InstanceNorm{dims}d False", 4, inputs=values)
        for name in ("MaxPool", "AvgPool", "AdaptiveMaxPool", "AdaptiveAvgPool"):
            add(f"{name}{dims}d", 2, inputs=values)
        add(f"LPPool{dims}d", 2, 2, inputs=values)
        for name in ("ReflectionPad", "ReplicationPad", "ZeroPad", "CircularPad"):
            add(f"{name}{dims}d", 1, inputs=values)
        add(f"ConstantPad{dims}d", 1, 0.5, inputs=values)
        small = (floats(4, *[2] * dims), torch.arange(2**dims).expand(ROWS, 4, -1))
        places = small[1].reshape(small[0].shape)
        add(f"MaxUnpool{dims}d", 2, inputs=(small[0], places))
    for name, norm in (
        ("spectral_norm", spectral_norm),
        ("weight_norm", weight_norm),
        ("parametrizations.spectral_norm", parametrizations.spectral_norm),
        ("parametrizations.weight_norm", parametrizations.weight_norm),
        ("parametrizations.orthogonal", parametrizations.orthogonal),
    ):
        made[name] = partial(_normed, norm), (floats(16),)
    return made


def _normed(norm: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        normed: nn.Module = norm(nn.Linear(16, 16))  # more than one iteration finds
    return normed


CASES = cases()

RANDOM = (
    "AlphaDropout Dropout Dropout1d Dropout2d Dropout3d FeatureAlphaDropout FractionalMaxPool2d "
    "FractionalMaxPool3d RReLU"
).split()
"""They draw other numbers in a pipe, as ``docs/contract.md`` says."""
OTHERS = (
    "Container DataParallel Module ModuleDict ModuleList ParameterDict ParameterList RNNBase "
    "RNNCellBase Sequential SyncBatchNorm TransformerDecoder TransformerEncoder"
).split()
"""Containers of others, bases of others, and what a pipe refuses."""


def test_every_layer_of_torch_is_tried_or_known() -> None:
    found = {c.__name__ for _, c in inspect.getmembers(nn, inspect.isclass)
             if issubclass(c, nn.Module)}  # fmt: skip
    losses = {name for name in found if name.removesuffix("2d").endswith("Loss")}
    found = {name.removeprefix("Lazy") for name in found}
    assert {case.split()[0] for case in CASES} | {*RANDOM, *OTHERS} | losses >= found


def results(layer: nn.Module, inputs: tuple[Tensor, ...], parts: int) -> list[Any]:
    """Returns outputs, gradients and state of a layer that gets its inputs in so many parts."""
    given = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    outputs = []
    for part in zip(*[x.chunk(parts) for x in given], strict=True):
        y = layer(*part)
        y = y[0] if isinstance(y, tuple) else y
        if y.requires_grad:
            places = torch.arange(1, y[0].numel() + 1).view(y[:1].shape)
            torch.autograd.backward((y.square() * places).sum())
        outputs.append(y.detach())
    gradients = [p.grad for p in (*given, *layer.parameters())]
    return [torch.cat(outputs), gradients, dict(layer.state_dict())]


def differs(make: Callable[[], nn.Module], inputs: tuple[Tensor, ...]) -> bool:
    """Returns whether a layer computes something else from micro-batches than from the whole."""
    found = []
    for parts in (1, 3):
        torch.manual_seed(1)
        layer = make().double()
        found.append(results(layer, inputs, parts))
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
    make, inputs = CASES[case]
    assert bool(warned(make())) == differs(make, inputs)


def lookup() -> nn.Module:
    return nn.Embedding(5, 4, scale_grad_by_freq=True)


def test_the_warning_names_layers_and_reasons() -> None:
    model = nn.Sequential(lookup(), parametrizations.spectral_norm(nn.Linear(4, 4)))
    with pytest.warns(WholeBatchWarning, match="'0' .scale_grad_by_freq.*'1.param.*' .spectral"):
        pipert.pipeline(model, ["1"], devices=["cpu"] * 2).close()


def test_nothing_is_said_of_a_layer_that_does_not_iterate_or_update_in_eval_mode() -> None:
    for layer in (nn.InstanceNorm1d(4, track_running_stats=True), _normed(spectral_norm),
                  parametrizations.spectral_norm(nn.Linear(4, 4))):  # fmt: skip
        assert warned(layer.train()) == [WholeBatchWarning]
        assert warned(layer.eval()) == []
