"""Draft trees: their fixed topologies, and the trees that streams draft (section 3.2.2, A.1).

A tree stores for every node the path from the root to it. Masks, acceptance and the cache all read
that one table. Nodes are in breadth-first order, so the root is node 0 and a parent comes before
its children. Everything that depends on the drafted tokens stays on the device, with shapes that
the settings alone decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

import mlx.core as mx
import numpy as np

from ..settings import MAX_EDGE_LOGPROB, MIN_EDGE_LOGPROB, TreeConfig
from .condition import RESCORED
from .shapes import evaluated, expect_shape, indices, take

# The token of nodes that only fill a tree up to a usual size: no target token equals it.
PAD_TOKEN = -1


@dataclass(frozen=True)
class Topology:
    """The shape of a tree of N nodes, without its tokens."""

    # [N - 1] index of each node's token in the flattened [G, K] candidate table
    slots: mx.array
    depths: mx.array  # [N] distance from the root
    # [N, P] the node at each depth on the way from the root; repeats the node itself beyond
    # its own depth
    paths: mx.array
    num_candidates: int  # K, candidates that each stream must rank
    num_internal: int  # leading nodes that may have children

    @cached_property
    def parents(self) -> mx.array:
        """[N] the parent of each node; the root is its own."""
        return evaluated(_parents(self.paths, self.depths))

    @cached_property
    def ancestors(self) -> mx.array:
        """[N, N] bool: column j is row i itself or one of its ancestors."""
        return evaluated(_ancestors(self.paths))

    @cached_property
    def below_root(self) -> mx.array:
        """[N, P] bool: which entries of `paths` are neither the root nor repeated."""
        return evaluated(_below_root(self.paths, self.depths))

    @cached_property
    def edge_slots(self) -> mx.array:
        """[N] `slots`, with slot 0 in front for the root, whose value is not used."""
        return evaluated(mx.concatenate([indices(1), self.slots]))

    @property
    def num_nodes(self) -> int:
        """N, the nodes with the root."""
        return self.depths.shape[0]


@dataclass(frozen=True, eq=False)
class Tree:
    """A draft tree of N nodes on the device; fields that `Topology` has too mean the same."""

    tokens: mx.array  # [N] token of each node
    depths: mx.array
    paths: mx.array
    num_internal: int
    # the fixed topology, or None if this tree's shape was chosen on the device
    topology: Topology | None = None
    num_padding: int = 0  # nodes of `PAD_TOKEN`

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays that have to be computed before the tree can be read."""
        return [self.tokens, self.depths, self.paths]

    def __post_init__(self) -> None:
        (num_nodes,) = self.tokens.shape
        expect_shape("tree depths", self.depths, num_nodes)
        expect_shape("tree paths", self.paths, num_nodes, None)

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.tokens.shape[0]

    @property
    def num_drafted(self) -> int:
        """All nodes but the root and those of `PAD_TOKEN`."""
        return self.num_nodes - 1 - self.num_padding

    @cached_property
    def parents(self) -> mx.array:
        """[N] parent of each node; the root is its own."""
        return self.topology.parents if self.topology else _parents(self.paths, self.depths)

    @cached_property
    def ancestors(self) -> mx.array:
        """[N, N] bool: column j is row i itself or one of its ancestors (eq. 4, figure 8)."""
        return self.topology.ancestors if self.topology else _ancestors(self.paths)

    def path_sums(
        self,
        edges: mx.array,  # [N] one value a node, such as its log probability given its parent
    ) -> mx.array:  # [N]; 0 for the root
        """Sums over each node's path from the root, without the root's own value."""
        fixed = self.topology
        below_root = fixed.below_root if fixed else _below_root(self.paths, self.depths)
        return mx.where(below_root, edges[self.paths], 0.0).sum(axis=1)

    def select(
        self,
        keep: mx.array,  # [M] ascending node numbers, including every ancestor of a kept node
    ) -> Tree:
        """The tree of these M nodes, numbered from 0 up in the same order."""
        is_on_path = self.paths[keep][:, :, None] == keep
        paths = is_on_path.argmax(axis=-1).astype(mx.int32)
        tree = Tree(take(self.tokens, keep), take(self.depths, keep), paths, keep.shape[0])
        vars(tree)["ancestors"] = is_on_path.any(axis=1)  # as the property would find them anew
        return tree


def _parents(
    paths: mx.array,  # [N, P]
    depths: mx.array,  # [N]
) -> mx.array:  # [N]
    """The root is its own parent."""
    # The root's -1 is the end of its path, which is the root.
    return mx.take_along_axis(paths, depths[:, None] - 1, axis=1)[:, 0]


def _ancestors(
    paths: mx.array,  # [N, P]
) -> mx.array:  # [N, N]
    """Whether column j is row i itself or one of its ancestors."""
    return (paths[:, :, None] == indices(paths.shape[0])).any(axis=1)


def _below_root(
    paths: mx.array,  # [N, P]
    depths: mx.array,  # [N]
) -> mx.array:  # [N, P]
    """Whether an entry is neither the root nor repeated."""
    levels = indices(paths.shape[1])
    return (levels > 0) & (levels <= depths[:, None])


def top_nodes(
    scores: mx.array,  # [N]
    count: int,  # at least 1
) -> mx.array:  # [count] ascending; all N if there are no more
    """The nodes of the highest scores; which of equal scores are taken is left open."""
    if count >= scores.shape[0]:
        return indices(scores.shape[0])
    others = scores.shape[0] - count
    return mx.sort(mx.argpartition(scores, others)[others:]).astype(mx.int32)


def clip_logprobs(logprobs: mx.array) -> mx.array:
    """Clip to a range below 0, in float32: so a child's path sum is always below its parent's, and
    never -inf."""
    return mx.clip(logprobs.astype(mx.float32), MIN_EDGE_LOGPROB, MAX_EDGE_LOGPROB)


def topology_of_paths(
    # by node, the rank, from 0, of the candidate at each depth of its path; () for the root.
    # Breadth first, with every node's parent
    ranks: list[tuple[int, ...]],
    num_candidates: int,  # K, more than every rank
) -> Topology:
    index = {path: node for node, path in enumerate(ranks)}
    depths = np.array([len(path) for path in ranks], np.int32)
    num_levels = int(depths.max()) + 1
    paths = [[index[path[:depth]] for depth in range(num_levels)] for path in ranks]
    slots = [(len(path) - 1) * num_candidates + path[-1] for path in ranks[1:]]
    inner = {path[:-1] for path in ranks[1:]}
    return Topology(
        slots=mx.array(np.array(slots, np.int32)),
        depths=mx.array(depths),
        paths=mx.array(np.array(paths, np.int32)),
        num_candidates=num_candidates,
        num_internal=1 + max((index[path] for path in inner), default=0),
    )


@lru_cache(maxsize=64)
def full_topology(width: int, levels: int) -> Topology:
    """A tree in which every node has `width` children, `levels` deep below the root; K is
    `width`."""
    ranks = [path for depth in range(levels + 1) for path in product(range(width), repeat=depth)]
    return topology_of_paths(ranks, width)


@lru_cache(maxsize=64)
def candidate_topology(
    size: int,  # nodes of the tree that is chosen later, including the root
    width: int | None,  # most children of a node; None for any number
    levels: int,  # below the root
) -> Topology:
    """All nodes that may be among the best `size`, whatever the probabilities are.

    A node is outscored by every node whose ranks are all at least as good, at its own depth and
    above. Counting itself, depth d holds (r_1 + 1) ... (r_d + 1) of those; with more than `size` of
    them in all, the node cannot be chosen.
    """
    limit = max(1, min(width or size - 1, size - 1))
    ranks: list[tuple[int, ...]] = []
    level: list[tuple[tuple[int, ...], int, int]] = [((), 1, 1)]
    for _ in range(levels + 1):
        ranks += [path for path, _, _ in level]
        level = [
            ((*path, rank), outscored * (rank + 1), total + outscored * (rank + 1))
            for path, outscored, total in level
            for rank in range(limit)
            if total + outscored * (rank + 1) <= size
        ]
    return topology_of_paths(ranks, limit)


@lru_cache(maxsize=64)
def chain_with_siblings_topology(width: int, levels: int) -> Topology:
    """A chain with siblings: each level has `width` nodes, all of them children of the level
    above's candidate 0. So N = 1 + levels * width, and K is `width`."""
    ranks = [(0,) * depth + (rank,) for depth in range(levels) for rank in range(width)]
    return topology_of_paths([(), *ranks], width)


def draft_topology(
    config: TreeConfig,
    num_streams: int,  # G, levels below the root
) -> Topology:
    """For "full", the topology of the drafted tree itself, InputError if that is too large; for
    "best", of all candidate nodes, from which the best are chosen."""
    if config.kind == "full":
        config.num_nodes(num_streams)
        return full_topology(config.full_width, num_streams)
    return candidate_topology(config.size, config.width, num_streams)


def count_candidates(
    config: TreeConfig,
    num_streams: int,  # G, levels below the root
    *,
    conditional: bool,  # candidates are scored given the token before them
) -> int:
    """K, the number of each stream's likeliest tokens that `grow_tree` needs."""
    if not conditional:
        return draft_topology(config, num_streams).num_candidates
    return max(RESCORED, config.full_width) if config.kind == "full" else RESCORED


def root_tree(
    root: mx.array,  # [1]
) -> Tree:
    bare = full_topology(1, 0)
    return Tree(root, bare.depths, bare.paths, 1, bare)


def chain_tree(
    tokens: mx.array,  # [N]
) -> Tree:
    """A tree in which each token is the one child of the token before it."""
    chain = chain_with_siblings_topology(1, tokens.shape[0] - 1)
    return Tree(tokens, chain.depths, chain.paths, chain.num_internal, chain)


def grow_tree(
    root: mx.array,  # [1] the newest token
    tokens: mx.array,  # [G, K] each stream's candidates, best first, K of `count_candidates`
    logprobs: mx.array,  # [G, K]; or [G, K, K], given the token before
    config: TreeConfig,
) -> Tree:
    """Draft a tree, stream j's candidates at depth j (section 3.2.2). Streams are conditionally
    independent given their node, so a node's score is the product of its streams' probabilities
    along the path."""
    if logprobs.ndim == 3:
        return grow_conditional_tree(root, tokens, logprobs, config)
    topology = draft_topology(config, tokens.shape[0])
    size = topology.num_nodes if config.kind == "full" else config.size
    return grow_best_tree(root, tokens, logprobs, topology, size)


def grow_best_tree(
    root: mx.array,  # [1] the newest token
    tokens: mx.array,  # [G, K] best first; stream j's are the nodes at depth j
    logprobs: mx.array,  # [G, K]; a node's score is their sum along its path
    topology: Topology,  # of all nodes that may be chosen
    size: int,  # most nodes, including the root
) -> Tree:
    expect_shape("candidates", tokens, tokens.shape[0], topology.num_candidates)
    node_tokens = mx.concatenate([root, take(tokens.flatten(), topology.slots)])
    tree = Tree(node_tokens, topology.depths, topology.paths, topology.num_internal, topology)
    if topology.num_nodes <= size:
        return tree
    edges = take(clip_logprobs(logprobs).flatten(), topology.edge_slots)
    return tree.select(top_nodes(tree.path_sums(edges), size))


def grow_conditional_tree(
    root: mx.array,  # [1] the newest token
    tokens: mx.array,  # [G, K] in any order
    # [G, K, K] (last axis) given each of the stream before; of the first stream row 0: given the
    # root
    logprobs: mx.array,
    config: TreeConfig,
) -> Tree:
    """Draft a tree from candidates whose log probabilities depend on the token before them.

    Of kind "best" it is a beam search, exact among the candidates: no child outscores its parent,
    so that of the best nodes at most `size` - d are d levels below the root, all of them among the
    children of such nodes above.
    """
    levels, count = tokens.shape
    width = min(count, config.full_width if config.kind == "full" else config.width or count)
    if config.kind == "best":
        levels = min(levels, config.size - 1)
        width = 1 if config.size == 2 else width
    if levels == 0:
        return root_tree(root)
    if config.kind == "full" or width == 1:
        return _full_conditional_tree(
            root, tokens, _best_children(logprobs, width), full_topology(width, levels)
        )
    nodes, depths, paths, ancestors = _search_beam(
        root, tokens, logprobs, levels, config.size, width
    )
    tree = Tree(nodes, depths, paths, nodes.size)
    vars(tree)["ancestors"] = ancestors
    return tree


@mx.compile
def _search_beam(
    root: mx.array,  # [1]
    tokens: mx.array,  # [G, K]
    logprobs: mx.array,  # [G, K, K]
    levels: int,  # below the root, at most G
    size: int,  # nodes, including the root
    width: int,  # most children of a node, at most K
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Tokens [N], depths [N], paths [N, P] and ancestors [N, N], breadth first."""
    count = tokens.shape[1]
    children = []
    if width < count:
        ranked = _best_children(logprobs, width)
        logprobs = mx.take_along_axis(logprobs, ranked, axis=-1)
        children = _split_levels(ranked)
    edges = _split_levels(clip_logprobs(logprobs))
    layout = _beam_layout(levels, size, count, width)
    chosen = [layout.nodes[:1]]
    slots = [layout.nodes[:1]]
    scores = [layout.root_score]
    for level, kept in enumerate(layout.counts):
        below = edges[level][slots[-1]]
        below = (below + scores[-1][:, None] if level else below).flatten()
        best = mx.argpartition(below, below.size - kept)[-kept:]
        own = take(children[level][slots[-1]].flatten(), best) if children else best % width
        slots.append(own)
        chosen.append(best)
        scores.append(take(below, best))
    parents = mx.concatenate(chosen) // width + layout.above
    below_root = take(tokens.flatten(), mx.concatenate(slots[1:]) + layout.slots)
    trail = [layout.nodes]
    for _ in layout.counts:
        trail.append(take(parents, trail[-1]))
    paths = mx.take_along_axis(mx.stack(trail, axis=1), layout.up, axis=1).astype(mx.int32)
    tree = Tree(mx.concatenate([root, below_root]), layout.depths, paths, parents.size)
    if tree.num_nodes > size:
        tree = tree.select(top_nodes(mx.concatenate(scores), size))
    return tree.tokens, tree.depths, tree.paths, tree.ancestors


def _best_children(
    logprobs: mx.array,  # [G, K, K]
    width: int,
) -> mx.array:  # [G, K, width]
    """The columns of each row's largest values, the largest first."""
    if width == 1:
        return mx.argmax(logprobs, axis=-1, keepdims=True)
    return mx.argsort(-logprobs, axis=-1)[:, :, :width]


def _split_levels(array: mx.array) -> list[mx.array]:
    """The rows of `array` as a list; one split is cheaper than indexing each."""
    return [one.squeeze(0) for one in mx.split(array, array.shape[0])]


def _full_conditional_tree(
    root: mx.array,  # [1]
    tokens: mx.array,  # [G, K]
    ranked: mx.array,  # [G, K, width] by `_best_children`
    topology: Topology,  # the full tree of that width; its levels may be fewer than G
) -> Tree:
    slots = indices(1)
    nodes = [root]
    rows = zip(_split_levels(ranked), _split_levels(tokens), strict=True)
    for children, own_tokens in list(rows)[: topology.paths.shape[1] - 1]:
        slots = children[slots].flatten()
        nodes.append(take(own_tokens, slots))
    found = mx.concatenate(nodes)
    return Tree(found, topology.depths, topology.paths, topology.num_internal, topology)


@dataclass(frozen=True, eq=False)
class _BeamLayout:
    """The layout of a beam's N nodes, including the root, before their tokens are known."""

    counts: list[int]  # of each depth below the root
    depths: mx.array  # [N]
    root_score: mx.array  # [1]
    nodes: mx.array  # [N] from 0 up
    above: mx.array  # [N] the first node of each node's parent's depth
    up: mx.array  # [N, P] levels from each node up to the node at each depth of its path
    slots: mx.array  # [N - 1] the first of the candidates [G, K] of each node below the root


@lru_cache(maxsize=64)
def _beam_layout(
    levels: int,  # below the root
    size: int,  # nodes of the tree that is chosen from the beam, including the root
    num_candidates: int,  # K
    width: int,  # most children of a node
) -> _BeamLayout:
    """The layout of a beam whose depth d keeps `size` - d nodes, or all children of depth d - 1 if
    these are fewer. Evaluated."""
    counts = [1]
    for level in range(levels):
        counts.append(min(size - 1 - level, counts[-1] * width))
    depths = np.repeat(np.arange(levels + 1), counts)
    above = np.cumsum([0, 0, *counts])[depths]
    up = np.maximum(depths[:, None] - np.arange(levels + 1), 0)
    slots = (depths[1:] - 1) * num_candidates
    found = (np.arange(len(depths)), above, up, slots)
    arrays = [evaluated(mx.array(one.astype(np.uint32))) for one in found]
    return _BeamLayout(
        counts[1:], evaluated(mx.array(depths, mx.int32)), evaluated(mx.zeros(1)), *arrays
    )
