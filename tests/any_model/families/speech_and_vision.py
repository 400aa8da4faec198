"""Lists models of ``transformers`` for speech, for images, and for images with text."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.any_model.families.decoders import LLAMA
from tests.any_model.family import ROWS, VOCABULARY, Family, images, own_loss, tokens
from tests.any_model.hugging import hugging

__all__ = ["SPEECH_AND_VISION"]

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WAV2VEC2 = {
    "vocab_size": 12,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "conv_dim": (8, 8),
    "conv_stride": (4, 2),
    "conv_kernel": (4, 2),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "classifier_proj_size": 16,
}
SPEECH = ("wav2vec2.encoder.layers.1", "wav2vec2.encoder.layers.3")
LEAF = "the model makes its input a leaf that requires grad"
VIT = NO_DROPOUT | {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "image_size": 8,
    "patch_size": 4,
}
SWIN = NO_DROPOUT | {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [1, 2],
    "num_heads": [2, 4],
    "window_size": 2,
    "drop_path_rate": 0.0,
}
CONVNEXT = {
    "hidden_sizes": [4, 8, 12],
    "depths": [1, 2, 1],
    "num_stages": 3,
    "drop_path_rate": 0.0,
    "patch_size": 2,
}
NORMALISED = "batch normalisation uses the statistics of the micro-batch"


def spoken(labels: bool = False) -> dict[str, Any]:
    batch: dict[str, Any] = {"input_values": torch.randn(ROWS, 96)}
    return batch | {"labels": torch.randint(1, 12, (ROWS, 3))} if labels else batch


def pairs() -> dict[str, Any]:
    return tokens(6, padded=True) | images(8) | {"return_loss": True}


def described() -> dict[str, Any]:
    """Draws rows in which one image of four patches replaces the first four tokens."""
    batch = tokens(8)
    batch["input_ids"] = batch["input_ids"].clamp(max=VOCABULARY - 2)
    batch["input_ids"][:, :4] = VOCABULARY - 1
    return batch | images(8)


def segmented() -> dict[str, Any]:
    return images(32) | {"labels": torch.randint(2, (ROWS, 32, 32))}


SPEECH_AND_VISION: list[Family] = [
    hugging(
        "wav2vec2, ctc", "Wav2Vec2ForCTC", SPEECH, partial(spoken, labels=True),
        config=WAV2VEC2 | {"ctc_loss_reduction": "mean"}, loss=own_loss, notes=LEAF,
    ),
    hugging(
        "wav2vec2, weighted sum of layers", "Wav2Vec2ForSequenceClassification", SPEECH, spoken,
        config=WAV2VEC2 | {"use_weighted_layer_sum": True},
        notes=LEAF + "; the hidden states of all layers are summed at the end",
    ),
    hugging(
        "vit (transformers)", "ViTForImageClassification",
        ("vit.layers.1", "vit.layers.3"), partial(images, 8), config=VIT, seldom=False,
    ),
    hugging(
        "swin", "SwinForImageClassification", ("swin.encoder.layers.1",), partial(images, 16),
        config=SWIN,
    ),
    hugging(
        "convnext (transformers)", "ConvNextForImageClassification",
        ("convnext.encoder.stages.1", "convnext.encoder.stages.2"), partial(images, 16),
        config=CONVNEXT,
    ),
    hugging(
        "resnet (transformers)", "ResNetForImageClassification",
        ("resnet.encoder.stages.1",), partial(images, 16),
        config={
            "embedding_size": 8, "hidden_sizes": [8, 12], "depths": [2, 2], "layer_type": "basic",
        },
        mixes_rows=NORMALISED,
    ),
    hugging(
        "segformer", "SegformerForSemanticSegmentation",
        ("segformer.stages.1", "decode_head"), partial(images, 16),
        config=NO_DROPOUT | {
            "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16],
            "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [2, 4],
            "mlp_ratios": [2, 2], "decoder_hidden_size": 8, "drop_path_rate": 0.0,
            "classifier_dropout_prob": 0.0,
        },
        mixes_rows=NORMALISED, notes="the outputs of all stages skip to the head",
    ),
    hugging(
        "upernet", "UperNetForSemanticSegmentation",
        ("backbone.encoder.stages.2", "decode_head"), segmented,
        config={
            "backbone_config": CONVNEXT | {
                "model_type": "convnext", "out_features": ["stage1", "stage2", "stage3"],
            },
            "hidden_size": 8, "pool_scales": [2, 3], "use_auxiliary_head": True,
            "auxiliary_in_channels": 12, "auxiliary_channels": 8, "auxiliary_num_convs": 1,
        },
        loss=own_loss, mixes_rows=NORMALISED, notes="a backbone whose stages skip to two heads",
    ),
    hugging(
        "clip", "CLIPModel",
        ("vision_model.encoder.layers.1", "text_model.encoder.layers.1"), pairs,
        config={
            "text_config": {
                "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24,
                "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 8,
                "eos_token_id": 2,
            },
            "vision_config": {
                "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
                "num_attention_heads": 4, "image_size": 8, "patch_size": 4,
            },
            "projection_dim": 8,
        },
        loss=own_loss,
        mixes_rows="the contrastive loss compares each row with all of the micro-batch",
        whole_rows="logits have a column for each row of the micro-batch",
    ),
    hugging(
        "llava", "LlavaForConditionalGeneration",
        ("model.language_model.layers.1", "model.language_model.layers.3"), described,
        config={
            "text_config": LLAMA | {"model_type": "llama"},
            "vision_config": VIT | {"model_type": "clip_vision_model"},
            "image_token_index": VOCABULARY - 1, "image_token_id": VOCABULARY - 1,
            "vision_feature_select_strategy": "default", "vision_feature_layer": -2,
        },
        notes="images' features are written into the text's embeddings",
    ),
]  # fmt: skip
