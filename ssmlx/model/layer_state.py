"""The state that one layer keeps of a text, and the views by which a step reads and extends it.

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

# Keys and values of R tokens in one layer: one array [2, Hkv, R, Dh] if both have one shape,
# else keys [1, H, R, Dh] and values [1, H', R, Dh'], each of its own heads and width.
Rows = tuple[mx.array, ...]

# The values of a step's rows [1, Hkv, R, Dh], to those that attention sees.
ValueMap = Callable[[mx.array], mx.array]

# Keys and values of a step's rows, to those that attention reads; it keeps the rows.
UpdateAndFetch = Callable[[mx.array, mx.array], tuple[mx.array, mx.array]]

# Indices of a path's rows in buffers: once for all layers whose buffers are alike.
PathIndices = dict[tuple[int, ...], mx.array]


def join_key_values(
    keys: mx.array,  # [1, H, R, Dh]
    values: mx.array,  # [1, H', R, Dh']
) -> Rows:
    if keys.shape == values.shape:
        return (mx.concatenate([keys, values], axis=0),)
    return keys, values


def split_key_values(rows: Rows) -> tuple[mx.array, mx.array]:
    """The reverse of `join_key_values`."""
    if len(rows) == 1:
        return rows[0][:1], rows[0][1:]
    keys, values = rows
    return keys, values


def count_rows(rows: Rows) -> int:
    """R, the number of rows."""
    return int(rows[0].shape[2])


def drop_rows(
    array: mx.array,  # [B, H, R, Dh]
    first: int,
    last: int,  # not included
) -> mx.array:
    if first == last:
        return array
    after = array[:, :, last:]
    return mx.concatenate([array[:, :, :first], after], axis=2) if first else after


@dataclass(eq=False)
class LayerView:
    """The cache object that mlx-lm's decoder layer is handed: the two members that it uses."""

    # tokens before those that are appended; or the positions of a step's rows, as
    # `rope.PositionedRope` takes them
    offset: int | mx.array | Positions
    # keys and values of the rows, to those that attention reads
    update_and_fetch: UpdateAndFetch

    def without_keys(
        self,
        first: int,  # number of the first key that is left out
        last: int,  # not included
    ) -> LayerView:
        """A view whose attention does not read some of the keys; all rows are still written."""
        if first == last:
            return self

        def write(keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
            keys, values = self.update_and_fetch(keys, values)
            return drop_rows(keys, first, last), drop_rows(values, first, last)

        return LayerView(self.offset, write)


class AttentionState:
    """Keys and values of one layer, in one buffer if both have one shape, otherwise in two.

        [2, Hkv, S + capacity, Dh]:   | scratch S                   | committed                |
                                           ^ R rows       ^ P path    ^ L tokens, then free room
                                        of the step in hand

    A step's rows are written at the end of the scratch, directly before the committed tokens, so
    attention reads [R rows | P of each path | L tokens] as one strided slice; keys are stored after
    rotary, so their order does not matter. `copy_path_rows` takes what an accepted path left, and
    `write_path` writes it after the committed tokens, once the host knows how many it is.

    Buffers are made when the first rows are written, and are written in place if nothing that is
    evaluated later reads what they held before.
    """

    def __init__(
        self,
        scratch: int,  # S
        capacity: int,  # most committed tokens
        buffers: Rows = (),
    ) -> None:
        self._scratch = scratch
        self._capacity = capacity
        self._buffers = buffers
        self._step_first = 0  # the first row of the step in hand

    @classmethod
    def of(cls, rows: Rows) -> AttentionState:
        """A state of given rows, without scratch rows or free room."""
        return cls(0, count_rows(rows), rows)

    @property
    def arrays(self) -> Sequence[mx.array]:
        return self._buffers

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def grow(
        self,
        scratch: int,  # S
        capacity: int,  # most committed tokens
    ) -> None:
        """Grow the buffers by a copy, with zeros in the new room; neither size may become less."""
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
        num_committed: int,  # L
        paths: Sequence[Rows],  # what each uncounted path left, the oldest first
        # changes the rows' values, not those of paths, before they are written
        map_values: ValueMap | None,
    ) -> LayerView:
        """A view that writes the layer's rows, when it runs, followed by those of `paths`, at the
        end of the scratch; attention reads from there to the end of the committed tokens."""

        def write(keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
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

    def append_view(
        self,
        num_committed: int,  # L
    ) -> LayerView:
        """A view that writes the layer's rows, when it runs, after the committed tokens; attention
        reads no scratch rows."""

        def write(keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
            first = self._scratch + num_committed
            self._write_keys_values(first, keys, values)
            return self._read(self._scratch, first + keys.shape[2])

        return LayerView(num_committed, write)

    def copy_path_rows(
        self,
        path: mx.array,  # [P] numbers among the rows of the step that ran last
        known: PathIndices,  # shared by the layers of a step; read and filled in
    ) -> Rows:
        """Copies of all P rows, also of those that do not count: a mask hides these."""
        rows = []
        for buffer in self._buffers:
            shape = (*buffer.shape[:2], path.shape[0], buffer.shape[3])
            key = (id(path), self._step_first, *shape)
            if key not in known:
                known[key] = mx.broadcast_to((path + self._step_first)[:, None], shape)
            rows.append(mx.take_along_axis(buffer, known[key], axis=2))
        return tuple(rows)

    def write_path(
        self,
        rows: Rows,
        num_committed: int,  # L
    ) -> None:
        """Write a path after the committed tokens; rows that do not fit are dropped. Repetitions of
        the path's last node are written too: they lie beyond the committed tokens, in free
        room."""
        room = self._capacity - num_committed
        fitting = tuple([array[:, :, :room] for array in rows])
        self._write(self._scratch + num_committed, fitting)

    def first_rows(self, num_tokens: int) -> Rows:
        """The rows of the first `num_tokens` committed tokens: slices of the buffers."""
        last = self._scratch + num_tokens
        return tuple([buffer[:, :, self._scratch : last] for buffer in self._buffers])

    def copy(self) -> AttentionState:
        """A copy, whose writes do not change this one, nor the other way round."""
        twin = copy.copy(self)
        # Arrays of their own, for `_write` changes the array objects.
        twin._buffers = tuple([copy.copy(buffer) for buffer in self._buffers])
        return twin

    def _write(
        self,
        first: int,  # row number
        rows: Rows,  # in the form of the buffers
    ) -> None:
        last = self._require_room(first, count_rows(rows))
        for buffer, array in zip(self._buffers, rows, strict=True):
            buffer[:, :, first:last] = array

    def _write_keys_values(
        self,
        first: int,  # row number
        keys: mx.array,  # [1, H, R, Dh]
        values: mx.array,  # [1, H', R, Dh']
    ) -> None:
        """The first call makes the buffers, of zeros, in the shapes and dtypes of its rows."""
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
        """Refuse rows beyond the buffers; returns the number after the last row."""
        last = first + num_rows
        size = self._scratch + self._capacity
        if first < 0 or last > size:
            raise ValueError(f"rows {first} to {last} of {size}: reserve more")
        return last

    def _read(
        self,
        first: int,
        last: int,  # not included
    ) -> tuple[mx.array, mx.array]:
        """Slices of the buffers."""
        if len(self._buffers) == 1:
            (both,) = self._buffers
            return both[:1, :, first:last], both[1:, :, first:last]
        keys, values = self._buffers
        return keys[:, :, first:last], values[:, :, first:last]


def _empty(
    like: mx.array,  # [B, H, R, Dh]
    size: int,
) -> mx.array:  # [B, H, size, Dh]
    batch, num_heads, _, width = like.shape
    return mx.zeros((batch, num_heads, size, width), like.dtype)
