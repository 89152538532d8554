"""What the text says again: one guess more beside those of streams.

Where an answer quotes its prompt or itself (names, numbers, code), what followed the text's last
tokens where they stood before is likely to follow. How likely, the answer shows: copies are trusted
by how much of it they have count_copy_hits that streams had not.

`text_index` knows the same on the host, for drafters that wait for the tokens. Streams do not: they
draft behind a call that nobody has read, so what they copy has to be looked up on the device.
"""

from collections.abc import Sequence

import mlx.core as mx

from ..model.shapes import indices
from ..model.tree import PAD_TOKEN

NGRAM = 3  # most tokens that are looked up; fewer where so many stand nowhere
COPIED = 0.15
GOES_ON = 0.4
"""How likely the text is to go on as it did before; and to go on with it, where it has begun to."""
DOUBT = 2.0  # guesses of an answer that weigh as much as these numbers
Guesses = tuple[mx.array, mx.array]
"""Candidates and log probabilities as `grow_conditional` takes them."""
_ROOM = 256  # tokens by which the text's buffer grows
_FAR = 2**28  # more tokens than a text has


class TextOnDevice:
    """The text so far [C], then room, on the device: a call's tokens are written unread."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._most = len(tokens)  # tokens that it holds at most: the host does not know how many
        # Before the text stands what equals nothing, so that it can be shifted.
        # few sizes
        known = [PAD_TOKEN - 1] * (NGRAM - 1)
        room = _ROOM + -len(tokens) % _ROOM
        self._tokens = mx.array([*known, *tokens, *[PAD_TOKEN] * room], mx.int32)

    def write(self, tokens: mx.array, place: mx.array) -> None:
        """Put `tokens` [P] where `place` [1] says. Written twice, they are there once."""
        self._most += tokens.shape[0]
        if self._most > self._tokens.shape[0] - NGRAM:
            more = max(_ROOM, self._tokens.shape[0])
            self._tokens = mx.concatenate([self._tokens, mx.full(more, PAD_TOKEN, mx.int32)])
        self._tokens = mx.slice_update(self._tokens, tokens, place + (NGRAM - 1), axes=(0,))

    def continuation(self, last: mx.array, count: int) -> mx.array:
        """[A, count] the tokens that followed the last ones where they stood before.

        The newest stand at `last` [A], a place each. The longest n-gram decides, then the newest
        place. What reaches the end goes on in itself, so that a text with a period is copied at
        full length. Tokens that stand nowhere else are followed by `PAD_TOKEN`.
        """
        return _continuation(self._tokens, last[:, None], count)


class Copies:
    """Mixes copies into the guesses of every call, and learns from it how far to trust them."""

    def __init__(self, text: Sequence[int]) -> None:
        self._text = TextOnDevice(text)
        self._copy_counts = initial_copy_counts()
        self._before: tuple[mx.array, ...] | None = None  # what the last tree was made of

    def follow(self, tokens: Sequence[int], position: int) -> None:
        """The text has gone on by `tokens` from `position` on, of which nothing was guessed."""
        self._text.write(mx.array(list(tokens), mx.int32), mx.array([position], mx.int32))
        self._before = None

    def mix_into_guesses(
        self, guesses: Guesses, said: mx.array, num_accepted: mx.array, place: mx.array
    ) -> Guesses:
        """`mix_copies` of what is guessed behind a call.

        The call decided on `said` [P], of which the first is at `place` [1] of the text; those
        after the first `num_accepted` [1] + 1 repeat the last.
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
    """[2, 2] what copies have count_copy_hits when they have told nothing yet, see `count_copy_hits`."""
    return mx.array([[COPIED * DOUBT, GOES_ON * DOUBT], [DOUBT, DOUBT]])


@mx.compile
def mix_copies(tokens: mx.array, logprobs: mx.array, copied: mx.array, told: mx.array) -> Guesses:
    """Candidates [..., G, K] and log probabilities [..., G, K, K] with the tokens `copied` [..., G]
    of the text among them, of which `PAD_TOKEN` is none.

    They weigh as much as `told` [..., 2, 2] says, see `count_copy_hits`: its first column for the first
    level, its last for those behind a copy. A copy that no stream guesses takes the place of the
    least likely candidate.
    """
    levels, count = tokens.shape[-2:]
    ours = copied[..., None]
    known = tokens == ours
    is_new = (ours >= 0) & ~known.any(axis=-1, keepdims=True) & (indices(count) == count - 1)
    is_copy = known | is_new
    # The token before is the text's, too: in every row of the first level.
    follows = mx.concatenate([mx.ones_like(known[..., :1, :]), is_copy[..., :-1, :]], axis=-2)
    weights = (told[..., 0, :] / told[..., 1, :])[..., mx.array([0, *[1] * (levels - 1)])]
    weight = (weights[..., None] * ((ours >= 0) & follows))[..., None]
    probs = mx.where(is_new[..., None, :], 0.0, mx.exp(logprobs))
    mixed = (1 - weight) * probs + weight * is_copy[..., None, :]
    return mx.where(is_new, ours, tokens), mx.log(mixed)


def count_copy_hits(
    tokens: mx.array, logprobs: mx.array, copied: mx.array, said: mx.array
) -> mx.array:
    """[2, G] how much of `said` [G], the text behind a place, its copies count_copy_hits, and of how much
    they could have: 1 where all before them was right.

    Of a token to which the streams gave the probability q, of candidates `tokens` [G, K] and
    `logprobs` [G, K, K] without copies, it is 1 / (1 + q): all where no stream guessed it, half
    where streams were sure of it. Of another token than the copy it is nothing.
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
    told: mx.array, before: tuple[mx.array, ...], said: mx.array, num_accepted: mx.array
) -> mx.array:
    """`told` [2, 2] with what a call has shown of the guesses `before` it, and their copies."""
    count = min(before[0].shape[0], said.shape[0])
    known = (a[:count] for a in (*before, said))
    columns = mx.array([[1.0, 0.0], *[[0.0, 1.0]] * (count - 1)])  # the first level's, and others'
    # Not `indices`: an array of it may be `num_accepted`, and none is compiled in twice.
    counts = mx.array([[level] for level in range(count)]) <= num_accepted
    return told + count_copy_hits(*known) @ (columns * counts)


@mx.compile
def _continuation(text: mx.array, last: mx.array, count: int) -> mx.array:
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
