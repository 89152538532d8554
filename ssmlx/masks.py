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


def second_pass_visibility(num_accepted: mx.array, length: int, num_streams: int) -> mx.array:
    """[G, G + P] bool: which stream of the last accepted node sees which stream and path node.

    As in `stream_visibility`, a stream sees the node, its ancestors, and streams up to itself.

    Args:
        num_accepted: [1] accepted nodes below the root; later entries of the path are idle.
        length: P, entries of the accepted path.
        num_streams: G.
    """
    stream = mx.arange(num_streams)
    path = mx.broadcast_to(mx.arange(length) <= num_accepted, (num_streams, length))
    return mx.concatenate([stream[:, None] >= stream, path], axis=1)


class MaskBuffer:
    """Masks over [a step's own rows | every committed token], kept from step to step.

    Row r sees every committed token and those of the step's own rows that its visibility names.
    The cache holds the step's rows directly before the committed ones (see `cache.TreeCache`),
    so the part that changes is the first C columns. They are written in place, and not at all
    while the same fixed topology comes again: a step costs a slice, however long the context.
    """

    def __init__(self, max_sizes: int = 8) -> None:
        self._buffers: OrderedDict[tuple[int, int], mx.array] = OrderedDict()
        self._written: dict[tuple[int, int], object] = {}
        self._max_sizes = max_sizes

    def mask(self, visible: mx.array, committed: int, capacity: int, key: object) -> mx.array:
        """[R, C + committed] bool view.

        Args:
            visible: [R, C] bool, the step's rows among themselves; C is R unless some rows only
                are seen.
            committed: L, tokens in the cache.
            capacity: tokens that the cache has room for; the mask grows with it.
            key: names the content of `visible`; None if it may differ every time.
        """
        rows, columns = visible.shape
        shape = rows, columns
        buffer = self._buffer(shape, columns + capacity)
        if key is None or self._written.get(shape) is not key:
            buffer[:, :columns] = visible
            self._written[shape] = key
        self._buffers[shape] = buffer
        return buffer[:, : columns + committed]

    def _buffer(self, shape: tuple[int, int], width: int) -> mx.array:
        buffer = self._buffers.pop(shape, None)
        if buffer is None or buffer.shape[1] < width:
            buffer = mx.ones((shape[0], width), mx.bool_)
            self._written.pop(shape, None)
        while len(self._buffers) >= self._max_sizes:
            dropped, _ = self._buffers.popitem(last=False)
            self._written.pop(dropped, None)
        return buffer
