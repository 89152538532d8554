"""Lookup: what followed the text's last tokens where they stood before is likely to follow.

`PromptLookupDrafter` drafts from nothing else, and looks up on the host. Streams look up on the
device (`continuation`): where an answer quotes its prompt or itself (names, numbers, code), the
copy is one guess more beside theirs.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence

import mlx.core as mx

from ..decoding.drafter import Verified
from ..model.shapes import indices
from ..model.tree import PAD_TOKEN, Tree
from ..settings import PromptLookupConfig
from .trie import Trie, padded_size

MAX_MATCHES = 8  # places that are remembered of each n-gram, the newest ones
NGRAM = 3  # most tokens that are looked up on the device; fewer where so many stand nowhere
_ROOM = 256  # tokens by which the text's buffer grows
_FAR = 2**28  # more tokens than a text has


class PromptLookupDrafter:
    """Drafts what followed the text's last n tokens where they stood earlier.

    The longest n first, and for each the newest place first; every match's continuation is a
    chain, and chains with a common beginning share its nodes. A continuation that reaches the
    end of the text goes on in itself, so a text with a period is drafted at full length.

    With a reference, continuations are its own alone, and it follows the prompt as the answer does.
    """

    num_streams, num_parameters, draft_calls, cache_bytes = 0, 0, 0, 0
    waits = True

    def __init__(self, config: PromptLookupConfig) -> None:
        self.num_levels = config.num_draft_tokens
        self.max_nodes = padded_size(config.size)
        self._config = config
        self.start(())

    def start(self, tokens: Sequence[int]) -> None:
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], deque[int]] = defaultdict(
            lambda: deque(maxlen=MAX_MATCHES + 1)
        )
        self._source = 0  # tokens that are looked up in; 0 for the text itself
        if reference := self._config.reference:
            self._extend([*tokens[-self._config.ngram :], *reference])
            self._source = len(self._text)
        self._extend(tokens)

    def propose(self, verified: Verified) -> Tree:
        """See `Drafter.propose`. Waits for the target, for its tokens are what is looked up."""
        (new_tokens,) = verified.read()
        self._extend(new_tokens)
        text = self._text
        trie = Trie(text[-1], self._config.size)
        for end in self._matches():
            period = len(text) - end
            following = text[end : min(end + self.num_levels, self._source or len(text))]
            count = len(following) if self._source else self.num_levels
            trie.add([following[index % period] for index in range(count)])
            if trie.is_full:
                break
        tree, _ = trie.tree(self.num_levels if len(trie.tokens) > 1 else 0)
        return tree

    def _extend(self, tokens: Iterable[int]) -> None:
        text = self._text
        for token in tokens:
            text.append(token)
            if self._source:
                continue
            for n in range(1, min(self._config.ngram, len(text)) + 1):
                self._ends[tuple(text[-n:])].append(len(text))

    def _matches(self) -> Iterator[int]:
        """Where the text's last tokens ended before: the likeliest places first."""
        text = self._text
        for n in range(min(self._config.ngram, len(text)), 0, -1):
            ends = self._ends[tuple(text[-n:])]
            yield from (end for end in reversed(ends) if end < len(text))


class TextOnDevice:
    """The text so far [C], then room, on the device: a call's tokens are written unread."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._most = len(tokens)  # tokens that it holds at most: the host does not know how many
        # Before the text stands what equals nothing, so that it can be shifted.
        known, room = [PAD_TOKEN - 1] * (NGRAM - 1), _ROOM + -len(tokens) % _ROOM  # few sizes
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


@mx.compile
def _continuation(text: mx.array, last: mx.array, count: int) -> mx.array:
    size, length = text.shape[0] - NGRAM + 1, mx.array(0)
    places, own = indices(size), text[last + indices(NGRAM)]
    agrees = places < last
    for n in reversed(range(NGRAM)):
        agrees = agrees & (text[n : n + size] == own[:, n : n + 1])
        length = length + agrees
    # The longest first, then the newest; 0 is none.
    best = mx.max(length * _FAR + mx.where(length > 0, places, 0), axis=1, keepdims=True)
    found = best % _FAR
    following = text[found + NGRAM + indices(count) % mx.maximum(last - found, 1)]
    return mx.where(best > 0, following, PAD_TOKEN)
