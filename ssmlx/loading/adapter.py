"""The adapter folder's format: what the converter and the trainer write and `ssmlx.load` reads.

    streams_config.json          settings, LoRA's scale, and what identifies the base model
    streams.safetensors          each where the settings name it: stream_embeddings [G, D],
                                 stream_init and prune_adapter, .lora_A.weight [r, D] and
                                 .lora_B.weight [D, r]; root_init, alike but for A [r, 2 D];
                                 condition, .embed.weight and .gate.weight [r, D] and .out.weight
                                 [D, r]; draft_vocab [Vd]
    adapters.safetensors         LoRA of scope "all", with adapter_config.json beside it: exactly
                                 what mlx-lm's own `--adapter-path` reads
    stream_adapters.safetensors  LoRA of scope "streams"; mlx-lm, which would apply it to every
                                 row, does not find it

Streams that draft for a fine-tuned model, and leave its answers as they are, have both: the LoRA
of the task on every row, in the first, and their own on stream rows, in the second.

A fused folder is an mlx-lm model folder, LoRA merged into its weights, with the two streams
files beside them.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import InputError, quoted, require
from ..json_files import read_json
from ..model.backbone import BaseIdentity
from ..model.condition import Condition
from ..model.lora import LoraWeights, layer_of
from ..model.streams import LowRank, StreamWeights
from ..settings import AdapterScope, Allowed, StreamConfig
from .files import account_for, read_tensors, save_tensors
from .names import CONFIG_FILE, LORA_FILES, LORA_SETTINGS, STREAMS_FILE

FORMAT = "ssmlx-adapter/1"
LORA_FILE = LORA_FILES["all"]
SCALE = Allowed(least=-1e6, most=1e6)  # of LoRA
_AGAIN = "convert the checkpoint again"
_TASK_LORA = f"a folder with {LORA_FILE} and {LORA_SETTINGS}, as mlx-lm's LoRA training writes it"


@dataclass(frozen=True, eq=False)
class Adapter:
    config: StreamConfig
    streams: StreamWeights
    base: BaseIdentity  # the model that it belongs to
    # LoRA of the config's scope by module path; empty where it is fused into the base
    lora: Mapping[str, LoraWeights] = field(default_factory=dict)
    # LoRA on every row beside a `lora` of scope "streams": that of a fine-tuned model, for which
    # the streams draft
    task_lora: Mapping[str, LoraWeights] = field(default_factory=dict)

    @property
    def every_row_lora(self) -> Mapping[str, LoraWeights]:
        """What makes of the base model the one whose answers are given; may be empty."""
        return self.lora if self.config.adapter_scope == "all" else self.task_lora

    @property
    def stream_lora(self) -> Mapping[str, LoraWeights]:
        """What acts on stream rows alone; may be empty."""
        return {} if self.config.adapter_scope == "all" else self.lora


def check_draft_vocab(
    found: Any, config: StreamConfig, vocab_size: int, source: str | Path
) -> None:
    """Raises InputError unless `found`, of MLX or of PyTorch, is [Vd] rising int32 tokens."""
    dtype = str(found.dtype).rpartition(".")[2]
    size = config.draft_vocab_size
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
    """Read a streams file, accounting for every tensor; `vocab_size` is V of the base model."""
    size = config.hidden_size
    expected: dict[str, tuple[int, ...]] = {}
    if config.has_embeddings:
        expected["stream_embeddings"] = (config.num_streams, size)
    if config.draft_vocab_size:
        expected["draft_vocab"] = (config.draft_vocab_size,)
    for name, rank, inputs in (
        ("stream_init", config.stream_init_rank, size),
        ("root_init", config.root_init_rank, 2 * size),
        ("prune_adapter", config.prune_rank, size),
    ):
        if rank:
            expected[f"{name}.lora_A.weight"] = (rank, inputs)
            expected[f"{name}.lora_B.weight"] = (size, rank)
    if rank := config.condition_rank:
        shapes = {"embed": (rank, size), "gate": (rank, size), "out": (size, rank)}
        expected |= {f"condition.{part}.weight": shape for part, shape in shapes.items()}
    tensors = read_tensors(path, "stream weights")
    account_for(tensors, expected, path)
    if config.draft_vocab_size:
        check_draft_vocab(tensors["draft_vocab"], config, vocab_size, path)
    return streams_of(tensors)


def streams_of(tensors: Mapping[str, mx.array]) -> StreamWeights:
    """Stream weights from the tensors of a streams file; others among them are left aside."""

    def low_rank(name: str) -> LowRank | None:
        if f"{name}.lora_A.weight" not in tensors:
            return None
        return LowRank(tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"])

    def condition() -> Condition | None:
        names = [f"condition.{part}.weight" for part in ("embed", "gate", "out")]
        return Condition(*(tensors[name] for name in names)) if names[0] in tensors else None

    return StreamWeights(
        tensors.get("stream_embeddings"),
        low_rank("stream_init"),
        low_rank("root_init"),
        low_rank("prune_adapter"),
        tensors.get("draft_vocab"),
        condition(),
    )


def stream_tensors(streams: StreamWeights) -> dict[str, mx.array]:
    arrays = {"stream_embeddings": streams.embeddings, "draft_vocab": streams.draft_vocab}
    tensors = {name: array for name, array in arrays.items() if array is not None}
    for name, low_rank in (
        ("stream_init", streams.init),
        ("root_init", streams.root_init),
        ("prune_adapter", streams.prune),
    ):
        if low_rank is not None:
            tensors[f"{name}.lora_A.weight"] = low_rank.a
            tensors[f"{name}.lora_B.weight"] = low_rank.b
    if streams.condition is not None:
        parts = vars(streams.condition).items()
        tensors |= {f"condition.{part}.weight": array for part, array in parts}
    return tensors


def cast_tensors(tensors: Mapping[str, mx.array], dtype: mx.Dtype) -> dict[str, mx.array]:
    """The tensors in `dtype`; a draft vocabulary's ids stay what they are."""
    return {
        name: array if name == "draft_vocab" else array.astype(dtype)
        for name, array in tensors.items()
    }


def cast_streams(streams: StreamWeights, dtype: mx.Dtype) -> StreamWeights:
    return streams_of(cast_tensors(stream_tensors(streams), dtype))


def lora_tensors(lora: Mapping[str, LoraWeights]) -> dict[str, mx.array]:
    tensors: dict[str, mx.array] = {}
    for module, weights in lora.items():
        tensors |= {f"{module}.lora_a": weights.a, f"{module}.lora_b": weights.b}
    return tensors


def write_streams(folder: Path, adapter: Adapter, *, fused: bool) -> None:
    save_tensors(folder / STREAMS_FILE, stream_tensors(adapter.streams))
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
    write_streams(folder, adapter, fused=False)
    files = {"streams": adapter.stream_lora, "all": adapter.every_row_lora}
    for scope, lora in files.items():
        if lora:
            save_tensors(folder / LORA_FILES[scope], lora_tensors(lora))
    if lora := adapter.every_row_lora:
        # With this, mlx-lm itself loads the LoRA.
        places = [layer_of(path) for path in lora]
        weights = next(iter(lora.values()))
        settings = {
            "fine_tune_type": "lora",
            "num_layers": adapter.config.num_layers - min(layer for layer, _ in places),
            "lora_parameters": {
                "rank": weights.a.shape[-1],
                "scale": weights.scale,
                "dropout": 0.0,
                "keys": sorted({module for _, module in places}),
            },
        }
        (folder / LORA_SETTINGS).write_text(json.dumps(settings, indent=1) + "\n")


def _scale_of(lora: Mapping[str, LoraWeights]) -> float | None:
    scales = {weights.scale for weights in lora.values()}
    return scales.pop() if scales else None


def load_adapter(folder: Path) -> Adapter:
    """Read an adapter folder, or the streams of a fused model folder."""
    values = _read_settings(folder)
    path = folder / CONFIG_FILE
    config = StreamConfig.from_dict(values)
    identity = BaseIdentity.read(path, values)
    streams = read_streams(folder / STREAMS_FILE, config, identity.vocab_size)

    def read(scope: AdapterScope, scale_name: str) -> dict[str, LoraWeights]:
        scale: Any = values.get(scale_name)
        what = f"{path} has {scale_name} {scale!r}"
        expected = f"a number, {SCALE.text()}"
        require(SCALE.holds(scale, whole=False), what, expected=expected, do=_AGAIN)
        return read_lora_file(folder / LORA_FILES[scope], f"LoRA of scope {scope!r}", float(scale))

    if values["fused"]:
        return Adapter(config, streams, identity)
    lora = read(config.adapter_scope, "lora_scale")
    if values.get("task_lora_scale") is None:
        return Adapter(config, streams, identity, lora)
    what = f"{path} has a task_lora_scale beside LoRA of scope 'all'"
    expected = "it beside scope 'streams' alone"
    require(config.adapter_scope == "streams", what, expected=expected, do=_AGAIN)
    return Adapter(config, streams, identity, lora, read("all", "task_lora_scale"))


def read_identity(folder: Path) -> BaseIdentity:
    """The base model that an adapter folder is for, from its settings alone."""
    return BaseIdentity.read(folder / CONFIG_FILE, _read_settings(folder))


def _read_settings(folder: Path) -> dict[str, Any]:
    what = f"no adapter folder {folder}"
    do = "check --adapter, or convert a checkpoint"
    require(folder.is_dir(), what, expected="a folder that `python -m convert` wrote", do=do)
    values = read_json(folder / CONFIG_FILE, "the settings of an ssmlx adapter")
    require(
        values.get("format") == FORMAT,
        f"{folder} has the format {values.get('format')!r}",
        expected=FORMAT,
        do="turn a PyTorch checkpoint into an adapter with `python -m convert` first",
    )
    fused = values.setdefault("fused", False)
    what = f"{folder / CONFIG_FILE} has fused {quoted(fused)}"
    require(isinstance(fused, bool), what, expected="true or false", do=_AGAIN)
    return values


def read_lora_file(path: Path, what: str, scale: float) -> dict[str, LoraWeights]:
    """LoRA of the layers' modules by path, from `lora_a` and `lora_b` as mlx-lm names them."""
    tensors = read_tensors(path, what)
    names = {name.rpartition(".")[0] for name in tensors}
    modules = sorted(name for name in names if re.search(r"\blayers\.\d+\.", name))
    pairs = [f"{module}.{part}" for module in modules for part in ("lora_a", "lora_b")]
    expected = {one: (*tensors[one].shape, 1, 1)[:2] if one in tensors else () for one in pairs}
    account_for(tensors, expected, path)
    return {
        module: LoraWeights(tensors[f"{module}.lora_a"], tensors[f"{module}.lora_b"], scale)
        for module in modules
    }


def read_lora(folder: Path, option: str) -> dict[str, LoraWeights]:
    """LoRA as mlx-lm writes and reads it; `option` named the folder, for the message."""
    require(folder.is_dir(), f"no folder {folder}", expected=_TASK_LORA, do=f"check {option}")
    settings = read_json(folder / LORA_SETTINGS, _TASK_LORA)
    parameters = settings.get("lora_parameters")
    scale: Any = parameters.get("scale") if isinstance(parameters, dict) else None
    require(
        settings.get("fine_tune_type", "lora") == "lora" and SCALE.holds(scale, whole=False),
        f"{folder / LORA_SETTINGS} does not describe LoRA",
        expected='"fine_tune_type": "lora" and a scale in "lora_parameters"',
        do="convert a PEFT checkpoint with `python -m convert` first",
    )
    lora = read_lora_file(folder / LORA_FILE, _TASK_LORA, float(scale))
    what = f"{folder / LORA_FILE} is empty"
    do = "use a LoRA's own file"
    require(bool(lora), what, expected="pairs of lora_a and lora_b", do=do)
    return lora
