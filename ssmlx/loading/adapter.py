"""What is put on a base model, LoRA, streams, or both; and the folders that hold it.

LoRA alone lies in mlx-lm's files or in PEFT's, see `lora_files`. Streams, and the LoRA that comes
with them, in those that the converter and the trainers write:

    streams_config.json          settings, LoRA's scale, and what identifies the base model
    streams.safetensors          each where the settings name it: stream_embeddings [G, D],
                                 stream_init and prune_adapter, .lora_A.weight [r, D] and
                                 .lora_B.weight [D, r]; root_init, alike but for A [r, 2 D];
                                 condition, .embed.weight and .gate.weight [r, D] and .out.weight
                                 [D, r]; draft_vocab [Vd]
    adapters.safetensors         LoRA on every row, with adapter_config.json beside it: exactly
                                 what mlx-lm's own `--adapter-path` reads
    stream_adapters.safetensors  LoRA on stream rows alone; mlx-lm, which would apply it to every
                                 row, does not find it

Streams that draft for a fine-tuned model, and leave its answers as they are, have both: the LoRA
of the task on every row, in the first, and their own on stream rows, in the second.

A fused folder is an mlx-lm model folder, LoRA merged into its weights, with the two streams
files beside them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from ..errors import InputError, quoted, require
from ..json_files import read_json
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
from .tensors import check_tensors, read_tensors, write_finite_tensors_in_place

FORMAT = "ssmlx-adapter/1"
_AGAIN = "convert the checkpoint again"


@dataclass(frozen=True, eq=False, kw_only=True)
class Adapter:
    """LoRA, streams, or both; this class itself is LoRA without streams.

    Attributes:
        lora: on every row, by module path: what makes of the base the model whose answers are
            given. Empty where these are the base's, or where it is fused into the base.
        base_model: the name of the model that it is for; empty where its files name none.
    """

    lora: Loras = field(default_factory=dict)
    base_model: str = ""

    def describe_parts_and_effect(self) -> str:
        """Return one line on what the adapter has, and whether it changes the answers."""
        return f"{describe_lora(self.lora)}, which changes the answers; no streams"


@dataclass(frozen=True, eq=False, kw_only=True)
class StreamAdapter(Adapter):
    """Streams, and the LoRA that comes with them.

    Attributes:
        config: settings of the streams, and of the base as they know it.
        streams: weights.
        base: identifies the base model that it belongs to.
        stream_lora: on stream rows alone, by module path; empty of scope "all".
    """

    config: StreamConfig
    streams: StreamWeights
    base: BaseIdentity
    stream_lora: Loras = field(default_factory=dict)

    @property
    def trained_lora(self) -> Loras:
        """The LoRA that is trained with the streams: `lora` where the scope is "all", else
        `stream_lora`.
        """
        return self.lora if self.config.adapter_scope == "all" else self.stream_lora

    @property
    def task_lora(self) -> Loras:
        """The LoRA on every row that streams of scope "streams" draft beside, which is `lora`;
        empty of scope "all".
        """
        return {} if self.config.adapter_scope == "all" else self.lora

    def with_trained(self, lora: Loras, **changes: Any) -> "StreamAdapter":
        """Return a copy of the adapter with `lora` as its `trained_lora`.

        `changes` are other fields to replace, by name. The adapter itself stays as it is.
        """
        if self.config.adapter_scope == "all":
            return replace(self, lora=lora, **changes)
        return replace(self, stream_lora=lora, **changes)

    def describe_parts_and_effect(self) -> str:
        """Return one line for the user: how many streams in how many top layers, which LoRA on
        every row, and whether the answers change.

        An adapter with 0 streams is described as LoRA alone.
        """
        config = self.config
        if not config.num_streams:
            return super().describe_parts_and_effect()
        size = f"{config.num_streams} streams in the top {config.num_msa_layers} layers"
        if self.lora:
            return f"{size}, and {describe_lora(self.lora)}, which changes the answers"
        return f"{size}; the answers are the model's own"


class TokenIds(Protocol):
    """An array of MLX, or a tensor of PyTorch."""

    @property
    def dtype(self) -> Any: ...

    @property
    def shape(self) -> Sequence[int]: ...

    def tolist(self) -> Any: ...


def require_ascending_draft_vocab(
    draft_vocab: TokenIds, size: int, vocab_size: int, source: str | Path
) -> None:
    """Raise InputError unless a draft vocabulary is [Vd] int32 token ids, strictly ascending, from
    0 to below V.

    Args:
        draft_vocab: of any type and shape; its values are read where it is of int32.
        size: Vd, 1 or more.
        vocab_size: V, of the base model.
        source: named in the message.
    """
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
        do="use the files that belong together, or make the checkpoint again",
    )


def read_stream_weights(path: Path, config: StreamConfig, vocab_size: int) -> StreamWeights:
    """Read a streams file, which must have exactly the tensors that its settings ask for.

    Args:
        path: of the file.
        config: the settings, which decide names and shapes.
        vocab_size: V, of the base model.

    Returns:
        The weights, evaluated, in the dtypes of the file.

    Raises:
        InputError: there is no file, it cannot be read, a tensor is missing, spare, of another
            shape, no float or not finite; or the draft vocabulary is not as
            `require_ascending_draft_vocab` wants it.
    """
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
        require_ascending_draft_vocab(tensors["draft_vocab"], size, vocab_size, path)
    return streams_from_tensors(tensors)


def streams_from_tensors(tensors: Mapping[str, mx.array]) -> StreamWeights:
    """Build stream weights from tensors under their names in a streams file.

    Parts whose tensors are not there become None. Other tensors are ignored. Shapes are not
    checked.

    Raises:
        KeyError: a part has its first tensor and lacks another.
    """

    def low_rank(name: str) -> LowRank | None:
        """Return the low-rank pair `name`; None where `tensors` has no first factor of it."""
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
    """Return the arrays of stream weights by their names in a streams file; parts that are None are
    left out.
    """
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
    """Return copies of the tensors of a streams file in `dtype`; `draft_vocab` stays as it is."""
    return {
        name: array if name == "draft_vocab" else array.astype(dtype)
        for name, array in tensors.items()
    }


def cast_streams(streams: StreamWeights, dtype: mx.Dtype) -> StreamWeights:
    """Return stream weights in `dtype`; a draft vocabulary stays int32."""
    return streams_from_tensors(cast_stream_tensors(stream_tensors(streams), dtype))


def write_streams_and_settings(
    folder: Path, adapter: StreamAdapter, *, lora_is_merged: bool
) -> None:
    """Write the streams file and the settings file of an adapter into a folder, in place over older
    ones.

    LoRA tensors are not written; of them the settings note the scale, None without LoRA.

    Args:
        folder: which is there.
        adapter: its LoRA has one scale, see `unify_rank_and_scale`.
        lora_is_merged: whether LoRA is merged into a model in the same folder; the settings note
            it as "fused".

    Raises:
        InputError: a weight is not finite, by which time nothing is written; or the streams file
            cannot be written.
        OSError: the settings file cannot be written; the streams file is there by then.
    """
    write_finite_tensors_in_place(folder / STREAMS_FILE, stream_tensors(adapter.streams))
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


def write_adapter_in_place(folder: Path, adapter: StreamAdapter) -> None:
    """Write an adapter into a folder that is there: streams, settings, and the files of its LoRA.

    LoRA is written with one rank and scale, see `unify_rank_and_scale`; `adapter` itself stays as
    it is. Older files are written over, one after the other, not as a whole. Files of a LoRA that
    the adapter lacks are not written, and older ones are not deleted.

    Raises:
        InputError: a weight is not finite, or a file of tensors cannot be written.
        OSError: a file of settings cannot be written.
    """
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


def load_adapter(folder: Path) -> Adapter:
    """Read an adapter folder: LoRA alone, as mlx-lm or PEFT wrote it, or streams with their LoRA.

    Nothing is put on a model, nor compared with one.

    Returns:
        A `StreamAdapter` where the folder has settings of streams, else an `Adapter`.

    Raises:
        InputError: it holds neither, or what it holds is broken or cannot be used as it is.
    """
    if not is_lora_folder(folder):
        return load_stream_adapter(folder)
    found = read_lora_folder(folder)
    return Adapter(lora=found.lora, base_model=found.base_model)


def load_stream_adapter(folder: Path) -> StreamAdapter:
    """Read an adapter folder with streams, or the streams of a fused model folder.

    Returns:
        The adapter with the LoRA that was trained with its streams, and that of a task where it has
        one; of a fused folder, without any.

    Raises:
        InputError: the folder has LoRA and no streams, or neither; a file is missing, broken or
            does not fit the others; or the LoRA that was trained with the streams is DoRA, or is
            outside of the layers.
    """
    require(
        not is_lora_folder(folder),
        f"{folder} has LoRA and no streams",
        expected="an adapter with streams",
        do=f"let it learn some: python -m ssmlx.adapt --model MODEL --adapter {folder}",
    )
    values = _read_stream_settings(folder)
    path = folder / CONFIG_FILE
    config = StreamConfig.from_dict(values)
    identity = BaseIdentity.from_settings(path, values)
    adapter = StreamAdapter(
        config=config,
        streams=read_stream_weights(folder / STREAMS_FILE, config, identity.vocab_size),
        base=identity,
        base_model=config.base_model,
    )

    def read_scaled_lora(scope: AdapterScope, scale_name: str) -> dict[str, LoraWeights]:
        """Read the LoRA file of a scope, with the scale that the settings have under `scale_name`.

        Raises:
            InputError: the scale is no number or out of bounds, or the file is missing or broken.
        """
        scale: Any = values.get(scale_name)
        what = f"{path} has {scale_name} {scale!r}"
        expected = f"a number, {SCALE.in_words()}"
        require(SCALE.holds(scale), what, expected=expected, do=_AGAIN)
        return read_lora_file(folder / LORA_FILES[scope], f"LoRA of scope {scope!r}", float(scale))

    if values["fused"]:
        return adapter
    trained = read_scaled_lora(config.adapter_scope, "lora_scale")
    is_plain = all(one.magnitude is None and in_layer(path) for path, one in trained.items())
    what = f"{folder} has DoRA, or LoRA outside of the layers, that was trained with its streams"
    do = "use the files that belong together"
    require(is_plain, what, expected="LoRA of the layers", do=do)
    adapter = adapter.with_trained(trained)
    if values.get("task_lora_scale") is None:
        return adapter
    what = f"{path} has a task_lora_scale beside LoRA of scope 'all'"
    expected = "it beside scope 'streams' alone"
    require(config.adapter_scope == "streams", what, expected=expected, do=_AGAIN)
    return replace(adapter, lora=read_scaled_lora("all", "task_lora_scale"))


def read_base_identity(folder: Path) -> BaseIdentity:
    """Read which base model an adapter with streams is for; of its folder, the settings alone.

    Raises:
        InputError: there are no such settings, or they are broken.
    """
    return BaseIdentity.from_settings(folder / CONFIG_FILE, _read_stream_settings(folder))


def _read_stream_settings(folder: Path) -> dict[str, Any]:
    """Read the JSON object in an adapter's `CONFIG_FILE`, with "fused" set to False where it is
    missing.

    Raises:
        InputError: there is no folder or no such file; "format" is not `FORMAT`; or "fused" is
            neither true nor false.
    """
    what = f"no adapter folder {folder}"
    do = "check --adapter, or convert a checkpoint"
    require(folder.is_dir(), what, expected="a folder with LoRA or streams", do=do)
    values = read_json(folder / CONFIG_FILE, f"an adapter's settings, or a LoRA's {LORA_SETTINGS}")
    require(
        values.get("format") == FORMAT,
        f"{folder} has the format {values.get('format')!r}",
        expected=FORMAT,
        do="turn a PyTorch checkpoint into an adapter with `python -m ssmlx.convert` first",
    )
    fused = values.setdefault("fused", False)
    what = f"{folder / CONFIG_FILE} has fused {quoted(fused)}"
    require(isinstance(fused, bool), what, expected="true or false", do=_AGAIN)
    return values
