"""Builds the experiments' models at any fraction of the paper's width, and for torchgpipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from torchgpipe import skip as peer
except ImportError:
    raise SystemExit(
        "The experiments run torchgpipe 0.0.7 beside pipert, and it is not installed.\n"
        "Install it with: pip install '.[bench]'"
    ) from None

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from models.amoebanet import amoebanet_d  # noqa: E402
from models.resnet import resnet  # noqa: E402
from models.skips import Add, Concatenate, Stash  # noqa: E402
from models.unet import unet  # noqa: E402

__all__ = ["AMOEBANET", "RESNET", "UNET", "Model", "for_torchgpipe", "unet_model"]


@dataclass(frozen=True)
class Model:
    """A model that can be built at any fraction of the paper's width, with the same layers."""

    name: str
    at_width: Callable[[float], nn.Sequential]
    side: int
    """The side of an image, in the paper."""

    def image(self, fraction: float) -> tuple[int, int, int]:
        """Returns channels, height and width of a sample; sides are multiples of 32, 64 or more."""
        side = max(64, 32 * round(self.side * fraction / 32))
        return 3, side, side


def _multiple(number: float, of: int) -> int:
    return max(of, of * round(number / of))


def unet_model(blocks: int, channels: int) -> Model:
    """Describes U-Net (B, C)."""
    name = f"U-Net ({blocks}, {channels})"
    return Model(name, lambda f: unet(blocks, _multiple(channels * f, 2)), 192)


UNET = unet_model(5, 64)
AMOEBANET = Model("AmoebaNet-D (18, 256)", lambda f: amoebanet_d(18, _multiple(256 * f, 16)), 224)
RESNET = Model("ResNet-101", lambda f: resnet((3, 4, 23, 3), channels=_multiple(64 * f, 2)), 224)


# --- the layers for torchgpipe, which has its own kind of skips ----------------------------------


class _Stash(nn.Module):
    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        yield peer.stash("skip", x)
        return x


class _Concatenate(nn.Module):
    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        skip = yield peer.pop("skip")
        below, right = skip.shape[2] - x.shape[2], skip.shape[3] - x.shape[3]
        if below or right:
            x = F.pad(x, (0, right, 0, below))
        return torch.cat([skip, x], dim=1)


class _Add(nn.Module):
    def __init__(self, projection: nn.Module) -> None:
        super().__init__()
        self.projection = projection

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        skip = yield peer.pop("skip")
        projected: Tensor = self.projection(skip)
        return x + projected


def for_torchgpipe(module: nn.Sequential) -> nn.Sequential:
    """Replaces the layers with skips by torchgpipe's; parameters are shared."""
    make_stash = peer.skippable(stash=["skip"])(_Stash)
    make_concatenate = peer.skippable(pop=["skip"])(_Concatenate)
    make_add = peer.skippable(pop=["skip"])(_Add)
    namespaces: dict[object, Any] = {}
    layers: list[nn.Module] = []
    for layer in module:
        made: Any = None
        if isinstance(layer, Stash):
            made = make_stash()
        elif isinstance(layer, Concatenate):
            made = make_concatenate()
        elif isinstance(layer, Add):
            made = make_add(layer.projection)
        if made is not None and isinstance(layer, Stash | Concatenate | Add):
            namespace, _ = layer.skip_key("skip")
            layers.append(made.isolate(namespaces.setdefault(namespace, peer.Namespace())))
        else:
            layers.append(layer)
    return nn.Sequential(*layers)
