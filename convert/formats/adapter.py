"""Converts a PyTorch checkpoint to an MLX adapter folder, or to a fused model folder."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import save_config, save_model

from ssmlx.errors import require
from ssmlx.loading.adapter import (
    StreamAdapter,
    cast_streams,
    read_stream_weights,
    write_streams_and_settings,
)
from ssmlx.loading.generation_config import GENERATION_FILE
from ssmlx.loading.identity import BaseIdentity
from ssmlx.loading.load import is_quantised
from ssmlx.loading.lora_files import Loras
from ssmlx.loading.tensors import check_tensors
from ssmlx.model.backbone import Backbone
from ssmlx.model.lora import LoraWeights, RowScope, attach_lora, linear_paths, linear_sizes
from ssmlx.settings import AdapterScope

from ..reference import format as layout


def read_peft_lora(
    folder: Path,  # with adapter_config.json and the weights
    num_layers: int,
    model: nn.Module,
) -> dict[str, LoraWeights]:
    """Read LoRA by module path of the MLX model; factors are transposed."""
    settings = layout.read_lora_settings(folder / layout.ADAPTER_CONFIG, num_layers)
    path, tensors = layout.read_peft_tensors(folder)
    modules = dict(model.named_modules())
    paths = linear_paths(model, settings.layers, settings.modules, layout.CHECK_MODULES)
    expected: dict[str, tuple[int, ...]] = {}
    for module in paths:
        out_size, in_size = linear_sizes(modules[module])
        expected[f"{layout.PEFT_PREFIX}{module}.lora_A.weight"] = (settings.rank, in_size)
        expected[f"{layout.PEFT_PREFIX}{module}.lora_B.weight"] = (out_size, settings.rank)
    check_tensors(tensors, expected, path)
    found = {}
    for module in paths:
        a, b = (tensors[f"{layout.PEFT_PREFIX}{module}.lora_{part}.weight"].T for part in "AB")
        found[module] = LoraWeights(mx.contiguous(a), mx.contiguous(b), settings.scale)
    return found


def read_checkpoint(
    lora_folder: Path,  # with PEFT's files
    streams_file: Path,  # stream weights, `streams_config.json` beside them
    backbone: Backbone,
    *,
    scope: AdapterScope | None = None,  # replaces the checkpoint's
    base_model: str = "",  # name of the base, if the checkpoint has none
    task_folder: Path | None = None,  # LoRA on every row, beside streams of scope "streams"
) -> StreamAdapter:
    config = layout.read_stream_config(streams_file.parent / layout.STREAMS_CONFIG)
    layout.require_same_layers_and_width(config, len(backbone.layers), backbone.hidden_size)
    config = replace(
        config,
        adapter_scope=scope or config.adapter_scope,
        base_model=config.base_model or base_model,
    )
    streams = read_stream_weights(streams_file, config, backbone.vocab_size)
    lora = read_peft_lora(lora_folder, config.num_layers, backbone.model)
    task = {}
    if task_folder is not None:
        require(
            config.adapter_scope == "streams",
            f"the LoRA of a task in {task_folder} beside LoRA of scope 'all'",
            expected="streams of scope 'streams'",
            do="omit --task-lora, or train with --adapter-scope streams",
        )
        own = task_folder / layout.STREAMS_CONFIG
        task_config = layout.read_stream_config(own) if own.is_file() else config
        task = read_peft_lora(task_folder, task_config.num_layers, backbone.model)
    adapter = StreamAdapter(
        config=config,
        streams=streams,
        base=BaseIdentity.of(backbone),
        lora=task,
        base_model=config.base_model,
    )
    return adapter.with_trained(lora)


def cast_adapter(adapter: StreamAdapter, dtype: str) -> StreamAdapter:
    if dtype in ("stored", "auto"):
        return adapter
    kind = getattr(mx, dtype)

    def cast(lora: Loras) -> dict[str, LoraWeights]:
        return {
            path: replace(
                weights,
                a=weights.a.astype(kind),
                b=weights.b.astype(kind),
                magnitude=None if weights.magnitude is None else weights.magnitude.astype(kind),
            )
            for path, weights in lora.items()
        }

    streams = cast_streams(adapter.streams, kind)
    return replace(
        adapter, streams=streams, lora=cast(adapter.lora), stream_lora=cast(adapter.stream_lora)
    )


def write_fused_model(
    folder: Path,
    adapter: StreamAdapter,
    backbone: Backbone,
    tokenizer: TokenizerWrapper,
    model_config: Mapping[str, Any],
) -> None:
    """Merge the LoRA into the backbone's layers, in place; write the model with its streams."""
    require(
        adapter.config.adapter_scope == "all",
        "--fuse with LoRA of scope 'streams'",
        expected="scope 'all': merged weights act on every row, and would change the answers",
        do="omit --fuse",
    )
    require(
        not is_quantised(backbone.model),
        "--fuse into quantized weights",
        expected="float weights: merged LoRA would be rounded away",
        do="give --dtype float16, bfloat16 or float32 as well, or omit --fuse",
    )
    attach_lora(backbone.model, adapter.lora, RowScope(0), merge=True, dtype=backbone.dtype)
    settings = {k: v for k, v in model_config.items() if not k.startswith("quantization")}
    save_model(folder, backbone.model)
    save_config(settings, folder / "config.json")
    tokenizer.save_pretrained(folder)
    generation = (backbone.origin.folder or folder) / GENERATION_FILE
    if generation.is_file():  # the model's sampling settings
        shutil.copyfile(generation, folder / GENERATION_FILE)
    write_streams_and_settings(folder, adapter, lora_is_merged=True)
