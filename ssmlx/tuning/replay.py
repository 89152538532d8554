"""Held-out text replayed: how many tokens a target call would advance.

The text stands for what the target would have said, so one forward over it predicts every step:
at the last accepted token the streams draft a tree, the text says how far it holds, and the next
step starts behind it. For answers of the model itself this is what decoding does, call for call;
for other texts it is an estimate. No tree is grown: where the text stands among the guesses says
from which size, or width, on a tree would have held it, and so serves every tree at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..model.tree import Topology, draft_topology
from ..settings import MAX_EDGE_LOGPROB, MIN_EDGE_LOGPROB, TreeConfig

NEVER = np.iinfo(np.int32).max
Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Guesses:
    tokens: np.ndarray  # [A, G, C] the C likeliest tokens of each stream, best first
    logprobs: np.ndarray  # [A, G, C] their log probabilities
    # [A] the answer; the step that says answer[i] guesses tokens[i] for what follows
    answer: np.ndarray


@dataclass(frozen=True)
class Replay:
    num_tokens: int
    num_calls: int

    @property
    def tokens_per_call(self) -> float:
        return self.num_tokens / max(1, self.num_calls)


def num_candidates(tree: TreeConfig, num_streams: int) -> int:
    """C, the candidates of each stream that a replay of `tree` needs."""
    return draft_topology(tree, num_streams).num_candidates


def replay(guesses: Sequence[Guesses], tree: TreeConfig) -> Replay:
    """Decode every answer with `tree` and without pruning, the prompt's call counted."""
    if tree.kind == "full":
        depths = [depths_within(needed_widths(one), tree.full_width) for one in guesses]
    else:
        needed = (needed_sizes(one, one.tokens.shape[1], tree.size) for one in guesses)
        depths = [depths_within(one, tree.size) for one in needed]
    after = advance(depths)
    return Replay(after.num_tokens + len(guesses), after.num_calls + len(guesses))


def advance(depths: Sequence[Ints]) -> Replay:
    """Tokens and calls after the prompt's, from how far the draft before each token [A] holds."""
    tokens = calls = 0
    for held in depths:
        place, last = 0, len(held) - 1
        tokens += last
        while place < last:
            place += 1 + int(held[place])
            calls += 1
    return Replay(tokens, calls)


def depths_within(needed: Ints, limit: int) -> Ints:
    """[A] how far the answer holds in the trees of size or width `limit`."""
    return (needed <= limit).sum(axis=1).astype(np.int32)


def true_ranks(guesses: Guesses) -> Ints:
    """[A, G] the rank at which each stream has the token that the answer holds; `NEVER` if none."""
    length, streams, _ = guesses.tokens.shape
    ranks = np.full((length, streams), NEVER, np.int32)
    for place in range(length):
        following = guesses.answer[place + 1 : place + 1 + streams]
        hits = guesses.tokens[place, : len(following)] == following[:, None]
        found = hits.any(axis=1)
        ranks[place, : len(following)][found] = hits.argmax(axis=1)[found]
    return ranks


def needed_widths(guesses: Guesses) -> Ints:
    """[A, G] children a level of the smallest full tree that holds the answer to each depth."""
    widest = np.maximum.accumulate(true_ranks(guesses), axis=1)
    return np.where(widest < NEVER, widest + 1, NEVER).astype(np.int32)


@dataclass(frozen=True, eq=False)
class Contenders:
    topology: Topology  # the same on the device
    # parents, depths, ranks: [N] of each node; the root's rank is 0
    parents: Ints
    depths: Ints
    ranks: Ints
    children: dict[tuple[int, int], int]  # a node's child of some rank

    def scores(self, logprobs: Floats) -> Floats:
        """[N] log probability of each node's path, from [G, C]."""
        edges = np.clip(logprobs, MIN_EDGE_LOGPROB, MAX_EDGE_LOGPROB).astype(np.float32)
        scores = np.zeros(len(self.parents), np.float32)
        for depth in range(1, int(self.depths.max(initial=0)) + 1):
            level = np.flatnonzero(self.depths == depth)
            scores[level] = scores[self.parents[level]] + edges[depth - 1, self.ranks[level]]
        return scores

    def path(self, ranks: Ints) -> list[int]:
        """The nodes below the root along `ranks` [G], as far as there are any."""
        node, nodes = 0, []
        for rank in ranks:
            if (node, int(rank)) not in self.children:
                break
            node = self.children[node, int(rank)]
            nodes.append(node)
        return nodes


@lru_cache(maxsize=16)
def contenders(size: int, num_candidates: int, levels: int) -> Contenders:
    """The contenders for a best tree of `size` nodes, of no more candidates than there are."""
    config = TreeConfig(kind="best", size=size, width=num_candidates)
    topology = draft_topology(config, levels)
    paths, depths = np.array(topology.paths), np.array(topology.depths)
    nodes = np.arange(len(depths))
    parents = paths[nodes, np.maximum(depths - 1, 0)]
    ranks = np.zeros(len(depths), np.int32)
    ranks[1:] = np.array(topology.slots) % topology.num_candidates
    children = {(int(parents[n]), int(ranks[n])): int(n) for n in nodes[1:]}
    return Contenders(topology, parents, depths, ranks, children)


def needed_sizes(guesses: Guesses, levels: int, largest: int) -> Ints:
    """[A, levels] nodes of the smallest best tree that holds the answer to each depth.

    Best trees of one draft are nested, so one ranking of nodes serves every size up to `largest`.
    """
    length, _, count = guesses.tokens.shape
    known = contenders(largest, count, levels)
    ranks, needed = true_ranks(guesses)[:, :levels], np.full((length, levels), NEVER, np.int32)
    for place in range(length):
        nodes = known.path(ranks[place])
        if nodes:
            scores = known.scores(guesses.logprobs[place])
            better = (scores[:, None] > scores[nodes]).sum(axis=0)
            needed[place, : len(nodes)] = better + 1
    return needed
