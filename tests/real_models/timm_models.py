"""Lists models of ``timm``."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.real_models.real_model import RealModel, images, library

__all__ = ["TIMM"]


def timm(
    name: str,
    architecture: str,
    size: int = 16,
    training: bool = True,
    recomputed: bool = True,
    **config: Any,
) -> RealModel:
    """Describes an architecture of timm's registry, with another configuration."""

    def make() -> nn.Module:
        model: nn.Module = library("timm").create_model(architecture, num_classes=5, **config)
        return model.train(training)

    return RealModel(f"timm-{name}", make, images("x", size), recomputed)


VIT: dict[str, Any] = {"patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2}
SIZED: dict[str, Any] = VIT | {"img_size": 16}

TIMM = [
    timm("vit", "vit_tiny_patch16_224", **SIZED, qk_norm=True, init_values=0.1, reg_tokens=2),
    timm(
        "beit", "beit_base_patch16_224", **SIZED,
        use_shared_rel_pos_bias=True, use_rel_pos_bias=False,
    ),
    timm("eva", "eva02_tiny_patch14_224", **SIZED),
    timm("deit", "deit_tiny_distilled_patch16_224", **SIZED),
    timm("cait", "cait_xxs24_224", **SIZED),
    timm("naflexvit", "naflexvit_base_patch16_gap", **VIT),
    timm(
        "swin", "swin_tiny_patch4_window7_224", img_size=16, patch_size=2, window_size=4,
        embed_dim=8, depths=(2, 2), num_heads=(2, 2), drop_path_rate=0.0,
    ),
    timm(
        "hiera", "hiera_tiny_224", size=32, img_size=(32, 32), embed_dim=8, num_heads=1,
        stages=(1, 1, 1), q_pool=1, mask_unit_size=(4, 4),
    ),
    timm(
        "crossvit", "crossvit_tiny_240", size=24, img_size=24, img_scale=(1.0, 1.0),
        patch_size=(4, 6), embed_dim=(8, 16), num_heads=(2, 2), depth=((1, 2, 0), (1, 1, 0)),
    ),
    timm(
        "sequencer", "sequencer2d_s", size=28, img_size=28, layers=(1, 1), embed_dims=(8, 8),
        hidden_sizes=(4, 4), patch_sizes=(7, 2), mlp_ratios=(2.0, 2.0),
    ),
    timm(
        "tnt", "tnt_s_legacy_patch16_224", img_size=16, patch_size=8, embed_dim=16, inner_dim=8,
        depth=2, num_heads_inner=2, num_heads_outer=2,
    ),
    timm(
        "resnet", "resnet18", size=32, layers=(1, 1, 1, 1), channels=(4, 8, 8, 12),
        training=False, recomputed=False,
    ),
]  # fmt: skip
"""Batch normalisation in training is no part of this: it normalises each micro-batch."""
