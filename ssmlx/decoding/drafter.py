"""What every drafter is given, and what it must give: the decoding loop knows no more of it.

The drafters themselves are the files of `ssmlx/drafters/`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx

from ..model.shapes import indices
from ..model.text_cache import TextCache
from ..model.tree import Tree
from .accept import Acceptance
from .draft_shape import DraftShape

Noise = mx.array | None
"""What is known of the decisions that are guessed, see `Sampling.noise`."""
Taps = Mapping[int, mx.array]
"""Hidden states by layer: [1, R, D] as they enter layer n, R rows.

Of a model of N layers number N is what enters the final norm: the last layer's output."""


@dataclass(frozen=True)
class Needs:
    """What a drafter needs of the target's calls beside the last hidden states."""

    streams: int = 0
    """G, speculative streams that each node of a verified tree carries (the paper's schedule)."""
    taps: tuple[int, ...] = ()
    """Layers whose input it reads: of the prompt, and of the nodes of every tree. The number of all
    layers stands for the final norm."""
    host_tokens: bool = False
    """Whether `propose` reads values of tokens, such as to look them up. Then each call is read
    before it drafts; otherwise the next tree is drafted while the call runs."""
    follows_from_start: bool = False
    """Whether it is started behind the prompt's call and follows every token from then on, because
    what it offers (`OfferSource`) depends on the text. Otherwise it is started when the controller
    first lets it draft."""


@dataclass(frozen=True, eq=False)
class Verified:
    """What a target call leaves for drafting, on the device: M nodes, and the path accepted of
    them.
    """

    tree: Tree  # the M nodes that were verified
    # [M] the target's token after each of them, see `Sampling.sample_or_mark_unresolved`
    target_tokens: mx.array
    acceptance: Acceptance  # how far the tree held
    # [1, M, D] last hidden states of the nodes, before the final norm; None of a model without
    # stages, where a drafter taps the final norm instead
    node_hidden: mx.array | None
    # [1, G, D] those of the last accepted node's streams; None where the call carried no streams
    stream_hidden: mx.array | None
    # [1, M, D] hidden states of the nodes before the insertion layer; None of a model without
    # streams
    insertion_hidden: mx.array | None
    position: mx.array  # [1] the root's position in the text
    cache: TextCache  # holds the accepted path: as its newest path, or committed already
    # by layer [1, M, D]: the input of the layers that a drafter taps
    taps: Taps = field(default_factory=dict)

    @property
    def root(self) -> mx.array:
        """[1] the newest token, which the next tree starts from."""
        return self.acceptance.correction

    @property
    def root_position(self) -> mx.array:
        """[1] the position of `root` in the text."""
        return self.position + self.acceptance.num_accepted + 1

    @property
    def last_hidden(self) -> mx.array:
        """[1, 1, D] last hidden state of the last accepted node, which predicted `root`.

        Raises:
            ValueError: of a model without stages.
        """
        if self.node_hidden is None:
            raise ValueError("a model without stages gives last hidden states as a tap alone")
        return self.node_hidden[:, self.acceptance.last]

    def accepted_taps(self) -> Taps:
        """By layer [1, P, D]: the taps of the accepted path's nodes alone, the root's first.

        Rows after number `num_accepted` repeat the last accepted node's.
        """
        return {layer: rows[:, self.acceptance.path] for layer, rows in self.taps.items()}


class Drafter(Protocol):
    """Proposes the tree that the next call verifies.

    Siblings of a tree carry different tokens; a node of token `tree.PAD_TOKEN` fills a tree up to a
    usual size and is never accepted. Whatever is proposed, the answer is the target's own.

    A drafter may also have an `offer()`, with which it says at each call what it could draft now
    (`ssmlx.policy.offers.OfferSource`); one without is taken to bring as much at every call.

    Attributes:
        largest: the largest tree that it proposes, padding included.
        needs: what it needs of the target's calls.
        num_parameters: parameters that it needs beside the target's and LoRA's.
        draft_calls: forward passes of a model other than the target, since it was made.
        cache_bytes: bytes that it keeps of the text itself, beside those of a draft model.
    """

    @property
    def largest(self) -> DraftShape: ...

    @property
    def needs(self) -> Needs: ...

    @property
    def num_parameters(self) -> int: ...

    @property
    def draft_calls(self) -> int: ...

    @property
    def cache_bytes(self) -> int: ...

    def start(self, tokens: Sequence[int]) -> Iterator[None] | None:
        """Begin behind a text, and forget what another one left.

        A loop calls it once: where the drafter needs taps, before the prompt is processed; where it
        follows the text (`needs.follows_from_start`), behind that; else when it is first to draft.
        An answer that comes back from a batch has a new loop.

        Args:
            tokens: the text so far; tokens that nobody knows are `PAD_TOKEN`.

        Returns:
            None; or, where that takes calls of a model, an iterator that yields None before each of
            them, for others to go first. The loop runs it to its end.
        """

    def follow(self, tokens: Sequence[int], position: int, taps: Taps | None = None) -> None:
        """Take in tokens that the text has gone on by.

        A drafter that needs host tokens and has started follows every call at once, with the taps
        that it needs; others follow when they next draft, without taps, but for the tokens of calls
        that they drafted behind, which `propose` showed them. A drafter that needs taps also
        follows each piece of the prompt.

        Args:
            tokens: ids; those that nobody knows are `PAD_TOKEN`.
            position: the first one's position in the text.
            taps: for each token, what entered the tapped layers at the position before it, [1, R,
                D]; None where the calls did not keep them.
        """

    def propose(self, verified: Verified, shape: DraftShape) -> Tree:
        """Draft a tree for the next call.

        What reads values of `verified` waits for the target: only drafters that need host tokens
        do, and the loop has read them by then.

        Args:
            verified: the call to draft behind.
            shape: how large a tree; fewer nodes are fine.

        Returns:
            A tree whose root is `verified.root`; a bare root where there is nothing to draft. A
            drafter that needs host tokens knows it: the last token that `start` or `follow` gave.
        """


def rank_candidates(
    logits: mx.array, count: int, vocab: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """The likeliest tokens of each row; of equal ones those of the lowest columns.

    Args:
        logits: [G, V]; [G, Vd] with a draft vocabulary.
        count: K, at most the number of columns.
        vocab: [Vd] the token of each column; the column's number unless given.

    Returns:
        [G, K] tokens, likeliest first, and [G, K] their float32 log probabilities, normalised over
        all columns.
    """
    columns, values = top_columns_and_values(logits, count)
    tokens = columns if vocab is None else vocab[columns]
    return tokens, values - mx.logsumexp(logits.astype(mx.float32), axis=-1, keepdims=True)


def with_noise(logits: mx.array, noise: Noise) -> mx.array:
    """Float32 `logits` plus `noise`, of one shape; `logits` as they are where `noise` is None."""
    return logits if noise is None else logits.astype(mx.float32) + noise


def top_columns_and_values(values: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The largest values of each row, without a sort of whole rows.

    A sort of a row takes many passes on a GPU. All that is wanted stands in the K blocks of columns
    with the largest maxima, so about sqrt(V K) numbers are sorted, twice.

    Args:
        values: [R, V].
        count: K, at most V.

    Returns:
        [R, K] columns and [R, K] their values in float32, largest first; of equal values the lowest
        columns.
    """
    rows, size = values.shape
    # Of a block: a power of two, of which most vocabularies' sizes are multiples.
    width = 1 << (math.isqrt(size // count).bit_length() - 1)
    columns = indices(size)[None]
    found = values
    if width > 1:
        whole = size // width * width
        maxima = values[:, :whole].reshape(rows, -1, width).max(axis=-1)
        # In the order of their columns, so that a stable sort leaves equal values in it.
        blocks = mx.sort(mx.argsort(-maxima, axis=-1)[:, :count], axis=-1).astype(mx.int32)
        columns = (blocks[:, :, None] * width + indices(width)).reshape(rows, -1)
        if whole < size:
            rest = mx.broadcast_to(indices(whole, size), (rows, size - whole))
            columns = mx.concatenate([columns, rest], axis=-1)
        found = mx.take_along_axis(values, columns, axis=-1)
    order = mx.argsort(-found, axis=-1)[:, :count]
    columns = mx.broadcast_to(columns, found.shape)
    best = mx.take_along_axis(found, order, axis=-1).astype(mx.float32)
    return mx.take_along_axis(columns, order, axis=-1), best
