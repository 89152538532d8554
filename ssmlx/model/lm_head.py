"""The LM head of an mlx-lm model: hidden states to logits of all tokens, or of some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .lora import EmbeddingLora, RowLora
from .shapes import arrays_in

PACKED_KINDS = (nn.QuantizedLinear, nn.QuantizedEmbedding)
HEAD_KINDS = (nn.Linear, nn.Embedding, *PACKED_KINDS, RowLora, EmbeddingLora)

LMHead = Callable[[mx.array], mx.array]
"""Normed hidden states [1, R, D] to logits [1, R, number of tokens]."""


@dataclass(frozen=True, eq=False)
class Head:
    """An LM head of whose logits its model makes others: it scales them, or caps them."""

    layer: nn.Module  # with a row for each token
    model: nn.Module  # with that head, and a body that gives back what it takes

    def __call__(self, normed: mx.array) -> mx.array:
        return self.model(normed)


def pack_rows(layer: nn.Module, bits: int) -> nn.Module:
    """A linear layer or embedding with its weights packed to `bits` bits, mlx-lm's affine format.

    As it is where it is packed already, or no group size of MLX's divides its width.
    """
    width = int(layer.weight.shape[-1])
    sizes = [size for size in (64, 32) if width % size == 0]
    if isinstance(layer, PACKED_KINDS) or not sizes:
        return layer
    packable: Any = layer
    return packable.to_quantized(group_size=sizes[0], bits=bits)


def head_bytes(head: LMHead | None) -> int:
    """Bytes of the weights behind an LM head, such as `Backbone.draft_head` made."""
    layer = head_layer(head)
    arrays = arrays_in(layer.parameters()) if isinstance(layer, nn.Module) else []
    return sum(array.nbytes for array in arrays)


def head_layer(head: LMHead | None) -> Any:
    """The module that has a row for each token."""
    # A tied head is its embedding's own method.
    return head.layer if isinstance(head, Head) else getattr(head, "__self__", head)


def give_back(_self: nn.Module, hidden: mx.array, *_more: Any, **_others: Any) -> mx.array:
    return hidden
