"""Turning a Llama-architecture GGUF file into a folder in mlx-lm's layout, without PyTorch.

Only the files of `names.ALIASES` are read, which are pinned by their checksums: one model of
SmolLM2's family, its weights quantised as Q4_1. Nothing else was tried.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .tensors import write_tensors

_Tensors = dict[str, mx.array]
_Metadata = dict[str, Any]

_GROUP_SIZE = 32
_MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3  # of tokenizer.ggml.token_type: tokens that are never made by merges


def convert_trusted_gguf(gguf_path: Path, out_dir: Path) -> None:
    """Convert the file. Weights keep their bits; only that they are finite is checked."""
    loaded = mx.load(str(gguf_path), format="gguf", return_metadata=True)
    tensors, values = cast("tuple[_Tensors, _Metadata]", loaded)
    meta = {k: v.tolist() if isinstance(v, mx.array) else v for k, v in values.items()}
    config = _tied_llama_config(meta)
    weights = _to_hugging_face_tensors(tensors, config)
    config |= _config_of_tensors(weights)
    tokenizer = _build_tokenizer(meta)
    tokenizer_config = _tokenizer_config(meta)
    out_dir.mkdir(parents=True, exist_ok=True)
    write_tensors(out_dir / "model.safetensors", weights, {"format": "mlx"})
    tokenizer.save(str(out_dir / "tokenizer.json"))
    for name, settings in (("tokenizer_config", tokenizer_config), ("config", config)):
        text = json.dumps(settings, indent=2, ensure_ascii=False)
        (out_dir / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def _tied_llama_config(meta: _Metadata) -> dict[str, Any]:
    """The config.json of a Llama model with tied embeddings; vocabulary and quantisation are added
    later."""
    width = meta["llama.embedding_length"]
    heads = meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_size": width,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": width // heads,
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": _shortest_decimal(meta["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest_decimal(meta["llama.rope.freq_base"]),
        "tie_word_embeddings": True,
        **{
            f"{name}_token_id": meta[f"tokenizer.ggml.{key}_token_id"]
            for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        },
    }


def _shortest_decimal(value: float) -> float:
    """The shortest decimal of the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _to_hugging_face_tensors(
    tensors: _Tensors,  # by their names in the GGUF file
    config: dict[str, Any],
) -> _Tensors:
    """Tensors by Hugging Face's names, with its order of rows; norms become float16."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    renamed = {}
    for name, tensor in tensors.items():
        *block, kind, part = name.split(".")
        if kind in heads:
            tensor = _unpermute(tensor, heads[kind])
        module = f"model.layers.{block[1]}.{_LAYER_NAMES[kind]}" if block else _MODEL_NAMES[kind]
        renamed[f"{module}.{part}"] = tensor.astype(mx.float16) if tensor.ndim == 1 else tensor
    return renamed


def _unpermute(rows: mx.array, heads: int) -> mx.array:
    """Rows [heads * head_dim, ...] with each head's rotary pairs half a head apart."""
    # llama.cpp stores the two values that one angle rotates side by side; Hugging Face, and so
    # mlx-lm, half a head apart. Scales and biases of quantised weights go by rows too.
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _config_of_tensors(
    weights: _Tensors,  # by Hugging Face's names
) -> dict[str, Any]:
    """Entries of config.json: "vocab_size", and "quantization" with an entry for each unusual
    module."""
    bits = {}
    for name, scales in weights.items():
        module, _, part = name.rpartition(".")
        if part == "scales":
            columns = scales.shape[-1] * _GROUP_SIZE
            bits[module] = weights[f"{module}.weight"].shape[-1] * 32 // columns
    config: dict[str, Any] = {"vocab_size": weights["model.embed_tokens.weight"].shape[0]}
    if not bits:
        return config
    usual = Counter(bits.values()).most_common(1)[0][0]
    others = {
        module: {"group_size": _GROUP_SIZE, "bits": number}
        for module, number in sorted(bits.items())
        if number != usual
    }
    return config | {"quantization": {"group_size": _GROUP_SIZE, "bits": usual, **others}}


def _build_tokenizer(meta: _Metadata) -> Tokenizer:
    """A byte-level BPE tokenizer that splits numbers into digits, as SmolLM's does."""
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, meta["tokenizer.ggml.token_type"], strict=True)
    control = [token for token, kind in kinds if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    return tokenizer


def _tokenizer_config(meta: _Metadata) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    names = (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        **{f"{ours}_token": tokens[meta[f"tokenizer.ggml.{key}_token_id"]] for ours, key in names},
        "chat_template": meta["tokenizer.chat_template"],
    }
