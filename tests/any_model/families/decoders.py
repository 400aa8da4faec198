"""Lists decoders of text, which predict each token from those before it."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.any_model.family import VOCABULARY, Family, own_loss, tokens
from tests.any_model.hugging import hugging

__all__ = ["DECODERS"]

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "use_cache": False,
}
LLAMA = SIZES | {
    "intermediate_size": 24,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
TIED = "the head has the embedding's weight"


def labelled() -> dict[str, Any]:
    batch = tokens()
    return {**batch, "labels": batch["input_ids"]}


DECODERS: list[Family] = [
    hugging(
        "llama", "LlamaForCausalLM", ("model.layers.1", "model.layers.3"),
        partial(tokens, padded=True), config=LLAMA, seldom=False,
    ),
    hugging(
        "llama, tied, with labels", "LlamaForCausalLM", ("model.layers.2", "model.norm"), labelled,
        config=LLAMA | {"tie_word_embeddings": True}, loss=own_loss, seldom=False, notes=TIED,
    ),
    hugging(
        "qwen3", "Qwen3ForCausalLM", ("model.layers.2",), tokens,
        config=LLAMA | {"tie_word_embeddings": True}, notes=TIED,
    ),
    hugging(
        "gemma2", "Gemma2ForCausalLM", ("model.layers.1", "model.layers.3"), tokens,
        config=LLAMA | {"sliding_window": 3}, notes=TIED,
    ),
    hugging(
        "gemma3", "Gemma3ForCausalLM", ("model.layers.2", "lm_head"), tokens,
        config=LLAMA | {
            "sliding_window": 3, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        },
        notes=TIED + "; two kinds of rotary tables",
    ),
    hugging("phi3", "Phi3ForCausalLM", ("model.layers.2",), tokens, config=LLAMA),
    hugging(
        "gpt2", "GPT2LMHeadModel", ("transformer.h.1", "transformer.h.2"),
        partial(tokens, padded=True), notes=TIED, seldom=False,
        config={
            "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 4, "n_head": 4, "n_positions": 16,
            "use_cache": False, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
        },
    ),
    hugging(
        "gpt-neox", "GPTNeoXForCausalLM", ("gpt_neox.layers.2",), tokens,
        config=SIZES | {"intermediate_size": 24, "max_position_embeddings": 32},
    ),
    hugging(
        "opt", "OPTForCausalLM", ("model.decoder.layers.1", "model.decoder.layers.2"), tokens,
        notes=TIED,
        config=SIZES | {
            "ffn_dim": 24, "max_position_embeddings": 32, "dropout": 0.0, "word_embed_proj_dim": 16,
        },
    ),
    hugging(
        "bloom", "BloomForCausalLM", ("transformer.h.2",), tokens, notes=TIED,
        config={
            "vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 4, "n_head": 4,
            "hidden_dropout": 0.0, "attention_dropout": 0.0, "use_cache": False,
        },
    ),
    hugging(
        "xlnet", "XLNetLMHeadModel", ("transformer.layer.1", "transformer.layer.3"), tokens,
        notes=TIED + "; rows are dimension 1 inside",
        config={
            "vocab_size": VOCABULARY, "d_model": 16, "n_layer": 4, "n_head": 4, "d_inner": 24,
            "dropout": 0.0, "use_mems_eval": False, "use_mems_train": False,
        },
    ),
]  # fmt: skip
