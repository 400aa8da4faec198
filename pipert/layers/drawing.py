"""Decides which layers might draw random numbers. Tasks of other layers get no generators."""

from __future__ import annotations

from torch import nn

from pipert._torch import HOOKS_OF_ALL
from pipert.layers.intercepted import compiled_call
from pipert.layers.modules import modules_of

__all__: list[str] = []


def may_draw(layer: nn.Module) -> bool:
    """Whether a layer could draw random numbers. True unless it is known not to."""
    kind = type(layer)
    if layer._forward_hooks or layer._forward_pre_hooks or "forward" in layer.__dict__:
        return True
    if layer._backward_hooks or layer._backward_pre_hooks:  # which run in the backward of a step
        return True
    if compiled_call(layer) is not None:  # a compilation saves and restores the generators
        return True
    if kind in _DROPOUTS:
        return layer.training
    if kind is nn.Sequential:
        return any(map(may_draw, layer.children()))
    return kind not in _DETERMINISTIC


def draws(partition: nn.Sequential) -> bool:
    """Whether a layer of the partition could draw random numbers, in its current mode.

    Any layer could if there are global module hooks.
    """
    return any(may_draw(layer) for layer in partition) or any(HOOKS_OF_ALL)


def is_compiled(layer: nn.Module) -> bool:
    """Whether torch.compile or torch.jit made or changed any part of the layer."""
    return any(map(is_compiled_itself, modules_of(layer)))


def is_compiled_itself(module: nn.Module) -> bool:
    """Like :func:`is_compiled`, but without the modules inside ``module``."""
    # Not isinstance: torch._dynamo takes long to import, and is only loaded once it is used.
    return (
        type(module).__module__.startswith(("torch._dynamo", "torch.jit"))
        or compiled_call(module) is not None
    )


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
