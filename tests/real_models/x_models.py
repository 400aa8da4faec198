"""Lists models of ``x-transformers``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.any_model.family import VOCABULARY
from tests.real_models.real_model import ROWS, RealModel, draw, library

__all__ = ["X_TRANSFORMERS"]

LAYERS: dict[str, Any] = {"depth": 3, "heads": 2, "attn_dim_head": 8, "verbose": False}
TOKENS = {"num_tokens": VOCABULARY, "max_seq_len": 12}


def tokens(length: int = 8) -> Tensor:
    return torch.randint(VOCABULARY, (ROWS, length))


def mask() -> Tensor:
    """Draws from which of eight places on a row is padded."""
    return torch.arange(8) < torch.randint(3, 9, (ROWS, 1))


def stack(name: str, kind: str = "Decoder", around: Any = (), **config: Any) -> RealModel:
    """Describes a stack of layers between an embedding of tokens and logits.

    Args:
        around: options of what is around the stack.
        config: options of the stack.
    """

    def make() -> nn.Module:
        x = library("x_transformers")
        layers = getattr(x, kind)(dim=16, **LAYERS, **config)
        model: nn.Module = x.TransformerWrapper(attn_layers=layers, **TOKENS, **dict(around))
        return model

    return RealModel(f"x-{name}", make, lambda: {"x": tokens()})


def encoder_decoder() -> nn.Module:
    config = LAYERS | TOKENS
    sides = {f"{side}_{name}": config[name] for side in ("enc", "dec") for name in config}
    model: nn.Module = library("x_transformers").XTransformer(dim=16, tie_token_emb=True, **sides)
    return model


def continuous() -> nn.Module:
    x = library("x_transformers")
    layers = x.Encoder(dim=16, **LAYERS, use_rmsnorm=True, ff_glu=True)
    model: nn.Module = x.ContinuousTransformerWrapper(
        dim_in=5, dim_out=6, max_seq_len=12, attn_layers=layers, num_memory_tokens=2
    )
    return model


X_TRANSFORMERS = [
    stack("tied", around={"tie_embedding": True, "num_memory_tokens": 2}),
    stack("rotary", rotary_pos_emb=True, attn_qk_norm=True, ff_glu=True, ff_swish=True),
    stack("alibi", alibi_pos_bias=True, attn_kv_heads=1, shift_tokens=1),
    stack("one bias", rel_pos_bias=True, residual_attn=True),
    stack("streams", num_residual_streams=3, add_value_residual=True),
    stack("one layer", weight_tie_layers=True, gate_residual=True),
    stack("two heads", around={"num_output_heads": 2, "emb_dim": 8}, attn_gate_values=True),
    stack("reordered", layers_execute_order=(0, 1, 2, 3, 0, 1, 4, 5)),
    stack("skips", "Encoder", around={"use_cls_token": True}, unet_skips=True),
    RealModel(
        "x-encoder-decoder",
        encoder_decoder,
        lambda: {"src": tokens(), "tgt": tokens(6), "mask": mask()},
        returns_loss=True,
    ),
    RealModel("x-continuous", continuous, lambda: {"x": draw(8, 5), "mask": mask()}),
]
