"""Lookahead decoding (Fu et al. 2024): Jacobi iterations that feed a pool of n-grams.

A window of W columns and N - 1 levels guesses what comes: the token at level l, column i is a
guess for the position i + l + 1 after the root. Level 0 is a chain below the root; level l of a
column hangs below level l - 1 of the same column. With W = 3 and N = 3 (a tree of two levels):

    root - a0 - a1 - a2
            |    |    |
            b0   b1   b2

So a guess sees the root, level 0 up to its own column, and its own column above it: exactly the
paper's attention pattern, as a draft tree. The target's tokens after the last level complete W
new n-grams (a0 b0 c0, a1 b1 c1, ...), which join the pool, and are the next window's last level.

The pool's n-grams that begin with the root are verified beside the window. Both are put into
one trie, in which equal guesses at the same position are one node. Siblings therefore differ, every
node is what the target would have to write, and acceptance stays the same walk as for any other
drafter; the window's own guesses are accepted too if they turn out right.
"""

import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Self

from ..decoding.draft_shape import DraftShape
from ..decoding.drafter import Needs, Taps, Verified
from ..decoding.sampling import UNRESOLVED
from ..model.shapes import to_list
from ..model.tree import Tree
from ..settings import LookaheadConfig
from .base import BaseDrafter, DrafterInputs
from .trie import Trie, padded_size

MAX_KEYS = 1 << 16  # first tokens whose n-grams are kept


class NgramPool:
    """N-grams by their first token; those that were seen longest ago are forgotten."""

    def __init__(
        self,
        per_key: int,  # n-grams that are kept for a first token
        max_keys: int = MAX_KEYS,  # first tokens whose n-grams are kept
    ) -> None:
        self._per_key = per_key
        self._max_keys = max_keys
        self._ngrams: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(kept) for kept in self._ngrams.values())

    def add(self, ngram: Sequence[int]) -> None:
        """Added again, an n-gram becomes the newest; a first token is forgotten with all of its
        n-grams."""
        first, *rest = ngram
        kept = self._ngrams.setdefault(first, OrderedDict())
        self._ngrams.move_to_end(first)
        kept[tuple(rest)] = None
        kept.move_to_end(tuple(rest))
        if len(kept) > self._per_key:
            kept.popitem(last=False)
        if len(self._ngrams) > self._max_keys:
            self._ngrams.popitem(last=False)

    def continuations_of(self, first: int) -> Iterator[tuple[int, ...]]:
        """The tokens after `first` in its n-grams, the newest first."""
        return reversed(self._ngrams.get(first, OrderedDict()))


class LookaheadDrafter(BaseDrafter):
    """Drafts from a window of Jacobi iterations and the n-grams that it left. Its trees must reach
    the target whole: pruning would stop the iterations."""

    name = "lookahead"
    needs = Needs(host_tokens=True)
    needs_whole_context = True
    shaped_by = ()

    def __init__(self, config: LookaheadConfig) -> None:
        self._config = config
        self._num_rows = config.ngram - 1
        self._max_nodes = 1 + (config.window + config.guesses) * self._num_rows
        levels = config.window + config.ngram - 2
        self.largest = DraftShape(self.name, padded_size(self._max_nodes), levels)
        self.start((0,))

    @classmethod
    def build(cls, inputs: DrafterInputs) -> Self:
        return cls(inputs.settings)

    def start(self, tokens: Sequence[int]) -> None:
        """The first window is drawn at random from the text, by a fixed seed."""
        config = self._config
        rng = random.Random(0)
        self._pool = NgramPool(config.guesses)
        if config.pool_from_prompt:
            for first in range(len(tokens) - config.ngram + 1):
                self._pool.add(tokens[first : first + config.ngram])
        self._root = tokens[-1]
        self._window = [rng.choices(tokens, k=config.window) for _ in range(self._num_rows)]
        self._tree: Tree | None = None
        self._last_level: list[int] = []
        self._calls = 0  # that were read since the last tree was drafted

    def follow(self, tokens: Sequence[int], position: int, taps: Taps | None = None) -> None:
        self._root = tokens[-1]
        self._calls += 1

    def propose(self, verified: Verified, shape: DraftShape) -> Tree:
        """Propose n-grams of the pool. If the call just read verified all of the tree proposed
        before, a Jacobi step comes first, for which the host reads its target tokens."""
        # Whether the call just read verified its own tree, and all of it.
        own = self._tree if self._calls == 1 else None
        if own is not None and verified.tree.num_nodes == own.num_nodes:
            # One Jacobi step: every level takes the place of the one above it.
            # An unresolved token is as good a guess as others.
            last = [max(token, UNRESOLVED - token) for token in to_list(verified.target_tokens)]
            rows = [*self._window, [last[node] for node in self._last_level]]
            for ngram in zip(*rows, strict=True):
                self._pool.add(ngram)
            self._window = rows[1:]
        self._tree = self._build_tree(self._root, shape.levels)
        self._calls = 0
        return self._tree

    def _build_tree(self, root: int, num_levels: int) -> Tree:
        """Build a tree of the window and n-grams; notes the window's last level."""
        trie = Trie(root, self._max_nodes)
        # The window's nodes first: there is room for all of them, however many guesses follow.
        nodes = [[0] * self._config.window for _ in range(self._num_rows)]
        node = 0
        for column in range(self._config.window):
            below = node
            for level, row in enumerate(self._window):
                below = nodes[level][column] = trie.add(row[column : column + 1], below)
            node = nodes[0][column]
        for rest in self._pool.continuations_of(root):
            trie.add(rest)
        in_tree = trie.indices_in_tree()
        self._last_level = [in_tree[node] for node in nodes[-1]]
        return trie.to_padded_tree(num_levels)
