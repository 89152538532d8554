"""The PyTorch checkpoint format: PEFT's two files for LoRA, and two files for the streams.

    adapter_config.json, adapter_model.safetensors (or .bin)    LoRA, as PEFT writes it
    streams_config.json, streams.safetensors                    settings and stream weights

`streams.safetensors` holds `stream_embeddings` unless `stream_design` is "value_rotation", the
low-rank pairs `stream_init.*` and `prune_adapter.*` if they have a rank, and, if `draft_vocab_size`
is not 0, `draft_vocab`: int32, strictly ascending, the ids of the tokens that streams draft from.
Only reading a .bin file needs PyTorch.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ssmlx.errors import require
from ssmlx.json_files import build_settings, read_json
from ssmlx.loading.lora_files import SCALE
from ssmlx.loading.tensors import read_tensors
from ssmlx.settings import StreamConfig

from .. import check_torch
from ..base import load_pickled_tensors

FORMAT = "speculative-streaming-pytorch/1"
STREAMS_CONFIG = "streams_config.json"
STREAMS_WEIGHTS = "streams.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_POSITION = "node + j"
TASK_LORA = "task_lora"  # folder in a checkpoint of scope "streams", with LoRA on every row
ADAPTER_PICKLE = "adapter_model.bin"
PEFT_PREFIX = "base_model.model."
CHECK_MODULES = "check lora_modules, or target_modules in adapter_config.json"

# Settings that change LoRA's results, and are implemented neither in PyTorch nor in MLX here.
_UNSUPPORTED = (
    "use_dora", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern",
    "exclude_modules", "lora_bias", "trainable_token_indices", "alora_invocation_tokens",
    "layer_replication", "arrow_config", "use_bdlora", "use_qalora", "kasa_config", "velora_config",
    "monteclora_config",
)  # fmt: skip


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_modules(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(name, str) for name in value)
    return bool(value == "all-linear")


# Settings of LoRA: PEFT's default, accepted values, message for others. PEFT's other ways
# to start LoRA may change the base's weights too, so that the LoRA belongs to another model.
_LORA_VALUES: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "r": (None, lambda r: _is_whole(r) and r > 0, "a positive whole number"),
    "lora_alpha": (
        8, lambda alpha: SCALE.holds(alpha), f"a number, {SCALE.in_words()}"
    ),
    "target_modules": (None, _are_modules, "a list of names, or all-linear"),
    "use_rslora": (False, lambda flag: isinstance(flag, bool), "true or false"),
    "init_lora_weights": (True, lambda way: isinstance(way, bool) or way == "gaussian",
                          "true, false or 'gaussian', which leave the base's weights alone"),
}  # fmt: skip


@dataclass(frozen=True)
class LoraSettings:
    """Rank, scale, modules and layers of a checkpoint's LoRA."""

    rank: int = 0  # r; 0 for a model without LoRA
    alpha: float = 32  # the numerator of the scale
    modules: tuple[str, ...] = ()  # names of linear modules, whole or last parts; () for every one
    layers: tuple[int, ...] = ()
    rank_stabilised: bool = False  # scale alpha / sqrt(r) in place of alpha / r

    @property
    def scale(self) -> float:
        """The factor of B A x."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)


def read_stream_config(path: Path) -> StreamConfig:
    """Read `streams_config.json`, in which the pruning adapter has its own object."""
    values = read_json(path, "a stream checkpoint's settings")
    prune = values.pop("prune_adapter", None) or {}
    own = "an object with a rank, or null"
    _require(isinstance(prune, dict), path, "prune_adapter", prune, own)
    config = build_settings(StreamConfig, {"prune_rank": prune.get("rank", 0), **values}, path)
    layer = config.insertion_layer
    for name, found, expected in (
        ("format", values.get("format", FORMAT), FORMAT),
        ("stream_position", values.get("stream_position", _POSITION), _POSITION),
        ("prune_adapter.layer", prune.get("layer", layer), layer),
    ):
        _require(found == expected, path, name, found, repr(expected))
    return config


def require_same_layers_and_width(config: StreamConfig, num_layers: int, hidden_size: int) -> None:
    require(
        (num_layers, hidden_size) == (config.num_layers, config.hidden_size),
        f"the base model has {num_layers} layers of width {hidden_size}",
        expected=f"{config.num_layers} of width {config.hidden_size}, as "
        f"{config.base_model or 'the streams'}",
        do="give the base model that the adapter was trained on",
    )


def stream_settings_json(config: StreamConfig) -> dict[str, Any]:
    """The content of `streams_config.json`."""
    values = config.to_dict()
    rank = values.pop("prune_rank")
    prune = {
        "rank": rank,
        "layer": config.insertion_layer,
        "form": "lm_head(final_norm(h + B A h))",
    }
    return {
        "format": FORMAT,
        **values,
        "stream_position": _POSITION,
        "prune_adapter": prune if rank else None,
    }


def read_lora_settings(path: Path, num_layers: int) -> LoraSettings:
    """Read adapter_config.json; without `layers_to_transform`, LoRA is on all layers."""
    values = read_json(path, "PEFT's adapter_config.json")
    for name in _UNSUPPORTED:
        _require(not values.get(name), path, name, values.get(name), "unset")
    for name, expected in (("peft_type", "LORA"), ("bias", "none")):
        found = values.get(name, expected)
        _require(found == expected, path, name, found, repr(expected))
    for name, (default, is_fit, expected) in _LORA_VALUES.items():
        _require(is_fit(values.get(name, default)), path, name, values.get(name), expected)
    targets = values["target_modules"]
    layers = values.get("layers_to_transform")
    every = range(num_layers)
    chosen = list(every) if layers is None else layers if isinstance(layers, list) else [layers]
    are_layers = bool(chosen) and all(_is_whole(layer) and layer in every for layer in chosen)
    expected = f"layers of 0 to {num_layers - 1}"
    _require(are_layers, path, "layers_to_transform", layers, expected)
    return LoraSettings(
        values["r"],
        values.get("lora_alpha", 8),
        () if targets == "all-linear" else tuple(targets),
        tuple(chosen),
        values.get("use_rslora", False),
    )


def peft_settings_json(
    lora: LoraSettings,  # its modules are not used
    modules: Iterable[str],
    base_model: str,
) -> dict[str, Any]:
    """The content of PEFT's adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model or None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(modules),
        "layers_to_transform": list(lora.layers),
        "use_dora": False,
        "use_rslora": lora.rank_stabilised,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _require(ok: bool, path: Path, name: str, found: Any, expected: str) -> None:
    do = "train or convert the checkpoint in a form that is supported"
    require(ok, f"{name} is {found!r} in {path}", expected=expected, do=do)


def read_peft_tensors(folder: Path) -> tuple[Path, dict[str, mx.array]]:
    """Read the path, and the tensors by name, without PEFT's ".default" before ".weight"."""
    safe = folder / ADAPTER_WEIGHTS
    pickled = folder / ADAPTER_PICKLE
    if safe.exists() or not pickled.exists():
        path = safe
        found = read_tensors(safe, "PEFT's LoRA weights")
    else:
        path = pickled
        found = read_pickle(pickled)
    return path, {name.replace(".default.weight", ".weight"): t for name, t in found.items()}


def read_pickle(path: Path) -> dict[str, mx.array]:
    """Read float32 tensors by name; no pickled code is run."""
    check_torch()
    return {name: mx.array(t.float().numpy()) for name, t in load_pickled_tensors(path).items()}
