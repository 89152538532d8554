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

LMHead = Callable[[mx.array], mx.array]
"""Normed hidden states [1, R, D] to logits [1, R, number of tokens]."""


@dataclass(frozen=True, eq=False)
class ScaledHead:
    """An LM head whose model scales or caps the logits: both are called as one.

    Attributes:
        layer: the head's layer, with a row for each token.
        model: the model around that layer, whose body returns its input.
    """

    layer: nn.Module
    model: nn.Module

    def __call__(self, normed: mx.array) -> mx.array:
        """[..., V] scaled or capped logits of `normed` [..., D]."""
        logits: mx.array = self.model(normed)
        return logits


def quantise_if_possible(layer: nn.Module, bits: int) -> nn.Module:
    """Make a linear layer or embedding whose weights are quantised, in MLX's affine mode.

    Groups are of 64 weights, or of 32 where 64 does not divide the layer's width.

    Args:
        layer: an `nn.Linear` or `nn.Embedding`, quantised or not; it stays as it is.
        bits: for each weight.

    Returns:
        The quantised layer; `layer` itself where it is quantised already, or where neither 64 nor
        32 divides its width.
    """
    width = int(layer.weight.shape[-1])
    group_sizes = [size for size in (64, 32) if width % size == 0]
    if isinstance(layer, PACKED_KINDS) or not group_sizes:
        return layer
    packable: Any = layer
    packed: nn.Module = packable.to_quantized(group_size=group_sizes[0], bits=bits)
    return packed


def select_rows(layer: nn.Module, tokens: mx.array) -> nn.Module:
    """Make a copy of an LM head's layer with some tokens' rows alone.

    Args:
        layer: of one of `HEAD_KINDS`; it stays as it is.
        tokens: [Vd] ids.

    Returns:
        A layer of Vd rows in the order of `tokens`, copies of the rows in their dtype and
        quantisation. Of a layer with LoRA: a plain layer with LoRA merged in, not quantised.
    """
    if isinstance(layer, EmbeddingLora | RowLora):
        return layer.layer_of_merged_rows(tokens)
    rows = copy.copy(layer)
    for name in ("weight", "scales", "biases", "bias"):
        if layer.get(name) is not None:
            rows[name] = layer[name][tokens]
    return rows


def row_weights(layer: nn.Module, tokens: mx.array) -> mx.array:
    """The weights of an LM head's rows, dequantised, LoRA merged into them.

    Args:
        layer: of one of `HEAD_KINDS`.
        tokens: [...] ids.

    Returns:
        [..., D] in the order of `tokens`, without any bias.
    """
    weights: mx.array
    if isinstance(layer, EmbeddingLora | RowLora):
        weights = layer.layer_of_merged_rows(tokens.flatten()).weight
        return mx.unflatten(weights, 0, tokens.shape)
    # A linear layer has its weights under an embedding's names.
    kind: Any = nn.QuantizedEmbedding if isinstance(layer, PACKED_KINDS) else nn.Embedding
    weights = kind.__call__(layer, tokens)
    return weights


def head_bytes(head: LMHead | None) -> int:
    """Bytes of the parameters of an LM head's layer, such as `Backbone.draft_head` made.

    0 for None. A head that is tied counts the whole embedding.
    """
    layer = head_layer(head)
    arrays = arrays_in(layer.parameters()) if isinstance(layer, nn.Module) else []
    return sum(array.nbytes for array in arrays)


def head_layer(head: LMHead | None) -> Any:
    """The module that has a row for each token: a linear layer, or an embedding; None for None."""
    # A tied head is its embedding's own method.
    return head.layer if isinstance(head, ScaledHead) else getattr(head, "__self__", head)


def return_input(_self: nn.Module, *args: Any, **named: Any) -> mx.array:
    """The call of a model's body that returns its input: of the model, its head is left.

    The input is the first argument, or `inputs` where a class names it (MiniMax).
    """
    hidden: mx.array = args[0] if args else named["inputs"]
    return hidden
