"""The LM head of an mlx-lm model: hidden states to logits of all tokens, or of some."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .lora import EmbeddingLora, RowLora
from .shapes import arrays_in

PACKED_KINDS = (nn.QuantizedLinear, nn.QuantizedEmbedding)
HEAD_KINDS = (nn.Linear, nn.Embedding, *PACKED_KINDS, RowLora, EmbeddingLora)

# Normed hidden states [1, R, D] to logits [1, R, number of tokens].
LMHead = Callable[[mx.array], mx.array]


@dataclass(frozen=True, eq=False)
class ScaledHead:
    """An LM head whose model scales or caps the logits: both are called as one."""

    layer: nn.Module  # has a row for each token
    model: nn.Module  # around that layer; its body returns its input

    def __call__(
        self,
        normed: mx.array,  # [..., D]
    ) -> mx.array:  # [..., V]
        logits: mx.array = self.model(normed)
        return logits


def quantise(layer: nn.Module, bits: int) -> nn.Module:
    """Quantise a layer in MLX's affine mode, in groups of 64 weights, or of 32; unchanged if it is
    quantised already or neither divides its width."""
    width = int(layer.weight.shape[-1])
    group_sizes = [size for size in (64, 32) if width % size == 0]
    if isinstance(layer, PACKED_KINDS) or not group_sizes:
        return layer
    packable: Any = layer
    packed: nn.Module = packable.to_quantized(group_size=group_sizes[0], bits=bits)
    return packed


def select_rows(
    layer: nn.Module,  # of one of `HEAD_KINDS`
    tokens: mx.array,  # [Vd]
) -> nn.Module:
    """A copy with only some tokens' rows, in their order. A layer with LoRA becomes a plain one,
    not quantised, with LoRA merged in."""
    if isinstance(layer, EmbeddingLora | RowLora):
        return layer.layer_of_merged_rows(tokens)
    rows = copy.copy(layer)
    for name in ("weight", "scales", "biases", "bias"):
        if layer.get(name) is not None:
            rows[name] = layer[name][tokens]
    return rows


def row_weights(
    layer: nn.Module,  # of one of `HEAD_KINDS`
    tokens: mx.array,  # [...]
) -> mx.array:  # [..., D]
    """Rows of a head's weight, dequantised, with LoRA merged in, without any bias."""
    weights: mx.array
    if isinstance(layer, EmbeddingLora | RowLora):
        weights = layer.layer_of_merged_rows(tokens.flatten()).weight
        return mx.unflatten(weights, 0, tokens.shape)
    # A linear layer has its weights under an embedding's names.
    kind: Any = nn.QuantizedEmbedding if isinstance(layer, PACKED_KINDS) else nn.Embedding
    weights = kind.__call__(layer, tokens)
    return weights


def head_bytes(head: LMHead | None) -> int:
    """A tied head counts the whole embedding."""
    layer = head_layer(head)
    arrays = arrays_in(layer.parameters()) if isinstance(layer, nn.Module) else []
    return sum(array.nbytes for array in arrays)


def head_layer(head: LMHead | None) -> Any:
    """The module that has a row for each token: a linear layer, or an embedding."""
    # A tied head is its embedding's own method.
    return head.layer if isinstance(head, ScaledHead) else getattr(head, "__self__", head)


def return_input(_self: nn.Module, *args: Any, **named: Any) -> mx.array:
    """The call of a model's body, so that only its head is left. The input is the first argument,
    or `inputs` in some classes (MiniMax)."""
    hidden: mx.array = args[0] if args else named["inputs"]
    return hidden
