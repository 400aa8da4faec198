"""Lists models of ``diffusers``."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tests.any_model.family import ROWS, Family, Made, library, made, pixels

__all__ = ["DIFFUSION"]

BLOCKS = {"norm_num_groups": 4, "block_out_channels": (8, 16), "layers_per_block": 1}


def noisy(size: int, channels: int) -> dict[str, Tensor]:
    return {"sample": pixels(size, channels), "timestep": torch.arange(ROWS)}


def _unet() -> Made:
    unet = library("diffusers").UNet2DModel(
        sample_size=8, attention_head_dim=4, **BLOCKS,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return made(unet, noisy(8, 3))


def _conditioned_unet() -> Made:
    unet = library("diffusers").UNet2DConditionModel(
        sample_size=8, attention_head_dim=4, cross_attention_dim=8, **BLOCKS,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    text = torch.randn(ROWS, 5, 8)
    return made(unet, {"sample": pixels(8, 4), "timestep": 7, "encoder_hidden_states": text})


def _dit() -> Made:
    dit = library("diffusers").DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=4, sample_size=4,
        num_embeds_ada_norm=10, norm_num_groups=4,
    )  # fmt: skip
    rows = torch.arange(ROWS)
    # Training drops random labels, for guidance; with a probability of zero it drops none.
    for block in dit.transformer_blocks:
        block.norm1.emb.class_embedder.dropout_prob = 0.0
    return made(dit, {"hidden_states": pixels(4, 4), "timestep": rows, "class_labels": rows})


def _autoencoder() -> Made:
    vae = library("diffusers").AutoencoderKL(
        latent_channels=4, sample_size=8, **BLOCKS,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    return made(vae, {"sample": pixels(8)})


diffusers = partial(Family, library="diffusers")

DIFFUSION: list[Family] = [
    diffusers(
        "unet (diffusers)", _unet, ("mid_block", "up_blocks.1"), seldom=False,
        notes="skips from the way down to the way up",
    ),
    diffusers(
        "unet with conditions (diffusers)", _conditioned_unet, ("down_blocks.1", "up_blocks.0"),
        notes="skips; the time is a number, the same in all micro-batches",
    ),
    diffusers(
        "dit (diffusers)", _dit, ("transformer_blocks.1", "transformer_blocks.3"),
        notes="time and class modulate each block",
    ),
    diffusers(
        "autoencoder (diffusers)", _autoencoder, ("encoder.mid_block", "decoder.up_blocks.0"),
        notes="forward calls methods of its own, not modules alone",
    ),
]  # fmt: skip
