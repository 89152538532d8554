"""The parts of both profiles that come from the reference: its LoRA, its rows, its heads.

No logits of the whole vocabulary leave the graph: the target's choice of each node, the log
probability of a drafted token, and each stream's likeliest tokens do.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ssmlx.model.condition import EPSILON

from ..reference.checkpoint import merge_lora
from ..reference.model import StreamFusedReference
from ..typed_torch import Module
from .settings import GraphSizes


@dataclass(frozen=True, eq=False)
class Rows:
    """The positions of a call's rows, what they see, and where their keys and values go."""

    positions: torch.Tensor  # [R] int32
    # [R] int32, slots of nodes' keys and values; None for streams, which are not kept: they see
    # each other after the slots
    slots: torch.Tensor | None
    mask: torch.Tensor  # [1, 1, R, S] additive, of streams [1, 1, R, S + R]
    caches: Sequence[torch.Tensor]  # keys and values of every layer, in turn


class Head(Module):
    """Rows [V, D] of an LM head, multiplied in pieces of at most `piece` rows.

    Hidden states are [1, R, D], or if `channels_first` [1, D, 1, R]. The rows may be those of a
    draft vocabulary; a token is then its number in it.
    """

    def __init__(
        self,
        weight: torch.Tensor,  # [V, D]
        bias: torch.Tensor | None,  # [V]
        *,
        channels_first: bool,
        piece: int | None = None,  # None multiplies all rows at once
    ) -> None:
        super().__init__()
        self.channels_first = channels_first
        self.piece = piece or weight.shape[0]
        self.weight = nn.Parameter(weight, False)
        self.bias = None if bias is None else nn.Parameter(bias, False)

    def piece_logits(self, hidden: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each piece's first token, and its logits [R, tokens of the piece]."""
        for first in range(0, self.weight.shape[0], self.piece):
            weight = self.weight[first : first + self.piece]
            bias = None if self.bias is None else self.bias[first : first + self.piece]
            if self.channels_first:
                logits = functional.conv2d(hidden, weight[:, :, None, None], bias)
                yield first, logits[0, :, 0].t()
            else:
                yield first, functional.linear(hidden, weight, bias)[0]

    def likeliest(self, hidden: torch.Tensor) -> torch.Tensor:
        """The likeliest tokens [R] int32; the first of equal ones."""
        found = [
            (logits.amax(dim=-1), logits.argmax(dim=-1).int() + first)
            for first, logits in self.piece_logits(hidden)
        ]
        if len(found) == 1:
            return found[0][1]
        best, tokens = (torch.stack(parts, dim=1) for parts in zip(*found, strict=True))
        return tokens.gather(1, best.argmax(dim=-1, keepdim=True))[:, 0]

    def logsumexp(self, hidden: torch.Tensor) -> torch.Tensor:
        """The log of the summed exponentials [R]."""
        totals = [logsumexp(logits) for _, logits in self.piece_logits(hidden)]
        return logsumexp(torch.cat(totals, dim=-1))[:, 0]

    def token_logits(
        self,
        rows: torch.Tensor,  # [m, D] final-normed
        tokens: torch.Tensor,  # [m]
    ) -> torch.Tensor:
        """The logit [m] of one token per row."""
        logits = (rows * functional.embedding(tokens, self.weight)).sum(dim=-1)
        return logits if self.bias is None else logits + self.bias[tokens]

    def rank(self, hidden: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rank [R, count] int32 tokens, best first, with their log probabilities over all V."""
        best = []
        columns = []
        for first, logits in self.piece_logits(hidden):
            values, found = logits.topk(min(count, logits.shape[-1]), dim=-1)
            best.append(values)
            columns.append(found.int() + first)
        logprobs = best[0]
        tokens = columns[0]
        if len(best) > 1:
            logprobs, order = torch.cat(best, dim=-1).topk(count, dim=-1)
            tokens = torch.cat(columns, dim=-1).gather(1, order)
        return tokens, logprobs - self.logsumexp(hidden)[:, None]


def logsumexp(logits: torch.Tensor) -> torch.Tensor:
    """Log of summed exponentials [..., 1], each at most 1 so that float16 does not overflow."""
    peak = logits.amax(dim=-1, keepdim=True)
    return ((logits - peak).float().exp().sum(dim=-1, keepdim=True).log() + peak).to(peak.dtype)


def renormalise_topk(
    logprobs: torch.Tensor,  # [G, K] without a condition
    added_logits: torch.Tensor,  # [G, K, K] by each candidate before (second axis)
) -> torch.Tensor:
    """Log probabilities [G, K, K] given each candidate before; the K candidates' total stays."""
    scores = logprobs[:, None] + added_logits
    return scores - logsumexp(scores) + logsumexp(logprobs)[:, None]


class Profile(Module, ABC):
    """The layers, heads and layout of an exported model, implemented in `gpu.py` and `ane.py`."""

    axis: int  # the rows' axis in hidden states
    piece: int | None = None  # most rows of a matrix of an LM head

    def __init__(self, model: StreamFusedReference, sizes: GraphSizes) -> None:
        """Merge LoRA of scope "all" into the reference, which is unusable afterwards."""
        super().__init__()
        self.base = model.base
        self.config = model.config
        self.sizes = sizes
        self.decoder = model.decoder
        self.reference = model
        if model.config.adapter_scope == "all":
            merge_lora(model)
        # Attention modules without this attribute have a KV head for every query head.
        self.groups = getattr(self.decoder.layers[0].self_attn, "num_key_value_groups", 1)
        # A stream looks G positions ahead of the last slot.
        positions = torch.arange(sizes.num_slots + sizes.num_streams)
        tables = self.decoder.rotary(positions[None])
        self.rotary = None if tables is None else tuple(table[0] for table in tables)
        head = self.base.lm_head
        new_head = partial(Head, channels_first=self.axis == 3, piece=self.piece)
        self.head = self.draft_head = new_head(head.weight, head.bias)
        if (vocab := model.draft_vocab) is not None:
            bias = None if head.bias is None else head.bias[vocab]
            self.draft_head = new_head(head.weight[vocab].detach(), bias)
        if model.condition is not None or model.root_init is not None:
            squares = self.decoder.embedding_table.float().square().mean(dim=-1)
            # For a row of zeros, the largest value of float16.
            inverse_rms = (squares + EPSILON).rsqrt().clamp(max=6e4)
            self.inverse_rms: torch.Tensor  # [V] of the embeddings
            self.register_buffer("inverse_rms", inverse_rms, persistent=False)

    @staticmethod
    def linear_of(module: Any, x: torch.Tensor) -> torch.Tensor:
        """Apply `module`, possibly with LoRA, to hidden states in this profile's layout."""
        return module(x)

    def take_rows(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return hidden[:, rows] if self.axis == 1 else hidden[..., rows]

    def as_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """Convert hidden states to rows [R, D]."""
        return hidden[0] if self.axis == 1 else hidden[0, :, 0].t()

    def from_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of `as_rows`."""
        return rows[None] if self.axis == 1 else rows.t()[None, :, None]

    @abstractmethod
    def cache_shape(self) -> tuple[int, ...]:
        """The shape of one layer's keys, and of its values."""

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Embed tokens [R] at positions [R], in this profile's layout."""
        return self.from_rows(self.decoder.embed(tokens[None], positions[None])[0])

    def unit_rms_embeddings(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings [m, D], each scaled to an RMS of 1."""
        return (
            functional.embedding(tokens, self.decoder.embedding_table)
            * self.inverse_rms[tokens, None]
        )

    def condition_logits(
        self,
        streams: torch.Tensor,  # final-normed, in this profile's layout
        previous: torch.Tensor,  # [G, K] candidates of the stream before
        tokens: torch.Tensor,  # [G, K] candidates of the stream
    ) -> torch.Tensor:
        """What `previous` (second axis) adds to the logits of `tokens` (third axis), [G, K, K]."""
        given: Any = self.reference.condition
        embedded = self.from_rows(self.unit_rms_embeddings(previous.flatten()))
        told = self.as_rows(self.linear_of(given.embed, embedded))
        gate = self.as_rows(self.linear_of(given.gate, streams)).sigmoid()[:, None]
        mixed = (gate * told.reshape(*tokens.shape, -1)).flatten(0, 1)
        correction = self.as_rows(self.linear_of(given.out, self.from_rows(mixed)))
        # The head's rows by token: with tied weights the embedding table, which is loaded anyway.
        rows = functional.embedding(tokens, self.head.weight)
        return correction.reshape(rows.shape) @ rows.transpose(1, 2)

    @abstractmethod
    def run(self, hidden: torch.Tensor, first: int, last: int, rows: Rows) -> torch.Tensor:
        """Run layers `first` to `last` - 1; caches the keys and values of nodes, not of streams."""

    def root_states(
        self,
        roots: torch.Tensor,  # [m] the tokens after the nodes
        normed: torch.Tensor,  # the m nodes' final-normed states, in this profile's layout
    ) -> torch.Tensor:
        """Features [m, 2 D] of roots and states, in this profile's layout."""
        embedded = self.unit_rms_embeddings(roots)
        return self.from_rows(torch.cat([embedded, self.as_rows(normed)], dim=-1))

    def start_streams(
        self,
        node: torch.Tensor,  # before the insertion layer, one row
        root_inputs: torch.Tensor | None,  # one row of `root_states`
    ) -> torch.Tensor:
        """The G stream rows of one node before the upper layers (eq. 3)."""
        model = self.reference
        started = node
        if model.stream_init is not None:
            started = self.linear_of(model.stream_init, node)
        if self.config.stream_init == "residual":
            started = node + started
        if model.root_init is not None:
            started = started + self.linear_of(model.root_init, root_inputs)
        if model.stream_embeddings is None:
            return torch.cat([started] * self.sizes.num_streams, dim=self.axis)
        return started + self.from_rows(model.stream_embeddings)

    def early_exit_states(
        self,
        nodes: torch.Tensor,  # before the insertion layer, in this profile's layout
    ) -> torch.Tensor:
        """Final-normed states for the early exit's head (Speculative Streaming, section 3.2.3)."""
        return self.norm(nodes + self.linear_of(self.reference.prune_adapter, nodes))

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.decoder.norm(hidden)
