"""Lists what draws random numbers: torch functions, and layers that might call them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__: list[str] = []


def may_draw(layer: nn.Module) -> bool:
    """Whether a layer could draw random numbers: true unless it is known not to."""
    kind = type(layer)
    if layer._forward_hooks or layer._forward_pre_hooks or "forward" in layer.__dict__:
        return True
    if kind in _DROPOUTS:
        return layer.training
    if kind is nn.Sequential:
        return any(map(may_draw, layer.children()))
    return kind not in _DETERMINISTIC


def draws(partition: nn.Sequential) -> bool:
    """Whether one of its layers could draw random numbers, in the mode it is in now."""
    return any(may_draw(layer) for layer in partition)


def is_compiled(layer: nn.Module) -> bool:
    """Whether torch.compile or torch.jit made or changed any part of the layer."""
    return any(
        _is_wrapper(module) or getattr(module, "_compiled_call_impl", None) is not None
        for module in layer.modules()
    )


def may_draw_inside(layer: nn.Module) -> bool:
    """Whether a compiled layer could draw, judged by the modules it was compiled from."""
    return any(may_draw(m) for m in layer.modules() if not (_is_wrapper(m) and _has_children(m)))


def _is_wrapper(module: nn.Module) -> bool:
    # Not isinstance: torch._dynamo takes long to import, and is loaded only once used.
    return type(module).__module__.startswith(("torch._dynamo", "torch.jit"))


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _functions_that_draw() -> frozenset[str]:
    """Returns the names of torch functions that may draw from a default generator.

    Those that torch marks and, listed by hand, those composed of them without a mark.
    """
    names = {
        "_sample_dirichlet", "binomial", "dropout1d", "dropout2d", "dropout3d", "dropout_",
        "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_", "feature_dropout",
        "feature_dropout_", "fractional_max_pool2d", "fractional_max_pool2d_with_indices",
        "fractional_max_pool3d", "fractional_max_pool3d_with_indices", "gumbel_softmax",
        "multi_head_attention_forward", "random_", "rrelu", "rrelu_",
        "scaled_dot_product_attention", "svd_lowrank", "pca_lowrank",
        # torch.nn.init, for layers created inside a layer
        "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_",
        "orthogonal_", "sparse_",
    }  # fmt: skip
    for name in dir(torch.ops.aten):
        packet: Any = getattr(torch.ops.aten, name)
        overloads: list[str] = getattr(packet, "overloads", list)()
        tags = [tag for overload in overloads for tag in getattr(packet, overload).tags]
        if torch.Tag.nondeterministic_seeded in tags:
            names.add(name)
    return frozenset(names)


FUNCTIONS_THAT_DRAW = _functions_that_draw()

_DROPOUTS = frozenset(
    {
        nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
        nn.FeatureAlphaDropout, nn.RReLU,
    }  # fmt: skip
)

_DETERMINISTIC = frozenset(
    {
        nn.Identity, nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag, nn.Flatten,
        nn.Unflatten, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d,
        nn.ConvTranspose3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm,
        nn.LayerNorm, nn.RMSNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
        nn.LocalResponseNorm, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d,
        nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
        nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d, nn.Upsample,
        nn.PixelShuffle, nn.PixelUnshuffle, nn.ZeroPad2d, nn.ReflectionPad2d, nn.ReLU, nn.ReLU6,
        nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid,
        nn.Tanh, nn.Softplus, nn.Softmax, nn.LogSoftmax, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh,
        nn.GLU, nn.Softsign, nn.Tanhshrink, nn.LogSigmoid, nn.Threshold,
    }  # fmt: skip
)
