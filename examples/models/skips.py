"""Layers for skip connections: one stashes a tensor, a later one pops it.

In a ``Pipe`` the tensor goes straight from the first layer's device to the second's; the layers
in between do not see it. Isolating two such layers in the same namespace connects them::

    namespace = Namespace()
    nn.Sequential(Stash().isolate(namespace), ..., Concatenate().isolate(namespace))

Until it is popped, a stashed tensor must not be changed in place: an activation that follows a
:class:`Stash` must not have ``inplace=True``.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipert.skip import Skippable, pop, skippable, stash

__all__ = ["Add", "Concatenate", "Stash"]


@skippable(stash=["skip"])
class Stash(Skippable):
    """Stashes a reference to its input, without a copy, and returns the input."""

    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class Concatenate(Skippable):
    """Concatenates its input and the skip, both ``[batch, channels, height, width]``, by channel.

    Pooling and upsampling an odd side gives an input smaller than the skip; it is padded with zeros
    below and to the right.
    """

    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        skip = yield pop("skip")
        below, right = skip.shape[2] - x.shape[2], skip.shape[3] - x.shape[3]
        if below or right:
            x = F.pad(x, (0, right, 0, below))
        return torch.cat([skip, x], dim=1)


@skippable(pop=["skip"])
class Add(Skippable):
    """Adds its input and the skip, optionally after projecting the skip to the input's shape."""

    def __init__(self, projection: nn.Module | None = None) -> None:
        super().__init__()
        self.projection = nn.Identity() if projection is None else projection

    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        skip = yield pop("skip")
        projected: Tensor = self.projection(skip)
        return x + projected
