"""The MLX adapter folder: what the converter writes and `ssmlx.load` reads.

    streams_config.json          settings, LoRA's scale, and what identifies the base model
    streams.safetensors          stream_embeddings, stream_init.*, prune_adapter.*, draft_vocab,
                                 each where the settings name it
    adapters.safetensors         LoRA of scope "all", with adapter_config.json beside it: exactly
                                 what mlx-lm's own `--adapter-path` reads
    stream_adapters.safetensors  LoRA of scope "streams"; mlx-lm, which would apply it to every
                                 row, does not find it

Streams that draft for a fine-tuned model, and leave its answers as they are, have both: the LoRA
of the task on every row, in the first, and their own on stream rows, in the second.

A fused folder is an mlx-lm model folder, LoRA merged into its weights, with the two streams
files beside them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import InputError
from ..model.backbone import Backbone
from ..model.lora import LoraWeights, RowScope, attach_lora, detach_lora, layer_of, linear_shape
from ..model.shapes import to_list
from ..model.streams import LowRank, StreamFusedModel, StreamWeights
from ..settings import AdapterScope, StreamConfig, read_json
from .bundled import CONFIG_FILE
from .files import account_for, read_tensors

FORMAT = "ssmlx-adapter/1"
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

    @classmethod
    def read(cls, path: Path, values: Mapping[str, Any]) -> BaseIdentity:
        """The identity in the settings `values` of the file `path`.

        Raises:
            InputError: they do not hold one.
        """
        base = values.get("base", {})
        try:
            return cls(**{**base, "norm_probe": tuple(base["norm_probe"])})
        except (TypeError, KeyError) as error:
            raise InputError(
                f"{path} does not say which base model it is for",
                expected="an entry `base`",
                do="convert it again",
            ) from error

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
        lora: LoRA of the config's scope by module path; empty where it is fused into the base.
        base: the model that it belongs to.
        task_lora: LoRA on every row beside a `lora` of scope "streams": that of a fine-tuned
            model, for which the streams draft.
    """

    config: StreamConfig
    streams: StreamWeights
    base: BaseIdentity
    lora: Mapping[str, LoraWeights] = field(default_factory=dict)
    task_lora: Mapping[str, LoraWeights] = field(default_factory=dict)

    @property
    def every_row_lora(self) -> Mapping[str, LoraWeights]:
        """What makes of the base model the one whose answers are given; may be empty."""
        return self.lora if self.config.adapter_scope == "all" else self.task_lora

    @property
    def stream_lora(self) -> Mapping[str, LoraWeights]:
        """What acts on stream rows alone; may be empty."""
        return {} if self.config.adapter_scope == "all" else self.lora


def expected_stream_tensors(config: StreamConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes that a streams file must hold."""
    size = config.hidden_size
    expected: dict[str, tuple[int, ...]] = {}
    if config.has_embeddings:
        expected["stream_embeddings"] = (config.num_streams, size)
    if config.draft_vocab_size:
        expected["draft_vocab"] = (config.draft_vocab_size,)
    for name, rank in (
        ("stream_init", config.stream_init_rank),
        ("prune_adapter", config.prune_rank),
    ):
        if rank:
            expected[f"{name}.lora_A.weight"] = (rank, size)
            expected[f"{name}.lora_B.weight"] = (size, rank)
    return expected


def check_draft_vocab(
    found: Any, config: StreamConfig, vocab_size: int, source: str | Path
) -> None:
    """Check that `found`, an array of MLX or of PyTorch, is a draft vocabulary.

    Raises:
        InputError: it is of another type or size, not ascending, or outside the vocabulary.
    """
    dtype, size = str(found.dtype).rpartition(".")[2], config.draft_vocab_size
    tokens = found.tolist() if dtype == "int32" else []
    if dtype != "int32" or tuple(found.shape) != (size,):
        fault = f"a draft_vocab of {dtype} {list(found.shape)}"
    elif not 0 <= min(tokens) <= max(tokens) < vocab_size:
        fault = f"tokens {min(tokens)} to {max(tokens)} in draft_vocab"
    elif any(later <= token for token, later in pairwise(tokens)):
        fault = "a draft_vocab that is not strictly ascending"
    else:
        return
    raise InputError(
        f"{source} has {fault}",
        expected=f"int32 [{size}], token ids strictly ascending from 0 to {vocab_size - 1}",
        do="use the files that belong together, or make the checkpoint again",
    )


def read_streams(path: Path, config: StreamConfig, vocab_size: int) -> StreamWeights:
    """Read a streams file, accounting for every tensor.

    Args:
        path: the file.
        config: the settings beside it.
        vocab_size: V of the base model.

    Raises:
        InputError: the file is unreadable or does not fit `config`.
    """
    tensors = read_tensors(path, "stream weights")
    account_for(tensors, expected_stream_tensors(config), path)
    if config.draft_vocab_size:
        check_draft_vocab(tensors["draft_vocab"], config, vocab_size, path)

    def low_rank(name: str) -> LowRank | None:
        if f"{name}.lora_A.weight" not in tensors:
            return None
        return LowRank(tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"])

    return StreamWeights(
        tensors.get("stream_embeddings"),
        low_rank("stream_init"),
        low_rank("prune_adapter"),
        tensors.get("draft_vocab"),
    )


def stream_tensors(streams: StreamWeights) -> dict[str, mx.array]:
    """The tensors of a streams file."""
    arrays = {"stream_embeddings": streams.embeddings, "draft_vocab": streams.draft_vocab}
    tensors = {name: array for name, array in arrays.items() if array is not None}
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
    _check_fit(dict(model.named_modules()), lora, source)


def _check_fit(
    modules: Mapping[str, nn.Module], lora: Mapping[str, LoraWeights], source: Path
) -> None:
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
    values = {
        "format": FORMAT,
        **adapter.config.to_dict(),
        "base": adapter.base.__dict__,
        "fused": fused,
        "lora_scale": _scale_of(adapter.lora),
    }
    if adapter.task_lora:
        values["task_lora_scale"] = _scale_of(adapter.task_lora)
    (folder / CONFIG_FILE).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def write_adapter(folder: Path, adapter: Adapter) -> None:
    """Write an adapter folder's files into `folder`."""
    write_streams(folder, adapter, fused=False)
    _write_lora(folder / LORA_FILES["streams"], adapter.stream_lora)
    _write_lora(folder / LORA_FILES["all"], adapter.every_row_lora)
    if adapter.every_row_lora:
        settings = mlx_lm_settings(adapter)
        (folder / "adapter_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def _write_lora(path: Path, lora: Mapping[str, LoraWeights]) -> None:
    tensors: dict[str, mx.array] = {}
    for module, weights in lora.items():
        tensors |= {f"{module}.lora_a": weights.a, f"{module}.lora_b": weights.b}
    if tensors:
        mx.save_safetensors(str(path), tensors)


def _scale_of(lora: Mapping[str, LoraWeights]) -> float | None:
    """The one scale of all modules; None of none."""
    scales = {weights.scale for weights in lora.values()}
    return scales.pop() if scales else None


def mlx_lm_settings(adapter: Adapter) -> dict[str, Any]:
    """The adapter_config.json with which mlx-lm itself loads the LoRA."""
    lora = adapter.every_row_lora
    places = [layer_of(path) for path in lora]
    weights = next(iter(lora.values()))
    return {
        "fine_tune_type": "lora",
        "num_layers": adapter.config.num_layers - min(layer for layer, _ in places),
        "lora_parameters": {
            "rank": weights.a.shape[-1],
            "scale": weights.scale,
            "dropout": 0.0,
            "keys": sorted({module for _, module in places}),
        },
    }


def load_adapter(folder: Path) -> Adapter:
    """Read an adapter folder, or the streams of a fused model folder.

    Raises:
        InputError: a file is missing, truncated, of another format, or does not fit the rest.
    """
    values = _read_settings(folder)
    config = StreamConfig.from_dict(values)
    identity = BaseIdentity.read(folder / CONFIG_FILE, values)
    streams = read_streams(folder / STREAMS_FILE, config, identity.vocab_size)
    if values.get("fused"):
        return Adapter(config, streams, identity)
    lora = _read_lora(folder, config.adapter_scope, values, "lora_scale")
    task: Mapping[str, LoraWeights] = {}
    if values.get("task_lora_scale") is not None:
        if config.adapter_scope == "all":
            raise InputError(
                f"{folder / CONFIG_FILE} has a task_lora_scale beside LoRA of scope 'all'",
                expected="it beside scope 'streams' alone",
                do="convert the checkpoint again",
            )
        task = _read_lora(folder, "all", values, "task_lora_scale")
    return Adapter(config, streams, identity, lora, task)


def read_identity(folder: Path) -> BaseIdentity:
    """The base model that an adapter folder is for, from its settings alone.

    Raises:
        InputError: the settings are missing, of another format, or do not say it.
    """
    return BaseIdentity.read(folder / CONFIG_FILE, _read_settings(folder))


def _read_settings(folder: Path) -> dict[str, Any]:
    _check_folder(folder)
    values = read_json(folder / CONFIG_FILE, "the settings of an ssmlx adapter")
    if values.get("format") != FORMAT:
        raise InputError(
            f"{folder} has the format {values.get('format')!r}",
            expected=FORMAT,
            do="turn a PyTorch checkpoint into an adapter with `python -m convert` first",
        )
    return values


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise InputError(
            f"no adapter folder {folder}",
            expected="a folder that `python -m convert` wrote",
            do="check --adapter, or convert a checkpoint",
        )


def _read_lora(
    folder: Path, scope: AdapterScope, values: Mapping[str, Any], scale_name: str
) -> dict[str, LoraWeights]:
    scale = values.get(scale_name)
    if not isinstance(scale, int | float):
        raise InputError(
            f"{folder / CONFIG_FILE} has {scale_name} {scale!r}",
            expected="a number",
            do="convert the checkpoint again",
        )
    return read_lora_file(folder / LORA_FILES[scope], f"LoRA of scope {scope!r}", float(scale))


def read_lora_file(path: Path, what: str, scale: float) -> dict[str, LoraWeights]:
    """LoRA of each module by its path, from `lora_a` and `lora_b` as mlx-lm names them.

    Args:
        path: a safetensors file.
        what: what it should hold, for the message.
        scale: of all modules.

    Raises:
        InputError: the file is missing or broken, or a tensor of a pair is.
    """
    tensors = read_tensors(path, what)
    modules = sorted({name.rpartition(".")[0] for name in tensors})
    pairs = [f"{module}.{part}" for module in modules for part in ("lora_a", "lora_b")]
    expected = {name: tensors[name].shape if name in tensors else () for name in pairs}
    account_for(tensors, expected, path)
    return {
        module: LoraWeights(tensors[f"{module}.lora_a"], tensors[f"{module}.lora_b"], scale)
        for module in modules
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
    config, base = adapter.config, adapter.base
    if (config.num_layers, config.hidden_size) != (base.num_layers, base.hidden_size):
        raise InputError(
            f"the adapter's settings say {config.num_layers} layers of width {config.hidden_size}",
            expected=f"{base.num_layers} of width {base.hidden_size}, as its base model has",
            do="convert the checkpoint again",
        )


def fuse_streams(
    backbone: Backbone,
    adapter: Adapter,
    *,
    merge_lora: bool,
    check: Callable[[StreamFusedModel], object] | None = None,
) -> StreamFusedModel:
    """Attach an adapter to its base model, in place of one that is attached already.

    Args:
        backbone: the base model; its layers are changed in place, until `unfuse_streams`.
        adapter: what to attach.
        merge_lora: add LoRA that acts on every row into the weights of layers that are not
            quantised. The original weights are dropped where the backbone can read them again.
        check: called with the new model before any layer is changed; may refuse it by raising.

    Raises:
        InputError: the adapter is another model's. No layer is changed then.
    """
    check_base(adapter, backbone)
    modules = {**dict(backbone.model.named_modules()), **backbone.kept}
    for lora in (adapter.every_row_lora, adapter.stream_lora):
        _check_fit(modules, lora, Path("the adapter"))
    every_row = RowScope(0)
    scope = every_row if adapter.config.adapter_scope == "all" else RowScope()
    dtype = backbone.dtype
    streams = cast_streams(adapter.streams, dtype)
    fused = StreamFusedModel(backbone, adapter.config, streams, scope)
    fused.is_fine_tuned = bool(adapter.every_row_lora)
    if check is not None:
        check(fused)
    unfuse_streams(backbone)
    model = backbone.model
    on_all = attach_lora(model, adapter.every_row_lora, every_row, merge=merge_lora, dtype=dtype)
    on_streams = attach_lora(model, adapter.stream_lora, scope, merge=False, dtype=dtype)
    replaced: dict[str, nn.Module | None] = {**on_streams, **on_all}
    if merge_lora and backbone.reload is not None:
        merged = {path for path, module in on_all.items() if isinstance(module, nn.Linear)}
        replaced |= dict.fromkeys(merged)
    backbone.replaced = replaced
    # Now: the first answer would merge and cast, which takes time and memory.
    mx.eval(model.parameters(), *stream_tensors(streams).values())
    return fused


def unfuse_streams(backbone: Backbone) -> None:
    """Take off what `fuse_streams` attached: the base model's own weights come back.

    Raises:
        InputError: weights have to be read again, and cannot be. Nothing is changed then.
    """
    dropped = [path for path, module in backbone.replaced.items() if module is None]
    read = backbone.reload(dropped) if dropped and backbone.reload is not None else {}
    detach_lora(backbone.model, {**backbone.kept, **read})
    backbone.replaced = {}


def cast_streams(streams: StreamWeights, dtype: mx.Dtype) -> StreamWeights:
    def cast(low_rank: LowRank | None) -> LowRank | None:
        return low_rank and LowRank(low_rank.a.astype(dtype), low_rank.b.astype(dtype))

    embeddings = streams.embeddings
    if embeddings is not None:
        embeddings = embeddings.astype(dtype)
    return replace(
        streams, embeddings=embeddings, init=cast(streams.init), prune=cast(streams.prune)
    )
