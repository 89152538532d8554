"""What one layer keeps of a text, and how a step goes on from it.

The caches (`cache`) know which tokens are committed and which paths are not counted yet; a state
knows what its layer keeps of them, rows of attention. What models without stages keep is in
`state_cache`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from .rope import Positions

Rows = tuple[mx.array, ...]
"""Keys and values of R tokens in one layer: one array [2, Hkv, R, Dh] where both have one shape,
else keys [1, H, R, Dh] and values [1, H', R, Dh'], each of its own heads and width."""

ValueMap = Callable[[mx.array], mx.array]
"""The values of a step's rows [1, Hkv, R, Dh], to those that attention sees."""

UpdateAndFetch = Callable[[mx.array, mx.array], tuple[mx.array, mx.array]]
"""Keys and values of a step's rows, to those that attention reads; it keeps the rows."""

PathIndices = dict[tuple[int, ...], mx.array]
"""Where the rows of a path are in buffers: once for all layers whose buffers are alike."""


def join_key_values(keys: mx.array, values: mx.array) -> Rows:
    """Keys [1, H, R, Dh] and values [1, H', R, Dh'] in the form of a layer's buffers.

    One array where both have one shape, else both: see `Rows`.
    """
    if keys.shape == values.shape:
        return (mx.concatenate([keys, values], axis=0),)
    return keys, values


def split_key_values(rows: Rows) -> tuple[mx.array, mx.array]:
    """The keys [1, H, R, Dh] and the values of `rows`: the reverse of `join_key_values`.

    The values may have another number of heads and another width than the keys, see `Rows`.
    """
    if len(rows) == 1:
        return rows[0][:1], rows[0][1:]
    keys, values = rows
    return keys, values


def count_rows(rows: Rows) -> int:
    """R, how many tokens `rows` hold."""
    return int(rows[0].shape[2])


def drop_rows(array: mx.array, first: int, last: int) -> mx.array:
    """`array` [B, H, R, Dh] without its rows from number `first` up to, not including, `last`.

    `array` itself where `first` is `last`.
    """
    if first == last:
        return array
    behind = array[:, :, last:]
    return mx.concatenate([array[:, :, :first], behind], axis=2) if first else behind


@dataclass(eq=False)
class LayerView:
    """The cache object that mlx-lm's decoder layer is handed: the two members that it uses."""

    # tokens before those that are appended; or the positions of a step's rows, as
    # `rope.PositionedRope` takes them
    offset: int | mx.array | Positions
    # keys and values of the rows, to those that attention reads
    update_and_fetch: UpdateAndFetch

    def without_keys(self, first: int, last: int) -> LayerView:
        """A view like this one, whose attention does not read some of the keys and their values.

        All rows are still written. The view itself is returned where `first` is `last`.

        Args:
            first: number of the first key that is left out, among those that attention reads.
            last: number after the last one that is left out.
        """
        if first == last:
            return self

        def write(keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
            keys, values = self.update_and_fetch(keys, values)
            return drop_rows(keys, first, last), drop_rows(values, first, last)

        return LayerView(self.offset, write)


class AttentionState:
    """Keys and values of one layer, in one buffer where both have one shape, else in two.

        [2, Hkv, S + capacity, Dh]:   | scratch S                   | committed                |
                                           ^ R rows       ^ P path    ^ L tokens, then free room
                                        of the step in hand

    A step's rows are written at the end of the scratch, directly before the committed tokens, so
    attention reads [R rows | P of each path | L tokens] as one strided slice; keys are stored
    after rotary, so their order does not matter. `copy_path_rows` takes what an accepted path left,
    and `write_path` writes it behind the committed tokens, once the host knows how many it is.

    Buffers are made when the first rows are written, and are written in place where nothing that
    is evaluated later reads what they held before.

    Args:
        scratch: S.
        capacity: most committed tokens.
        buffers: of that size; none yet unless given.
    """

    def __init__(self, scratch: int, capacity: int, buffers: Rows = ()) -> None:
        """Keep the sizes and `buffers`, which are not copied; none are made yet where none are
        given.
        """
        self._scratch = scratch
        self._capacity = capacity
        self._buffers = buffers
        self._step_first = 0  # the first row of the step in hand

    @classmethod
    def of(cls, rows: Rows) -> AttentionState:
        """A state whose committed tokens have the keys and values `rows`, without scratch rows or
        free room.
        """
        return cls(0, count_rows(rows), rows)

    @property
    def arrays(self) -> Sequence[mx.array]:
        return self._buffers

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def grow(self, scratch: int, capacity: int) -> None:
        """Make room for `scratch` rows before the committed ones and for `capacity` of the latter.

        Neither may become less. Where one grows, buffers are copied, with zeros in the new room;
        without buffers only the numbers are kept.

        Args:
            scratch: S, rows of a step and of paths that are not committed yet.
            capacity: most committed tokens.
        """
        front = scratch - self._scratch
        back = capacity - self._capacity
        if front or back:
            widths = [(0, 0), (0, 0), (front, back), (0, 0)]
            self._buffers = tuple([mx.pad(buffer, widths) for buffer in self._buffers])
        self._scratch = scratch
        self._capacity = capacity

    def step_view(
        self,
        positions: mx.array | Positions,
        num_committed: int,
        paths: Sequence[Rows],
        map_values: ValueMap | None,
    ) -> LayerView:
        """The cache object for a step's rows.

        When the layer runs, its rows and behind them those of `paths` are written at the end of the
        scratch, and attention reads from there to the end of the committed tokens. The layer's call
        raises ValueError where the scratch is too small.

        Args:
            positions: rotary positions of the rows, as `rope.PositionedRope` takes them.
            num_committed: L, committed tokens.
            paths: what each path that is not committed yet left, the oldest first.
            map_values: changes the rows' values, not those of paths, before they are written; None
                for as they are.
        """

        def write(keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
            """Write the rows and the paths behind them; return the keys and values from the first
            row up to the text's end.
            """
            if map_values is not None:
                values = map_values(values)
            num_rows = keys.shape[2]
            first = self._scratch - num_rows - sum(count_rows(path) for path in paths)
            self._write_keys_values(first, keys, values)
            self._step_first = first
            first += num_rows
            for path in paths:
                self._write(first, path)
                first += count_rows(path)
            return self._read(self._step_first, self._scratch + num_committed)

        return LayerView(positions, write)

    def append_view(self, num_committed: int) -> LayerView:
        """The cache object for tokens that follow `num_committed` committed ones.

        When the layer runs, they are written behind these, and attention reads the committed tokens
        and them, no scratch rows. The layer's call raises ValueError where there is no room for
        them.
        """

        def write(keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
            first = self._scratch + num_committed
            self._write_keys_values(first, keys, values)
            return self._read(self._scratch, first + keys.shape[2])

        return LayerView(num_committed, write)

    def copy_path_rows(self, path: mx.array, known: PathIndices) -> Rows:
        """Copy all P rows of `path` out of the buffers, those that do not count too: a mask hides
        these.

        Args:
            path: [P] numbers among the rows of the step that ran last.
            known: indices by path and buffer shape, shared by the layers of a step; read and filled
                in.

        Returns:
            The keys and values of the P rows.
        """
        rows = []
        for buffer in self._buffers:
            shape = (*buffer.shape[:2], path.shape[0], buffer.shape[3])
            key = (id(path), self._step_first, *shape)
            if key not in known:
                known[key] = mx.broadcast_to((path + self._step_first)[:, None], shape)
            rows.append(mx.take_along_axis(buffer, known[key], axis=2))
        return tuple(rows)

    def write_path(self, rows: Rows, num_committed: int) -> None:
        """Write a path's rows behind the `num_committed` committed tokens.

        Rows that do not fit are dropped. Rows of the path behind those that count, repetitions of
        its last node, are written too: they stand beyond the committed tokens, in free room.
        """
        room = self._capacity - num_committed
        fitting = tuple([array[:, :, :room] for array in rows])
        self._write(self._scratch + num_committed, fitting)

    def first_rows(self, num_tokens: int) -> Rows:
        """Slices of the buffers: the rows of the first `num_tokens` committed tokens."""
        last = self._scratch + num_tokens
        return tuple([buffer[:, :, self._scratch : last] for buffer in self._buffers])

    def copy(self) -> AttentionState:
        """A copy on the same contents; what is written to one of both does not change the other."""
        twin = copy.copy(self)
        # Arrays of their own, for `_write` changes the array objects.
        twin._buffers = tuple([copy.copy(buffer) for buffer in self._buffers])
        return twin

    def _write(self, first: int, rows: Rows) -> None:
        """Write `rows`, in the form of the buffers, into them from row number `first` on.

        Raises:
            ValueError: the rows do not fit, or `first` is negative; nothing is written.
        """
        last = self._require_room(first, count_rows(rows))
        for buffer, array in zip(self._buffers, rows, strict=True):
            buffer[:, :, first:last] = array

    def _write_keys_values(self, first: int, keys: mx.array, values: mx.array) -> None:
        """Write keys [1, H, R, Dh] and values [1, H', R, Dh'] of R rows from row `first` on.

        The first call makes the buffers, of zeros, in the shapes and dtypes of its rows: one where
        both have one shape, else two. Into one, keys and values are written one after the other:
        joining the rows first would take another kernel in every layer.

        Raises:
            ValueError: the rows do not fit, or `first` is negative; nothing is written.
        """
        last = self._require_room(first, keys.shape[2])
        if not self._buffers:
            size = self._scratch + self._capacity
            self._buffers = tuple([_empty(one, size) for one in join_key_values(keys, values)])
        if len(self._buffers) == 1:
            (both,) = self._buffers
            both[:1, :, first:last] = keys
            both[1:, :, first:last] = values
        else:
            self._write(first, (keys, values))

    def _require_room(self, first: int, num_rows: int) -> int:
        """The number after the last of `num_rows` rows from number `first` on.

        Raises:
            ValueError: they do not fit, or `first` is negative.
        """
        last = first + num_rows
        size = self._scratch + self._capacity
        if first < 0 or last > size:
            raise ValueError(f"rows {first} to {last} of {size}: reserve more")
        return last

    def _read(self, first: int, last: int) -> tuple[mx.array, mx.array]:
        """Keys and values from row `first` up to, not including, `last`: slices of the buffers."""
        if len(self._buffers) == 1:
            (both,) = self._buffers
            return both[:1, :, first:last], both[1:, :, first:last]
        keys, values = self._buffers
        return keys[:, :, first:last], values[:, :, first:last]


def _empty(like: mx.array, size: int) -> mx.array:
    """Zeros [B, H, size, Dh] in the dtype of `like` [B, H, R, Dh]."""
    batch, num_heads, _, width = like.shape
    return mx.zeros((batch, num_heads, size, width), like.dtype)
