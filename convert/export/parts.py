"""What both profiles take from the reference: its LoRA, its rows, its heads.

No logits of the whole vocabulary leave the graph: the target's choice of each node, the log
probability of a drafted token, and each stream's likeliest tokens do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..reference.checkpoint import merge_lora
from ..reference.model import LoraLinear, StreamFusedReference


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


class Head(nn.Module):
    """Rows of an LM head.

    Args:
        weight: [V, D], the head's own tensor where it is whole, so that the package stores it once.
        bias: [V], or None.
        channels_first: whether hidden states are [1, D, 1, R], as the profile `ane` has them, in
            place of [1, R, D].
        piece: most rows of a matrix; the Neural Engine takes no wider one.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        channels_first: bool,
        piece: int | None = None,
    ) -> None:
        super().__init__()
        self.channels_first = channels_first
        self.piece = piece or weight.shape[0]
        self.weight = nn.Parameter(weight, False)
        self.bias = None if bias is None else nn.Parameter(bias, False)

    def pieces(self, hidden: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Each piece's first token, and its logits [R, tokens of the piece]."""
        for first in range(0, self.weight.shape[0], self.piece):
            weight = self.weight[first : first + self.piece]
            bias = None if self.bias is None else self.bias[first : first + self.piece]
            if self.channels_first:
                logits = functional.conv2d(hidden, weight[:, :, None, None], bias)
                yield first, logits[0, :, 0].t()
            else:
                yield first, functional.linear(hidden, weight, bias)[0]

    def choose(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R] int32, the likeliest token after each row."""
        found = [
            (logits.amax(dim=-1), logits.argmax(dim=-1).int() + first)
            for first, logits in self.pieces(hidden)
        ]
        if len(found) == 1:
            return found[0][1]
        best, tokens = (torch.stack(parts, dim=1) for parts in zip(*found, strict=True))
        return tokens.gather(1, best.argmax(dim=-1, keepdim=True))[:, 0]

    def log_total(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R] the logarithm of the sum of exponentials, which float16 could not hold."""
        logits = [logits for _, logits in self.pieces(hidden)]
        peak = torch.stack([part.amax(dim=-1) for part in logits]).amax(dim=0)
        parts = [(part - peak[:, None]).float().exp().sum(dim=-1) for part in logits]
        return (torch.stack(parts).sum(dim=0).log() + peak).to(peak.dtype)

    def logit_of(self, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[m] the logit of each of `tokens` [m] after its own of `rows` [m, D]."""
        logits = (rows * functional.embedding(tokens, self.weight)).sum(dim=-1)
        return logits if self.bias is None else logits + self.bias[tokens]

    def rank(self, hidden: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns [R, count] int32 and log probabilities [R, count], best first."""
        best, columns = [], []
        for first, logits in self.pieces(hidden):
            values, found = logits.topk(min(count, logits.shape[-1]), dim=-1)
            best.append(values)
            columns.append(found.int() + first)
        logprobs, tokens = best[0], columns[0]
        if len(best) > 1:
            logprobs, order = torch.cat(best, dim=-1).topk(count, dim=-1)
            tokens = torch.cat(columns, dim=-1).gather(1, order)
        return tokens, logprobs - self.log_total(hidden)[:, None]


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
