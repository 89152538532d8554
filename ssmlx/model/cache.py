"""The key/value caches of a step that verifies a tree: the only file that changes a cache.

A layer has one buffer for keys and values:

    [2, Hkv, S + capacity, Dh]:   | scratch S                   | committed                |
                                       ^ R rows       ^ P path    ^ L tokens, then free room
                                    of the step in hand

A step's rows (tree nodes, and in the upper layers the streams) are written at the end of the
scratch, directly before the committed tokens, so attention reads [R rows | L tokens] as one
strided slice; keys are stored after rotary, so their order does not matter. `commit` takes the
accepted path's rows, a handful, and `advance` writes them behind the committed ones. Nothing else
is ever moved: the rows that were not accepted, and all stream rows, are simply overwritten by the
next step.

How many rows of a path count is known to the device at once and to the host when it has read the
result. A step may be built before that: it sees the path's rows between its own and the committed
ones, and a mask hides those that do not count. So nothing has to wait for the host, and a buffer
is only ever written when no work in flight reads it: MLX would copy it otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx

from .masks import SINKS, StepMasks
from .rope import Positions
from .shapes import arrays_in, expect_shape, indices

ValueMap = Callable[[mx.array], mx.array]
"""The values of a step's rows [1, Hkv, R, Dh], to those that attention sees."""


@dataclass(eq=False)
class Path:
    """An accepted path that a step left."""

    rows: list[mx.array]  # [2, Hkv, P, Dh] keys and values of its nodes, a layer each
    count: mx.array  # [1] how many of the P rows count
    num_tokens: int | None = None  # the same on the host, once it has learned it

    @cached_property
    def counts(self) -> mx.array:
        """[P] bool: which of the rows count."""
        return indices(self.length) < self.count

    @property
    def length(self) -> int:
        """P."""
        return int(self.rows[0].shape[2])


@dataclass(eq=False)
class LayerView:
    """The cache object that mlx-lm's decoder layer is handed."""

    # tokens before those that are appended; or the positions of a step's rows, as
    # `rope.PositionedRope` takes them
    offset: int | mx.array | Positions
    # keys and values of the rows, to those that attention reads
    update_and_fetch: Callable[[mx.array, mx.array], tuple[mx.array, mx.array]]

    def without(self, first: int, last: int) -> LayerView:
        """The same, where attention does not read the keys from `first` up to `last`."""
        if first == last:
            return self

        def write(keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
            keys, values = self.update_and_fetch(keys, values)
            return _without(keys, first, last), _without(values, first, last)

        return LayerView(self.offset, write)


class RowsCache:
    """Buffers by layer: `scratch` (S) rows for steps, then room for `capacity` committed tokens.

    With it go the masks of the steps that it serves, of lower and of upper layers.
    """

    _skipped = 0  # committed tokens between the sinks and the others, which it does not hold

    def __init__(self, layers: range, scratch: int = 0) -> None:
        self.layers = layers
        self.scratch = scratch
        self.capacity = 0
        self._offset = 0
        self._buffers: dict[int, mx.array] = {}
        self._paths: list[Path] = []
        self.lower_masks = StepMasks()
        self.upper_masks = StepMasks()

    @property
    def mask_bytes(self) -> int:
        """Bytes of the masks that are kept from step to step."""
        return self.lower_masks.nbytes + self.upper_masks.nbytes

    def forget_masks(self) -> None:
        """Keep no mask of a step that was built and is not run: it would hold its whole cache."""
        self.lower_masks.forget()
        self.upper_masks.forget()

    @property
    def offset(self) -> int:
        """L, the committed tokens that the host knows of."""
        return self._offset

    @property
    def end(self) -> int:
        """The position behind the committed tokens."""
        return self._skipped + self._offset

    def places(self, own: mx.array, window: int) -> tuple[mx.array, int]:
        """Positions of what attention reads for a step's rows at `own` [R], and how many of the
        committed tokens are not among them: those that a `window` hides from any row."""
        first = max(0, self.end + 1 - window)
        start = mx.array([self.end])
        columns = [own]
        dropped = first if first <= SINKS else max(SINKS, first - self._skipped)
        for path in self._paths:
            columns.append(start + indices(path.length))
            start = start + path.count
        held = mx.arange(dropped, self._offset)
        columns.append(mx.where(held < SINKS, held, held + self._skipped))
        return mx.concatenate(columns), dropped

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def path_masks(self, num_rows: int) -> list[mx.array]:
        """[num_rows, P] bool of each path that is not counted: every row sees what counts of it.

        They stand in a mask between a step's own rows and the committed tokens.
        """
        return [mx.broadcast_to(path.counts, (num_rows, path.length)) for path in self._paths]

    def view(
        self, layer: int, positions: mx.array | Positions, map_values: ValueMap | None = None
    ) -> LayerView:
        """What to hand to decoder layer `layer` for a step's rows at rotary `positions`.

        Attention then reads [R rows | P of each uncounted path | L tokens], the rows' values as
        `map_values` makes them.
        """

        def write(keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
            if map_values is not None:
                values = map_values(values)
            return self._write_front(layer, mx.concatenate([keys, values], axis=0))

        return LayerView(positions, write)

    def _resize(self, scratch: int, capacity: int) -> None:
        """Buffers are copied only where they grow."""
        front = scratch - self.scratch
        back = capacity - self.capacity
        if front or back:
            self._buffers = {n: _pad(old, front, back) for n, old in self._buffers.items()}
        self.scratch = scratch
        self.capacity = capacity

    def _write(self, layer: int, first: int, rows: mx.array) -> None:
        if layer not in self._buffers:
            _, num_heads, _, head_size = rows.shape
            shape = (2, num_heads, self.scratch + self.capacity, head_size)
            self._buffers[layer] = mx.zeros(shape, rows.dtype)
        buffer = self._buffers[layer]
        last = first + rows.shape[2]
        if first < 0 or last > buffer.shape[2]:
            raise ValueError(f"rows {first} to {last} of {buffer.shape[2]}: reserve more")
        buffer[:, :, first:last] = rows

    def _write_front(self, layer: int, rows: mx.array) -> tuple[mx.array, mx.array]:
        rows = mx.concatenate([rows, *(path.rows[layer] for path in self._paths)], axis=2)
        first = self.scratch - rows.shape[2]
        self._write(layer, first, rows)
        return self._read(layer, first, self.scratch + self._offset)

    def _read(self, layer: int, first: int, last: int) -> tuple[mx.array, mx.array]:
        buffer = self._buffers[layer]
        return buffer[:1, :, first:last], buffer[1:, :, first:last]

    def _append_path(self, path: Path) -> None:
        # All of them, where there is room: rows that do not count are free room.
        room = self.capacity - self._offset
        for layer in self.layers:
            self._write(layer, self.scratch + self._offset, path.rows[layer][:, :, :room])
        self._offset += path.num_tokens or 0


class TreeCache(RowsCache):
    """Keys and values of every layer, for one sequence.

    `scratch` is S, the most rows that a step will have, paths of the step before included; it grows
    when a step needs more. The room for committed tokens grows by `step`.
    """

    def __init__(self, num_layers: int, *, scratch: int = 0, step: int = 256) -> None:
        super().__init__(range(num_layers), scratch)
        self._step = step
        self._first_rows = [0] * num_layers

    @property
    def length(self) -> mx.array:
        """[1] tokens before the next step's root: the committed ones and those of `paths`."""
        length = mx.array([self._offset], mx.int32)
        for path in self._paths:
            length = length + path.count
        return length

    @property
    def paths(self) -> tuple[Path, ...]:
        """Accepted paths that are not counted yet, the oldest first."""
        return tuple(self._paths)

    @property
    def state(self) -> list[mx.array]:
        """The buffers and the rows taken from them, for `mx.eval`."""
        return [*self._buffers.values(), *(row for path in self._paths for row in path.rows)]

    def reserve(self, *, tokens: int, scratch: int = 0) -> None:
        """Make room for `tokens` more committed tokens and a step of `scratch` rows.

        Paths that are not counted yet are provided for. Buffers are copied only when they grow:
        once in `step` tokens.
        """
        uncounted = sum(path.length for path in self._paths)
        capacity = self.capacity
        needed = self._offset + tokens + uncounted
        if needed > capacity:
            capacity = -(-needed // self._step) * self._step
        self._resize(max(scratch + uncounted, self.scratch), capacity)

    def append_view(self, layer: int) -> LayerView:
        """What to hand to decoder layer `layer` when tokens are appended."""

        def write(keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
            self._paths = []  # of a step that was abandoned
            first = self.scratch + self._offset
            rows = mx.concatenate([keys, values], axis=0)
            self._write(layer, first, rows)
            return self._read(layer, self.scratch, first + rows.shape[2])

        return LayerView(self._offset, write)

    def commit(
        self, lower_path: mx.array, upper_path: mx.array, split: int, count: mx.array
    ) -> None:
        """Take the accepted path's rows, which `advance` writes behind the committed tokens.

        Pruning numbers the nodes anew half-way up, so the same path has two sets of indices.

        Args:
            lower_path: [P] rows of the accepted nodes in layers before `split`.
            upper_path: [P] the same nodes' rows from layer `split` on.
            split: the first layer after pruning.
            count: [1] how many of the P rows count.
        """
        expect_shape("upper path", upper_path, lower_path.shape[0])
        places: dict[tuple[int, ...], mx.array] = {}  # in a buffer: once, where layers are alike
        rows = []
        for layer, first in zip(self.layers, self._first_rows, strict=True):
            path = lower_path if layer < split else upper_path
            buffer = self._buffers[layer]
            shape = (*buffer.shape[:2], path.shape[0], buffer.shape[3])
            key = (id(path), first, *shape)
            if key not in places:
                places[key] = mx.broadcast_to((path + first)[:, None], shape)
            rows.append(mx.take_along_axis(buffer, places[key], axis=2))
        self._paths.append(Path(rows, count))

    def advance(self, num_tokens: int) -> None:
        """Count as committed `num_tokens` rows: of the oldest path, or of those appended.

        What it writes must not be evaluated together with a step that was built before: that
        one still reads the buffers. The next step's evaluation does it.
        """
        if self._offset + num_tokens > self.capacity:
            raise ValueError(
                f"{self._offset + num_tokens} tokens in a cache with room for {self.capacity}"
            )
        if self._paths:
            path = self._paths.pop(0)
            path.num_tokens = num_tokens
            self._append_path(path)
        else:
            self._offset += num_tokens

    def hold(self) -> TreeCache:
        """What the cache holds now, to `restore` should the step built next not be run.

        MLX cannot write in place into what someone holds: let go of it before evaluating.
        """
        held = copy.copy(self)
        held._buffers = {layer: copy.copy(buffer) for layer, buffer in self._buffers.items()}
        held._paths = list(self._paths)
        return held

    def restore(self, held: TreeCache) -> None:
        """Hold again what the cache held, before anything was advanced since."""
        vars(self).update(vars(held))

    @classmethod
    def of_rows(cls, rows: Sequence[mx.array]) -> TreeCache:
        """A cache of L committed tokens: `rows` [2, Hkv, L, Dh] are keys and values by layer."""
        cache = cls(len(rows))
        cache._buffers = dict(enumerate(rows))
        cache.capacity = cache._offset = int(rows[0].shape[2])
        return cache

    def rows(self, num_tokens: int, layers: range | None = None) -> list[mx.array]:
        """[2, Hkv, L, Dh] keys and values of the first L committed tokens, by layer."""
        first = self.scratch
        last = self.scratch + num_tokens
        return [self._buffers[layer][:, :, first:last] for layer in layers or self.layers]

    def fork(self, num_tokens: int) -> TreeCache:
        """A cache of the first `num_tokens` committed tokens alone, for someone else to go on with.

        Both hold the same buffers, of which MLX makes a copy when one of them writes. Buffers that
        are mostly something else are not held: a few rows are copied at once.
        """
        if not 0 < num_tokens <= self._offset:
            raise ValueError(f"cannot take {num_tokens} tokens of {self._offset}")
        if 2 * num_tokens < self.scratch + self.capacity:
            return TreeCache.of_rows([mx.contiguous(rows) for rows in self.rows(num_tokens)])
        fork = TreeCache(len(self.layers), scratch=self.scratch, step=self._step)
        fork._buffers = {layer: copy.copy(buffer) for layer, buffer in self._buffers.items()}
        fork.capacity = self.capacity
        fork._offset = num_tokens
        return fork

    def back_to(self, num_tokens: int) -> int:
        """How many of the first `num_tokens` committed tokens `trim` can keep."""
        return num_tokens

    def trim(self, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` committed tokens, and every uncounted path."""
        if not 0 <= num_tokens <= self._offset:
            raise ValueError(f"cannot keep {num_tokens} tokens of {self._offset}")
        self._paths = []
        self._offset = num_tokens

    def _write_front(self, layer: int, rows: mx.array) -> tuple[mx.array, mx.array]:
        keys, values = super()._write_front(layer, rows)
        self._first_rows[layer] = self.scratch + self._offset - keys.shape[2]
        return keys, values


class StateCache(TreeCache):
    """What a model itself keeps of one sequence, of kinds from which no token can be taken back."""

    def __init__(self, make: Callable[[], list[Any]]) -> None:
        super().__init__(0)
        self._make = make
        self.own = make()

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)

    @property
    def state(self) -> list[mx.array]:
        found = arrays_in([one.state for one in self.own])
        return [array for array in found if isinstance(array, mx.array)]

    def advance(self, num_tokens: int) -> None:
        self._offset += num_tokens

    def back_to(self, num_tokens: int) -> int:
        return num_tokens if num_tokens == self._offset else 0

    def trim(self, num_tokens: int) -> None:
        if num_tokens != self.back_to(num_tokens):
            raise ValueError(f"cannot keep {num_tokens} tokens of {self._offset}")
        if num_tokens != self._offset:
            self.own = self._make()
            self._offset = 0


class StreamCache(RowsCache):
    """Keys and values of the upper layers for a second pass, that of one node's streams.

    A layer's buffer holds what these streams see, once more, L of them committed:

        [2, Hkv, S + capacity, Dh]:   | room | G streams | P paths | sinks | window | free room |

    The streams run in the same evaluation as the pass that verified the tree, whose attention
    still reads the rows of `TreeCache`. MLX would copy a whole buffer to write into it then; a
    buffer of its own is always written in place. It costs one copy of a window of these layers
    when it begins to follow, when the window moves, or when it has not followed for a while.
    """

    def follow(self, cache: TreeCache, num_streams: int, first: int = 0) -> None:
        """Take over what `cache` has committed, and its paths; the newest holds the streams' node.

        `cache` is that after `commit` of a step; `num_streams` is G, the stream rows to come;
        `first` is the first token behind the sinks that they see.
        """
        known = [path for path in self._paths if path.num_tokens is not None]
        held = self._skipped + self._offset + sum(path.num_tokens or 0 for path in known)
        skipped = max(0, first - SINKS)
        scratch = num_streams + sum(path.length for path in cache.paths)
        as_before = held == cache.offset and skipped == self._skipped and self._buffers
        if not as_before or scratch > self.scratch:
            self.scratch = max(scratch, self.scratch)
            self.capacity = cache.capacity - skipped
            self._skipped = skipped
            self._offset = cache.offset - skipped
            room = cache.capacity - cache.offset
            self._buffers = {
                n: _pad(_without(rows, SINKS, SINKS + skipped), self.scratch, room)
                for n, rows in zip(self.layers, cache.rows(cache.offset, self.layers), strict=True)
            }
        else:
            self._resize(self.scratch, max(self.capacity, cache.capacity - skipped))
            for path in known:
                self._append_path(path)
        self._paths = list(cache.paths)


def _without(rows: mx.array, first: int, last: int) -> mx.array:
    """`rows` [B, Hkv, L, Dh] before `first`, and those from `last` on."""
    if first == last:
        return rows
    behind = rows[:, :, last:]
    return mx.concatenate([rows[:, :, :first], behind], axis=2) if first else behind


def _pad(buffer: mx.array, front: int, back: int) -> mx.array:
    """Add zero rows before and behind those of `buffer` [2, Hkv, S + capacity, Dh]."""
    return mx.pad(buffer, [(0, 0), (0, 0), (front, back), (0, 0)])
