"""The cache against one that concatenates, and the promise that a step copies no buffer."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest

from ssmlx.model.cache import TreeCache

HEADS, SIZE, LAYERS = 2, 3, 3


class NaiveCache:
    """Committed keys and values as lists of rows, [rows, 2, Hkv, Dh] a layer.

    `paths` are those that the host has not counted: (rows a layer, how many count).
    """

    def __init__(self):
        self.committed = [np.zeros((0, 2, HEADS, SIZE), np.float32) for _ in range(LAYERS)]
        self.step = [None] * LAYERS
        self.paths = []

    def append(self, layer, rows):
        self.committed[layer] = np.concatenate([self.committed[layer], rows])

    def commit(self, lower, upper, split, count):
        rows = [self.step[i][lower if i < split else upper] for i in range(LAYERS)]
        self.paths.append((rows, count))

    def count(self):
        """The host learns of the oldest path; how many of its rows counted."""
        rows, count = self.paths.pop(0)
        for layer in range(LAYERS):
            self.append(layer, rows[layer][:count])
        return count

    def seen(self, layer, rows):
        """What a step's rows find in the cache, those of the paths that do not count included."""
        paths = [of_layers[layer] for of_layers, _ in self.paths]
        return np.concatenate([rows, *paths, self.committed[layer]])

    @property
    def length(self):
        return len(self.committed[0]) + sum(count for _, count in self.paths)


def as_arrays(rows):
    """[R, 2, Hkv, Dh] to the keys and values [1, Hkv, R, Dh] of a layer."""
    keys, values = (mx.array(rows[:, i].transpose(1, 0, 2)[None]) for i in range(2))
    return keys, values


def as_rows(keys, values):
    return np.stack([np.array(part[0]).transpose(1, 0, 2) for part in (keys, values)], axis=1)


def random_rows(rng, count):
    return rng.normal(size=(count, 2, HEADS, SIZE)).astype(np.float32)


def append(cache, naive, rng, count):
    for layer in range(LAYERS):
        rows = random_rows(rng, count)
        found = cache.append_view(layer).update_and_fetch(*as_arrays(rows))
        naive.append(layer, rows)
        assert np.array_equal(as_rows(*found), naive.committed[layer])
    cache.advance(count)


def write_tree(cache, naive, rng, lower_rows, upper_rows, split):
    for layer in range(LAYERS):
        rows = random_rows(rng, lower_rows if layer < split else upper_rows)
        view = cache.view(layer, mx.arange(len(rows)) + cache.length)
        assert view.offset.tolist() == list(range(naive.length, naive.length + len(rows)))
        found = view.update_and_fetch(*as_arrays(rows))
        naive.step[layer] = rows
        assert np.array_equal(as_rows(*found), naive.seen(layer, rows))


def one_step(cache, naive, rng, draw):
    """Verify a tree of N nodes, pruned to M, whose path of P rows has `accepted` real ones.

    The host counts the path at once, or a step later.
    """
    split, nodes, streams = draw.randint(0, LAYERS), draw.randint(1, 6), draw.randint(0, 3)
    kept = sorted([0, *draw.sample(range(1, nodes), draw.randint(0, nodes - 1))])
    upper_rows = len(kept) * (1 + streams)
    path_length = draw.randint(1, 4)
    accepted = draw.randint(1, min(path_length, len(kept)))
    path = sorted(draw.sample(range(len(kept)), accepted))
    padded = path + [path[-1]] * (path_length - accepted)
    cache.reserve(tokens=path_length, scratch=nodes * (1 + streams))
    write_tree(cache, naive, rng, nodes, upper_rows, split)
    lower = [kept[node] for node in padded]
    cache.commit(mx.array(lower), mx.array(padded), split, mx.array([accepted]))
    naive.commit(lower, padded, split, accepted)
    for _ in range(draw.randint(max(len(naive.paths) - 1, 0), len(naive.paths))):
        cache.advance(naive.count())


def check_committed(cache, naive, rng):
    """What a next tree would read."""
    cache.reserve(tokens=1, scratch=1)
    write_tree(cache, naive, rng, 1, 1, LAYERS)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("scratch", [0, 24])
def test_random_sequences_equal_concatenation(seed, scratch):
    rng, draw = np.random.default_rng(seed), random.Random(seed)
    cache, naive = TreeCache(LAYERS, scratch=scratch, step=4), NaiveCache()
    for _ in range(12):
        action = draw.choice(["append", "step", "step", "step", "trim"])
        if action == "append":
            cache.trim(cache.offset)  # a path that nobody counted is forgotten
            naive.paths = []
            count = draw.randint(1, 6)
            cache.reserve(tokens=count)
            append(cache, naive, rng, count)
        elif action == "step":
            one_step(cache, naive, rng, draw)
        else:
            keep = draw.randint(cache.offset // 2, cache.offset)
            cache.trim(keep)
            naive.committed = [rows[:keep] for rows in naive.committed]
            naive.paths = []
        assert cache.offset == len(naive.committed[0])
        check_committed(cache, naive, rng)
        assert cache.capacity % 4 == 0


def test_commit_moves_nothing_until_it_is_counted():
    rng, naive = np.random.default_rng(0), NaiveCache()
    cache = TreeCache(LAYERS, step=4)
    cache.reserve(tokens=3, scratch=4)
    append(cache, naive, rng, 3)
    cache.reserve(tokens=2, scratch=4)
    write_tree(cache, naive, rng, 4, 4, 1)
    cache.commit(mx.array([0, 2]), mx.array([0, 2]), 1, mx.array([2]))
    assert cache.offset == 3 and cache.length.tolist() == [5]
    naive.commit([0, 2], [0, 2], 1, 2)
    check_committed(cache, naive, rng)


def test_a_step_that_is_not_run_is_taken_back():
    rng, naive = np.random.default_rng(0), NaiveCache()
    cache = TreeCache(LAYERS, scratch=4, step=4)
    cache.reserve(tokens=3, scratch=4)
    append(cache, naive, rng, 3)
    write_tree(cache, naive, rng, 4, 4, 1)
    cache.commit(mx.array([0, 2]), mx.array([0, 2]), 1, mx.array([2]))
    naive.commit([0, 2], [0, 2], 1, 2)
    before = cache.hold()
    cache.reserve(tokens=2, scratch=9)  # grows, and writes over the rows of the step before
    for layer in range(LAYERS):
        view = cache.view(layer, mx.arange(9))
        view.update_and_fetch(*as_arrays(random_rows(rng, 9)))
    cache.commit(mx.array([0]), mx.array([0]), 1, mx.array([1]))
    cache.restore(before)
    assert len(cache.paths) == 1 and cache.capacity == 4
    cache.reserve(tokens=0)
    cache.advance(naive.count())
    check_committed(cache, naive, rng)


def test_growth_happens_once_in_a_step_of_tokens():
    rng, naive = np.random.default_rng(0), NaiveCache()
    cache, sizes = TreeCache(LAYERS, scratch=2, step=4), []
    for _ in range(9):
        cache.reserve(tokens=1, scratch=2)
        append(cache, naive, rng, 1)
        sizes.append(cache.capacity)
    assert sizes == [4, 4, 4, 4, 8, 8, 8, 8, 12]
    assert cache.nbytes == LAYERS * 2 * HEADS * (2 + 12) * SIZE * 4


def test_wrong_use_is_refused():
    cache = TreeCache(1, step=4)
    cache.reserve(tokens=2)
    keys = mx.zeros((1, HEADS, 2, SIZE))
    cache.append_view(0).update_and_fetch(keys, keys)
    cache.advance(2)
    with pytest.raises(ValueError, match="cannot keep 3"):
        cache.trim(3)
    with pytest.raises(ValueError, match="cannot keep -1"):
        cache.trim(-1)
    with pytest.raises(ValueError, match="reserve more"):
        cache.view(0, mx.arange(2)).update_and_fetch(keys, keys)
    with pytest.raises(ValueError, match="room for 4"):
        cache.advance(3)


def test_a_step_copies_no_buffer():
    """Buffers of 34 MB: a whole step may raise the peak by a sliver of one."""
    layers, heads, size, rows = 4, 4, 64, 12
    cache = TreeCache(layers, scratch=rows, step=16384)
    cache.reserve(tokens=16000, scratch=rows)

    def verify():
        """Layer by layer in one graph, as the model does."""
        hidden = mx.ones((1, heads, rows, size))
        for layer in range(layers):
            view = cache.view(layer, mx.arange(rows))
            keys, values = view.update_and_fetch(hidden, hidden)
            # Few of the rows that attention reads, so that its own room does not hide a copy.
            hidden = hidden + keys[:, :, -rows:] + values[:, :, -rows:]
        return hidden

    mx.eval(verify())
    cache.advance(15000)
    mx.eval(cache.state)
    buffer = cache.nbytes // layers
    assert buffer > 32e6
    for _ in range(5):
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        if before < cache.nbytes:
            pytest.skip("this backend does not report its memory")
        hidden = verify()
        cache.commit(mx.array([0, 3, 5]), mx.array([0, 3, 5]), 1, mx.array([2]))
        mx.eval(hidden, cache.state)
        cache.advance(2)
        assert mx.get_peak_memory() - before < buffer / 20
    copied = [buffer + 0 for buffer in cache.state]
    mx.eval(copied)
    assert mx.get_peak_memory() - before > buffer  # the measure sees a copy
