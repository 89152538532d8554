"""Masks: the ones drawn in the docstrings, and the buffer against masks built anew."""

from __future__ import annotations

import random
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from tiny import random_tree, tree_from_parents

from ssmlx.model.masks import MaskBuffer, stream_positions, stream_visibility


def naive_visibility(tree, num_streams):
    """Equations 1 and 2, row by row."""
    depths, paths, nodes = tree.depths.tolist(), tree.paths.tolist(), tree.num_nodes
    above = [set(path[: depth + 1]) for path, depth in zip(paths, depths, strict=True)]
    owners = [(node, 0) for node in range(nodes)]
    owners += [(node, j) for node in range(nodes) for j in range(1, num_streams + 1)]

    def sees(row, column):
        (node, stream), (other, other_stream) = row, column
        if other_stream == 0:
            return other in above[node]
        return other == node and other_stream <= stream

    return np.array([[sees(row, column) for column in owners] for row in owners])


def test_golden_visibility():
    chain = tree_from_parents([1, 2], [0, 0])
    expected = ["x.....", "xx....", "x.x...", "x.xx..", "xx..x.", "xx..xx"]
    found = np.array(stream_visibility(chain.ancestors, 2))
    assert ["".join(".x"[int(cell)] for cell in row) for row in found] == expected


def test_positions():
    assert stream_positions(mx.array([4, 5, 5]), 2).tolist() == [4, 5, 5, 5, 6, 6, 7, 6, 7]
    assert stream_positions(mx.array([4, 5]), 0).tolist() == [4, 5]


@pytest.mark.parametrize("num_streams", [0, 1, 3])
def test_visibility_equals_the_naive_one(num_streams):
    rng = random.Random(0)
    for num_nodes in (1, 2, 5, 9):
        tree = random_tree(rng, num_nodes, 4)
        found = np.array(stream_visibility(tree.ancestors, num_streams))
        assert np.array_equal(found, naive_visibility(tree, num_streams))


@dataclass
class Seen:
    """What a mask needs to know of a cache, with paths given as (count, length)."""

    offset: int
    capacity: int
    paths: tuple[tuple[int, int], ...] = ()

    def path_masks(self, num_rows):
        rows = [np.arange(length) < count for count, length in self.paths]
        return [mx.array(np.broadcast_to(row, (num_rows, row.size))) for row in rows]


def scratch_mask(visible, committed, paths=()):
    parts = [np.arange(length) < count for count, length in paths]
    columns = np.concatenate([*parts, np.ones(committed, bool)])
    return np.concatenate([visible, np.broadcast_to(columns, (len(visible), columns.size))], axis=1)


def test_mask_buffer_equals_a_mask_built_anew():
    rng, masks = random.Random(1), MaskBuffer(max_sizes=3)
    draw = np.random.default_rng(1)
    keys = [object() for _ in range(12)]
    contents = {}
    committed, capacity = 0, 4
    for _ in range(300):
        rows = rng.randint(1, 6)
        key = rng.choice([None, *keys])
        if key is None or (id(key), rows) not in contents:
            contents[id(key), rows] = draw.random((rows, rows)) < 0.5
        visible = contents[id(key), rows]
        # An answer grows, is trimmed, or outgrows the cache.
        committed = max(0, committed + rng.choice([-9, 0, 1, 2, 5]))
        capacity = max(capacity, -(-committed // 4) * 4)
        lengths = [rng.randint(1, 3) for _ in range(rng.choice([0, 0, 1, 2]))]
        paths = tuple((rng.randint(1, length), length) for length in lengths)
        found = masks.mask(mx.array(visible), Seen(committed, capacity, paths), key)
        assert np.array_equal(np.array(found), scratch_mask(visible, committed, paths))


def test_two_topologies_of_one_size_do_not_read_each_other():
    masks, first, second = MaskBuffer(), object(), object()
    one, other = np.tri(3, dtype=bool), np.eye(3, dtype=bool)
    for visible, key in [(one, first), (other, second), (one, first), (other, None), (one, first)]:
        found = masks.mask(mx.array(visible), Seen(2, 8), key)
        assert np.array_equal(np.array(found), scratch_mask(visible, 2))


def test_an_equal_key_is_not_written_again():
    masks, key = MaskBuffer(), object()
    masks.mask(mx.array(np.eye(2, dtype=bool)), Seen(1, 8), key)
    again = masks.mask(mx.zeros((2, 2), mx.bool_), Seen(3, 8), key)
    assert np.array_equal(np.array(again), scratch_mask(np.eye(2, dtype=bool), 3))


def test_a_mask_in_hand_outlives_the_next_write():
    """A step may still be running when the next one's mask is written."""
    masks = MaskBuffer()
    before = masks.mask(mx.array(np.eye(3, dtype=bool)), Seen(2, 8), None)
    masks.mask(mx.zeros((3, 3), mx.bool_), Seen(2, 8), None)
    assert np.array_equal(np.array(before), scratch_mask(np.eye(3, dtype=bool), 2))
