"""A head whose weight is an embedding's, which may be on another rank."""

from __future__ import annotations

from torch import Tensor, nn


class Head(nn.Module):
    """Logits: ``[..., width]`` to ``[..., vocabulary]``."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T
