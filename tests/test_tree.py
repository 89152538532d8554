"""Draft trees against brute force over the full tree."""

from __future__ import annotations

from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from tiny import best_rank_paths, tree_from_parents

from ssmlx.errors import InputError
from ssmlx.model.tree import contender_topology, draft_topology, full_topology, grow_tree, root_tree
from ssmlx.settings import TreeConfig


def rank_paths(topology):
    """Each node's ranks from the root on, read from slots and paths."""
    slots, depths = topology.slots.tolist(), topology.depths.tolist()
    ranks = [slot % topology.num_candidates for slot in slots]
    return [
        tuple(ranks[node - 1] for node in path[1 : depth + 1])
        for path, depth in zip(topology.paths.tolist(), depths, strict=True)
    ]


def token_paths(tree):
    """Each node's tokens from the root's children on."""
    tokens, depths = tree.tokens.tolist(), tree.depths.tolist()
    return [
        tuple(tokens[node] for node in path[1 : depth + 1])
        for path, depth in zip(tree.paths.tolist(), depths, strict=True)
    ]


def distinct_candidates(levels, width):
    """Token of stream j's candidate of rank r: 100 j + r."""
    return mx.array([[100 * (j + 1) + r for r in range(width)] for j in range(levels)], mx.int32)


def random_probs(rng, levels, width, sharpness):
    logits = sharpness * rng.normal(size=(levels, width + 3))
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return -np.sort(-probs, axis=1)[:, :width]


@pytest.mark.parametrize(("width", "levels"), [(1, 0), (1, 4), (2, 3), (3, 2), (4, 3)])
def test_full_topology(width, levels):
    topology = full_topology(width, levels)
    expected = [r for depth in range(levels + 1) for r in product(range(width), repeat=depth)]
    assert topology.num_nodes == sum(width**level for level in range(levels + 1))
    assert rank_paths(topology) == expected  # breadth first
    assert topology.depths.tolist() == [len(ranks) for ranks in expected]
    assert topology.num_internal == max(1, sum(width**level for level in range(levels)))
    index = {ranks: node for node, ranks in enumerate(expected)}
    for node, path in enumerate(topology.paths.tolist()):
        assert path == [index[expected[node][:depth]] for depth in range(levels + 1)]
    levels_of_slots = [slot // topology.num_candidates for slot in topology.slots.tolist()]
    assert levels_of_slots == [len(ranks) - 1 for ranks in expected[1:]]


def test_full_tree_tokens_and_parents():
    tokens = mx.array([[10, 11], [20, 21]], mx.int32)
    config = TreeConfig(kind="full", width=2)
    tree = grow_tree(mx.array([7], mx.int32), tokens, mx.zeros((2, 2)), config)
    assert tree.tokens.tolist() == [7, 10, 11, 20, 21, 20, 21]
    assert tree.parents.tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert tree.num_internal == 3
    expected = np.eye(7, dtype=bool)
    for node, above in {1: [0], 2: [0], 3: [0, 1], 4: [0, 1], 5: [0, 2], 6: [0, 2]}.items():
        expected[node, above] = True
    assert np.array_equal(np.array(tree.ancestors), expected)
    assert tree.path_sums(mx.array([9.0, 1, 2, 4, 8, 16, 32])).tolist() == [0, 1, 2, 5, 9, 18, 34]


def test_full_tree_size_is_limited():
    with pytest.raises(InputError, match="1365 nodes"):
        draft_topology(TreeConfig(kind="full", width=4), 5)


def test_root_tree():
    tree = root_tree(mx.array([5], mx.int32))
    assert (tree.num_nodes, tree.num_internal) == (1, 1)
    assert tree.paths.tolist() == [[0]]
    assert tree.parents.tolist() == [0]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 30])
@pytest.mark.parametrize("width", [None, 1, 2, 4])
@pytest.mark.parametrize("levels", [1, 3, 4])
def test_best_tree_is_the_brute_force_optimum(size, width, levels):
    config = TreeConfig(kind="best", width=width, size=size)
    topology = draft_topology(config, levels)
    ranks = topology.num_candidates
    contenders = set(rank_paths(topology))
    candidates = distinct_candidates(levels, ranks)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        probs = random_probs(rng, levels, ranks, sharpness=[0.3, 1, 2, 3][seed])
        best = best_rank_paths(probs, size, ranks) if ranks**levels < 3000 else None
        if best:
            assert best <= contenders
        tree = grow_tree(mx.array([1]), candidates, mx.array(np.log(probs)), config)
        found = [tuple(token % 100 for token in path) for path in token_paths(tree)]
        assert len(found) == len(set(found)) == min(size, topology.num_nodes)
        assert [len(path) for path in found] == tree.depths.tolist() == sorted(map(len, found))
        assert all(path[:-1] in found for path in found if path)
        if best:
            assert set(found) == best


def test_contenders_hold_every_optimum():
    """Flat, steep and mixed probabilities; one missing node would show."""
    rng = np.random.default_rng(0)
    for size, levels in ((5, 3), (9, 2), (12, 4)):
        contenders = set(rank_paths(contender_topology(size, 3, levels)))
        seen = set()
        for _ in range(200):
            probs = random_probs(rng, levels, 3, sharpness=rng.choice([0.1, 1.0, 4.0]))
            seen |= best_rank_paths(probs, size, 3)
        assert seen <= contenders
        full = sum(3**level for level in range(levels + 1))
        assert len(contenders) < full


@pytest.mark.parametrize("size", [4, 6, 9])
def test_certain_streams_keep_the_tree_closed_under_ancestors(size):
    """A probability that rounds to 1 gives a child its parent's score."""
    config = TreeConfig(kind="best", width=3, size=size)
    logprobs = mx.array([[0.0, -30.0, -40.0], [-1e-9, -1e9, -1e9], [0.0, -25.0, -50.0]] * 2)
    tree = grow_tree(mx.array([1]), distinct_candidates(6, 3), logprobs, config)
    paths = token_paths(tree)
    assert tree.num_nodes == size
    assert all(path[:-1] in paths for path in paths if path)
    assert (100, 200, 300)[: size - 1] in paths


def test_select_renumbers_paths():
    tree = tree_from_parents([5, 6, 7, 8, 9, 10], [0, 0, 0, 1, 2, 4])
    kept = tree.select(mx.array([0, 2, 4, 5]))
    assert kept.tokens.tolist() == [5, 7, 9, 10]
    assert kept.depths.tolist() == [0, 1, 2, 3]
    assert kept.parents.tolist() == [0, 0, 1, 2]
    assert kept.paths.tolist() == [[0, 0, 0, 0], [0, 1, 1, 1], [0, 1, 2, 2], [0, 1, 2, 3]]
    short = tree.select(mx.array([0, 1, 2]))
    assert short.parents.tolist() == [0, 0, 0]
    assert np.array_equal(np.array(short.ancestors), [[1, 0, 0], [1, 1, 0], [1, 0, 1]])
