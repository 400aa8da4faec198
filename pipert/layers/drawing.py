"""Decides which layers might draw random numbers. Tasks of other layers get no generators."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from pipert._torch import has_hooks, have_modules_hooks
from pipert.layers.intercepted import compiled_call


def may_draw(layer: nn.Module) -> bool:
    """Whether a layer could draw random numbers. True unless it is known not to."""
    kind = type(layer)
    if has_hooks(layer) or "forward" in layer.__dict__:
        return True
    if compiled_call(layer) is not None:  # a compilation saves and restores the generators
        return True
    if kind in _DROPOUTS:
        return layer.training
    if kind is nn.Sequential:
        return any(map(may_draw, layer.children()))
    if kind in _OTHERS or issubclass(kind, LazyModuleMixin):
        return True
    return kind.__module__ not in _DETERMINISTIC


def draws(partition: nn.Sequential) -> bool:
    """Whether a layer of the partition could draw random numbers, in its current mode.

    Any layer could if there are global module hooks.
    """
    return have_modules_hooks() or any(map(may_draw, partition))


_DROPOUTS = {
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
    nn.RReLU,
}  # fmt: skip
_OTHERS = {nn.FractionalMaxPool2d, nn.FractionalMaxPool3d, nn.MultiheadAttention}
# All other layers in these files of torch.nn.modules do not draw, once they have parameters.
_DETERMINISTIC = {
    f"torch.nn.modules.{name}"
    for name in (
        "activation", "batchnorm", "conv", "flatten", "instancenorm", "linear", "normalization",
        "padding", "pixelshuffle", "pooling", "sparse", "upsampling",
    )
}  # fmt: skip
