"""Lists encoders of text."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.any_model.family import ROWS, VOCABULARY, Family, Whole, tokens
from tests.any_model.hugging import hugging

__all__ = ["ENCODERS"]

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = NO_DROPOUT | {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
LAYERS = ("bert.encoder.layer.1", "bert.encoder.layer.3")
padded = partial(tokens, padded=True)
TIED = "the decoder has the embedding's weight"


def with_positions() -> dict[str, Any]:
    """Draws tokens, with positions that have one row for all."""
    return tokens() | {"position_ids": Whole(torch.arange(6)[None])}


def with_global_tokens() -> dict[str, Any]:
    batch = tokens(8)
    return batch | {"global_attention_mask": (torch.arange(8) < 2).long().expand(ROWS, 8)}


ENCODERS: list[Family] = [
    hugging("bert", "BertForMaskedLM", LAYERS, padded, config=BERT, notes=TIED, seldom=False),
    hugging(
        "bert with hidden states", "BertForMaskedLM", LAYERS, padded,
        config=BERT | {"output_hidden_states": True},
        notes=TIED + "; the hidden states of all layers are part of the output",
    ),
    hugging(
        "bert with positions of one row", "BertForMaskedLM", LAYERS, with_positions, config=BERT,
        notes=TIED + "; the positions have one row, and are given in Replicate",
    ),
    hugging(
        "roberta", "RobertaForMaskedLM", ("roberta.encoder.layer.2", "lm_head"), padded,
        config=BERT, notes=TIED,
    ),
    hugging(
        "distilbert", "DistilBertForMaskedLM", ("distilbert.transformer.layer.2",), padded,
        config={
            "vocab_size": VOCABULARY, "dim": 16, "n_layers": 4, "n_heads": 4, "hidden_dim": 24,
            "dropout": 0.0, "attention_dropout": 0.0, "max_position_embeddings": 32,
        },
        notes=TIED,
    ),
    hugging(
        "albert", "AlbertForMaskedLM", ("albert.encoder", "predictions"), padded,
        config=BERT | {"embedding_size": 8, "classifier_dropout_prob": 0.0},
        notes=TIED + "; all layers are one module, called four times: no cut is between them",
    ),
    hugging(
        "deberta-v2", "DebertaV2ForMaskedLM", ("deberta.encoder.layer.2",), padded,
        config=BERT | {
            "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "legacy": False,
            "position_buckets": 4, "norm_rel_ebd": "layer_norm",
        },
        notes="all layers share the embedding of positions",
    ),
    hugging(
        "longformer", "LongformerForMaskedLM", ("longformer.encoder.layer.2",),
        with_global_tokens, config=BERT | {"attention_window": 4}, notes=TIED,
    ),
    hugging(
        "fnet", "FNetForMaskedLM", ("fnet.encoder.layer.2",), tokens,
        config=BERT | {"use_tpu_fourier_optimizations": False, "tpu_short_seq_length": 6},
        notes=TIED,
    ),
    hugging(
        "funnel", "FunnelForMaskedLM", ("funnel.encoder.blocks.1.0", "funnel.decoder"),
        partial(tokens, 8, padded=True),
        config={
            "vocab_size": VOCABULARY, "block_sizes": [2, 2], "num_decoder_layers": 2, "d_model": 16,
            "n_head": 4, "d_head": 4, "d_inner": 24, "hidden_dropout": 0.0,
            "attention_dropout": 0.0, "activation_dropout": 0.0, "pool_q_only": True,
        },
        notes=TIED + "; an early hidden state skips to the decoder; "
        "warns of `pooling_mult`, which nothing reads",
    ),
    hugging(
        "perceiver", "PerceiverForMaskedLM",
        ("perceiver.encoder.self_attends.1", "perceiver.decoder"),
        padded,
        config={
            "vocab_size": VOCABULARY, "num_latents": 4, "d_latents": 16, "d_model": 16,
            "num_blocks": 1, "num_self_attends_per_block": 2, "num_self_attention_heads": 4,
            "num_cross_attention_heads": 4, "attention_probs_dropout_prob": 0.0,
            "max_position_embeddings": 6,
        },
        notes=TIED,
    ),
]  # fmt: skip
