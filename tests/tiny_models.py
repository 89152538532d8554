"""Tiny models of transformers on disk."""

import oracle
import torch
import transformers
from real import write_tokenizer

VOCAB = 64
CONTEXT = 48
COMMON = {
    "hidden_size": 32, "num_hidden_layers": oracle.LAYERS, "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT, "vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
OPT = {**COMMON, "ffn_dim": 48}
MLP = {**COMMON, "intermediate_size": 48}
BASES = {
    "opt": ("OPT", OPT),
    # Not the share of turned features that mlx-lm takes for granted.
    "phi": ("Phi", {**MLP, "rope_parameters": {"partial_rotary_factor": 0.25}}),
    # OpenLLaMA 3B's odd heads of 100 features.
    "open-llama": (
        "Llama",
        {**MLP, "hidden_size": 200, "num_attention_heads": 2, "rms_norm_eps": 1e-6},
    ),
    "llama": ("Llama", {**MLP, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {**MLP, "num_key_value_heads": 2, "head_dim": 8}),
    "stablelm": ("StableLm", {**MLP, "num_key_value_heads": 2, "use_qkv_bias": True}),
}


def make_base(name, *, seed=0, **changes):
    """A random model of transformers, no norm and no bias of which is as it begins."""
    family, sizes = BASES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**sizes, **changes})
    model_class = getattr(transformers, f"{family}ForCausalLM")
    model = model_class._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim > 1:
                parameter.copy_(parameter.shape[1] ** -0.5 * 1.2 * noise)
            else:
                parameter.add_(0.2 * noise)
    return model


def write_base(folder, name, **changes):
    base = make_base(name, **changes)
    base.save_pretrained(folder)
    write_tokenizer(folder)
    return base
