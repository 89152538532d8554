"""Drafters: what proposes the next tree (here the model's own streams)."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import mlx.core as mx

from .config import TreeConfig
from .model import StreamFusedModel
from .shapes import expect_shape
from .tree import Tree, draft_topology, grow_tree


class Drafter(Protocol):
    """Proposes the tree that the next step verifies.

    Attributes:
        num_streams: streams that a step must carry for this drafter.
        num_levels: levels below the root of the trees that it proposes, at most.
    """

    num_streams: int
    num_levels: int

    def propose(self, root: mx.array, stream_hidden: mx.array) -> Tree:
        """The tree below `root` [1].

        Args:
            root: the newest token.
            stream_hidden: [1, G, D] last hidden states of the last accepted node's streams.
        """
        ...


class StreamDrafter:
    """Drafts from the model's speculative streams (section 3.2.2).

    Args:
        model: a model with streams.
        tree: the shape of the tree.
        num_streams: G, at most as many as were trained.
    """

    def __init__(self, model: StreamFusedModel, tree: TreeConfig, num_streams: int) -> None:
        self.num_streams = self.num_levels = num_streams
        # A stream cannot rank more candidates than there are tokens that it may draft.
        most = model.draft_vocab_size
        width = tree.full_width if tree.kind == "full" else tree.width or most
        tree = replace(tree, width=min(width, most))
        self._model, self._tree = model, tree
        self._num_candidates = draft_topology(tree, num_streams).num_candidates

    def propose(self, root: mx.array, stream_hidden: mx.array) -> Tree:
        """See `Drafter.propose`."""
        expect_shape("stream hidden states", stream_hidden, 1, self.num_streams, None)
        logits = self._model.draft_logits(stream_hidden)
        tokens, logprobs = rank_candidates(logits, self._num_candidates)
        vocab = self._model.draft_vocab
        if vocab is not None:
            tokens = vocab[tokens]
        return grow_tree(root, tokens, logprobs, self._tree)


def rank_candidates(logits: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Tokens [G, K] and log probabilities [G, K] of each row's `count` likeliest, best first.

    Args:
        logits: [G, V]
    """
    logits = logits.astype(mx.float32)
    found = mx.argpartition(-logits, count - 1, axis=-1)[:, :count]
    values = mx.take_along_axis(logits, found, axis=-1)
    order = mx.argsort(-values, axis=-1)
    tokens = mx.take_along_axis(found, order, axis=-1)
    logprobs = mx.take_along_axis(values, order, axis=-1)
    return tokens, logprobs - mx.logsumexp(logits, axis=-1, keepdims=True)
