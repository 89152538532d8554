"""What is put on a base model (LoRA, streams, or both) and the folders that hold it.

LoRA alone is stored as mlx-lm or PEFT write it, see `lora_files`. Streams, and the LoRA that comes
with them, are in these files:

    streams_config.json          settings, LoRA's scale, and what identifies the base model
    streams.safetensors          each if the settings name it: stream_embeddings [G, D];
                                 stream_init and prune_adapter, .lora_A.weight [r, D] and
                                 .lora_B.weight [D, r]; root_init, alike but for A [r, 2 D];
                                 condition, .embed.weight and .gate.weight [r, D] and .out.weight
                                 [D, r]; draft_vocab [Vd]
    adapters.safetensors         LoRA on every row, with adapter_config.json beside it: exactly
                                 what mlx-lm's own `--adapter-path` reads
    stream_adapters.safetensors  LoRA on stream rows alone, under a name that mlx-lm does not look
                                 for, as it would apply this LoRA to every row

Streams that draft for a fine-tuned model have both: the LoRA of the task on every row, and their
own on stream rows. A fused folder is an mlx-lm model folder with LoRA merged into its weights, and
the two streams files beside them.
"""
# The API reference shows this text as its page on the adapter format.

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from ..errors import InputError, quoted, require
from ..json_files import build_settings, read_json
from ..model.condition import Condition
from ..model.lora import LoraWeights, in_layer
from ..model.streams import LowRank, StreamWeights
from ..settings import AdapterScope, StreamConfig
from .folders import CONFIG_FILE, LORA_FILES, LORA_SETTINGS, STREAMS_FILE, is_lora_folder
from .identity import BaseIdentity
from .lora_files import (
    SCALE,
    Loras,
    describe_lora,
    read_lora_file,
    read_lora_folder,
    scale_of_first,
    unify_rank_and_scale,
    write_lora_file,
    write_uniform_lora,
)
from .tensors import check_tensors, read_tensors, write_tensors

FORMAT = "ssmlx-adapter/1"
_AGAIN = "convert the checkpoint again"


@dataclass(frozen=True, eq=False, kw_only=True)
class Adapter:
    """LoRA, streams, or both; this class itself is LoRA without streams."""

    # by module path, on every row, so it changes the answers; empty if it is fused into the base
    lora: Loras = field(default_factory=dict)
    base_model: str = ""  # the name of the model that it is for; empty if its files name none
    name: str | None = None  # by which it was requested

    def describe(self) -> str:
        """One line about the adapter, for the user."""
        return f"{describe_lora(self.lora)}, which changes the answers; no streams"


@dataclass(frozen=True, eq=False, kw_only=True)
class StreamAdapter(Adapter):
    config: StreamConfig
    streams: StreamWeights
    base: BaseIdentity
    # by module path, on stream rows alone; empty if the scope is "all"
    stream_lora: Loras = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = (self.config.num_layers, self.config.hidden_size)
        true = (self.base.num_layers, self.base.hidden_size)
        require(
            own == true,
            f"the adapter's settings say {own[0]} layers of width {own[1]}",
            expected=f"{true[0]} of width {true[1]}, as its base model has",
            do=_AGAIN,
        )

    @property
    def trained_lora(self) -> Loras:
        """The LoRA that is trained with the streams."""
        return self.lora if self.config.adapter_scope == "all" else self.stream_lora

    @property
    def task_lora(self) -> Loras:
        """The LoRA of a task, beside which streams with a LoRA of their own draft."""
        return {} if self.config.adapter_scope == "all" else self.lora

    def with_trained(self, lora: Loras, **changes: Any) -> "StreamAdapter":
        """A copy with `lora` as its `trained_lora`, and with other fields replaced by `changes`."""
        if self.config.adapter_scope == "all":
            return replace(self, lora=lora, **changes)
        return replace(self, stream_lora=lora, **changes)

    def describe(self) -> str:
        config = self.config
        if not config.num_streams:
            return super().describe()
        size = f"{config.num_streams} streams in the top {config.num_msa_layers} layers"
        if self.lora:
            return f"{size}, and {describe_lora(self.lora)}, which changes the answers"
        return f"{size}; the answers are the model's own"


class TokenIds(Protocol):
    """An array of MLX or a tensor of PyTorch."""

    @property
    def dtype(self) -> Any: ...

    @property
    def shape(self) -> Sequence[int]: ...

    def tolist(self) -> Any: ...


def check_draft_vocab(
    draft_vocab: TokenIds,
    size: int,  # Vd
    vocab_size: int,  # V
    source: str | Path,  # for messages
) -> None:
    """Refuse a draft vocabulary unless it is [Vd] int32, strictly ascending, from 0 to below V."""
    dtype = str(draft_vocab.dtype).rpartition(".")[2]
    tokens = draft_vocab.tolist() if dtype == "int32" else []
    if dtype != "int32" or tuple(draft_vocab.shape) != (size,):
        fault = f"a draft_vocab of {dtype} {list(draft_vocab.shape)}"
    elif not 0 <= min(tokens) <= max(tokens) < vocab_size:
        fault = f"tokens {min(tokens)} to {max(tokens)} in draft_vocab"
    elif any(later <= token for token, later in pairwise(tokens)):
        fault = "a draft_vocab that is not strictly ascending"
    else:
        return
    raise InputError(
        f"{source} has {fault}",
        expected=f"int32 [{size}], token ids strictly ascending from 0 to {vocab_size - 1}",
        do="use files that belong together, or create the checkpoint again",
    )


def read_stream_weights(
    path: Path,
    config: StreamConfig,
    vocab_size: int,  # V
) -> StreamWeights:
    """The weights of a streams file, evaluated, in its dtypes; the file must have exactly the
    tensors of its settings."""
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
    check_tensors(tensors, expected, path)
    if size := config.draft_vocab_size:
        check_draft_vocab(tensors["draft_vocab"], size, vocab_size, path)
    return streams_from_tensors(tensors)


def streams_from_tensors(tensors: Mapping[str, mx.array]) -> StreamWeights:
    """The inverse of `stream_tensors`; shapes are not checked."""

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
    """The tensors of streams, by their names in a streams file."""
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


def cast_stream_tensors(tensors: Mapping[str, mx.array], dtype: mx.Dtype) -> dict[str, mx.array]:
    # draft_vocab holds token ids
    return {
        name: array if name == "draft_vocab" else array.astype(dtype)
        for name, array in tensors.items()
    }


def cast_streams(streams: StreamWeights, dtype: mx.Dtype) -> StreamWeights:
    return streams_from_tensors(cast_stream_tensors(stream_tensors(streams), dtype))


def write_streams_and_settings(
    folder: Path,
    adapter: StreamAdapter,
    *,
    lora_is_merged: bool,  # into a model in the same folder
) -> None:
    """Write both files, over older ones. Of LoRA, which must have one scale, only the scale is
    written."""
    write_tensors(folder / STREAMS_FILE, stream_tensors(adapter.streams))
    values = {
        "format": FORMAT,
        **adapter.config.to_dict(),
        "base": adapter.base.__dict__,
        "fused": lora_is_merged,
        "lora_scale": scale_of_first(adapter.trained_lora),
    }
    if adapter.task_lora:
        values["task_lora_scale"] = scale_of_first(adapter.task_lora)
    (folder / CONFIG_FILE).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def write_adapter(folder: Path, adapter: StreamAdapter) -> None:
    """Write streams, settings and LoRA files, one after the other; older LoRA files are not
    deleted."""
    adapter = replace(
        adapter,
        lora=unify_rank_and_scale(adapter.lora),
        stream_lora=unify_rank_and_scale(adapter.stream_lora),
    )
    write_streams_and_settings(folder, adapter, lora_is_merged=False)
    if adapter.stream_lora:
        write_lora_file(folder / LORA_FILES["streams"], adapter.stream_lora)
    if adapter.lora:
        write_uniform_lora(folder, adapter.lora, adapter.config.num_layers)


def load_adapter(folder: Path, name: str | None = None) -> Adapter:
    """Read an adapter's folder; nothing is compared with a model yet."""
    if not is_lora_folder(folder):
        return replace(load_stream_adapter(folder), name=name)
    found = read_lora_folder(folder)
    return Adapter(lora=found.lora, base_model=found.base_model, name=name)


def load_stream_adapter(folder: Path) -> StreamAdapter:
    """Read an adapter with streams, or the streams of a fused model folder."""
    require(
        not is_lora_folder(folder),
        f"{folder} has LoRA and no streams",
        expected="an adapter with streams",
        do=f"train some: python -m ssmlx.adapt --model MODEL --adapter {folder}",
    )
    values = _read_stream_settings(folder)
    path = folder / CONFIG_FILE
    config = build_settings(StreamConfig, values, path)
    identity = BaseIdentity.from_settings(path, values)
    adapter = StreamAdapter(
        config=config,
        streams=read_stream_weights(folder / STREAMS_FILE, config, identity.vocab_size),
        base=identity,
        base_model=config.base_model,
    )

    def read_scaled_lora(scope: AdapterScope, scale_name: str) -> dict[str, LoraWeights]:
        scale: Any = values.get(scale_name)
        what = f"{path} has {scale_name} {scale!r}"
        expected = f"a number, {SCALE.in_words()}"
        require(SCALE.holds(scale), what, expected=expected, do=_AGAIN)
        return read_lora_file(folder / LORA_FILES[scope], f"LoRA of scope {scope!r}", float(scale))

    if values["fused"]:
        return adapter
    trained = read_scaled_lora(config.adapter_scope, "lora_scale")
    is_plain = all(one.magnitude is None and in_layer(path) for path, one in trained.items())
    what = f"{folder} has streams that were trained with DoRA, or with LoRA outside the layers"
    do = "use files that belong together"
    require(is_plain, what, expected="LoRA inside the layers", do=do)
    adapter = adapter.with_trained(trained)
    if values.get("task_lora_scale") is None:
        return adapter
    what = f"{path} has a task_lora_scale beside LoRA of scope 'all'"
    expected = "task_lora_scale only with scope 'streams'"
    require(config.adapter_scope == "streams", what, expected=expected, do=_AGAIN)
    return replace(adapter, lora=read_scaled_lora("all", "task_lora_scale"))


def read_base_identity(folder: Path) -> BaseIdentity:
    """The base model that an adapter's settings name; no weights are read."""
    return BaseIdentity.from_settings(folder / CONFIG_FILE, _read_stream_settings(folder))


def _read_stream_settings(folder: Path) -> dict[str, Any]:
    """The content of `CONFIG_FILE`; "fused" is False if the file does not say."""
    what = f"no adapter folder {folder}"
    do = "check --adapter, or convert a checkpoint"
    require(folder.is_dir(), what, expected="a folder with LoRA or streams", do=do)
    values = read_json(folder / CONFIG_FILE, f"an adapter's settings, or a LoRA's {LORA_SETTINGS}")
    require(
        values.get("format") == FORMAT,
        f"{folder} has the format {values.get('format')!r}",
        expected=FORMAT,
        do="convert a PyTorch checkpoint with `python -m ssmlx.convert` first",
    )
    fused = values.setdefault("fused", False)
    what = f"{folder / CONFIG_FILE} has fused {quoted(fused)}"
    require(isinstance(fused, bool), what, expected="true or false", do=_AGAIN)
    return values
