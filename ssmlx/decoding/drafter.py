"""What every drafter is given, and what it must give: the decoding loop knows no more of it.

The drafters themselves are the files of `ssmlx/drafters/`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from ..model.cache import TreeCache
from ..model.shapes import indices, to_list
from ..model.tree import Tree
from .accept import Acceptance

Noise = mx.array | None
"""What is known of the decisions that are guessed, see `Sampling.noise`."""


@dataclass(frozen=True, eq=False)
class Verified:
    """What a target call leaves for drafting, on the device."""

    tree: Tree  # the M nodes that were verified
    # [M] the target's token after each of them, see `Sampling.choose`
    target_tokens: mx.array
    acceptance: Acceptance  # how far the tree held
    node_hidden: mx.array  # [1, M, D] last hidden states of the nodes, before the final norm
    # [1, G, D] those of the last accepted node's streams, where the step carried streams
    stream_hidden: mx.array
    insertion_hidden: mx.array  # [1, M, D] hidden states of the nodes before the insertion layer
    position: mx.array  # [1] the root's place in the text
    cache: TreeCache  # its newest path is the accepted one

    @property
    def root(self) -> mx.array:
        """[1] the newest token, which the next tree starts from."""
        return self.acceptance.correction

    @property
    def root_place(self) -> mx.array:
        """[1] the place of `root` in the text."""
        return self.position + self.acceptance.num_accepted + 1

    @property
    def last_hidden(self) -> mx.array:
        """[1, 1, D] last hidden state of the last accepted node, which predicted `root`."""
        return self.node_hidden[:, self.acceptance.last]

    def read(self, *more: mx.array) -> list[list[int]]:
        """The tokens that the call advanced by, and each of `more` [*], on the host.

        One read, which waits for the target.
        """
        accepted = self.acceptance
        arrays = [accepted.num_accepted, accepted.new_tokens, *more]
        flat = to_list(mx.concatenate([array.astype(mx.int32) for array in arrays]))
        parts = []
        first = 1
        for array in arrays[1:]:
            parts.append(flat[first : first + array.size])
            first += array.size
        parts[0] = parts[0][: flat[0] + 1]
        return parts


class Drafter(Protocol):
    """Proposes the tree that the next step verifies.

    All attributes but `draft_calls` and `cache_bytes` never change. Siblings of a tree carry
    different tokens; a node of token `tree.PAD_TOKEN` fills a tree up to a usual size and is never
    accepted.

    Attributes:
        num_streams: streams that a step must carry for this drafter.
        num_levels: levels below the root of the trees that it proposes, at most.
        max_nodes: nodes of the trees that it proposes, at most, padding included.
        num_parameters: parameters that it needs beside the target's and LoRA's.
        draft_calls: forward passes of a model other than the target, since `start`.
        cache_bytes: bytes that it keeps of the text itself, beside those of a draft model.
        waits: whether `propose` reads what the target decided, which waits for it.
    """

    num_streams: int
    num_levels: int
    max_nodes: int
    num_parameters: int
    draft_calls: int
    waits: bool

    @property
    def cache_bytes(self) -> int: ...

    def start(self, tokens: Sequence[int]) -> Iterator[list[int]] | None:
        """Begin, or go on behind calls that it has not seen: `tokens` are the text so far, of which
        those that nobody knows are `PAD_TOKEN`. Where that takes calls, in `prefill_turns`."""

    def propose(self, verified: Verified) -> Tree:
        """The tree below `verified.root`. What reads values of `verified` waits for the target."""


def rank_candidates(
    logits: mx.array, count: int, vocab: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Tokens [G, K] and log probabilities [G, K] of the K = `count` likeliest, best first.

    The columns of `logits` [G, V] are the tokens themselves, unless `vocab` [V] names them. Of
    equally likely ones those of the lowest ids are taken, and come first.
    """
    columns, values = top_columns(logits, count)
    tokens = columns if vocab is None else vocab[columns]
    return tokens, values - mx.logsumexp(logits.astype(mx.float32), axis=-1, keepdims=True)


def with_noise(logits: mx.array, noise: Noise) -> mx.array:
    """`logits` of what is decided with `noise`."""
    return logits if noise is None else logits.astype(mx.float32) + noise


def top_columns(values: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Columns [R, K] of the K = `count` largest of each row of `values` [R, V], and those [R, K]
    in float32; ranked as `rank_candidates` says.

    No sort sees a row as a whole, which on a GPU takes many passes: all that is wanted stands in
    the K blocks of columns with the largest maxima. About sqrt(V K) numbers are sorted, twice.
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
