"""Who sees whom among the rows of a step, under one mask for cache, tree and streams."""

from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from ..errors import require
from . import metal
from .metal import TreeMask
from .shapes import evaluated, expect_shape, indices


def stream_positions(
    node_positions: mx.array,  # [M]
    num_streams: int,  # G
) -> mx.array:  # [M * (1 + G)]
    """Positions in the text, nodes first, then streams node by node: stream j of a node is j
    further on."""
    ahead = indices(1, num_streams + 1)
    return mx.concatenate([node_positions, (node_positions[:, None] + ahead).flatten()])


def stream_visibility(
    ancestors: mx.array,  # [M, M] bool
    num_streams: int,  # G
) -> mx.array:  # [M * (1 + G), M * (1 + G)]
    """Whether a row of a step (first axis) sees another (eqs. 1 and 2).

    A node sees its ancestors and itself. Stream j of a node sees what the node sees, and the node's
    streams 1 to j. No row sees another node's streams. With M = 2 (a root and its child) and G = 2,
    rows n0 n1 s01 s02 s11 s12:

            n0  n1  s01 s02 s11 s12
        n0   x
        n1   x   x
        s01  x       x
        s02  x       x   x
        s11  x   x           x
        s12  x   x           x   x
    """
    num_nodes = ancestors.shape[0]
    expect_shape("ancestors", ancestors, num_nodes, num_nodes)
    num_stream_rows = num_nodes * num_streams
    if num_streams == 0:
        return ancestors
    no_streams = mx.zeros((num_nodes, num_stream_rows), mx.bool_)
    node_rows = mx.concatenate([ancestors, no_streams], axis=1)
    of_owners = mx.repeat(ancestors, num_streams, axis=0)
    stream_rows = mx.concatenate([of_owners, earlier_streams_mask(num_streams, num_nodes)], axis=1)
    return mx.concatenate([node_rows, stream_rows], axis=0)


@lru_cache(maxsize=64)
def earlier_streams_mask(
    num_streams: int,  # G
    num_nodes: int = 1,  # M
) -> mx.array:  # [M * G, M * G] bool
    """A node's stream j sees its streams 1 to j; rows go node by node. Evaluated, and one array for
    equal arguments."""
    row = indices(num_nodes * num_streams)
    owner = row // num_streams
    stream = row % num_streams
    return evaluated((owner[:, None] == owner) & (stream[:, None] >= stream))


# First tokens of a text that streams always see: attention rests on them if nothing fits.
SINKS = 4


Position = TypeVar("Position", int, mx.array)


def window_start(
    position: Position,
    window: int,  # tokens, at least 2
) -> Position:
    """The number of the first token after the sinks that streams of a node see: half a window
    before the last multiple of half a window up to the node, so it moves seldom."""
    half = window // 2
    start = (position // half - 1) * half
    return start * (start > 0)


def hide_outside_window(
    visible: Any,  # [..., R, C] bool
    columns: Any,  # [..., C] the position in the text of each column
    firsts: Any,  # [..., R] the first position of each row's window; 0 hides nothing
) -> Any:
    """Hide from each row the columns before its window, except the first `SINKS` tokens. Of MLX or
    NumPy: training's batches use it too."""
    columns = columns[..., None, :]
    return visible & ((columns < SINKS) | (columns >= firsts[..., None]))


class WindowKeys(NamedTuple):
    """The keys that attention with a window reads in a step."""

    positions: mx.array  # [keys] int, in the text
    num_left_out: int  # of the first committed tokens, which no row sees


class Columns(Protocol):
    """The cache as a mask sees it: implemented by `cache.RowsCache`."""

    capacity: int

    @property
    def offset(self) -> int: ...

    @property
    def end(self) -> int: ...

    def path_masks(self, num_rows: int) -> list[mx.array]: ...

    def keys_in_window(self, row_positions: mx.array, window: int) -> WindowKeys: ...


class LayerMask(NamedTuple):
    """A mask for one layer's attention, and the keys that it has no column for."""

    mask: mx.array | metal.TreeMask | str | None  # as mlx-lm's layers take it
    first_left_out: int = 0  # number of the first key that is left out
    end_left_out: int = 0  # number after the last one; none is left out if both are equal


class WindowMasks:
    """A step's mask, for layers that see the whole text and for those that see a window of it.

    A row at position p of a layer with a window of W tokens sees none before p - W + 1. What no row
    sees is left out of its keys, so a long text costs such a layer no more than a short one.
    """

    def __init__(
        self,
        whole: mx.array | metal.TreeMask,  # [R, C + L]
        positions: mx.array,  # [R]; or [1], the first row's, if the others follow it
        num_rows: int,  # R
        cache: Columns,
    ) -> None:
        self._whole = whole
        self._cache = cache
        self._rows = positions if positions.size == num_rows else positions + indices(num_rows)
        self._made: dict[int, LayerMask] = {}

    def for_window(
        self,
        window: int | None,  # tokens that a row sees, itself included; None for all
    ) -> LayerMask:
        if window is None:
            return LayerMask(self._whole)
        if window not in self._made:
            self._made[window] = self._mask_and_left_out_keys(window)
        return self._made[window]

    def _mask_and_left_out_keys(self, window: int) -> LayerMask:
        """The mask is bool [R, keys], even if the whole one is a `TreeMask`; it is the whole one,
        and no key is left out, if the window hides nothing from any row."""
        columns, dropped = self._cache.keys_in_window(self._rows, window)
        first = columns.size + dropped - self._cache.offset
        if self._cache.end + first <= window:
            return LayerMask(self._whole)
        dense = self._whole if isinstance(self._whole, mx.array) else self._whole.dense
        if dropped:
            dense = mx.concatenate([dense[:, :first], dense[:, first + dropped :]], axis=1)
        mask = dense & (columns > self._rows[:, None] - window)
        return LayerMask(mask, first, first + dropped)


class CausalMasks:
    """The causal masks of tokens that are appended, for layers with and without a window."""

    def __init__(
        self,
        count: int,  # R, tokens that are appended
        offset: int,  # L, tokens before them
        *,
        dense: bool,  # whether several tokens need an array, and not the word "causal"
    ) -> None:
        self._count = count
        self._offset = offset
        self._dense = dense

    def for_window(
        self,
        window: int | None,  # tokens that a row sees, itself included; None for all
    ) -> LayerMask:
        known = self._offset if window is None else min(self._offset, window - 1)
        if self._count == 1:
            return LayerMask(None, 0, self._offset - known)
        if self._dense or (window is not None and known + self._count > window):
            mask = create_causal_mask(self._count, known, window_size=window)
            return LayerMask(mask, 0, self._offset - known)
        return LayerMask("causal", 0, self._offset - known)


class StepMasks:
    """Masks over [a step's own rows | uncounted paths | committed tokens], kept between steps.

    Row r sees every committed token, the nodes of uncounted paths that count, and those of the
    step's own rows that its visibility names. The cache holds the step's rows and the paths
    directly before the committed tokens (see `cache.TreeCache`), so the part that changes is the
    first columns. They are written in place, and not at all while the same fixed topology comes
    again without paths: a step costs a slice, however long the context.

    While the fused kernel is on, and the model's layers take bits, masks are bits, and a dense one
    is made only if a layer wants it. At most `max_sizes` sizes are kept.
    """

    def __init__(self, max_sizes: int = 8) -> None:
        self._buffers: OrderedDict[tuple[int, int], mx.array] = OrderedDict()
        self._written: dict[tuple[int, int], object] = {}
        self._max_sizes = max_sizes

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def forget(self) -> None:
        """The mask of a step that is not run holds all that it was built of."""
        self._buffers.clear()
        self._written.clear()

    def step_mask(
        self,
        visible: mx.array,  # [R, R] bool, which of the step's rows sees which
        cache: Columns,
        key: object,  # the same object means the same `visible`; None if that may differ every time
        # whether the layers take a `TreeMask`; asked only if the fused kernel is on
        takes_bits: Callable[[], bool],
    ) -> mx.array | TreeMask:
        takes_bits_here = metal.is_on() and takes_bits()
        require(
            takes_bits_here or metal.chosen_attention() != "fused",
            "attention=fused, for a model with an attention of its own",
            expected="layers that call mlx-lm's scaled_dot_product_attention",
            do="use attention=auto",
        )
        if not takes_bits_here:
            return self.dense_mask(visible, cache, key)
        columns = mx.concatenate([visible, *cache.path_masks(visible.shape[0])], axis=1)
        return TreeMask(columns, lambda: self.dense_mask(visible, cache, key))

    def dense_mask(
        self,
        visible: mx.array,  # [R, R] bool
        cache: Columns,
        key: object,  # as in `step_mask`
    ) -> mx.array:  # [R, R + paths + L] bool
        """A view of a kept buffer: it holds until the next mask of its size."""
        if paths := cache.path_masks(visible.shape[0]):
            key = None
            visible = mx.concatenate([visible, *paths], axis=1)
        shape = visible.shape[0], visible.shape[1]
        width = shape[1] + cache.capacity
        buffer = self._buffers.pop(shape, None)
        if buffer is None or buffer.shape[1] < width:
            buffer = mx.ones((shape[0], width), mx.bool_)
            self._written.pop(shape, None)
        while len(self._buffers) >= self._max_sizes:
            dropped, _ = self._buffers.popitem(last=False)
            self._written.pop(dropped, None)
        if key is None or self._written.get(shape) is not key:
            buffer[:, : shape[1]] = visible
            self._written[shape] = key
        self._buffers[shape] = buffer
        return buffer[:, : shape[1] + cache.offset]
