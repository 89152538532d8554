"""Copies: tokens that followed the text's last ones before, mixed into the guesses of streams.

Where an answer quotes its prompt or itself (names, numbers, code), what followed the text's last
tokens where they stood before is likely to follow. How likely, the answer shows: copies weigh more
the more often they were right where streams were not.

`text_index` knows the same on the host, for drafters that wait for the tokens. Streams do not: they
draft behind a call that nobody has read, so what they copy has to be looked up on the device.
"""

from collections.abc import Sequence

import mlx.core as mx

from ..model.shapes import indices
from ..model.tree import PAD_TOKEN

NGRAM = 3
"""Tokens that are looked up at most; fewer where so many stand nowhere."""
FIRST_COPY_PROB = 0.15
NEXT_COPY_PROB = 0.4
"""How likely the first token of a copy is to be right, and each later one behind a right one, where
the answer has shown nothing yet."""
DOUBT = 2.0
"""Copies of an answer that weigh as much as these two numbers."""
Guesses = tuple[mx.array, mx.array]
"""Tokens [G, K] and log probabilities [G, K, K] of streams, as
`model.tree.grow_conditional_tree` takes them."""
_ROOM = 256  # tokens by which the text's buffer grows
_FAR = 2**28  # more tokens than a text has


class TextOnDevice:
    """The text so far in a buffer on the device, to which a call's tokens are written unread.

    Args:
        tokens: the text at the beginning, [C].
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        """Begin with the text `tokens`, which may be empty, and free room for 256 to 511 more."""
        self._most = len(tokens)  # tokens that it holds at most: the host does not know how many
        # Before the text stand tokens that equal nothing, so that it can be shifted. The buffer has
        # few sizes, as each is another kernel to compile.
        known = [PAD_TOKEN - 1] * (NGRAM - 1)
        room = _ROOM + -len(tokens) % _ROOM
        self._tokens = mx.array([*known, *tokens, *[PAD_TOKEN] * room], mx.int32)

    def write(self, tokens: mx.array, position: mx.array) -> None:
        """Write `tokens` [P] into the text from `position` [1] on, over what stands there.

        Both may be uncomputed: the host reads neither. The buffer about doubles where all that was
        ever written may have filled it.
        """
        self._most += tokens.shape[0]
        if self._most > self._tokens.shape[0] - NGRAM:
            more = max(_ROOM, self._tokens.shape[0])
            self._tokens = mx.concatenate([self._tokens, mx.full(more, PAD_TOKEN, mx.int32)])
        self._tokens = mx.slice_update(self._tokens, tokens, position + (NGRAM - 1), axes=(0,))

    def find_continuations(self, positions: mx.array, count: int) -> mx.array:
        """Find what followed earlier where the text's tokens up to a position stood before.

        Args:
            positions: [A] positions in the text; each is looked up as if the text ended with the
                token there.
            count: tokens to return for each.

        Returns:
            [A, count] what followed the longest earlier match of up to `NGRAM` tokens, of equally
            long ones the newest. What reaches the position itself repeats, so that a text with a
            period is copied at full length. `PAD_TOKEN` throughout where the token stands nowhere
            before.
        """
        return _find_continuations(self._tokens, positions[:, None], count)


class Copies:
    """Mixes copies into the guesses of every call, and learns from each how far to trust copies.

    Args:
        text: the tokens that stand before the first call.
    """

    def __init__(self, text: Sequence[int]) -> None:
        self._text = TextOnDevice(text)
        self._hits_and_trials = initial_hits_and_trials()
        self._before: tuple[mx.array, ...] | None = None  # guesses, copies

    def follow(self, tokens: Sequence[int], position: int) -> None:
        """Write `tokens`, for which no tree was drafted here, into the text from `position` on.

        The next call of `learn_and_mix_into_guesses` learns nothing then.
        """
        self._text.write(mx.array(list(tokens), mx.int32), mx.array([position], mx.int32))
        self._before = None

    def learn_and_mix_into_guesses(
        self, guesses: Guesses, decided: mx.array, num_accepted: mx.array, position: mx.array
    ) -> Guesses:
        """Write a call's tokens into the text, learn from them, and mix copies into new guesses.

        What is learned is how often the copy that was mixed in before was right; nothing at the
        first call, nor behind `follow`.

        Args:
            guesses: [G, K] tokens and [G, K, K] log probabilities of the streams behind the call.
            decided: [P] the tokens that the call decided on; those after the first `num_accepted` +
                1 repeat the last.
            num_accepted: [1] drafted tokens that were accepted.
            position: [1] the position of `decided[0]` in the text.

        Returns:
            Guesses of the same shapes, with the tokens among them that followed the text's newest
            ones before; see `mix_in_copies_unsorted`.
        """
        self._text.write(decided, position)
        if self._before is not None:
            self._hits_and_trials = _add_hits_and_trials_of_call(
                self._hits_and_trials, self._before, decided, num_accepted
            )
        copied = self._text.find_continuations(position + num_accepted, guesses[0].shape[0])[0]
        self._before = *guesses, copied
        return mix_in_copies_unsorted(*self._before, self._hits_and_trials)


def initial_hits_and_trials() -> mx.array:
    """[2, 2] hits and trials, as `mix_in_copies_unsorted` takes them, before an answer has shown
    anything."""
    return mx.array([[FIRST_COPY_PROB * DOUBT, NEXT_COPY_PROB * DOUBT], [DOUBT, DOUBT]])


@mx.compile
def mix_in_copies_unsorted(
    tokens: mx.array, logprobs: mx.array, copied: mx.array, hits_and_trials: mx.array
) -> Guesses:
    """Mix the tokens of a copy into the guesses of streams: a mixture of two distributions.

    A copied token that is no candidate of its level replaces the last one there. In the rows behind
    a copied token, and in all rows of the first level, a probability p becomes (1 - w) p, and w
    more for the copied token. Other rows stay, but with probability 0 for a token that came in.

    Args:
        tokens: [..., G, K] candidates of each level, best first.
        logprobs: [..., G, K, K] their log probabilities (last axis), given each candidate of the
            level before.
        copied: [..., G] the copy; `PAD_TOKEN` where there is none.
        hits_and_trials: [..., 2, 2] row 0 hits, row 1 trials, of `count_hits_and_trials_by_level`;
            column 0 for the first level, column 1 for the others. w is hits over trials.

    Returns:
        Tokens and log probabilities of the same shapes, not sorted anew.
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


def count_hits_and_trials_by_level(
    stream_tokens: mx.array, stream_logprobs: mx.array, copied: mx.array, decided: mx.array
) -> mx.array:
    """[2, G] by level: the hits of a copy in one call (row 0), and its trials (row 1).

    A level is a trial, 1, where it has a copied token and all copied tokens before it were right;
    else it is 0. Its hit is 1 / (1 + q) where the copy was right, q the probability that the
    streams gave to the token behind the right one before it: 1 where no stream guessed it, half
    where the streams were sure of it. Else it is 0.

    Args:
        stream_tokens: [G, K] the streams' candidates, without copies.
        stream_logprobs: [G, K, K] their log probabilities, given each candidate of the level
            before.
        copied: [G] the copy; `PAD_TOKEN` where there is none.
        decided: [G] the tokens that the target decided on at these levels.
    """
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
def _add_hits_and_trials_of_call(
    hits_and_trials: mx.array,
    before: tuple[mx.array, ...],
    decided: mx.array,
    num_accepted: mx.array,
) -> mx.array:
    """Add what a call has shown to the hits and trials so far.

    Args:
        hits_and_trials: [2, 2] as `mix_in_copies_unsorted` takes them.
        before: tokens [G, K], log probabilities [G, K, K] and copy [G] of which the call's tree was
            made.
        decided: [P] what the call decided on; levels beyond P are left out.
        num_accepted: [1] drafted tokens that were accepted; the first `num_accepted` + 1 levels
            count.

    Returns:
        [2, 2] the new sums.
    """
    count = min(before[0].shape[0], decided.shape[0])
    known = (a[:count] for a in (*before, decided))
    columns = mx.array([[1.0, 0.0], *[[0.0, 1.0]] * (count - 1)])  # the first level's, and others'
    # Not `indices`: an array of it may be `num_accepted`, and none is compiled in twice.
    counts = mx.array([[level] for level in range(count)]) <= num_accepted
    return hits_and_trials + count_hits_and_trials_by_level(*known) @ (columns * counts)


@mx.compile
def _find_continuations(buffer: mx.array, positions: mx.array, count: int) -> mx.array:
    """[A, count] tokens, as `TextOnDevice.find_continuations` returns them, compiled.

    Args:
        buffer: the text behind `NGRAM` - 1 tokens that equal nothing.
        positions: [A, 1] positions in the text.
        count: tokens to return for each.
    """
    size = buffer.shape[0] - NGRAM + 1
    length = mx.array(0)
    starts = indices(size)
    own = buffer[positions + indices(NGRAM)]
    agrees = starts < positions
    for n in reversed(range(NGRAM)):
        agrees = agrees & (buffer[n : n + size] == own[:, n : n + 1])
        length = length + agrees
    # The longest first, then the newest; 0 is none.
    best = mx.max(length * _FAR + mx.where(length > 0, starts, 0), axis=1, keepdims=True)
    found = best % _FAR
    following = buffer[found + NGRAM + indices(count) % mx.maximum(positions - found, 1)]
    return mx.where(best > 0, following, PAD_TOKEN)
