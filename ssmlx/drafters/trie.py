"""Draft trees that are put together on the host, token by token."""

from array import array
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
        order = self._breadth_first_order()
        index = [0] * len(order)  # by node of the trie
        width = num_levels + 1
        paths = array("i", [0]) * width  # one behind the other
        num_internal = 1
        for new, old in enumerate(order[1:], 1):
            index[old] = new
            above = index[self.parents[old]]
            depth = self.depths[old]
            paths += paths[above * width : above * width + depth]
            paths += array("i", [new]) * (width - depth)
            num_internal = max(num_internal, above + 1)
        size = padded_size(len(order))
        num_padding = size - len(order)
        for new in range(len(order), size):
            paths += array("i", [0]) + array("i", [new]) * num_levels
        tokens = [self.tokens[old] for old in order] + [PAD_TOKEN] * num_padding
        depths = [self.depths[old] for old in order] + [1] * num_padding
        # By way of NumPy, for MLX takes longer to read a list.
        return Tree(
            mx.array(np.array(tokens, np.int32)),
            mx.array(np.array(depths, np.int32)),
            mx.array(np.frombuffer(paths, np.int32).reshape(size, width)),
            num_internal,
            num_padding=num_padding,
        )

    def indices_in_tree(self) -> list[int]:
        """By node of the trie, its number in the tree of `to_padded_tree`: breadth first, and in
        the order of adding at one depth."""
        index = [0] * len(self.tokens)
        for new, old in enumerate(self._breadth_first_order()):
            index[old] = new
        return index

    def _breadth_first_order(self) -> list[int]:
        """The nodes by depth, those of one depth in the order of adding."""
        return sorted(range(len(self.depths)), key=self.depths.__getitem__)


def padded_size(count: int) -> int:
    """The smallest of a few usual numbers of nodes that is `count`, 1 or more, or above.

    They are 1, 2, 4, 8, then steps of 8 to 32, of 16 to 64, of 32 beyond: so masks and kernels meet
    few shapes.
    """
    if count <= 8:
        return 1 << (count - 1).bit_length()
    step = 8 if count <= 32 else 16 if count <= 64 else 32
    return -(-count // step) * step
