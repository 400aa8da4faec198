"""Lists mixtures of experts, and models with recurrent layers."""

from __future__ import annotations

import torch

from tests.any_model.families.decoders import LLAMA, TIED, labelled
from tests.any_model.family import VOCABULARY, Family, own_loss, tokens
from tests.any_model.hugging import hugging

__all__ = ["EXPERTS_AND_STATE_SPACE"]

EXPERTS = LLAMA | {"num_local_experts": 3, "num_experts_per_tok": 2}
BALANCED = "the auxiliary loss balances the experts' load over the micro-batch"
MAMBA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "state_size": 4,
    "num_hidden_layers": 4,
    "use_cache": False,
}

EXPERTS_AND_STATE_SPACE: list[Family] = [
    hugging(
        "mixtral", "MixtralForCausalLM", ("model.layers.1", "model.layers.3"), tokens,
        config=EXPERTS, dtype=torch.float32,
    ),
    hugging(
        "mixtral with auxiliary loss", "MixtralForCausalLM", ("model.layers.2",), labelled,
        config=EXPERTS | {"output_router_logits": True, "router_aux_loss_coef": 0.1},
        loss=own_loss, mixes_rows=BALANCED, dtype=torch.float32, seldom=False,
    ),
    hugging(
        "qwen2-moe", "Qwen2MoeForCausalLM", ("model.layers.2",), tokens,
        config=LLAMA | {
            "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12, "num_experts": 3,
            "num_experts_per_tok": 2, "decoder_sparse_step": 1, "experts_implementation": "eager",
        },
    ),
    hugging(
        "mamba", "MambaForCausalLM", ("backbone.layers.1", "backbone.layers.3"), tokens,
        config=MAMBA | {"conv_kernel": 3, "expand": 2, "time_step_rank": 2}, notes=TIED,
        seldom=False,
    ),
    hugging(
        "mamba2", "Mamba2ForCausalLM", ("backbone.layers.2",), tokens,
        config=MAMBA | {
            "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4, "expand": 2,
            "conv_kernel": 3,
        },
    ),
    hugging(
        "rwkv", "RwkvForCausalLM", ("rwkv.blocks.2",), tokens,
        config={
            "vocab_size": VOCABULARY, "hidden_size": 16, "attention_hidden_size": 16,
            "intermediate_size": 24, "num_hidden_layers": 4, "context_length": 16,
            "use_cache": False,
        },
    ),
    hugging(
        "jamba", "JambaForCausalLM", ("model.layers.1", "model.layers.2"), tokens,
        config=LLAMA | {
            "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2,
            "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
            "mamba_d_state": 4, "mamba_dt_rank": 2, "experts_implementation": "eager",
        },
        notes="attention, state space and experts by turns",
    ),
    hugging(
        "recurrentgemma", "RecurrentGemmaForCausalLM", ("model.layers.2",), tokens,
        config={
            "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 4,
            "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 4, "lru_width": 16, "attention_window_size": 4, "use_cache": False,
            "attention_dropout": 0.0,
        },
        notes=TIED + "; warns of `recurrent_states`, which layers keep for themselves",
    ),
]  # fmt: skip
