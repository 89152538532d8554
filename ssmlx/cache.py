"""The key/value caches of a step that verifies a tree: the only file that changes a cache.

A layer has one buffer for keys and values:

    [2, Hkv, S + capacity, Dh]:   | scratch S        | committed                |
                                         ^ R rows    ^ L tokens, then free room
                                    of the step in hand

A step's rows (tree nodes, and in the upper layers the streams) are written at the end of the
scratch, directly before the committed tokens, so attention reads [R rows | L tokens] as one
strided slice; keys are stored after rotary, so their order does not matter. `commit` takes the
accepted rows, a handful, and `advance` writes them behind the committed ones. Nothing else is
ever moved: the rows that were not accepted, and all stream rows, are simply overwritten by the
next step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .shapes import expect_shape

ValueMap = Callable[[mx.array], mx.array]
"""The values of a step's rows [1, Hkv, R, Dh], to those that attention sees."""


class _AppendView:
    """What a decoder layer sees of the cache while tokens are appended behind the others."""

    def __init__(self, cache: TreeCache, layer: int) -> None:
        self._cache, self._layer = cache, layer
        self.offset: int = cache.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        first = self._cache.scratch + self.offset
        last = first + keys.shape[2]
        self._cache._accepted = []  # of a step that was abandoned
        self._cache._write(self._layer, first, last, keys, values)
        return self._cache._read(self._layer, self._cache.scratch, last)


class _TreeView:
    """What a decoder layer sees of the cache while a step's rows are verified.

    `offset` is the rows' positions [R], which `backbone.PositionedRope` understands.
    """

    def __init__(self, cache: TreeCache, layer: int, positions: mx.array) -> None:
        self._cache, self._layer = cache, layer
        self.offset = positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        cache, rows = self._cache, keys.shape[2]
        first = cache.scratch - rows
        cache._write(self._layer, first, cache.scratch, keys, values)
        cache._tree_rows[self._layer] = rows
        return cache._read(self._layer, first, cache.scratch + cache.offset)


class _MappedTreeView(_TreeView):
    """A tree view that stores other values than the layer computed."""

    def __init__(
        self, cache: TreeCache, layer: int, positions: mx.array, map_values: ValueMap
    ) -> None:
        super().__init__(cache, layer, positions)
        self._map_values = map_values

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return super().update_and_fetch(keys, self._map_values(values))


class TreeCache:
    """Keys and values of every layer, for one sequence.

    Args:
        num_layers: layers of the model.
        scratch: S, the most rows that a step will have. Grows when a step needs more.
        step: tokens by which the room for committed ones grows.
    """

    def __init__(self, num_layers: int, *, scratch: int = 0, step: int = 256) -> None:
        self.scratch = scratch
        self.capacity = 0
        self._step = step
        self._offset = 0
        self._buffers: list[mx.array | None] = [None] * num_layers
        self._tree_rows = [0] * num_layers
        self._accepted: list[mx.array] = []

    @property
    def offset(self) -> int:
        """L, the committed tokens."""
        return self._offset

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers if buffer is not None)

    @property
    def state(self) -> list[mx.array]:
        """The buffers and the rows taken from them, for `mx.eval`."""
        return [*(buffer for buffer in self._buffers if buffer is not None), *self._accepted]

    def reserve(self, *, tokens: int, scratch: int = 0) -> None:
        """Make room for `tokens` more committed tokens and a step of `scratch` rows.

        Buffers are copied only when they grow: once in `step` tokens.
        """
        capacity, needed = self.capacity, self._offset + tokens
        if needed > capacity:
            capacity = -(-needed // self._step) * self._step
        scratch = max(scratch, self.scratch)
        front, back = scratch - self.scratch, capacity - self.capacity
        if front or back:
            self._buffers = [
                None if old is None else _pad(old, front, back) for old in self._buffers
            ]
        self.scratch, self.capacity = scratch, capacity

    def append_view(self, layer: int) -> Any:
        """The cache object to hand to decoder layer `layer` when tokens are appended."""
        return _AppendView(self, layer)

    def tree_view(self, layer: int, positions: mx.array, map_values: ValueMap | None = None) -> Any:
        """The cache object to hand to decoder layer `layer` for a step's rows.

        Args:
            positions: [R] rotary position of each row.
            map_values: what becomes of the rows' values before attention, if anything.
        """
        if map_values is not None:
            return _MappedTreeView(self, layer, positions, map_values)
        return _TreeView(self, layer, positions)

    def advance(self, num_tokens: int) -> None:
        """Count as committed `num_tokens` rows: those appended, or those of the last `commit`.

        After a commit, evaluate `state` first: MLX writes into a buffer in place only when no
        work in flight still reads it, and copies the whole of it otherwise.
        """
        first = self.scratch + self._offset
        if self._offset + num_tokens > self.capacity:
            raise ValueError(
                f"{self._offset + num_tokens} tokens in a cache with room for {self.capacity}"
            )
        for buffer, rows in zip(self._buffers, self._accepted, strict=bool(self._accepted)):
            assert buffer is not None
            buffer[:, :, first : first + num_tokens] = rows[:, :, :num_tokens]
        self._accepted = []
        self._offset += num_tokens

    def trim(self, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` committed tokens."""
        if not 0 <= num_tokens <= self._offset:
            raise ValueError(f"cannot keep {num_tokens} tokens of {self._offset}")
        self._offset = num_tokens

    def commit(self, lower_path: mx.array, upper_path: mx.array, split: int) -> None:
        """Take the accepted path's rows, which `advance` writes behind the committed tokens.

        Pruning numbers the nodes anew half-way up, so the same path has two sets of indices.
        All P rows are taken; `advance` says how many of them count, which the host learns
        later. Until it does, the committed tokens are what they were.

        Args:
            lower_path: [P] rows of the accepted nodes in layers before `split`.
            upper_path: [P] the same nodes' rows from layer `split` on.
            split: the first layer after pruning.
        """
        expect_shape("upper path", upper_path, lower_path.shape[0])
        self._accepted = []
        for layer, buffer in enumerate(self._buffers):
            assert buffer is not None, "commit before any row was written"
            path = lower_path if layer < split else upper_path
            rows = path + (self.scratch - self._tree_rows[layer])
            self._accepted.append(mx.take(buffer, rows, axis=2))

    def accepted_rows(self, layer: int) -> mx.array:
        """[2, Hkv, P, Dh] what the last `commit` took of a layer, until `advance` is called."""
        return self._accepted[layer]

    def committed_rows(self, layer: int) -> mx.array:
        """[2, Hkv, L, Dh] view of a layer's committed tokens."""
        buffer = self._buffers[layer]
        assert buffer is not None, "no row was written yet"
        return buffer[:, :, self.scratch : self.scratch + self._offset]

    def _write(self, layer: int, first: int, last: int, keys: mx.array, values: mx.array) -> None:
        buffer = self._buffers[layer]
        if buffer is None:
            _, num_heads, _, head_size = keys.shape
            shape = (2, num_heads, self.scratch + self.capacity, head_size)
            buffer = self._buffers[layer] = mx.zeros(shape, keys.dtype)
        if first < 0 or last > buffer.shape[2]:
            raise ValueError(
                f"rows {first} to {last} of a cache of {buffer.shape[2]}: reserve more"
            )
        buffer[:, :, first:last] = mx.concatenate([keys, values], axis=0)

    def _read(self, layer: int, first: int, last: int) -> tuple[mx.array, mx.array]:
        buffer = self._buffers[layer]
        assert buffer is not None
        return buffer[:1, :, first:last], buffer[1:, :, first:last]


class _StreamView:
    """What a decoder layer sees of a `StreamCache` while the streams of one node run."""

    def __init__(
        self, cache: StreamCache, layer: int, positions: mx.array, map_values: ValueMap | None
    ) -> None:
        self._cache, self._layer, self._map_values = cache, layer, map_values
        self.offset = positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self._map_values is not None:
            values = self._map_values(values)
        return self._cache._write_and_read(self._layer, keys, values)


class StreamCache:
    """Keys and values of the upper layers for a second pass, that of one node's streams.

    A layer's buffer holds what these streams see, once more:

        [2, Hkv, S + capacity, Dh]:   | room | G streams | P path | committed L, then free room |

    The streams run in the same evaluation as the pass that verified the tree, whose attention
    still reads the rows of `TreeCache`. MLX would copy a whole buffer to write into it then; a
    buffer of its own is always written in place. It costs Ns / N of the cache's memory, and one
    copy of these layers when an answer begins; it follows one `TreeCache` through one answer.

    Args:
        layers: the layers with multi-stream attention.
    """

    def __init__(self, layers: range) -> None:
        self.layers = layers
        self._scratch = self.capacity = self._offset = 0
        self._buffers: list[mx.array] = []
        self._rows: list[mx.array] = []

    @property
    def offset(self) -> int:
        """L, the committed tokens that it holds."""
        return self._offset

    def follow(self, cache: TreeCache, num_streams: int) -> None:
        """Take over what `cache` has committed, and the path that its last `commit` took.

        Args:
            cache: between `commit` and `advance` of a step.
            num_streams: G, the stream rows to come.
        """
        rows = [cache.accepted_rows(layer) for layer in self.layers]
        scratch = rows[0].shape[2] + num_streams
        if not self._buffers or scratch > self._scratch:
            self._copy(cache, scratch)
        else:
            self._grow(cache.capacity)
            self._append(cache.offset - self._offset)
        self._rows, self._offset = rows, cache.offset

    def view(self, layer: int, positions: mx.array, map_values: ValueMap | None = None) -> Any:
        """The cache object to hand to decoder layer `layer`, one of `layers`.

        Args:
            positions: [G] rotary position of each stream.
            map_values: what becomes of the streams' values before attention, if anything.
        """
        return _StreamView(self, layer, positions, map_values)

    def _copy(self, cache: TreeCache, scratch: int) -> None:
        self._scratch, self.capacity, self._buffers = scratch, cache.capacity, []
        room = cache.capacity - cache.offset
        for layer in self.layers:
            committed = cache.committed_rows(layer)
            self._buffers.append(_pad(committed, scratch, room))

    def _grow(self, capacity: int) -> None:
        if capacity > self.capacity:
            more = capacity - self.capacity
            self._buffers = [_pad(buffer, 0, more) for buffer in self._buffers]
            self.capacity = capacity

    def _append(self, num_tokens: int) -> None:
        """Write the first rows of the path before, which are committed by now."""
        first = self._scratch + self._offset
        for buffer, rows in zip(self._buffers, self._rows, strict=True):
            buffer[:, :, first : first + num_tokens] = rows[:, :, :num_tokens]

    def _write_and_read(
        self, layer: int, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        index = layer - self.layers.start
        buffer, path = self._buffers[index], self._rows[index]
        own = mx.concatenate([keys, values], axis=0)
        first, last = self._scratch - own.shape[2] - path.shape[2], self._scratch + self._offset
        buffer[:, :, first : self._scratch] = mx.concatenate([own, path], axis=2)
        return buffer[:1, :, first:last], buffer[1:, :, first:last]


def _pad(buffer: mx.array, front: int, back: int) -> mx.array:
    """Add zero rows before and behind those of `buffer` [2, Hkv, S + capacity, Dh]."""
    return mx.pad(buffer, [(0, 0), (0, 0), (front, back), (0, 0)])
