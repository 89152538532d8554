"""Who sees whom among the rows of a step, under one mask for cache, tree and streams."""

from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from ..errors import require
from . import metal
from .metal import TreeMask
from .shapes import evaluated, expect_shape, indices


def stream_positions(node_positions: mx.array, num_streams: int) -> mx.array:
    """[M * (1 + G)] positions of nodes and streams, nodes first: stream j of a node is j further
    on.

    `node_positions` are [M], `num_streams` is G.
    """
    ahead = indices(1, num_streams + 1)
    return mx.concatenate([node_positions, (node_positions[:, None] + ahead).flatten()])


def stream_visibility(ancestors: mx.array, num_streams: int) -> mx.array:
    """[M * (1 + G), M * (1 + G)] bool: which row (first axis) sees which (eqs. 1 and 2).

    `ancestors` [M, M] bool are `Tree.ancestors`.

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
def earlier_streams_mask(num_streams: int, num_nodes: int = 1) -> mx.array:
    """[M * G, M * G] bool: which stream row sees which: its node's streams up to itself.

    Kept and shared.
    """
    row = indices(num_nodes * num_streams)
    owner = row // num_streams
    stream = row % num_streams
    return evaluated((owner[:, None] == owner) & (stream[:, None] >= stream))


SINKS = 4
"""First tokens of a text that streams always see: attention rests on them where nothing fits."""


Position = TypeVar("Position", int, mx.array)


def window_start(position: Position, window: int) -> Position:
    """The first token behind the sinks that streams of a node see.

    That is half a window before the last multiple of half a window, so it moves seldom.

    Args:
        position: of the node, a number or an int array of any shape.
        window: tokens, as the adapter's settings say.

    Returns:
        A position of the same kind; 0 near the text's beginning.
    """
    half = window // 2
    start = (position // half - 1) * half
    return start * (start > 0)


def hide_outside_window(visible: Any, columns: Any, firsts: Any) -> Any:
    """The mask `visible` [..., R, C] bool, of MLX or NumPy, with what streams do not see hidden.

    Args:
        visible: which row sees which column.
        columns: [..., C] the position of each column.
        firsts: [..., R] the first token behind the sinks that each row sees.
    """
    columns = columns[..., None, :]
    return visible & ((columns < SINKS) | (columns >= firsts[..., None]))


class Columns(Protocol):
    """What a mask needs to know of the cache that its rows stand in; `cache.RowsCache` has it."""

    capacity: int

    @property
    def offset(self) -> int: ...

    @property
    def end(self) -> int: ...

    def path_masks(self, num_rows: int) -> list[mx.array]: ...

    def key_positions(self, own: mx.array, window: int) -> tuple[mx.array, int]: ...


LayerMask = tuple[mx.array | metal.TreeMask | str | None, int, int]
"""A mask as mlx-lm's layers take it, and the first and last of the keys that it has no column for:
those from the one number up to the other."""


class WindowMasks:
    """A step's mask, for layers that see the whole text and for those that see a window of it.

    A row at position p of a layer with a window of W tokens sees none before p - W + 1. What no
    row sees is left out of its keys, so a long text costs such a layer no more than a short one.

    Args:
        whole: [R, C + L], as `StepMasks` gives it.
        positions: [R] of the rows; or [1], the first one's, where the others follow it.
        num_rows: R.
        cache: that they stand in.
    """

    def __init__(
        self, whole: mx.array | metal.TreeMask, positions: mx.array, num_rows: int, cache: Columns
    ) -> None:
        self._whole = whole
        self._cache = cache
        self._rows = positions if positions.size == num_rows else positions + indices(num_rows)
        self._made: dict[int, LayerMask] = {}

    def for_window(self, window: int | None) -> LayerMask:
        """The mask of a layer that sees `window` tokens (None for all), made once for each
        window."""
        if window is None:
            return self._whole, 0, 0
        if window not in self._made:
            self._made[window] = self._make_mask(window)
        return self._made[window]

    def _make_mask(self, window: int) -> LayerMask:
        """The mask of a window, and the keys left out; the whole mask where the window hides
        nothing.
        """
        columns, dropped = self._cache.key_positions(self._rows, window)
        first = columns.size + dropped - self._cache.offset
        if self._cache.end + first <= window:
            return self._whole, 0, 0
        dense = self._whole if isinstance(self._whole, mx.array) else self._whole.dense
        if dropped:
            dense = mx.concatenate([dense[:, :first], dense[:, first + dropped :]], axis=1)
        return dense & (columns > self._rows[:, None] - window), first, first + dropped


class CausalMasks:
    """The causal masks of tokens that are appended, for layers with and without a window.

    Args:
        count: R, tokens that are appended.
        offset: L, tokens before them.
        dense: whether arrays are needed; else the mask may be "causal", or None for a single token.
    """

    def __init__(self, count: int, offset: int, *, dense: bool) -> None:
        self._count = count
        self._offset = offset
        self._dense = dense

    def for_window(self, window: int | None) -> LayerMask:
        """The mask of a layer that sees `window` tokens (None for all), and the keys that it leaves
        out.
        """
        known = self._offset if window is None else min(self._offset, window - 1)
        if self._count == 1:
            return None, 0, self._offset - known
        if self._dense or (window is not None and known + self._count > window):
            mask = create_causal_mask(self._count, known, window_size=window)
            return mask, 0, self._offset - known
        return "causal", 0, self._offset - known


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
        """Drop all kept masks: that of a step which is not run holds all that it was built of."""
        self._buffers.clear()
        self._written.clear()

    def step_mask(
        self, visible: mx.array, cache: Columns, key: object, takes_bits: Callable[[], bool]
    ) -> mx.array | TreeMask:
        """The mask of a step, as `Stages.run` takes it; it grows with the cache's capacity.

        Args:
            visible: [R, R] bool, which of the step's rows sees which of them.
            cache: that the rows stand in.
            key: names the content of `visible`; None if it may differ every time.
            takes_bits: whether the model's layers take a `TreeMask`; asked only if the kernel is
                on.

        Returns:
            A `TreeMask` where the fused kernel is on and the layers take it; else as `mask`.

        Raises:
            InputError: attention=fused, and the layers do not take a `TreeMask`.
        """
        takes_bits_here = metal.is_on() and takes_bits()
        require(
            takes_bits_here or metal.chosen_attention() != "fused",
            "attention=fused, for a model with an attention of its own",
            expected="layers that call mlx-lm's scaled_dot_product_attention",
            do="use attention=auto",
        )
        if not takes_bits_here:
            return self.mask(visible, cache, key)
        columns = mx.concatenate([visible, *cache.path_masks(visible.shape[0])], axis=1)
        return TreeMask(columns, lambda: self.mask(visible, cache, key))

    def mask(self, visible: mx.array, cache: Columns, key: object) -> mx.array:
        """[R, R + paths + L] bool, a view of a kept buffer: it holds until the next mask of its
        size.

        The arguments are those of `step_mask`.
        """
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
