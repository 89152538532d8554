"""Copies: tokens that followed the text's last ones before, mixed into the guesses of streams.

When an answer quotes its prompt or itself (names, numbers, code), what followed an earlier
occurrence of the text's last tokens is likely to follow again. Copies weigh more the more often
they were right while streams were not. Streams draft before the host has read the call, so what
they copy is looked up on the device; `text_index` does the same on the host.
"""

from collections.abc import Sequence

import mlx.core as mx

from ..model.shapes import indices
from ..model.tree import PAD_TOKEN

NGRAM = 3  # most tokens that are looked up; fewer if so many have not occurred
# How likely the first token of a copy is to be right, and each later one after a right one, before
# the answer has shown anything.
FIRST_COPY_PROB = 0.15
NEXT_COPY_PROB = 0.4
DOUBT = 2.0  # copies of an answer that weigh as much as these two numbers
# Tokens [G, K] and log probabilities [G, K, K] of streams, as `model.tree.grow_conditional_tree`
# takes them.
Guesses = tuple[mx.array, mx.array]
_ROOM = 256  # tokens by which the text's buffer grows
_FAR = 2**28  # more tokens than a text has


class TextOnDevice:
    """The text so far in a buffer on the device, to which a call's tokens are written unread."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._most = len(tokens)  # tokens that it holds at most: the host does not know how many
        # Before the text come tokens that equal nothing, so that it can be shifted. The buffer has
        # few sizes, as each is another kernel to compile.
        known = [PAD_TOKEN - 1] * (NGRAM - 1)
        room = _ROOM + -len(tokens) % _ROOM
        self._tokens = mx.array([*known, *tokens, *[PAD_TOKEN] * room], mx.int32)

    def write(
        self,
        tokens: mx.array,  # [P]
        position: mx.array,  # [1] of the first one
    ) -> None:
        """Write tokens into the text; the host reads neither array."""
        self._most += tokens.shape[0]
        if self._most > self._tokens.shape[0] - NGRAM:
            more = max(_ROOM, self._tokens.shape[0])
            self._tokens = mx.concatenate([self._tokens, mx.full(more, PAD_TOKEN, mx.int32)])
        self._tokens = mx.slice_update(self._tokens, tokens, position + (NGRAM - 1), axes=(0,))

    def find_continuations(
        self,
        positions: mx.array,  # [A], each looked up as if the text ended with the token there
        count: int,  # tokens for each
    ) -> mx.array:  # [A, count]
        """The tokens that followed the longest earlier match of up to `NGRAM` tokens, of equally
        long ones the newest. At the position itself they repeat, so that a text with a period is
        copied at full length. `PAD_TOKEN` throughout without a match."""
        return _find_continuations(self._tokens, positions[:, None], count)


class Copies:
    """Mixes copies into the guesses of every call, and learns from each how far to trust copies."""

    def __init__(
        self,
        text: Sequence[int],  # before the first call
    ) -> None:
        self._text = TextOnDevice(text)
        self._hits_and_trials = initial_hits_and_trials()
        self._before: tuple[mx.array, ...] | None = None  # guesses, copies

    def follow(self, tokens: Sequence[int], position: int) -> None:
        """Write tokens for which no tree was drafted here: the next call teaches nothing."""
        self._text.write(mx.array(list(tokens), mx.int32), mx.array([position], mx.int32))
        self._before = None

    def learn_and_mix(
        self,
        guesses: Guesses,  # of the streams after the call
        # [P] by the call; those after the first `num_accepted` + 1 repeat the last
        decided: mx.array,
        num_accepted: mx.array,  # [1]
        position: mx.array,  # [1] of `decided[0]` in the text
    ) -> Guesses:
        self._text.write(decided, position)
        if self._before is not None:
            self._hits_and_trials = _add_hits_and_trials(
                self._hits_and_trials, self._before, decided, num_accepted
            )
        copied = self._text.find_continuations(position + num_accepted, guesses[0].shape[0])[0]
        self._before = *guesses, copied
        return mix_copies(*self._before, self._hits_and_trials)


def initial_hits_and_trials() -> mx.array:  # [2, 2]
    return mx.array([[FIRST_COPY_PROB * DOUBT, NEXT_COPY_PROB * DOUBT], [DOUBT, DOUBT]])


@mx.compile
def mix_copies(
    tokens: mx.array,  # [..., G, K] candidates of each level, best first
    logprobs: mx.array,  # [..., G, K, K] (last axis), given each candidate of the level before
    copied: mx.array,  # [..., G] the copy; `PAD_TOKEN` for none
    hits_and_trials: mx.array,  # [..., 2, 2] rows: hits, trials; columns: first level, others
) -> Guesses:
    """Mix a copy into the guesses of streams: a mixture of two distributions, not sorted anew.

    A copied token that is no candidate of its level replaces the last one there. In the rows after
    a copied token, and in all rows of the first level, a probability p becomes (1 - w) p, and w
    more for the copied token; w is hits over trials. Other rows stay, with probability 0 for a
    token that came in.
    """
    levels, count = tokens.shape[-2:]
    ours = copied[..., None]
    known = tokens == ours
    is_new = (ours >= 0) & ~known.any(axis=-1, keepdims=True) & (indices(count) == count - 1)
    is_copy = known | is_new
    # The token before is the text's, too: in every row of the first level.
    follows = mx.concatenate([mx.ones_like(known[..., :1, :]), is_copy[..., :-1, :]], axis=-2)
    weights = (hits_and_trials[..., 0, :] / hits_and_trials[..., 1, :])[
        ..., mx.array([0, *[1] * (levels - 1)])
    ]
    weight = (weights[..., None] * ((ours >= 0) & follows))[..., None]
    probs = mx.where(is_new[..., None, :], 0.0, mx.exp(logprobs))
    mixed = (1 - weight) * probs + weight * is_copy[..., None, :]
    return mx.where(is_new, ours, tokens), mx.log(mixed)


def count_hits_and_trials(
    stream_tokens: mx.array,  # [G, K] candidates, without copies
    stream_logprobs: mx.array,  # [G, K, K], given each candidate of the level before
    copied: mx.array,  # [G] the copy; `PAD_TOKEN` for none
    decided: mx.array,  # [G] by the target at these levels
) -> mx.array:  # [2, G] hits, trials
    """A level is a trial, 1, if it has a copied token and all copied tokens before it were right.
    Its hit is 1 / (1 + q) if the copy was right, q the probability that the streams gave to the
    token after the right one before it: 1 if no stream guessed it, half if the streams were sure of
    it."""
    is_said = stream_tokens == decided[:, None]
    root = mx.array([[True, *[False] * (stream_tokens.shape[1] - 1)]])  # any row of the first level
    before = mx.concatenate([root, is_said[:-1]])
    pairs = before[:, :, None] & is_said[:, None]
    probs = mx.where(pairs, mx.exp(stream_logprobs), 0.0).sum(axis=(1, 2))
    right = copied == decided
    follows = mx.concatenate([mx.array([True]), right[:-1]])
    could = mx.cumprod(follows.astype(mx.float32)) * (copied >= 0)
    return mx.stack([could * right / (1 + probs), could])


@mx.compile
def _add_hits_and_trials(
    hits_and_trials: mx.array,  # [2, 2]
    # tokens [G, K], log probabilities [G, K, K], copy [G] of the call's tree
    before: tuple[mx.array, ...],
    decided: mx.array,  # [P]
    num_accepted: mx.array,  # [1]; the first `num_accepted` + 1 levels count
) -> mx.array:  # [2, 2]
    count = min(before[0].shape[0], decided.shape[0])
    known = (a[:count] for a in (*before, decided))
    columns = mx.array([[1.0, 0.0], *[[0.0, 1.0]] * (count - 1)])  # the first level's, and others'
    # Not `indices`: an array of it may be `num_accepted`, and none is compiled in twice.
    counts = mx.array([[level] for level in range(count)]) <= num_accepted
    return hits_and_trials + count_hits_and_trials(*known) @ (columns * counts)


@mx.compile
def _find_continuations(
    buffer: mx.array,  # the text after `NGRAM` - 1 tokens that equal nothing
    positions: mx.array,  # [A, 1]
    count: int,  # tokens for each
) -> mx.array:  # [A, count]
    size = buffer.shape[0] - NGRAM + 1
    length = mx.array(0)
    starts = indices(size)
    own = buffer[positions + indices(NGRAM)]
    agrees = starts < positions
    for n in reversed(range(NGRAM)):
        agrees = agrees & (buffer[n : n + size] == own[:, n : n + 1])
        length = length + agrees
    # The longest first, then the newest; 0 means none.
    best = mx.max(length * _FAR + mx.where(length > 0, starts, 0), axis=1, keepdims=True)
    found = best % _FAR
    following = buffer[found + NGRAM + indices(count) % mx.maximum(positions - found, 1)]
    return mx.where(best > 0, following, PAD_TOKEN)
