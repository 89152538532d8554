"""Turning a Llama-architecture GGUF file into a folder in mlx-lm's layout, without PyTorch.

It reads the files of `names.ALIASES`, which are pinned by their checksums: what another file might
have instead is refused where it would be read wrongly, and not looked into.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ..errors import InputError, first_line

_Tensors = dict[str, mx.array]
_Metadata = dict[str, Any]

_GROUP_SIZE = 32
_MODEL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
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
_READ = {
    "general.architecture": ("llama",),
    # F32, F16, Q4_0, Q4_1, Q8_0: MLX rounds all others to float16.
    "general.file_type": (0, 1, 2, 3, 7),
    "llama.rope.scaling.type": (None, "none"),
    "tokenizer.ggml.model": ("gpt2",),
    "tokenizer.ggml.pre": ("smollm",),
}
_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type


def convert_gguf(gguf_path: Path, out_dir: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer of a GGUF file into `out_dir`.

    Weights keep the bits that the file stores, also the packed ones (Q4_0, Q4_1, Q8_0); only
    names change, and the rows of the query and key projections go back to Hugging Face's order.
    """
    tensors, meta = _read(gguf_path)
    try:
        config = _model_config(meta)
        weights = _settle_vectors(_rename(tensors, config))
        config |= _weights_config(weights)
        tokenizer, tokenizer_config = _tokenizer(meta), _tokenizer_config(meta)
    except KeyError as error:
        raise _refused(gguf_path, f"lacks or does not expect {error}") from error
    out_dir.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(out_dir / "model.safetensors"), weights, {"format": "mlx"})
    tokenizer.save(str(out_dir / "tokenizer.json"))
    for name, values in (("tokenizer_config", tokenizer_config), ("config", config)):
        text = json.dumps(values, indent=2, ensure_ascii=False)
        (out_dir / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def _read(path: Path) -> tuple[_Tensors, _Metadata]:
    try:
        tensors, values = cast(
            "tuple[_Tensors, _Metadata]",
            mx.load(str(path), format="gguf", return_metadata=True),
        )
        mx.eval(tensors)
    except (RuntimeError, ValueError) as error:
        raise _refused(path, f"cannot be read ({first_line(error)})") from error
    meta = {k: v.tolist() if isinstance(v, mx.array) else v for k, v in values.items()}
    for key, known in _READ.items():
        if meta.get(key) not in known:
            raise _refused(path, f"has {meta.get(key)!r} as {key}, not one of {known}")
    return tensors, meta


def _refused(path: Path, what: str) -> InputError:
    return InputError(
        f"{path.name} {what}",
        expected="a whole Llama GGUF file of a kind that this reader knows",
        do="download it again, or use a model folder",
    )


def _model_config(meta: _Metadata) -> dict[str, Any]:
    width, heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
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
        "num_key_value_heads": meta.get("llama.attention.head_count_kv", heads),
        "head_dim": meta.get("llama.attention.key_length", width // heads),
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": _shortest(meta["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(meta.get("llama.rope.freq_base", 10000.0)),
        **{
            f"{name}_token_id": meta[f"tokenizer.ggml.{key}_token_id"]
            for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
            if f"tokenizer.ggml.{key}_token_id" in meta
        },
    }


def _shortest(value: float) -> float:
    """The shortest decimal of the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rename(tensors: _Tensors, config: dict[str, Any]) -> _Tensors:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    renamed = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|scales|biases)", name)
        layer, kind, part = match.groups() if match else (None, name, "")
        if kind in heads:
            tensor = _unpermute(tensor, heads[kind])
        if layer is None:
            renamed[f"{_MODEL_NAMES[kind]}.{part}"] = tensor
        else:
            renamed[f"model.layers.{layer}.{_LAYER_NAMES[kind]}.{part}"] = tensor
    return renamed


def _unpermute(rows: mx.array, heads: int) -> mx.array:
    """Rows [heads * head_dim, ...] with each head's rotary pairs split into halves.

    llama.cpp puts the two values that one angle rotates side by side; Hugging Face, and mlx-lm
    with it, puts them half a head apart. Scales and biases go by rows too.
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _settle_vectors(weights: _Tensors) -> _Tensors:
    """Norms in float16 where the matrices are and no value changes by it.

    Norms that float16 cannot hold stay float32, all of them, and make the activations float32
    from the first norm on: slower, and never mixed from layer to layer.
    """
    embedding = weights.get("model.embed_tokens.scales", weights["model.embed_tokens.weight"])
    vectors = {name: tensor for name, tensor in weights.items() if tensor.ndim == 1}
    halves = {name: tensor.astype(mx.float16) for name, tensor in vectors.items()}
    exact = all(mx.array_equal(halves[name], vectors[name]).item() for name in vectors)
    return weights | halves if exact and embedding.dtype == mx.float16 else weights


def _weights_config(weights: _Tensors) -> dict[str, Any]:
    """The settings that only the tensors tell: vocabulary, tied head, bits of each layer."""
    config: dict[str, Any] = {
        "vocab_size": weights["model.embed_tokens.weight"].shape[0],
        "tie_word_embeddings": "lm_head.weight" not in weights,
    }
    bits = {}
    for name, scales in weights.items():
        module, _, part = name.rpartition(".")
        if part == "scales":
            columns = scales.shape[-1] * _GROUP_SIZE
            bits[module] = weights[f"{module}.weight"].shape[-1] * 32 // columns
    if not bits:
        return config
    usual = Counter(bits.values()).most_common(1)[0][0]
    quantization: dict[str, Any] = {"group_size": _GROUP_SIZE, "bits": usual}
    for module, number in sorted(bits.items()):
        if number != usual:
            quantization[module] = {"group_size": _GROUP_SIZE, "bits": number}
    return config | {"quantization": quantization}


def _tokenizer(meta: _Metadata) -> Tokenizer:
    """The byte-level BPE tokenizer whose parts the metadata holds, with SmolLM's rules."""
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
    # Tokens that stand for themselves in a text, and never merge.
    kinds = list(zip(tokens, meta["tokenizer.ggml.token_type"], strict=True))
    control = [token for token, kind in kinds if kind == _CONTROL]
    own = [token for token, kind in kinds if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in own])
    return tokenizer


def _tokenizer_config(meta: _Metadata) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = meta.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            config[f"{name}_token"] = tokens[index]
    template = meta.get("tokenizer.chat_template")
    return config if template is None else config | {"chat_template": template}
