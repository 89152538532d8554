"""From a base model's folder and an adapter to the PyTorch reference that is exported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ssmlx.errors import InputError
from ssmlx.loading.adapter import Adapter, BaseIdentity
from ssmlx.model.lora import layer_of

from ..base import load_base
from ..reference.checkpoint import merge_weights, tensor_of
from ..reference.format import LoraSettings
from ..reference.model import StreamFusedReference

_PROBE_LENGTH = 32


def build_reference(folder: Path, adapter: Adapter, num_streams: int) -> StreamFusedReference:
    """The reference with an adapter's weights, in float32.

    Args:
        folder: of the base model.
        adapter: as `ssmlx.loading.adapter.load_adapter` reads it.
        num_streams: G, the streams to use; the first ones of those trained.

    Raises:
        InputError: the model cannot be loaded or driven this way, or the adapter is another's.
    """
    base = load_base(folder)
    _check_identity(base, adapter)
    merge_weights(base, adapter.task_lora, Path("the adapter"))
    vocab = adapter.streams.draft_vocab
    model = StreamFusedReference(
        base,
        adapter.config,
        lora=_lora_settings(adapter),
        draft_vocab=None if vocab is None else tensor_of(vocab),
    )
    _fill(model, adapter)
    _limit_streams(model, num_streams)
    return model.eval().requires_grad_(False)


def base_identity(base: Any) -> BaseIdentity:
    """What tells a PyTorch base model from another, as MLX's side knows it."""
    inner = getattr(base, "model", None)
    inner = getattr(inner, "decoder", inner)
    names = ("norm", "final_layernorm", "final_layer_norm")
    norm = next(
        (found for name in names if (found := getattr(inner, name, None)) is not None), None
    )
    weight = getattr(norm, "weight", torch.zeros(0))
    config = base.config
    return BaseIdentity(
        config.model_type,
        config.num_hidden_layers,
        config.hidden_size,
        config.vocab_size,
        tuple(round(value, 6) for value in weight[:_PROBE_LENGTH].float().tolist()),
    )


def _check_identity(base: Any, adapter: Adapter) -> None:
    difference = adapter.base.difference(base_identity(base))
    if difference:
        raise InputError(
            f"the adapter belongs to another base model: this one has {difference}",
            expected=adapter.config.base_model or "the model it was converted for",
            do="choose that model with --model, or another --adapter",
        )


def _lora_settings(adapter: Adapter) -> LoraSettings:
    """Of an adapter's LoRA; rank 0 where it has none."""
    if not adapter.lora:
        return LoraSettings()
    sizes = {(weights.a.shape[1], weights.scale) for weights in adapter.lora.values()}
    places = [layer_of(path) for path in adapter.lora]
    modules, layers = sorted({m for _, m in places}), sorted({n for n, _ in places})
    if len(sizes) > 1 or len(places) != len(modules) * len(layers):
        raise InputError(
            "the adapter's LoRA differs from layer to layer",
            expected="one rank and scale, on the same modules of each layer",
            do="convert it with uniform LoRA",
        )
    ((rank, scale),) = sizes
    return LoraSettings(rank, scale * rank, tuple(modules), tuple(layers))


@torch.no_grad()
def _fill(model: StreamFusedReference, adapter: Adapter) -> None:
    """Copy the adapter's tensors into the reference."""
    for path, weights in adapter.lora.items():
        layer, module = layer_of(path)
        pair = model.adapters[f"layers.{layer}.{module}"].adapter
        pair.lora_A.weight.copy_(tensor_of(weights.a).t())
        pair.lora_B.weight.copy_(tensor_of(weights.b).t())
    streams = adapter.streams
    if model.stream_embeddings is not None:
        assert streams.embeddings is not None
        model.stream_embeddings.copy_(tensor_of(streams.embeddings))
    for mine, theirs in ((model.stream_init, streams.init), (model.prune_adapter, streams.prune)):
        if mine is not None and theirs is not None:
            mine.lora_A.weight.copy_(tensor_of(theirs.a))
            mine.lora_B.weight.copy_(tensor_of(theirs.b))


def _limit_streams(model: StreamFusedReference, num_streams: int) -> None:
    """Use the first `num_streams` streams alone."""
    model.config = replace(model.config, num_streams=num_streams)
    if model.stream_embeddings is not None:
        model.stream_embeddings = nn.Parameter(model.stream_embeddings[:num_streams].detach())


def check_context(model: StreamFusedReference, num_slots: int) -> None:
    """Check that the model can look back over the whole cache, and has positions for it.

    Raises:
        InputError: it cannot.
    """
    limit = getattr(model.base.config, "max_position_embeddings", None)
    if limit is not None and num_slots > limit:
        raise InputError(
            f"--context {num_slots}",
            expected=f"at most {limit}, the model's own",
            do="choose a smaller one",
        )
    windows = [window for window in model.windows if window is not None]
    if windows and min(windows) < num_slots:
        raise InputError(
            f"the model looks back {min(windows)} tokens in some layers",
            expected=f"the whole --context of {num_slots}, as every slot is visible here",
            do="choose a --context of at most that",
        )
