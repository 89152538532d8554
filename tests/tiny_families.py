"""Families of models, random and tiny: their settings, and models of them."""

import mlx.nn as nn
import tiny
from tiny import LATENT

WINDOW = 8
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "vocab_size": 64,
    "max_position_embeddings": 512, "rope_theta": 1000.0, "sliding_window": WINDOW,
    "query_pre_attn_scalar": 8, "sliding_window_pattern": 2,
}  # fmt: skip
BY_LAYER = {"layer_types": ["sliding_attention", "full_attention"] * 2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
MINISTRAL = {**BY_LAYER, "rope_parameters": {
    "rope_theta": 1000.0, "type": "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 16,
}}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
           "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}  # fmt: skip


def wrapped(kind, **settings):
    return {"text_config": {**SIZES, "model_type": kind, **settings}}


FAMILIES = {
    **{name: {} for name in ("qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text")},
    "llama": {"rope_scaling": {**LLAMA3, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    "qwen3_moe": EXPERTS,
    "gemma3": wrapped("gemma3_text"),
    "internlm2": {"head_dim": None},
    "bailing_moe": {
        **EXPERTS, "num_shared_experts": 1, "first_k_dense_replace": 1, "norm_head": False,
        "use_bias": False, "use_qkv_bias": False,
    },
    "spark2_5": {**BY_LAYER, "rope_parameters": {
        kind: {"rope_theta": 1000.0, "rope_type": "default"} for kind in BY_LAYER["layer_types"]
    }},
    "kimi_vl": wrapped("deepseek_v3", **LATENT),
    "kimi_k25": wrapped("deepseek_v3", **LATENT),
    "minimax": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16,
        "rotary_dim": 4,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, **BY_LAYER},
    "ministral3": MINISTRAL,
    "mistral3": wrapped("ministral3", **MINISTRAL),
    "smollm3": {"no_rope_layer_interval": 2},
    "granite": {
        "logits_scaling": 4.0, "attention_multiplier": 0.4, "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5, "attention_bias": False, "mlp_bias": False,
    },
    "minicpm": {"dim_model_base": 16, "scale_depth": 1.4, "scale_emb": 3},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5},
    "olmo3": BY_LAYER,
    "deepseek_v3": {**LATENT, "q_lora_rank": None, "rope_scaling": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0,
        "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
    }},
    "glm4_moe_lite": LATENT,
    "mistral4": {**LATENT, **MINISTRAL},
    "exaone4": {"sliding_window_pattern": "LG", "rope_scaling": None},
}  # fmt: skip
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
    "shared_expert_intermediate_size": 16, "partial_rotary_factor": 0.5,
}  # fmt: skip
CHAINS = {  # whose states follow no branches
    "qwen3_next": {**EXPERTS, **LINEAR},
    "qwen3_5": wrapped("qwen3_5_text", **LINEAR),
    "qwen3_5_moe": wrapped("qwen3_5_moe_text", **EXPERTS, **LINEAR),
    "gemma4": wrapped(
        "gemma4_text", **BY_LAYER, global_head_dim=8, vocab_size_per_layer_input=64,
        num_kv_shared_layers=2, hidden_size_per_layer_input=8, tie_word_embeddings=False,
        rope_parameters={
            kind: {"rope_theta": 1000.0, "rope_type": "default"} for kind in BY_LAYER["layer_types"]
        },
    ),
    "lfm2": {
        "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "block_dim": 32,
        "block_ff_dim": 48, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False, "full_attn_idxs": [1, 3],
    },
}  # fmt: skip


def make_base(name, tied=True, bits=None):
    settings = {"tie_word_embeddings": tied, **{**FAMILIES, **CHAINS}[name]}
    model = tiny.make_base(name, vocab=SIZES["vocab_size"], **{**SIZES, **settings})
    if tied and name == "gemma3_text":
        model.sanitize({})
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits, class_predicate=tiny._is_packable)
    return model
