"""Drafters: what proposes the next tree (here the model's own streams)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import mlx.core as mx

from .accept import Acceptance
from .config import TreeConfig
from .model import StreamFusedModel
from .shapes import expect_shape
from .tree import Tree, draft_topology, grow_tree


@dataclass(frozen=True, eq=False)
class Verified:
    """What a target call leaves for drafting, on the device.

    Attributes:
        tree: the M nodes that were verified.
        target_tokens: [M] the target's token after each of them.
        acceptance: how far the tree held.
        node_hidden: [1, M, D] last hidden states of the nodes, before the final norm.
        stream_hidden: [1, G, D] those of the last accepted node's streams.
    """

    tree: Tree
    target_tokens: mx.array
    acceptance: Acceptance
    node_hidden: mx.array
    stream_hidden: mx.array

    @property
    def root(self) -> mx.array:
        """[1] the newest token, which the next tree starts from."""
        return self.acceptance.correction

    @property
    def last_hidden(self) -> mx.array:
        """[1, 1, D] last hidden state of the last accepted node, which predicted `root`."""
        return self.node_hidden[:, self.acceptance.last]


class Drafter(Protocol):
    """Proposes the tree that the next step verifies.

    Attributes:
        num_streams: streams that a step must carry for this drafter.
        num_levels: levels below the root of the trees that it proposes, at most.
    """

    num_streams: int
    num_levels: int

    def start(self, tokens: Sequence[int]) -> None:
        """Begin a sequence: `tokens` are all that precede the answer."""
        ...

    def propose(self, verified: Verified) -> Tree:
        """The tree below `verified.root`. What reads values of `verified` waits for the target."""
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

    def start(self, tokens: Sequence[int]) -> None:
        """Nothing to do: all that streams know is in the model's own rows."""

    def propose(self, verified: Verified) -> Tree:
        """See `Drafter.propose`."""
        stream_hidden = verified.stream_hidden
        expect_shape("stream hidden states", stream_hidden, 1, self.num_streams, None)
        logits = self._model.draft_logits(stream_hidden)
        tokens, logprobs = rank_candidates(logits, self._num_candidates)
        vocab = self._model.draft_vocab
        if vocab is not None:
            tokens = vocab[tokens]
        return grow_tree(verified.root, tokens, logprobs, self._tree)


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
