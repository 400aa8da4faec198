"""The layers that make skip connections: one puts a tensor aside, a later one takes it back.

In a Pipe the tensor goes from the device of the first straight to the device of the second, and the
layers in between know nothing of it. Two such layers belong together when they are isolated in the
same namespace::

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
    """Puts a copy-free reference to its input aside, and hands the input on."""

    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class Concatenate(Skippable):
    """Joins its input and the skip: two times ``[batch, channels, height, width]``, along channels.

    An input that is smaller than the skip is padded with zeros, below and to the right. That is
    what pooling and upsampling make of a side that is odd.
    """

    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        skip = yield pop("skip")
        below, right = skip.shape[2] - x.shape[2], skip.shape[3] - x.shape[3]
        if below or right:
            x = F.pad(x, (0, right, 0, below))
        return torch.cat([skip, x], dim=1)


@skippable(pop=["skip"])
class Add(Skippable):
    """Adds its input and the skip, which a projection may bring to the input's shape before."""

    def __init__(self, projection: nn.Module | None = None) -> None:
        super().__init__()
        self.projection = nn.Identity() if projection is None else projection

    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        skip = yield pop("skip")
        projected: Tensor = self.projection(skip)
        return x + projected
