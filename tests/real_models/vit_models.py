"""Lists models of ``vit-pytorch``."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.real_models.real_model import RealModel, images, library

__all__ = ["VIT_PYTORCH"]


def vit(
    module: str, kind: str = "SimpleViT", name: str = "img", size: int = 16, **config: Any
) -> RealModel:
    """Describes a class of a module; ``name`` is that of its argument."""

    def make() -> nn.Module:
        model: nn.Module = getattr(library(f"vit_pytorch.{module}"), kind)(**config)
        return model

    return RealModel(module, make, images(name, size))


CLASSES: dict[str, Any] = {"image_size": 16, "num_classes": 5, "heads": 2}
VIT: dict[str, Any] = {**CLASSES, "patch_size": 4, "dim": 16, "dim_head": 8, "mlp_dim": 24}
SIMPLE = VIT | {"depth": 3}

VIT_PYTORCH = [
    vit("deepvit", "DeepViT", **SIMPLE),
    vit("parallel_vit", "ViT", **SIMPLE),
    vit("simple_vit_with_value_residual", **SIMPLE),
    vit("simple_vit_with_hyper_connections", **SIMPLE, num_residual_streams=2),
    vit("simple_vit_attn_residual", "SimpleViTAttnResidual", **SIMPLE),
    vit("normalized_vit", "nViT", "images", **SIMPLE),
    vit("jumbo_vit", "JumboViT", **SIMPLE, num_jumbo_cls=2, jumbo_cls_k=2),
    vit(
        "look_vit", "LookViT", **CLASSES, dim=16, dim_head=8, depth=2, patch_size=8, mlp_factor=2,
        highres_patch_size=4, highres_mlp_factor=2, cross_attn_heads=2, cross_attn_dim_head=8,
        dropout=0.0,
    ),
    vit(
        "nest", "NesT", **CLASSES, patch_size=2, dim=8, num_hierarchies=2, block_repeats=(1, 2),
        mlp_mult=2,
    ),
    vit(
        "regionvit", "RegionViT", "x", 64, dim=(8, 8, 8, 8), depth=(1, 1, 1, 1), window_size=2,
        num_classes=5,
    ),
]  # fmt: skip
