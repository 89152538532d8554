"""Draft trees that are put together on the host, token by token."""

from array import array
from collections.abc import Iterable

import mlx.core as mx
import numpy as np

from ..model.tree import PAD_TOKEN, Tree


class Trie:
    """A tree of tokens in which siblings always differ: what is added twice is there once. The root
    is node 0, and its own parent."""

    def __init__(
        self,
        root: int,  # the newest token of the text
        max_nodes: int,  # including the root; what goes beyond is left out
    ) -> None:
        self.tokens = [root]
        self.parents = [0]
        self.depths = [0]
        self._max_nodes = max_nodes
        self._children: dict[tuple[int, int], int] = {}

    @property
    def is_full(self) -> bool:
        return len(self.tokens) == self._max_nodes

    def add(self, tokens: Iterable[int], node: int = 0) -> int:
        """Add a path; returns its last node, or the last one that there was room for."""
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

    def to_padded_tree(
        self,
        num_levels: int,  # at least the deepest node's
    ) -> Tree:
        """The trie as a tree, in breadth-first order. So that kernels meet few shapes, paths have
        `num_levels` levels, and children of the root, of the token `PAD_TOKEN`, fill the nodes up
        to a `padded_size`."""
        order = self._breadth_first_order()
        index = [0] * len(order)  # by node of the trie
        width = num_levels + 1
        paths = array("i", [0]) * width  # one after the other
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
        """Each node's number in the tree of `to_padded_tree`."""
        index = [0] * len(self.tokens)
        for new, old in enumerate(self._breadth_first_order()):
            index[old] = new
        return index

    def _breadth_first_order(self) -> list[int]:
        """Nodes by depth, and in the order of adding at one depth."""
        return sorted(range(len(self.depths)), key=self.depths.__getitem__)


def padded_size(count: int) -> int:
    """The smallest of 1, 2, 4, 8, then steps of 8 to 32, of 16 to 64, of 32 beyond, that is at
    least `count`: so masks and kernels meet few shapes."""
    if count <= 8:
        return 1 << (count - 1).bit_length()
    step = 8 if count <= 32 else 16 if count <= 64 else 32
    return -(-count // step) * step
