"""Who sees whom among the rows of a step, under one mask for cache, tree and streams."""

from __future__ import annotations

from collections import OrderedDict

import mlx.core as mx

from .shapes import expect_shape


def stream_positions(node_positions: mx.array, num_streams: int) -> mx.array:
    """[M * (1 + G)] positions of the upper layers' rows: stream j of a node stands j further on.

    Args:
        node_positions: [M]
    """
    ahead = mx.arange(1, num_streams + 1)
    return mx.concatenate([node_positions, (node_positions[:, None] + ahead).flatten()])


def stream_visibility(ancestors: mx.array, num_streams: int) -> mx.array:
    """[M * (1 + G), M * (1 + G)] bool: which row (first axis) sees which (eqs. 1 and 2).

    A node sees its ancestors and itself. Stream j of a node sees what the node sees, and the
    node's streams 1 to j. No row sees another node's streams. With M = 2 (a root and its child)
    and G = 2, rows n0 n1 s01 s02 s11 s12:

            n0  n1  s01 s02 s11 s12
        n0   x
        n1   x   x
        s01  x       x
        s02  x       x   x
        s11  x   x           x
        s12  x   x           x   x

    Args:
        ancestors: [M, M] bool, `Tree.ancestors`.
    """
    num_nodes = ancestors.shape[0]
    expect_shape("ancestors", ancestors, num_nodes, num_nodes)
    num_stream_rows = num_nodes * num_streams
    owner = mx.arange(num_stream_rows) // max(num_streams, 1)
    stream = mx.arange(num_stream_rows) % max(num_streams, 1)
    own_earlier = (owner[:, None] == owner) & (stream[:, None] >= stream)
    no_streams = mx.zeros((num_nodes, num_stream_rows), mx.bool_)
    node_rows = mx.concatenate([ancestors, no_streams], axis=1)
    stream_rows = mx.concatenate([ancestors[owner], own_earlier], axis=1)
    return mx.concatenate([node_rows, stream_rows], axis=0)


class MaskBuffer:
    """Masks over [a step's own rows | every committed token], kept from step to step.

    Row r sees every committed token and those of the step's own rows that its visibility names.
    The cache holds the step's rows directly before the committed ones (see `cache.TreeCache`),
    so the part that changes is the first R columns. They are written in place, and not at all
    while the same fixed topology comes again: a step costs a slice, however long the context.
    """

    def __init__(self, max_sizes: int = 8) -> None:
        self._buffers: OrderedDict[int, mx.array] = OrderedDict()
        self._written: dict[int, object] = {}
        self._max_sizes = max_sizes

    def mask(self, visible: mx.array, committed: int, capacity: int, key: object) -> mx.array:
        """[R, R + committed] bool view.

        Args:
            visible: [R, R] bool, the step's rows among themselves.
            committed: L, tokens in the cache.
            capacity: tokens that the cache has room for; the mask grows with it.
            key: names the content of `visible`; None if it may differ every time.
        """
        rows = visible.shape[0]
        buffer = self._buffer(rows, rows + capacity)
        if key is None or self._written.get(rows) is not key:
            buffer[:, :rows] = visible
            self._written[rows] = key
        self._buffers[rows] = buffer
        return buffer[:, : rows + committed]

    def _buffer(self, rows: int, columns: int) -> mx.array:
        buffer = self._buffers.pop(rows, None)
        if buffer is None or buffer.shape[1] < columns:
            buffer = mx.ones((rows, columns), mx.bool_)
            self._written.pop(rows, None)
        while len(self._buffers) >= self._max_sizes:
            dropped, _ = self._buffers.popitem(last=False)
            self._written.pop(dropped, None)
        return buffer
