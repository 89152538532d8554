"""Lookup: what followed the text's last tokens where they stood before is likely to follow.

`PromptLookupDrafter` drafts from nothing else, and looks up on the host. `WithLookup` adds a chain
to another drafter's trees, on the device: where that drafter's guesses come from the model, and
the answer quotes its prompt (names, numbers, code, sentences to be summarised), the copy goes on
where the guesses end. No paper's; the losslessness of the tree's verification covers it.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence

import mlx.core as mx

from ..decoding.drafter import Drafter, Verified
from ..model.shapes import indices
from ..model.tree import PAD_TOKEN, Tree
from ..settings import PromptLookupConfig
from .trie import Trie, padded_size

MAX_MATCHES = 8  # places that are remembered of each n-gram, the newest ones
NGRAM = 4  # most tokens that are looked up beside a drafter; fewer where so many stand nowhere
_ROOM = 256  # tokens by which the text's buffer grows


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
        self.tokens = mx.array([*tokens, *[PAD_TOKEN] * _ROOM], mx.int32)

    def write(self, tokens: mx.array, place: mx.array) -> None:
        """Put `tokens` [P] where `place` [1] says. Written twice, they are there once."""
        self._most += tokens.shape[0]
        if self._most > self.tokens.shape[0]:
            more = max(_ROOM, self.tokens.shape[0])
            self.tokens = mx.concatenate([self.tokens, mx.full(more, PAD_TOKEN, mx.int32)])
        self.tokens = mx.slice_update(self.tokens, tokens, place, axes=(0,))


def continuation(text: mx.array, last: mx.array, count: int) -> mx.array:
    """[count] the tokens that followed the last ones of `text` [C] where they stood before.

    The newest stands at `last` [1]. The longest n-gram decides, then the newest place. What reaches
    the end of the text goes on in itself, so that a text with a period is drafted at full length.
    Tokens that stand nowhere else are followed by `PAD_TOKEN`.
    """
    places, length = indices(text.shape[0]), mx.zeros(text.shape[0], mx.int32)
    agrees = places < last
    for back in range(NGRAM):
        # Places shifted by `back`; what falls off the left end is equal to nothing.
        shifted = mx.concatenate([mx.full(back, PAD_TOKEN - 1, mx.int32), text])[: text.shape[0]]
        agrees = agrees & (shifted == text[mx.maximum(last - back, 0)])
        length = length + agrees.astype(mx.int32)
    found = mx.argmax(length * text.shape[0] + places * (length > 0), keepdims=True)
    period = mx.maximum(last - found, 1)
    following = text[found + 1 + indices(count) % period]
    return mx.where(length[found] > 0, following, PAD_TOKEN)


def extend(tree: Tree, chain: mx.array, count: int) -> Tree:
    """The tree with `count` nodes more: the chain, from where the tree stops agreeing with it.

    Of paths of P columns, `chain` is [P - 1 + count] tokens below the root.
    """
    num_nodes, width = tree.paths.shape
    along = chain[mx.maximum(tree.depths - 1, 0)]
    agrees = ((tree.tokens == along) | (tree.depths == 0))[tree.paths].all(axis=1)
    node = mx.where(agrees, tree.depths, -1).argmax(keepdims=True)
    depth = tree.depths[node]
    added = indices(count)
    columns = indices(width + count)
    known = mx.concatenate([tree.paths, mx.repeat(tree.paths[:, -1:], count, axis=1)], axis=1)
    below = num_nodes + mx.minimum(columns - depth - 1, added[:, None])
    paths = mx.where(columns <= depth, known[node], below)
    return Tree(
        mx.concatenate([tree.tokens, chain[depth + added]]),
        mx.concatenate([tree.depths, depth + 1 + added]),
        mx.concatenate([known, paths.astype(mx.int32)]),
        num_nodes + count - 1,
    )


class WithLookup:
    """A drafter that does not wait, and a chain of `num_nodes` nodes that were looked up."""

    draft_calls = 0
    waits = False

    def __init__(self, drafter: Drafter, num_nodes: int) -> None:
        self.drafter, self._num_nodes = drafter, num_nodes
        self.num_streams, self.num_parameters = drafter.num_streams, drafter.num_parameters
        self.num_levels = drafter.num_levels + num_nodes
        self.max_nodes = drafter.max_nodes + num_nodes
        self._text = TextOnDevice(())

    @property
    def cache_bytes(self) -> int:
        return self.drafter.cache_bytes

    def start(self, tokens: Sequence[int]) -> None:
        self.drafter.start(tokens)
        self._text = TextOnDevice(tokens)

    def propose(self, verified: Verified) -> Tree:
        accepted, place = verified.acceptance, verified.position + 1
        self._text.write(accepted.new_tokens, place)
        tree = self.drafter.propose(verified)
        count = tree.paths.shape[1] - 1 + self._num_nodes
        last = place + accepted.num_accepted
        return extend(tree, continuation(self._text.tokens, last, count), self._num_nodes)
