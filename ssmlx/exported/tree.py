"""Draft trees on the host, in numpy: grown from what an exported model's streams rank.

The rules are those of `ssmlx/tree.py` and `ssmlx/accept.py`. The fixed part, which nodes there can
be, comes with the package as tables, so that a host in any language needs no more than this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..settings import MAX_EDGE_LOGPROB, MIN_EDGE_LOGPROB


@dataclass(frozen=True, eq=False)
class TreeTables:
    """The fixed part of the trees: all nodes that there can be, breadth first.

    Attributes:
        slots: [N - 1] where each node's token stands in the flattened [G, K] candidates.
        depths: [N] distance from the root.
        paths: [N, P] the node at each depth on the way from the root; repeats the node itself
            beyond its own depth.
        num_candidates: K, candidates of each stream.
        size: nodes of a tree, the likeliest of these where there are more.
    """

    slots: np.ndarray
    depths: np.ndarray
    paths: np.ndarray
    num_candidates: int
    size: int

    @classmethod
    def of(cls, topology: Any, size: int) -> TreeTables:
        """The tables of a `ssmlx.model.tree.Topology`, for trees of `size` nodes."""
        arrays = {name: np.array(getattr(topology, name)) for name in ("slots", "depths", "paths")}
        return cls(**arrays, num_candidates=topology.num_candidates, size=size)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TreeTables:
        """The tables of a manifest."""
        arrays = {name: np.array(values[name], np.int32) for name in ("slots", "depths", "paths")}
        return cls(**arrays, num_candidates=values["num_candidates"], size=values["size"])

    def to_json(self) -> dict[str, Any]:
        """The tables as JSON values."""
        arrays = {name: getattr(self, name).tolist() for name in ("slots", "depths", "paths")}
        return {**arrays, "num_candidates": self.num_candidates, "size": self.size}


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A draft tree.

    Attributes:
        tokens: [N] token of each node; node 0 is the root.
        depths: [N] distance from the root.
        paths: [N, P] as in `TreeTables`.
    """

    tokens: np.ndarray
    depths: np.ndarray
    paths: np.ndarray

    @property
    def parents(self) -> np.ndarray:
        """[N] parent of each node; the root is its own."""
        above = np.maximum(self.depths - 1, 0)
        return np.take_along_axis(self.paths, above[:, None], axis=1)[:, 0]

    @property
    def ancestors(self) -> np.ndarray:
        """[N, N] bool: column j is row i itself or one of its ancestors."""
        nodes = np.arange(len(self.tokens))
        return (self.paths[:, :, None] == nodes).any(axis=1)

    def select(self, keep: np.ndarray) -> DraftTree:
        """The tree of the nodes `keep` [M], ascending, which hold every ancestor of theirs."""
        paths = (self.paths[keep][:, :, None] == keep).argmax(axis=-1).astype(np.int32)
        return DraftTree(self.tokens[keep], self.depths[keep], paths)


def root_tree(token: int) -> DraftTree:
    """The tree of one node."""
    zero = np.zeros(1, np.int32)
    return DraftTree(np.array([token], np.int32), zero, zero[:, None])


def node_scores(logprobs: np.ndarray, tables: TreeTables) -> np.ndarray:
    """[N] how likely each node that there can be is: its path's log probabilities, summed.

    Args:
        logprobs: [G, K] of each stream's candidates.
        tables: the nodes.
    """
    clipped = np.clip(logprobs.astype(np.float32), MIN_EDGE_LOGPROB, MAX_EDGE_LOGPROB)
    edges = np.concatenate([[0], clipped.flatten()[tables.slots]]).astype(np.float32)
    levels = np.arange(tables.paths.shape[1])
    below_root = (levels > 0) & (levels <= tables.depths[:, None])
    return np.where(below_root, edges[tables.paths], 0).sum(axis=1)


def grow_tree(root: int, tokens: np.ndarray, logprobs: np.ndarray, tables: TreeTables) -> DraftTree:
    """The tree below `root` of each stream's ranked candidates (section 3.2.2).

    Args:
        root: the newest token.
        tokens: [G, K] candidates of each stream, best first.
        logprobs: [G, K] their log probabilities.
        tables: the nodes that there can be.
    """
    node_tokens = np.concatenate([[root], tokens.flatten()[tables.slots]]).astype(np.int32)
    tree = DraftTree(node_tokens, tables.depths, tables.paths)
    if len(node_tokens) <= tables.size:
        return tree
    scores = node_scores(logprobs, tables)
    best = np.argpartition(-scores, tables.size - 1)[: tables.size]
    return tree.select(np.sort(best))


def accepted_path(tree: DraftTree, target_tokens: np.ndarray) -> np.ndarray:
    """The nodes from the root along children that carry the target's own token.

    Args:
        tree: M nodes.
        target_tokens: [M] the target's token after each of them.
    """
    agrees = (tree.tokens == target_tokens[tree.parents]) | (tree.depths == 0)
    accepted = agrees[tree.paths].all(axis=1)
    last = int(np.where(accepted, tree.depths, -1).argmax())
    return tree.paths[last][: tree.depths[last] + 1]
