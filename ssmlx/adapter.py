"""The MLX adapter folder: what the converter writes and `ssmlx.load` reads.

    streams_config.json          settings, LoRA's scale, and what identifies the base model
    streams.safetensors          stream_embeddings, stream_init.*, prune_adapter.*
    adapters.safetensors         LoRA of scope "all", with adapter_config.json beside it: exactly
                                 what mlx-lm's own `--adapter-path` reads
    stream_adapters.safetensors  LoRA of scope "streams"; mlx-lm, which would apply it to every
                                 row, does not find it

A fused folder is an mlx-lm model folder, LoRA merged into its weights, with the two streams
files beside them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .backbone import Backbone
from .config import AdapterScope, StreamConfig, read_json
from .errors import InputError
from .files import account_for, read_tensors
from .lora import LoraWeights, RowScope, attach_lora, linear_shape
from .model import LowRank, StreamFusedModel, StreamWeights
from .shapes import to_list

FORMAT = "ssmlx-adapter/1"
CONFIG_FILE = "streams_config.json"
STREAMS_FILE = "streams.safetensors"
LORA_FILES: dict[AdapterScope, str] = {
    "all": "adapters.safetensors",
    "streams": "stream_adapters.safetensors",
}
_PROBE_LENGTH = 32
_PROBE_TOLERANCE = 0.02


@dataclass(frozen=True)
class BaseIdentity:
    """What tells one base model from another, in whatever precision it is stored.

    Attributes:
        model_type: mlx-lm's name of the architecture.
        num_layers, hidden_size, vocab_size: its sizes.
        norm_probe: the first weights of its final norm, which no quantisation touches.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    norm_probe: tuple[float, ...]

    @classmethod
    def of(cls, backbone: Backbone) -> BaseIdentity:
        """The identity of a loaded model."""
        probe = backbone.final_norm_weight[:_PROBE_LENGTH].astype(mx.float32)
        return cls(
            str(getattr(backbone.model, "model_type", "")),
            len(backbone.layers),
            backbone.hidden_size,
            backbone.vocab_size,
            tuple(round(value, 6) for value in to_list(probe)),
        )

    def difference(self, other: BaseIdentity) -> str | None:
        """What tells `other` apart, in words; None if they are one model."""
        for name in ("model_type", "num_layers", "hidden_size", "vocab_size"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} {theirs!r} instead of {mine!r}"
        pairs = zip(self.norm_probe, other.norm_probe, strict=False)
        if any(abs(a - b) > _PROBE_TOLERANCE * max(1.0, abs(a)) for a, b in pairs):
            return "other weights (its final norm differs)"
        return None


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter in memory.

    Attributes:
        config: the stream settings.
        streams: stream weights.
        lora: LoRA by module path; empty where it is fused into the base.
        base: the model that it belongs to.
    """

    config: StreamConfig
    streams: StreamWeights
    base: BaseIdentity
    lora: Mapping[str, LoraWeights] = field(default_factory=dict)


def expected_stream_tensors(config: StreamConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes that a streams file must hold."""
    size = config.hidden_size
    expected: dict[str, tuple[int, ...]] = {"stream_embeddings": (config.num_streams, size)}
    for name, rank in (
        ("stream_init", config.stream_init_rank),
        ("prune_adapter", config.prune_rank),
    ):
        if rank:
            expected[f"{name}.lora_A.weight"] = (rank, size)
            expected[f"{name}.lora_B.weight"] = (size, rank)
    return expected


def read_streams(path: Path, config: StreamConfig) -> StreamWeights:
    """Read a streams file, accounting for every tensor.

    Raises:
        InputError: the file is unreadable or does not fit `config`.
    """
    tensors = read_tensors(path, "stream weights")
    account_for(tensors, expected_stream_tensors(config), path)

    def low_rank(name: str) -> LowRank | None:
        if f"{name}.lora_A.weight" not in tensors:
            return None
        return LowRank(tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"])

    return StreamWeights(
        tensors["stream_embeddings"], low_rank("stream_init"), low_rank("prune_adapter")
    )


def stream_tensors(streams: StreamWeights) -> dict[str, mx.array]:
    """The tensors of a streams file."""
    tensors = {"stream_embeddings": streams.embeddings}
    for name, low_rank in (("stream_init", streams.init), ("prune_adapter", streams.prune)):
        if low_rank is not None:
            tensors[f"{name}.lora_A.weight"] = low_rank.a
            tensors[f"{name}.lora_B.weight"] = low_rank.b
    return tensors


def check_lora(model: nn.Module, lora: Mapping[str, LoraWeights], source: Path) -> None:
    """Check that every LoRA pair fits a linear layer of `model`.

    Raises:
        InputError: names the modules that are absent or of another shape.
    """
    modules = dict(model.named_modules())
    found: dict[str, mx.array] = {}
    expected: dict[str, tuple[int, ...]] = {}
    for path, weights in lora.items():
        found |= {f"{path}.lora_a": weights.a, f"{path}.lora_b": weights.b}
        if isinstance(modules.get(path), nn.Linear | nn.QuantizedLinear):
            out_size, in_size = linear_shape(modules[path])
            rank = weights.a.shape[-1]
            expected |= {f"{path}.lora_a": (in_size, rank), f"{path}.lora_b": (rank, out_size)}
    account_for(found, expected, source)


def write_streams(folder: Path, adapter: Adapter, *, fused: bool) -> None:
    """Write the two streams files into `folder`."""
    mx.save_safetensors(str(folder / STREAMS_FILE), stream_tensors(adapter.streams))
    scales = {weights.scale for weights in adapter.lora.values()}
    values = {
        "format": FORMAT,
        **adapter.config.to_dict(),
        "base": adapter.base.__dict__,
        "fused": fused,
        "lora_scale": scales.pop() if scales else None,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def write_adapter(folder: Path, adapter: Adapter) -> None:
    """Write an adapter folder's files into `folder`."""
    write_streams(folder, adapter, fused=False)
    tensors: dict[str, mx.array] = {}
    for path, weights in adapter.lora.items():
        tensors |= {f"{path}.lora_a": weights.a, f"{path}.lora_b": weights.b}
    mx.save_safetensors(str(folder / LORA_FILES[adapter.config.adapter_scope]), tensors)
    if adapter.config.adapter_scope == "all":
        settings = mlx_lm_settings(adapter)
        (folder / "adapter_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def mlx_lm_settings(adapter: Adapter) -> dict[str, Any]:
    """The adapter_config.json with which mlx-lm itself loads the LoRA."""
    layers = {int(path.split(".layers.")[1].split(".")[0]) for path in adapter.lora}
    weights = next(iter(adapter.lora.values()))
    return {
        "fine_tune_type": "lora",
        "num_layers": adapter.config.num_layers - min(layers),
        "lora_parameters": {
            "rank": weights.a.shape[-1],
            "scale": weights.scale,
            "dropout": 0.0,
            "keys": sorted({path.split(".", 3)[3] for path in adapter.lora}),
        },
    }


def load_adapter(folder: Path) -> Adapter:
    """Read an adapter folder, or the streams of a fused model folder.

    Raises:
        InputError: a file is missing, truncated, of another format, or does not fit the rest.
    """
    _check_folder(folder)
    values = read_json(folder / CONFIG_FILE, "the settings of an ssmlx adapter")
    if values.get("format") != FORMAT:
        raise InputError(
            f"{folder} has the format {values.get('format')!r}",
            expected=FORMAT,
            do="turn a PyTorch checkpoint into an adapter with `python -m convert` first",
        )
    config = StreamConfig.from_dict(values)
    streams = read_streams(folder / STREAMS_FILE, config)
    base = values.get("base", {})
    try:
        identity = BaseIdentity(**{**base, "norm_probe": tuple(base["norm_probe"])})
    except (TypeError, KeyError) as error:
        raise InputError(
            f"{folder / CONFIG_FILE} does not say which base model it is for",
            expected="an entry `base`",
            do="convert the checkpoint again",
        ) from error
    lora = {} if values.get("fused") else _read_lora(folder, config, values.get("lora_scale"))
    return Adapter(config, streams, identity, lora)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise InputError(
            f"no adapter folder {folder}",
            expected="a folder that `python -m convert` wrote",
            do="check --adapter, or convert a checkpoint",
        )


def _read_lora(folder: Path, config: StreamConfig, scale: Any) -> dict[str, LoraWeights]:
    path = folder / LORA_FILES[config.adapter_scope]
    tensors = read_tensors(path, f"LoRA of scope {config.adapter_scope!r}")
    modules = {name.rpartition(".")[0] for name in tensors}
    pairs = {f"{module}.{part}" for module in modules for part in ("lora_a", "lora_b")}
    expected = {name: tensors[name].shape if name in tensors else () for name in sorted(pairs)}
    account_for(tensors, expected, path)
    if not isinstance(scale, int | float):
        raise InputError(
            f"{folder / CONFIG_FILE} has lora_scale {scale!r}",
            expected="a number",
            do="convert the checkpoint again",
        )
    return {
        module: LoraWeights(tensors[f"{module}.lora_a"], tensors[f"{module}.lora_b"], float(scale))
        for module in sorted(modules)
    }


def check_base(adapter: Adapter, backbone: Backbone) -> None:
    """Check that `backbone` is the model that the adapter was made for.

    Raises:
        InputError: says in what the two differ.
    """
    difference = adapter.base.difference(BaseIdentity.of(backbone))
    if difference:
        raise InputError(
            f"the adapter belongs to another base model: this one has {difference}",
            expected=f"{adapter.config.base_model or 'the model it was converted for'}",
            do="choose that model with --model, or another --adapter",
        )


def fuse_streams(backbone: Backbone, adapter: Adapter, *, merge_lora: bool) -> StreamFusedModel:
    """Attach an adapter to its base model.

    Args:
        backbone: the base model; its layers are changed in place.
        adapter: what to attach.
        merge_lora: add LoRA of scope "all" into the weights of layers that are not quantised.

    Raises:
        InputError: the adapter is another model's.
    """
    check_base(adapter, backbone)
    check_lora(backbone.model, adapter.lora, Path("the adapter"))
    every_row = adapter.config.adapter_scope == "all"
    scope = RowScope(0 if every_row else None)
    dtype, merge = backbone.dtype, merge_lora and every_row
    attach_lora(backbone.model, adapter.lora, scope, merge=merge, dtype=dtype)
    return StreamFusedModel(backbone, adapter.config, _cast(adapter.streams, dtype), scope)


def _cast(streams: StreamWeights, dtype: mx.Dtype) -> StreamWeights:
    def cast(low_rank: LowRank | None) -> LowRank | None:
        return low_rank and LowRank(low_rank.a.astype(dtype), low_rank.b.astype(dtype))

    return StreamWeights(streams.embeddings.astype(dtype), cast(streams.init), cast(streams.prune))
