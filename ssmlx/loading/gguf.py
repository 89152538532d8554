"""Turning a Llama-architecture GGUF file into a folder in mlx-lm's layout, without PyTorch."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, TypeVar, cast

import mlx.core as mx
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from ..errors import InputError, first_line

_T = TypeVar("_T")
_Tensors = dict[str, mx.array]

_GROUP_SIZE = 32
_PARTS = ("weight", "scales", "biases")
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
# general.file_type of the kinds that MLX reads without loss. It rounds all others to float16.
_PLAIN_FILES = {0: "F32", 1: "F16"}
_PACKED_FILES = {2: "Q4_0", 3: "Q4_1", 7: "Q8_0"}
_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type


def convert_gguf(gguf_path: Path, out_dir: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer of a GGUF file into `out_dir`.

    Weights keep the bits that the file stores, also the packed ones (Q4_0, Q4_1, Q8_0); only
    names change, and the rows of the query and key projections go back to Hugging Face's order.

    Raises:
        InputError: the file is missing, truncated or no GGUF file; its architecture,
            pre-tokenizer or a kind of its tensors is not known; or metadata is missing.
    """
    tensors, meta = _read(gguf_path)
    meta.check_kinds()
    config = _model_config(meta)
    tokenizer, tokenizer_config = _tokenizer(meta), _tokenizer_config(meta)
    weights = _settle_vectors(_rename(tensors, config, meta))
    config |= _weights_config(weights, meta)
    out_dir.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(out_dir / "model.safetensors"), weights, {"format": "mlx"})
    tokenizer.save(str(out_dir / "tokenizer.json"))
    _write_json(out_dir / "tokenizer_config.json", tokenizer_config)
    _write_json(out_dir / "config.json", config)


class _Metadata:
    """The key-value part of a GGUF file, with typed look-ups."""

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self._values, self.path = values, path

    def get(self, key: str, kind: type[_T]) -> _T | None:
        """The value of `key`, or None where the file has no such key."""
        value = self._values.get(key)
        if value is None:
            return None
        if isinstance(value, mx.array):
            value = value.tolist()
        if not isinstance(value, kind):
            raise self.wrong(
                f"holds a {type(value).__name__} as {key}", expected=f"a {kind.__name__}"
            )
        return value

    def need(self, key: str, kind: type[_T]) -> _T:
        """The value of `key`, which must be there."""
        value = self.get(key, kind)
        if value is None:
            raise self.wrong(f"lacks the metadata {key}", expected=f"a {kind.__name__} there")
        return value

    def wrong(self, what: str, *, expected: str) -> InputError:
        return InputError(
            f"{self.path.name} {what}",
            expected=expected,
            do="use a Llama GGUF file of a kind that this reader knows, or a model folder",
        )

    def check_kinds(self) -> None:
        """Refuse architectures, position scalings and weights that would be read wrongly."""
        architecture = self.need("general.architecture", str)
        if architecture != "llama":
            raise self.wrong(f"has the architecture {architecture!r}", expected="'llama'")
        scaling = self.get("llama.rope.scaling.type", str)
        if scaling not in (None, "none"):
            raise self.wrong(f"has {scaling!r} scaling of positions", expected="no scaling")
        kinds = _PLAIN_FILES | _PACKED_FILES
        if self.file_type is not None and self.file_type not in kinds:
            raise self.wrong(
                f"has weights of file type {self.file_type}", expected=", ".join(kinds.values())
            )

    @property
    def file_type(self) -> int | None:
        """llama.cpp's number for the kind of most weights, where the file tells it."""
        return self.get("general.file_type", int)


def _read(path: Path) -> tuple[_Tensors, _Metadata]:
    if not path.is_file():
        raise InputError(f"{path} does not exist", expected="a GGUF file", do="check the path")
    try:
        loaded, values = cast(
            "tuple[_Tensors, dict[str, Any]]",
            mx.load(str(path), format="gguf", return_metadata=True),
        )
        mx.eval(loaded)
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"{path} cannot be read ({first_line(error)}; {path.stat().st_size} bytes)",
            expected="a whole GGUF file",
            do="download it again, it may be truncated",
        ) from error
    return loaded, _Metadata(values, path)


def _model_config(meta: _Metadata) -> dict[str, Any]:
    """Every setting of mlx-lm's Llama that stands in the metadata."""
    width, heads = _size(meta, "embedding_length"), _size(meta, "attention.head_count")
    head_dim = meta.get("llama.attention.key_length", int) or width // heads
    rotary = meta.get("llama.rope.dimension_count", int) or head_dim
    if rotary != head_dim:
        raise meta.wrong(f"rotates {rotary} of {head_dim} values a head", expected="all of them")
    theta = meta.get("llama.rope.freq_base", float)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_size": width,
        "intermediate_size": _size(meta, "feed_forward_length"),
        "num_hidden_layers": _size(meta, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("llama.attention.head_count_kv", int) or heads,
        "head_dim": head_dim,
        "max_position_embeddings": _size(meta, "context_length"),
        "rms_norm_eps": _shortest(meta.need("llama.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": 10000.0 if theta is None else _shortest(theta),
        **_special_ids(meta),
    }


def _size(meta: _Metadata, key: str) -> int:
    value = meta.need(f"llama.{key}", int)
    if value < 1:
        raise meta.wrong(f"has llama.{key} of {value}", expected="1 or more")
    return value


def _shortest(value: float) -> float:
    """The shortest decimal of the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _special_ids(meta: _Metadata) -> dict[str, int]:
    ids = {
        "bos_token_id": meta.need("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": meta.need("tokenizer.ggml.eos_token_id", int),
    }
    padding = meta.get("tokenizer.ggml.padding_token_id", int)
    return ids if padding is None else ids | {"pad_token_id": padding}


def _rename(tensors: _Tensors, config: dict[str, Any], meta: _Metadata) -> _Tensors:
    """Hugging Face's names and row order; every tensor is known and none is missing."""
    wanted = {f"{name}.weight" for name in _MODEL_NAMES if name != "output"}
    for layer in range(config["num_hidden_layers"]):
        wanted |= {f"blk.{layer}.{name}.weight" for name in _LAYER_NAMES}
    if missing := sorted(wanted - tensors.keys()):
        raise meta.wrong(f"lacks {len(missing)} tensors, {missing[0]} first", expected="all")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    renamed = {}
    for name, tensor in tensors.items():
        layer_name, part = _split_name(name, config["num_hidden_layers"], meta)
        if part == "weight":
            _check_exact(name, tensor, meta)
        kind = name.split(".")[-2]
        if kind in heads:
            tensor = _unpermute(tensor, heads[kind], config["head_dim"], meta)
        renamed[f"{layer_name}.{part}"] = tensor
    return renamed


def _split_name(name: str, num_layers: int, meta: _Metadata) -> tuple[str, str]:
    """Hugging Face's module and the part of it that a GGUF tensor name stands for."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(\w+)", name)
    layer, kind, part = match.groups() if match else (None, name, "")
    if layer is None and kind in _MODEL_NAMES and part in _PARTS:
        return _MODEL_NAMES[kind], part
    if layer is not None and int(layer) < num_layers and kind in _LAYER_NAMES and part in _PARTS:
        return f"model.layers.{layer}.{_LAYER_NAMES[kind]}", part
    raise meta.wrong(f"has a tensor {name}", expected="those of a plain Llama decoder")


def _check_exact(name: str, tensor: mx.array, meta: _Metadata) -> None:
    # MLX unpacks every kind that it has no layout for to float16, rounding without a word.
    if meta.file_type in _PACKED_FILES and tensor.ndim > 1 and tensor.dtype == mx.float16:
        raise meta.wrong(
            f"has {name} in a kind that MLX would round to float16",
            expected=", ".join(_PACKED_FILES.values()),
        )


def _unpermute(rows: mx.array, heads: int, head_dim: int, meta: _Metadata) -> mx.array:
    """Rows [heads * head_dim, ...] with each head's rotary pairs split into halves.

    llama.cpp puts the two values that one angle rotates side by side; Hugging Face, and mlx-lm
    with it, puts them half a head apart. Scales and biases go by rows too.
    """
    if rows.shape[0] != heads * head_dim:
        raise meta.wrong(
            f"has {rows.shape[0]} query or key rows", expected=f"{heads} heads of {head_dim}"
        )
    pairs = rows.reshape(heads, head_dim // 2, 2, *rows.shape[1:])
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


def _weights_config(weights: _Tensors, meta: _Metadata) -> dict[str, Any]:
    """The settings that only the tensors tell: vocabulary, tied head, bits of each layer."""
    embedding = weights["model.embed_tokens.weight"]
    config: dict[str, Any] = {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "lm_head.weight" not in weights,
    }
    num_tokens = len(meta.need("tokenizer.ggml.tokens", list))
    if num_tokens > embedding.shape[0]:
        raise meta.wrong(
            f"has {num_tokens} tokens and {embedding.shape[0]} rows of embeddings",
            expected="a row for each token",
        )
    bits = _packed_bits(weights)
    if not bits:
        return config
    usual = Counter(bits.values()).most_common(1)[0][0]
    quantization: dict[str, Any] = {"group_size": _GROUP_SIZE, "bits": usual}
    for module, number in sorted(bits.items()):
        if number != usual:
            quantization[module] = {"group_size": _GROUP_SIZE, "bits": number}
    return config | {"quantization": quantization}


def _packed_bits(weights: _Tensors) -> dict[str, int]:
    """Bits of a value, for each module that is packed."""
    bits = {}
    for name, scales in weights.items():
        module, _, part = name.rpartition(".")
        if part == "scales":
            columns = scales.shape[-1] * _GROUP_SIZE
            bits[module] = weights[f"{module}.weight"].shape[-1] * 32 // columns
    return bits


def _smollm_pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


_PRE_TOKENIZERS = {"smollm": _smollm_pre_tokenizer}


def _tokenizer(meta: _Metadata) -> Tokenizer:
    """The byte-level BPE tokenizer whose parts the metadata holds."""
    kind, pre = meta.need("tokenizer.ggml.model", str), meta.need("tokenizer.ggml.pre", str)
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise meta.wrong(
            f"has the tokenizer {kind!r} with the pre-tokenizer {pre!r}",
            expected="'gpt2' with one of " + ", ".join(map(repr, _PRE_TOKENIZERS)),
        )
    tokens = meta.need("tokenizer.ggml.tokens", list)
    merges = [tuple(merge.split(" ", 1)) for merge in meta.need("tokenizer.ggml.merges", list)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, meta)
    if meta.get("tokenizer.ggml.add_bos_token", bool):
        bos = _special_ids(meta)["bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], meta: _Metadata) -> None:
    """Mark the tokens that stand for themselves in a text, and never merge."""
    kinds = meta.need("tokenizer.ggml.token_type", list)
    control = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL]
    own = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in own])


def _tokenizer_config(meta: _Metadata) -> dict[str, Any]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    tokens = meta.need("tokenizer.ggml.tokens", list)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": _size(meta, "context_length"),
    }
    for key, name in keys.items():
        index = meta.get(f"tokenizer.ggml.{name}_token_id", int)
        if index is not None and not 0 <= index < len(tokens):
            raise meta.wrong(f"has {key} {index}", expected=f"one of its {len(tokens)} tokens")
        if index is not None:
            config[key] = tokens[index]
    template = meta.get("tokenizer.chat_template", str)
    return config if template is None else config | {"chat_template": template}


def _write_json(path: Path, values: dict[str, Any]) -> None:
    text = json.dumps(values, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
