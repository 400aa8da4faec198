"""Lists models of ``diffusers``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.any_model.family import Whole
from tests.real_models.real_model import ROWS, RealModel, draw, library, steps

__all__ = ["DIFFUSERS"]


def diffusers(kind: str, batch: Callable[[], dict[str, Any]], **config: Any) -> RealModel:
    """Describes a class of diffusers."""

    def make() -> nn.Module:
        model: nn.Module = getattr(library("diffusers"), kind)(**config)
        return model.train()

    return RealModel(kind, make, batch)


def mask(length: int = 3) -> Tensor:
    """Returns a mask of texts of different lengths."""
    return torch.ones(ROWS, length).tril(1)


def noisy(*shape: int, text: int = 12) -> dict[str, Tensor]:
    """Draws something noisy, its time and the words that belong to it."""
    return {
        "hidden_states": draw(*shape), "timestep": steps(), "encoder_hidden_states": draw(3, text),
    }  # fmt: skip


def sizes() -> dict[str, Any]:
    """Draws what is for HunyuanDiT beside the noisy image."""
    return {
        "timestep": steps().double(), "text_embedding_mask": mask(),
        "encoder_hidden_states_t5": draw(4, 8), "text_embedding_mask_t5": mask(4),
        "image_meta_size": torch.randint(64, (ROWS, 6)), "style": torch.zeros(ROWS).long(),
    }  # fmt: skip


def places() -> dict[str, Any]:
    """Draws what is for Flux beside the noisy image."""
    return {
        "pooled_projections": draw(10), "guidance": torch.rand(ROWS),
        "img_ids": Whole(torch.randint(4, (6, 3))), "txt_ids": Whole(torch.zeros(3, 3)),
    }  # fmt: skip


HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8}
IMAGE: dict[str, Any] = HEADS | {"in_channels": 4, "sample_size": 8}

DIFFUSERS = [
    diffusers(
        "SD3Transformer2DModel", lambda: noisy(4, 8, 8) | {"pooled_projections": draw(10)},
        **IMAGE, out_channels=4, num_layers=3, joint_attention_dim=12, caption_projection_dim=16,
        pooled_projection_dim=10, pos_embed_max_size=8, dual_attention_layers=(0,),
        qk_norm="rms_norm",
    ),
    diffusers(
        "FluxTransformer2DModel", lambda: noisy(6, 4) | places(), **HEADS, in_channels=4,
        num_layers=1, num_single_layers=2, joint_attention_dim=12, pooled_projection_dim=10,
        guidance_embeds=True, axes_dims_rope=(2, 2, 4),
    ),
    diffusers(
        "PixArtTransformer2DModel",
        lambda: noisy(4, 8, 8) | {
            "encoder_attention_mask": mask(),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
        **IMAGE, num_layers=3, cross_attention_dim=16, caption_channels=12, norm_num_groups=4,
    ),
    diffusers(
        "WanTransformer3DModel", lambda: noisy(4, 2, 4, 4), in_channels=4, out_channels=4,
        num_attention_heads=2, attention_head_dim=12, text_dim=12, freq_dim=16, ffn_dim=24,
        num_layers=3, rope_max_seq_len=16,
    ),
    diffusers(
        "HunyuanDiT2DModel", lambda: noisy(4, 8, 8) | sizes(), **IMAGE, patch_size=2,
        hidden_size=16, num_layers=4, cross_attention_dim=12, cross_attention_dim_t5=8,
        pooled_projection_dim=8, text_len=3, text_len_t5=4,
    ),
    diffusers(
        "PriorTransformer",
        lambda: noisy(8, text=8) | {"proj_embedding": draw(8), "attention_mask": mask().bool()},
        **HEADS, num_layers=3, embedding_dim=8, num_embeddings=3,
    ),
    diffusers(
        "UNet1DModel", lambda: {"sample": draw(14, 16), "timestep": steps()}, sample_size=16,
        in_channels=14, out_channels=14, block_out_channels=(8, 8), norm_num_groups=4,
        down_block_types=("DownResnetBlock1D",) * 2, up_block_types=("UpResnetBlock1D",),
        mid_block_type="MidResTemporalBlock1D", out_block_type="OutConv1DBlock", act_fn="mish",
        time_embedding_type="positional", use_timestep_embedding=True, flip_sin_to_cos=False,
    ),
    diffusers(
        "UVit2DModel",
        lambda: {
            "input_ids": torch.randint(20, (ROWS, 4, 4)), "encoder_hidden_states": draw(3, 10),
            "pooled_text_emb": draw(8), "micro_conds": torch.rand(ROWS, 5),
        },
        hidden_size=16, cond_embed_dim=8, micro_cond_encode_dim=4, micro_cond_embed_dim=20,
        encoder_hidden_size=10, vocab_size=21, codebook_size=20, in_channels=8,
        block_out_channels=8, num_res_blocks=1, block_num_heads=2, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=24, sample_size=4,
    ),
    diffusers(
        "AutoencoderDC", lambda: {"sample": draw(3, 8, 8)}, latent_channels=4,
        attention_head_dim=4, encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"), encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8), encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1), encoder_qkv_multiscales=((), (3,)),
        decoder_qkv_multiscales=((), (3,)),
    ),
]  # fmt: skip
