"""What the systems of `perf.compare` draft with, loaded beside the target they share."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ssmlx.drafters.draft_model import DraftModel, load_draft_model
from ssmlx.drafters.heads import DraftingHeads, load_heads
from ssmlx.errors import InputError
from ssmlx.loading.adapter import stream_tensors
from ssmlx.loading.attach import fuse_streams
from ssmlx.model.backbone import Backbone
from ssmlx.model.streams import StreamFusedModel
from ssmlx.settings import HEAD_DRAFTERS

from ..run.samples import read_own_lora
from .plan import Plan, TaskPlan


@dataclass(frozen=True, eq=False)
class Drafting:
    """What systems of one kind draft with, loaded.

    Attributes:
        model: the target, with streams for those that need them.
        loaded: the draft model or the heads, as `stream_generate` takes them.
        weight_bytes: memory that stays in use.
        lora_parameters: of LoRA that acts on streams alone, which the target does not have.
    """

    model: StreamFusedModel
    loaded: Mapping[str, Any]
    weight_bytes: int = 0
    lora_parameters: int = 0


def same_arrays(model: Any) -> Any:
    """mlx-lm's own model, untouched, on the very arrays of `model`."""
    fresh = type(model)(model.args)
    fresh.load_weights(tree_flatten(model.parameters()))
    fresh.eval()
    return fresh


def load_drafting(
    plan: Plan, task: TaskPlan, kind: str, target: StreamFusedModel, tokenizer: TokenizerWrapper
) -> Drafting:
    """What systems of `kind` draft with, and how much memory it takes."""
    mx.synchronize()  # a step that an answer left running frees its memory when it ends
    before, size = mx.get_active_memory(), target.backbone.vocab_size
    if kind == "streams":
        drafting = load_streams(task, target)
    elif kind in HEAD_DRAFTERS:
        drafting = Drafting(target, {"heads": heads_of(kind, task.checkpoints[kind], target)})
    elif kind == "draft-model":
        name = str(task.checkpoints[kind])
        draft = load_draft_model(name, tokenizer, size, dtype=plan.dtype)
        drafting = Drafting(target, {"draft_model": draft})
    else:
        return Drafting(target, {})
    gc.collect()  # what loading left behind is not in use
    mx.synchronize()
    return replace(drafting, weight_bytes=max(0, mx.get_active_memory() - before))


def load_streams(task: TaskPlan, target: StreamFusedModel) -> Drafting:
    """The adapter's streams on the target's arrays, with its LoRA unless that is in the target."""
    assert task.adapter is not None
    adapter = read_own_lora(task.adapter)
    lora_parameters = sum(lora.a.size + lora.b.size for lora in adapter.stream_lora.values())
    adapter = replace(adapter, lora=adapter.stream_lora, task_lora={})
    backbone = Backbone(same_arrays(target.backbone.model))
    fused = fuse_streams(backbone, adapter, merge_lora=False)
    assert fused.streams is not None
    mx.eval(backbone.model.parameters(), stream_tensors(fused.streams))
    return Drafting(fused, {}, lora_parameters=lora_parameters)


def heads_of(kind: str, folder: Path, target: StreamFusedModel) -> DraftingHeads:
    """The heads of a folder, which must be of `kind`.

    Raises:
        InputError: they are of another kind, broken, or another model's.
    """
    heads = load_heads(folder, target)
    if heads.drafter != kind:
        raise InputError(
            f"--{kind} {folder} holds heads for {heads.drafter}",
            expected=f"heads for {kind}",
            do=f"give it as --{heads.drafter}",
        )
    return heads


def loaded_for_one(drafting: Drafting) -> dict[str, Any]:
    """What is loaded, for one answer. A draft model starts each with an empty cache."""
    loaded = dict(drafting.loaded)
    if "draft_model" in loaded:
        loaded["draft_model"] = DraftModel(loaded["draft_model"].model, loaded["draft_model"].name)
    return loaded
