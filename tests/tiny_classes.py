"""Any class of mlx-lm on random weights: its settings, weights and folder."""

import json
from contextlib import nullcontext, suppress
from copy import deepcopy
from importlib import import_module

import mlx.core as mx
from mlx.utils import tree_flatten

from ssmlx.model.tree import chain_tree

VOCAB = 64
LAYERS = 4
PROMPT = [(7 * i * i + 3 * i) % 60 + 1 for i in range(21)]  # past every window
# The settings of all classes at once; each takes those that it has.
SIZES = {
    **dict.fromkeys(("vocab_size", "num_vocab", "vocab_size_per_layer_input"), VOCAB),
    "embedding_size": VOCAB,
    **dict.fromkeys(("hidden_size", "hidden_dim", "n_embd", "d_model", "model_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), LAYERS),
    "num_transformer_layers": LAYERS,
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads"), 2),
    "num_attention_groups": 2, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "hidden_size_per_head", "global_head_dim", "kv_channels"), 8),
    "swa_head_dim": 8, "swa_v_head_dim": 8, "rotary_dim": 4, "partial_rotary_factor": 0.5,
    # feed-forward layers
    **dict.fromkeys(("intermediate_size", "dense_intermediate_size", "ffn_hidden_size"), 48),
    "ff_intermediate_size": 48, "intermediate_size_mlp": 48, "mlp_hidden_size": 96, "n_inner": 64,
    "mlp_bias": False, "hidden_act": "silu", "gegelu_limit": 20.0,
    # experts
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("shared_intermediate_size", "expert_ffn_hidden_size", "moe_hidden_size"), 16),
    "moe_shared_expert_intermediate_size": 16, "share_expert_dim": 16,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "moe_num_experts": 4,
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_shared_expert"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "moe_layer_freq"), 1),
    "first_k_dense_replace": 1, "num_dense_layers": 1, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "norm_topk_prob": True, "routed_scaling_factor": 1.5,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "use_expert_bias": True,
    "zero_expert_num": 2, "zero_expert_type": "identity", "interleave_moe_layer_step": 2,
    "expert_layer_offset": 1, "expert_layer_period": 2, "use_mixed_mlp_moe": True,
    # latent attention, and what picks the tokens that it reads
    "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "attention_method": "MLA", "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8,
    # norms, rotary embeddings, lengths, windows
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"), 1e-5),
    "layernorm_epsilon": 1e-5, "norm_epsilon": 1e-5, "post_norm_eps": 1e-5, "post_norm": True,
    "rope_theta": 1000.0, "rope_local_base_freq": 100.0, "swa_rope_theta": 100.0,
    "rotary_emb_base": 1000, "rotary_pct": 0.5, "rope_scaling": None,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "model_max_length"), 512),
    "block_size": 512,
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size"), 8),
    "attention_window_size": 8, "attention_chunk_size": 8, "conv_window": 2,
    "attention_bias": False, "use_qkv_bias": False, "use_qk_norm": True, "qk_norm": True,
    "tie_word_embeddings": False, "use_cla": True, "cla_share_factor": 2,
    # multipliers and caps
    "attention_multiplier": 0.4, "embedding_multiplier": 3.0, "logits_scaling": 4.0,
    "residual_multiplier": 0.5, "scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 16,
    "output_multiplier": 0.2, "final_logit_softcapping": 20.0, "logits_soft_cap": 20.0,
    # recurrent layers and convolutions
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 16),
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads"), 4), "mamba_head_dim": 8,
    "mamba_d_head": 8, "mamba_d_ssm": 32, "mamba_expand": 2, "mamba_d_conv": 4,
    "mamba_n_groups": 1, "n_groups": 1, "conv_kernel": 3, "conv1d_width": 4, "use_bias": False,
    "use_conv_bias": True, "mamba_proj_bias": False, "mamba_conv_bias": False,
    "time_step_limit": [0.01, 10.0], "time_step_rank": "auto", "layer_group_size": 2,
    "group_norm_size": 1, "attn_layer_offset": 1, "attn_layer_period": 2,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True,
    "full_attention_interval": 2, "conv_L_cache": 3, "conv_bias": False, "block_dim": 32,
    "block_ff_dim": 48, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False, "a_low_rank_dim": 8, "v_low_rank_dim": 8,
    "gate_low_rank_dim": 8, "decay_low_rank_dim": 8,
}  # fmt: skip
WINDOWED = ["sliding_attention", "full_attention"] * 2
ROPES_BY_LAYER = {
    "full_attention": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
KDA = {"num_heads": 4, "head_dim": 8, "kda_layers": [1, 3], "full_attn_layers": [2, 4],
       "short_conv_kernel_size": 4}  # fmt: skip


def wrapped(kind, **settings):
    """The settings of a model that also sees; what reads is of a class of its own."""
    return {"text_config": {**SIZES, "model_type": kind, **settings}}


GEMMA_3N = {
    "layer_types": WINDOWED, "activation_sparsity_pattern": [0.5] * LAYERS, "laurel_rank": 8,
    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "altup_num_inputs": 2,
    "altup_coef_clip": 1.0, "altup_correct_scale": True, "altup_active_idx": 0,
}  # fmt: skip
GEMMA_4 = {
    "layer_types": WINDOWED, "rope_parameters": ROPES_BY_LAYER, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
}  # fmt: skip
LFM_2 = {"full_attn_idxs": [1, 3], "layer_types": ["conv", "full_attention"] * 2}
MUSE = {
    "layer_types": WINDOWED, "layer_rope_theta": [100.0, 0.0] * 2, "num_shared_experts": 0,
    "rope_parameters": {"rope_theta": 100.0},
}  # fmt: skip
YARN = {
    "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0,
    "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
MINISTRAL = {
    "layer_types": WINDOWED,
    "rope_parameters": {**YARN, "rope_theta": 1000.0, "llama_4_scaling_beta": 0.1},
}
OWN = {
    "afm7": {"num_kv_reuse_layers": 2},
    "afmoe": {"layer_types": WINDOWED},
    "baichuan_m1": {"sliding_window_layers": [0, 2]},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1000.0},
    },
    "deepseek_v2": {"rope_scaling": YARN},
    "deepseek_v41": {"o_groups": 2, "o_lora_rank": 8, "hc_mult": 2, "index_head_dim": 16},
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"layer_types": WINDOWED, "is_moe_layer": [False, True] * 2},
    "gear": {"layer_types": ["conv_mixer", "sliding_attention", "conv_mixer", "full_attention"]},
    "gemma3": wrapped("gemma3_text", sliding_window_pattern=2),
    "gemma3_text": {"sliding_window_pattern": 2},
    "gemma3n": wrapped("gemma3n", **GEMMA_3N),
    "gemma4": wrapped("gemma4_text", **GEMMA_4),
    "gemma4_text": GEMMA_4,
    "glm_moe_dsa": {"rope_parameters": {"rope_theta": 1000.0}},
    "gpt_oss": {"layer_types": WINDOWED},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan": {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}},
    "hunyuan_v1_dense": {
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}, "head_dim": 16,
    },
    "internlm3": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "head_dim": 16},
    "kimi_k25": wrapped("deepseek_v3"),
    "kimi_k3": wrapped("kimi_linear", linear_attn_config=KDA, hidden_act="situ"),
    "kimi_linear": {"linear_attn_config": KDA},
    "kimi_vl": wrapped("deepseek_v3"),
    "laguna": {"layer_types": WINDOWED, "rope_parameters": ROPES_BY_LAYER},
    "lfm2": LFM_2,
    "lfm2-vl": wrapped("lfm2", **LFM_2),
    "lfm2_moe": LFM_2,
    "llama": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "head_dim": 16},
    "lille-130m": {"n_embd": 128},
    "llama4": wrapped("llama4", num_experts_per_tok=1),
    "llama4_text": {"no_rope_layers": [1, 0] * 2},
    "mellum": {"layer_types": WINDOWED, "rope_parameters": ROPES_BY_LAYER},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1] * 2, "moe_layer_freq": [0, 1] * 2,
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
    },
    "minicpm3": {"rope_scaling": {"original_max_position_embeddings": 16}},
    "minimax_m3_vl": wrapped("minimax_m3", moe_layer_freq=[0, 1] * 2),
    "ministral3": MINISTRAL,
    "mistral3": wrapped("ministral3", **MINISTRAL),
    "mistral4": MINISTRAL,
    "muse_glimmer": {"layer_types": WINDOWED},
    "muse_spark": wrapped("muse_spark", **MUSE),
    "nemotron-nas": {
        "block_configs": [{"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}}] * LAYERS
    },
    "nemotron_h": {"hybrid_override_pattern": ["M", "*", "-", "E"]},
    "olmo3": {"layer_types": WINDOWED},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "openelm": {
        "num_query_heads": [4] * LAYERS, "num_kv_heads": [2] * LAYERS, "ffn_dim_divisor": 8,
        "ffn_multipliers": [1.5] * LAYERS,
    },
    # It writes to tokens that it takes to be there.
    "phi3small": {"dense_attention_every_n_layers": 2, "vocab_size": 100352},
    "pixtral": wrapped("llama"),
    "plamo": {"n_shared_head": 4},
    "plamo2": {"full_attention_idx": [1]},
    "qwen2_vl": wrapped("qwen2"),
    "qwen3_vl": wrapped("qwen3"),
    "qwen3_vl_moe": wrapped("qwen3_moe"),
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "spark2_5": {"rope_parameters": ROPES_BY_LAYER, "hidden_act": "gelu"},
    "step3p5": {"layer_types": WINDOWED},
}  # fmt: skip
# Classes that mlx-lm itself does not run here, and what it says.
NEEDS_METAL = () if mx.metal.is_available() else ("bitnet", "muse_spark")
NOT_HERE = {
    **dict.fromkeys(NEEDS_METAL, "No Metal back-end"),
    "olmo": "hf_olmo",  # a package of its own
    "prism_hadamard_qwen35": "Hadamard pack",  # its weights are packed by another program
}


def random_weights(model):
    """Weights that no one token wins with: matrices around 0, vectors around 1."""
    weights = {}
    for number, (path, old) in enumerate(tree_flatten(model.parameters())):
        noise = 0.25 * mx.random.normal(old.shape, key=mx.random.key(number))
        new = noise if old.ndim > 1 or path.endswith("bias") else 1 + noise
        weights[path] = new if mx.issubdtype(old.dtype, mx.floating) else old
    return weights


def write_model(name, folder):
    """A folder with random weights of a class; without any where mlx-lm does not make it here."""
    folder.mkdir(exist_ok=True)
    config = {**SIZES, "model_type": name, **OWN.get(name, {})}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {"weight": mx.zeros(1)}
    with suppress(SystemExit, ValueError) if name in NOT_HERE else nullcontext():
        module = import_module(f"mlx_lm.models.{name}")
        weights = random_weights(module.Model(module.ModelArgs.from_dict(deepcopy(config))))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


DRAFTED = 4


def chain_of(text, root, right):
    """A chain behind `text[root]`, of which so many tokens are right."""
    known = text[root : root + 1 + DRAFTED]
    wrong = [(token + 1) % VOCAB for token in known[right + 1 :]]
    return chain_tree(mx.array([*known[: right + 1], *wrong], mx.int32))
