"""Lists models with an encoder and a decoder, with cuts in both."""

from __future__ import annotations

from typing import Any

import torch

from tests.any_model.family import ROWS, VOCABULARY, Family, own_loss, tokens
from tests.any_model.hugging import hugging

__all__ = ["ENCODER_DECODERS"]

T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "use_cache": False,
}
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
LAYERS = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
}
BOTH = "two cuts, in encoder and decoder"


def translated() -> dict[str, Any]:
    return tokens(6, "labels", padded=True)


def speech() -> dict[str, Any]:
    return {
        "input_features": torch.randn(ROWS, 8, 16),
        "decoder_input_ids": torch.randint(3, VOCABULARY, (ROWS, 5)),
    }


ENCODER_DECODERS: list[Family] = [
    hugging(
        "t5", "T5ForConditionalGeneration", ("encoder.block.2", "decoder.block.1"), translated,
        config=T5, loss=own_loss, seldom=False,
        notes=BOTH + "; embeddings and head have one weight; the first layers' position bias "
        "goes to all",
    ),
    hugging(
        "t5, cut in two places of the encoder and two of the decoder", "T5ForConditionalGeneration",
        ("encoder.block.1", "encoder.block.2", "decoder.block.0", "decoder.block.2"), translated,
        config=T5, loss=own_loss, notes="five partitions",
    ),
    hugging(
        "bart", "BartForConditionalGeneration",
        ("model.encoder.layers.1", "model.decoder.layers.1"),
        lambda: tokens(6, "decoder_input_ids", padded=True),
        config=LAYERS | NO_DROPOUT | {
            "vocab_size": VOCABULARY, "d_model": 16, "max_position_embeddings": 16,
            "use_cache": False,
        },
        notes=BOTH + "; embeddings and head have one weight",
    ),
    hugging(
        "whisper", "WhisperForConditionalGeneration",
        ("model.encoder.layers.1", "model.decoder.layers.1"), speech,
        config=LAYERS | NO_DROPOUT | {
            "vocab_size": VOCABULARY, "d_model": 16, "num_mel_bins": 8, "max_source_positions": 8,
            "max_target_positions": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
            "decoder_start_token_id": 1, "use_cache": False, "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        notes=BOTH + "; the head has the embedding's weight",
    ),
]  # fmt: skip
