"""What both profiles take from the reference: its LoRA, its draft head, its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..reference.checkpoint import merge_lora
from ..reference.model import LoraLinear, StreamFusedReference
from .heads import Head


@dataclass(frozen=True, eq=False)
class Rows:
    """What a run of layers needs to know of its rows.

    Attributes:
        positions: [R] int32.
        slots: [node rows] int32, where the nodes' keys and values go.
        mask: [1, 1, R, S + stream rows] additive.
        num_streams: streams of each node among the rows; 0 for nodes alone.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor
    num_streams: int = 0


@dataclass
class RowCount:
    """Rows in front of a call's stream rows, shared by its LoRA modules."""

    nodes: int = 0


def query_groups(model: StreamFusedReference) -> int:
    """H / Hkv; attention modules that do not name it have a KV head for every query head."""
    return getattr(model.decoder.layers[0].self_attn, "num_key_value_groups", 1)


def wrap_lora(model: StreamFusedReference, wrap: Callable[[LoraLinear], nn.Module]) -> None:
    """Make LoRA free where it acts on every row; else let `wrap` apply it to stream rows."""
    if model.config.adapter_scope == "all":
        merge_lora(model)
        return
    for path, adapted in model.adapters.items():
        _, index, place = path.split(".", 2)
        parent, _, name = place.rpartition(".")
        layer: Any = model.decoder.layers[int(index)]
        setattr(layer.get_submodule(parent), name, wrap(adapted))
    model.adapters = {}


def draft_head(
    model: StreamFusedReference, head: Head, *, channels_first: bool, piece: int | None = None
) -> Head:
    """The head of the draft vocabulary; `head` itself where streams draft from all tokens."""
    vocab = model.draft_vocab
    if vocab is None:
        return head
    bias = None if head.bias is None else head.bias[vocab]
    weight = head.weight[vocab].detach()
    return Head(weight, bias, channels_first=channels_first, piece=piece)
