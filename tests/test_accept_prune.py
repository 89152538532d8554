"""Acceptance and pruning against walks and sums in plain Python."""

from __future__ import annotations

import math
import random

import mlx.core as mx
import numpy as np
import pytest
from tiny import random_tree, tree_from_parents

from ssmlx.decoding.accept import accept
from ssmlx.decoding.prune import (
    is_pruned,
    nodes_over_threshold,
    nodes_within_budget,
    surviving_nodes,
    transition_logprobs,
)
from ssmlx.settings import PruneConfig


def naive_walk(tree, target):
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    path = [0]
    while True:
        after = [
            node
            for node in range(1, len(tokens))
            if parents[node] == path[-1] and tokens[node] == target[path[-1]]
        ]
        if not after:
            return path
        (node,) = after
        path.append(node)


@pytest.mark.parametrize("vocab", [2, 3, 6])
def test_accept_equals_a_walk(vocab):
    rng, lengths = random.Random(vocab), set()
    for _ in range(120):
        tree = random_tree(rng, rng.randint(1, 14), vocab)
        target = [rng.randrange(vocab) for _ in range(tree.num_nodes)]
        found = accept(tree, mx.array(target, mx.int32))
        path = naive_walk(tree, target)
        count = int(found.num_accepted.item())
        lengths.add(count)
        assert count == len(path) - 1
        assert found.path.tolist()[: count + 1] == path
        assert set(found.path.tolist()[count:]) == {path[-1]}
        assert found.new_tokens.tolist()[: count + 1] == [target[node] for node in path]
        assert set(found.new_tokens.tolist()[count:]) == {target[path[-1]]}
        assert found.last.tolist() == [path[-1]]
        assert found.correction.tolist() == [target[path[-1]]]
    assert {0, 1, 2} <= lengths


def test_a_right_token_below_a_wrong_one_is_not_accepted():
    tree = tree_from_parents([5, 6, 7], [0, 0, 1])
    found = accept(tree, mx.array([9, 7, 7]))
    assert (found.num_accepted.item(), found.correction.item()) == (0, 9)


def exit_probs(tree, rng, vocab):
    logits = rng.normal(0, 2, (tree.num_internal, vocab)).astype(np.float32)
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    edges = [1.0] + [float(probs[parents[n], tokens[n]]) for n in range(1, len(tokens))]
    return mx.array(logits), edges


def along_paths(tree, edges):
    """The edges of each node's path."""
    depths = tree.depths.tolist()
    return [
        [edges[node] for node in path[1 : depth + 1]]
        for path, depth in zip(tree.paths.tolist(), depths, strict=True)
    ]


def assert_closed(tree, kept):
    parents = tree.parents.tolist()
    assert kept == sorted(set(kept))
    assert kept[0] == 0
    assert all(parents[node] in kept for node in kept)


@pytest.mark.parametrize("seed", range(8))
def test_pruning_equals_brute_force(seed):
    rng, draw = np.random.default_rng(seed), random.Random(seed)
    tree = random_tree(draw, 12, 5)
    logits, edges = exit_probs(tree, rng, 5)
    found = transition_logprobs(tree, logits)
    assert np.allclose(found, np.log(edges), atol=1e-4)
    on_path = along_paths(tree, edges)
    scores = [math.prod(values) for values in on_path]
    for keep in range(1, 15):
        config = PruneConfig(kind="budget", keep=keep)
        kept = surviving_nodes(tree, logits, config).tolist()
        best = sorted(range(12), key=lambda node: -scores[node])[:keep]
        if all(1 - edge > 0.001 for edge in edges[1:]):
            assert kept == sorted(best)
        assert len(kept) == min(keep, 12)
        assert_closed(tree, kept)
    for threshold in (0.0, 0.02, 0.1, 0.3, 0.9, 1.0):
        config = PruneConfig(kind="threshold", threshold=threshold)
        kept = surviving_nodes(tree, logits, config).tolist()
        assert kept == [n for n in range(12) if all(p >= threshold for p in on_path[n])]
        assert_closed(tree, kept)


def test_certain_edges_do_not_outlive_their_parents():
    """All path probabilities round to the same number; the nodes nearest the root stay."""
    chain = tree_from_parents([1, 2, 3, 4, 5, 6], [0, 0, 1, 2, 3, 4])
    for keep in range(1, 7):
        kept = nodes_within_budget(chain, mx.zeros(6), keep)
        assert kept.tolist() == list(range(keep))


def test_threshold_semantics():
    """The paper's rule is on edges, not on path probabilities; an equal one stays."""
    chain = tree_from_parents([1, 2, 3, 4], [0, 0, 1, 2])
    edges = mx.log(mx.array([1.0, 0.5, 0.25, 0.5]))
    assert nodes_over_threshold(chain, edges, 0.2).tolist() == [0, 1, 2, 3]
    assert nodes_over_threshold(chain, edges, 0.3).tolist() == [0, 1]
    assert nodes_over_threshold(chain, edges, 0.6).tolist() == [0]
    impossible = mx.array([0.0, -math.inf, 0.0, 0.0])
    assert nodes_over_threshold(chain, impossible, 0.0).tolist() == [0, 1, 2, 3]


def test_what_can_be_pruned():
    tree, root = tree_from_parents([1, 2, 3], [0, 0, 0]), tree_from_parents([1], [0])
    assert not is_pruned(tree, PruneConfig())
    assert is_pruned(tree, PruneConfig(kind="budget", keep=2))
    assert not is_pruned(tree, PruneConfig(kind="budget", keep=3))
    assert is_pruned(tree, PruneConfig(kind="threshold"))
    assert not is_pruned(root, PruneConfig(kind="threshold"))
