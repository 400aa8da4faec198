"""A small GPT over bytes, as a plain ``nn.Sequential``; it does not know about pipelines."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # a token is a byte


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the model, which with :func:`build_model` is all that a saved state needs."""

    context: int = 128
    width: int = 128
    layers: int = 4
    heads: int = 4
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"heads must divide width, but {self.width} / {self.heads} does not")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be from 0 to below 1, not {self.dropout}")


class Embed(nn.Module):
    """Tokens and their positions: ``[batch, time]`` int64 to ``[batch, time, width]``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(config.context, config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.token(tokens)
        return embedded + self.position.weight[: tokens.shape[1]]


class Block(nn.Module):
    """Causal self-attention, then an MLP, each added to its input: ``[batch, time, width]``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.heads, self.dropout = config.heads, config.dropout
        self.attend = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width))
        self.project = nn.Linear(width, width)
        self.expand = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU())
        self.shrink = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        heads = self.attend(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [batch, heads, time, width / heads]
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        x = x + F.dropout(self.project(mixed.transpose(1, 2).flatten(2)), dropout)
        return x + F.dropout(self.shrink(self.expand(x)), dropout)


def build_model(config: ModelConfig) -> nn.Sequential:
    """A GPT of ``layers + 2`` layers: ``[batch, time]`` int64 to logits ``[batch, time, 256]``.

    The head has its own weight, unlike GPT-2, which shares the embedding's: the two layers are on
    different devices.
    """
    blocks = [Block(config) for _ in range(config.layers)]
    to_logits = nn.Linear(config.width, VOCABULARY, bias=False)
    head = nn.Sequential(nn.LayerNorm(config.width), to_logits)
    model = nn.Sequential(Embed(config), *blocks, head)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    return model
