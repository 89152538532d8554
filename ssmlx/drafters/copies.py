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
        self._most = len(tokens)  # tokens that it holds at most: the host does not know how many
        # Before the text stand tokens that equal nothing, so that it can be shifted. The buffer has
        # few sizes, as each is another kernel to compile.
        known = [PAD_TOKEN - 1] * (NGRAM - 1)
        room = _ROOM + -len(tokens) % _ROOM
        self._tokens = mx.array([*known, *tokens, *[PAD_TOKEN] * room], mx.int32)

    def write(self, tokens: mx.array, place: mx.array) -> None:
        """Write `tokens` [P] from position `place` [1] of the text on, over what stands there.

        The buffer grows where it may be full.
        """
        self._most += tokens.shape[0]
        if self._most > self._tokens.shape[0] - NGRAM:
            more = max(_ROOM, self._tokens.shape[0])
            self._tokens = mx.concatenate([self._tokens, mx.full(more, PAD_TOKEN, mx.int32)])
        self._tokens = mx.slice_update(self._tokens, tokens, place + (NGRAM - 1), axes=(0,))

    def continuation(self, last: mx.array, count: int) -> mx.array:
        """[A, count] the tokens that followed the text's last ones where they stood before.

        Args:
            last: [A] positions in the text; each is looked up as if the text ended with it.
            count: tokens to return for each.

        Returns:
            What followed the longest match of up to `NGRAM` tokens, of equally long ones the
            newest. What reaches the position itself repeats, so that a text with a period is copied
            at full length. `PAD_TOKEN` throughout where the token stands nowhere before.
        """
        return _continuation(self._tokens, last[:, None], count)


class Copies:
    """Mixes copies into the guesses of every call, and learns from each how far to trust copies.

    Args:
        text: the tokens that stand before the first call.
    """

    def __init__(self, text: Sequence[int]) -> None:
        self._text = TextOnDevice(text)
        self._copy_counts = initial_copy_counts()
        self._before: tuple[mx.array, ...] | None = None  # guesses, copies

    def follow(self, tokens: Sequence[int], position: int) -> None:
        """Write `tokens`, for which no tree was drafted here, into the text from `position` on."""
        self._text.write(mx.array(list(tokens), mx.int32), mx.array([position], mx.int32))
        self._before = None

    def mix_into_guesses(
        self, guesses: Guesses, said: mx.array, num_accepted: mx.array, place: mx.array
    ) -> Guesses:
        """Mix copies into `guesses` for the tree behind a call, and learn from that call.

        Args:
            guesses: [G, K] tokens and [G, K, K] log probabilities of the streams behind the call.
            said: [P] the tokens that the call decided on; those after the first
                `num_accepted` + 1 repeat the last.
            num_accepted: [1] drafted tokens that were accepted.
            place: [1] the position of `said[0]` in the text.

        Returns:
            Guesses of the same shapes, with copies among them.
        """
        self._text.write(said, place)
        if self._before is not None:
            self._copy_counts = _add_copy_counts(
                self._copy_counts, self._before, said, num_accepted
            )
        copied = self._text.continuation(place + num_accepted, guesses[0].shape[0])[0]
        self._before = *guesses, copied
        return mix_copies(*self._before, self._copy_counts)


def initial_copy_counts() -> mx.array:
    """[2, 2] the counts of `count_copy_hits`, summed, before an answer has shown anything."""
    return mx.array([[FIRST_COPY_PROB * DOUBT, NEXT_COPY_PROB * DOUBT], [DOUBT, DOUBT]])


@mx.compile
def mix_copies(
    tokens: mx.array, logprobs: mx.array, copied: mx.array, copy_counts: mx.array
) -> Guesses:
    """Mix the tokens of a copy into the guesses of streams.

    A copy that no stream guesses replaces the least likely candidate of its level.

    Args:
        tokens: [..., G, K] candidates of each level.
        logprobs: [..., G, K, K] their log probabilities, given each candidate of the level before.
        copied: [..., G] the copy; `PAD_TOKEN` where there is none.
        copy_counts: [..., 2, 2] hits and trials, see `count_copy_hits`: its first column for the
            first level, its last for levels behind a copied token; hits over trials is the weight.

    Returns:
        Candidates and log probabilities of the same shapes.
    """
    levels, count = tokens.shape[-2:]
    ours = copied[..., None]
    known = tokens == ours
    is_new = (ours >= 0) & ~known.any(axis=-1, keepdims=True) & (indices(count) == count - 1)
    is_copy = known | is_new
    # The token before is the text's, too: in every row of the first level.
    follows = mx.concatenate([mx.ones_like(known[..., :1, :]), is_copy[..., :-1, :]], axis=-2)
    weights = (copy_counts[..., 0, :] / copy_counts[..., 1, :])[
        ..., mx.array([0, *[1] * (levels - 1)])
    ]
    weight = (weights[..., None] * ((ours >= 0) & follows))[..., None]
    probs = mx.where(is_new[..., None, :], 0.0, mx.exp(logprobs))
    mixed = (1 - weight) * probs + weight * is_copy[..., None, :]
    return mx.where(is_new, ours, tokens), mx.log(mixed)


def count_copy_hits(
    tokens: mx.array, logprobs: mx.array, copied: mx.array, said: mx.array
) -> mx.array:
    """[2, G] by level: the hits of a copy, and its trials.

    A trial is a level whose copied tokens before it were all right, and which has a copied token.
    Its hit is 1 / (1 + q) where the copy was right, q the probability that the streams gave to the
    token: 1 where no stream guessed it, half where the streams were sure of it. Else it is 0.

    Args:
        tokens: [G, K] the streams' candidates, without copies.
        logprobs: [G, K, K] their log probabilities, given each candidate of the level before.
        copied: [G] the copy; `PAD_TOKEN` where there is none.
        said: [G] the text that came.
    """
    is_said = tokens == said[:, None]
    root = mx.array([[True, *[False] * (tokens.shape[1] - 1)]])  # any row of the first level
    before = mx.concatenate([root, is_said[:-1]])
    pairs = before[:, :, None] & is_said[:, None]
    probs = mx.where(pairs, mx.exp(logprobs), 0.0).sum(axis=(1, 2))
    right = copied == said
    follows = mx.concatenate([mx.array([True]), right[:-1]])
    could = mx.cumprod(follows.astype(mx.float32)) * (copied >= 0)
    return mx.stack([could * right / (1 + probs), could])


@mx.compile
def _add_copy_counts(
    copy_counts: mx.array, before: tuple[mx.array, ...], said: mx.array, num_accepted: mx.array
) -> mx.array:
    """`copy_counts` [2, 2] with what a call has shown.

    `before` are the tokens, log probabilities and copies that the call's tree was made of; `said`
    [P] is what the call decided on, of which the first `num_accepted` [1] + 1 count.
    """
    count = min(before[0].shape[0], said.shape[0])
    known = (a[:count] for a in (*before, said))
    columns = mx.array([[1.0, 0.0], *[[0.0, 1.0]] * (count - 1)])  # the first level's, and others'
    # Not `indices`: an array of it may be `num_accepted`, and none is compiled in twice.
    counts = mx.array([[level] for level in range(count)]) <= num_accepted
    return copy_counts + count_copy_hits(*known) @ (columns * counts)


@mx.compile
def _continuation(text: mx.array, last: mx.array, count: int) -> mx.array:
    """`TextOnDevice.continuation`, compiled: `text` is its buffer, `last` [A, 1]."""
    size = text.shape[0] - NGRAM + 1
    length = mx.array(0)
    places = indices(size)
    own = text[last + indices(NGRAM)]
    agrees = places < last
    for n in reversed(range(NGRAM)):
        agrees = agrees & (text[n : n + size] == own[:, n : n + 1])
        length = length + agrees
    # The longest first, then the newest; 0 is none.
    best = mx.max(length * _FAR + mx.where(length > 0, places, 0), axis=1, keepdims=True)
    found = best % _FAR
    following = text[found + NGRAM + indices(count) % mx.maximum(last - found, 1)]
    return mx.where(best > 0, following, PAD_TOKEN)
