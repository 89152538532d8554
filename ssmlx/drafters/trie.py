"""Draft trees that are put together on the host, token by token."""

from collections.abc import Iterable

import mlx.core as mx
import numpy as np

from ..model.tree import PAD_TOKEN, Tree


class Trie:
    """A tree of tokens in which siblings always differ: what is added twice is there once.

    Args:
        root: the newest token of the text.
        max_nodes: nodes at most, the root included; what goes beyond is left out.

    Attributes:
        tokens, parents, depths: of each node, in the order of adding; the root is node 0, and its
            own parent.
    """

    def __init__(self, root: int, max_nodes: int) -> None:
        """Begin with the root alone, which is node 0 and counts among `max_nodes`."""
        self.tokens = [root]
        self.parents = [0]
        self.depths = [0]
        self._max_nodes = max_nodes
        self._children: dict[tuple[int, int], int] = {}

    @property
    def is_full(self) -> bool:
        """Whether no node can be added."""
        return len(self.tokens) == self._max_nodes

    def add(self, tokens: Iterable[int], node: int = 0) -> int:
        """Add the path of `tokens` below `node`, as far as it is missing and there is room.

        Returns:
            The node at the path's end; the last one that had room where the trie became full.
        """
        for token in tokens:
            child = self._children.get((node, token))
            if child is None:
                if self.is_full:
                    break
                child = self._children[node, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
                self.depths.append(self.depths[node] + 1)
            node = child
        return node

    def to_padded_tree(self, num_levels: int) -> Tree:
        """Make a `Tree` in breadth-first order, see `indices_in_tree`.

        So that kernels meet few shapes, paths have `num_levels` levels below the root whatever was
        added, and nodes are filled up to a `padded_size` with children of the root of the token
        `PAD_TOKEN`, which is never accepted.

        Args:
            num_levels: no fewer than the deepest node's.
        """
        count = len(self.tokens)
        index = self.indices_in_tree()
        size = padded_size(count)
        tokens = np.full(size, PAD_TOKEN, np.int32)
        depths = np.ones(size, np.int32)
        paths = np.repeat(np.arange(size, dtype=np.int32)[:, None], num_levels + 1, axis=1)
        paths[:, 0] = 0
        for new, old in enumerate(np.argsort(index).tolist()):
            above = index[self.parents[old]]
            depth = self.depths[old]
            tokens[new] = self.tokens[old]
            depths[new] = depth
            paths[new, :depth] = paths[above, :depth]
        internal = 1 + int(index[self.parents].max())
        return Tree(
            mx.array(tokens),
            mx.array(depths),
            mx.array(paths),
            internal,
            num_padding=size - count,
        )

    def indices_in_tree(self) -> np.ndarray:
        """By node of the trie, its number in the tree of `to_padded_tree`: breadth first, and in
        the order of adding at one depth."""
        count = len(self.tokens)
        index = np.empty(count, np.int32)
        index[np.argsort(self.depths, kind="stable")] = np.arange(count)
        return index


def padded_size(count: int) -> int:
    """The smallest of a few usual numbers of nodes that is `count`, 1 or more, or above.

    They are 1, 2, 4, 8, then steps of 8 to 32, of 16 to 64, of 32 beyond: so masks and kernels meet
    few shapes.
    """
    if count <= 8:
        return 1 << (count - 1).bit_length()
    step = 8 if count <= 32 else 16 if count <= 64 else 32
    return -(-count // step) * step
