"""What streams guess along an answer, and how many calls any tree would have taken for it.

An answer is decoded once. One forward over it, the whole answer as a tree of one branch with all
its streams beside it, then says what the streams would have drafted at every place (the paper's
own pass, section 3.2.1); with greedy decoding that is what they do draft there, whatever the
tree. So a tree of any shape is replayed from these guesses: at the last accepted token it is
grown by the rule of `ssmlx.model.tree`, the answer says how far it holds, and the next step starts
behind that. Nothing is estimated; a test compares replays with real decoding, call for call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..decoding.drafter import rank_candidates
from ..decoding.loop import prefill
from ..decoding.prune import transition_logprobs
from ..model.streams import StreamFusedModel
from ..model.tree import (
    MAX_EDGE_LOGPROB,
    MIN_EDGE_LOGPROB,
    Topology,
    Tree,
    clip_edges,
    draft_topology,
    full_topology,
)
from ..settings import TreeConfig
from ..tuning.replay import Guesses

NEVER = np.iinfo(np.int32).max
_LOGIT_ROWS = 64  # rows of logits at a time: a vocabulary of 150,000 makes 40 MB of them
Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


def chain(tokens: Sequence[int]) -> Tree:
    """A tree of one branch."""
    topology = full_topology(1, len(tokens) - 1)
    nodes = mx.array(list(tokens), mx.int32)
    return Tree(nodes, topology.depths, topology.paths, topology.num_internal, topology)


def guesses_along(
    model: StreamFusedModel, prompt: list[int], answer: list[int], count: int
) -> Guesses:
    """What the streams guess before each token of `answer`: [A, G, count], fewer where Vd is."""
    cache, streams = model.make_cache(), model.num_streams
    prefill(model, prompt[:-1], cache)
    tree = chain([prompt[-1], *answer[:-1]])
    cache.reserve(tokens=1, scratch=tree.num_nodes * (1 + streams))
    hidden = model.insert(model.lower(tree, cache), streams)
    rows = model.upper(hidden, tree, cache, streams)[:, tree.num_nodes :]
    tokens, logprobs = _ranked(model, rows, min(count, model.draft_vocab_size))
    shape = (len(answer), streams, -1)
    return Guesses(tokens.reshape(shape), logprobs.reshape(shape), np.array(answer))


def _ranked(model: StreamFusedModel, rows: mx.array, count: int) -> tuple[Ints, Floats]:
    """Tokens and log probabilities [R, count] of stream rows [1, R, D]."""
    parts = []
    for first in range(0, rows.shape[1], _LOGIT_ROWS):
        logits = model.draft_logits(rows[:, first : first + _LOGIT_ROWS])
        tokens, logprobs = rank_candidates(logits, count)
        if model.draft_vocab is not None:
            tokens = model.draft_vocab[tokens]
        mx.eval(tokens, logprobs)
        parts.append((np.array(tokens, np.int32), np.array(logprobs, np.float32)))
    return np.concatenate([t for t, _ in parts]), np.concatenate([p for _, p in parts])


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
    """Every node that the best tree of some size may hold, on the host.

    Attributes:
        topology: the same on the device.
        parents, depths, ranks: of each node; the root's rank is 0.
        children: a node's child of some rank.
    """

    topology: Topology
    parents: Ints
    depths: Ints
    ranks: Ints
    children: dict[tuple[int, int], int]

    def scores(self, logprobs: Floats) -> Floats:
        """[C] log probability of each node's path, from [G, K]."""
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

    Best trees of one draft are nested, so one ranking of nodes serves every size.

    Args:
        guesses: of as many streams, or more.
        levels: streams that draft.
        largest: trees beyond this size are not asked about.
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


@dataclass(frozen=True, eq=False)
class Exits:
    """Best trees of an answer's places, and what early exit says of their nodes (section 3.2.3).

    Attributes:
        drafted: [A, N] draft score of each node.
        judged: [A, N] early-exit score of each node's path.
        path: [A, G] the node at which the answer stands at each depth; -1 where there is none.
    """

    drafted: Floats
    judged: Floats
    path: Ints

    def depths(self, size: int, keep: int) -> Ints:
        """[A] how far the answer holds in the best `size` nodes, pruned to `keep`."""
        held = np.ones(len(self.path), bool)
        depths = np.zeros(len(self.path), np.int32)
        inside = _places(self.drafted) < size
        kept = _places(np.where(inside, self.judged, -np.inf)) < keep
        for node in self.path.T:
            places = np.arange(len(node))
            held &= (node >= 0) & inside[places, node] & kept[places, node]
            depths += held
        return depths


def _places(scores: Floats) -> Ints:
    """[A, N] each node's place by score, the best first."""
    order = np.argsort(-scores, axis=1, kind="stable")
    places = np.empty_like(order)
    np.put_along_axis(places, order, np.arange(scores.shape[1])[None], axis=1)
    return places.astype(np.int32)


def exits_along(
    model: StreamFusedModel, prompt: list[int], guesses: Guesses, levels: int, size: int
) -> Exits:
    """What early exit says of the best tree of `size` nodes at every place of an answer.

    The lower layers run once on each tree, from the answer's end: a cache can forget tokens, and
    need not read any of them twice.
    """
    known = contenders(size, guesses.tokens.shape[2], levels)
    answer, ranks = guesses.answer.tolist(), true_ranks(guesses)[:, :levels]
    cache = model.make_cache(size)
    prefill(model, [*prompt, *answer[:-1]], cache)
    cache.reserve(tokens=1, scratch=size)
    rows = []
    for place in reversed(range(len(answer))):
        cache.trim(len(prompt) + place)
        scores = known.scores(guesses.logprobs[place])
        keep = np.sort(np.argsort(-scores, kind="stable")[:size])
        tree = _drafted(known, answer[place], guesses.tokens[place, :levels], keep)
        judged = judge(model, tree, cache)
        nodes = known.path(ranks[place])
        path = [int(np.searchsorted(keep, n)) if n in keep else -1 for n in nodes]
        rows.append((scores[keep], judged, path + [-1] * (levels - len(path))))
    drafted, judged_rows, paths = zip(*reversed(rows), strict=True)
    return Exits(np.stack(drafted), np.stack(judged_rows), np.array(paths, np.int32))


def _drafted(known: Contenders, root: int, tokens: Ints, keep: NDArray[np.intp]) -> Tree:
    """The tree of the contenders `keep`, below `root`."""
    topology = known.topology
    slots = np.array(topology.slots)
    width = topology.num_candidates
    below = tokens[slots // width, slots % width]
    nodes = mx.array(np.concatenate([[root], below]).astype(np.int32))
    whole = Tree(nodes, topology.depths, topology.paths, topology.num_internal)
    return whole.select(mx.array(keep.astype(np.int32)))


def judge(model: StreamFusedModel, tree: Tree, cache: object) -> Floats:
    """[N] early-exit score of each node's path."""
    hidden = model.lower(tree, cache)  # type: ignore[arg-type]
    logits = model.early_exit_logits(hidden[:, : tree.num_internal])
    edges = clip_edges(transition_logprobs(tree, logits))
    return np.array(tree.path_sums(edges), np.float32)


@dataclass(frozen=True)
class Advance:
    """What replays come to.

    Attributes:
        tokens: of all answers, but the prompt's call's one each.
        calls: of the target, but the prompt's.
    """

    tokens: int
    calls: int

    @property
    def per_call(self) -> float:
        """Tokens per call, after the prompt's."""
        return self.tokens / max(1, self.calls)


def advance(depths: Sequence[Ints]) -> Advance:
    """Replay answers from how far the draft of each place [A] holds."""
    tokens = calls = 0
    for held in depths:
        place, last = 0, len(held) - 1
        tokens += last
        while place < last:
            place += 1 + int(held[place])
            calls += 1
    return Advance(tokens, calls)


def depths_within(needed: Ints, limit: int) -> Ints:
    """[A] how far the answer holds in the trees of size or width `limit`."""
    return (needed <= limit).sum(axis=1).astype(np.int32)


def rank_table(guesses: Sequence[Guesses], ranks: Sequence[int]) -> list[list[float]]:
    """a[j][r]: how often stream j + 1 has the answer's token among its first `ranks[r]`.

    Counted at the places where the streams before it had theirs among all that they ranked.
    """
    found = np.concatenate([true_ranks(one) for one in guesses])
    table, reached = [], np.ones(len(found), bool)
    for column in found.T:
        own = column[reached]
        table.append([float((own < rank).mean()) if len(own) else 0.0 for rank in ranks])
        reached &= column < NEVER
    return table
