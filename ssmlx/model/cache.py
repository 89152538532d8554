"""The caches of a step that verifies a tree: which rows of a text count, and where they go.

Each layer keeps its state itself (`layer_state`); a cache knows which tokens are committed, and
which paths are not counted yet. A step's rows (tree nodes, and in the upper layers the streams) are
written before the committed tokens. `hold_accepted_path` copies the accepted path's rows, a
handful, and `commit_accepted` writes them after the committed ones. A step moves nothing else: rows
that were not accepted, and all stream rows, are simply overwritten by the next one.

How many rows of a path count is known to the device at once and to the host when it has read the
result. A step may be built before that: it sees the path's rows between its own and the committed
ones, and a mask hides those that do not count. So nothing has to wait for the host, and a buffer is
only ever written when no work in flight reads it: MLX would copy it otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import mlx.core as mx

from .layer_state import (
    AttentionState,
    LayerView,
    PathIndices,
    Rows,
    ValueMap,
    count_rows,
    drop_rows,
    split_key_values,
)
from .masks import SINKS, StepMasks, WindowKeys
from .rope import Positions
from .shapes import expect_shape, indices
from .text_cache import CACHE_STEP, TextCache


@dataclass(eq=False)
class AcceptedPath:
    """The rows of an accepted path in every layer, not yet written after the committed tokens."""

    rows: list[Rows]  # what its P nodes left in each layer
    count: mx.array  # [1] how many of the P rows count
    length: int  # P
    num_tokens: int | None = None  # `count` on the host, once it has learned it

    @cached_property
    def counts(self) -> mx.array:  # [P]
        """Whether each of the P rows counts."""
        return indices(self.length) < self.count


class RowsCache:
    """The states of some layers, with the masks of their steps."""

    def __init__(
        self,
        layers: range,  # their numbers
        scratch: int = 0,  # S, rows for a step and for uncounted paths, before the committed tokens
    ) -> None:
        self.layers = layers
        self.scratch = scratch
        self.capacity = 0  # most committed tokens that there is room for
        self._offset = 0
        self._states: dict[int, AttentionState] = {n: AttentionState(scratch, 0) for n in layers}
        self._paths: list[AcceptedPath] = []
        self.lower_masks = StepMasks()  # of nodes
        self.upper_masks = StepMasks()  # of nodes and streams

    @property
    def mask_bytes(self) -> int:
        return self.lower_masks.nbytes + self.upper_masks.nbytes

    @property
    def offset(self) -> int:
        """L, the committed tokens that the host knows of."""
        return self._offset

    @property
    def end(self) -> int:
        """The position in the text after the committed tokens."""
        return self._offset

    def keys_in_window(
        self,
        row_positions: mx.array,  # [R] of the step's rows, none before `end`
        window: int,  # W, tokens that the layer sees, including the row's own
    ) -> WindowKeys:
        """The positions of keys that a window shows: those of `key_positions`, without the first
        committed tokens that are hidden from every row."""
        dropped = self._num_committed_before(max(0, self.end + 1 - window))
        return WindowKeys(self.key_positions(row_positions, dropped), dropped)

    def key_positions(
        self,
        row_positions: mx.array,  # [R] of the step's rows
        num_left_out: int = 0,  # of the first committed tokens
    ) -> mx.array:
        """Positions in the text of the keys that attention reads: [step's rows | all rows of each
        uncounted path | committed tokens from `num_left_out` on]."""
        columns = [row_positions]
        start = mx.array([self.end])
        for path in self._paths:
            columns.append(start + indices(path.length))
            start = start + path.count
        held = mx.arange(num_left_out, self._offset)
        return mx.concatenate([*columns, self._positions_of(held)])

    def _num_committed_before(
        self,
        position: int,  # in the text
    ) -> int:
        return position

    def _positions_of(
        self,
        committed: mx.array,  # [K] numbers of committed tokens
    ) -> mx.array:
        """The positions in the text of some committed tokens."""
        return committed

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self._states.values())

    def path_masks(self, num_rows: int) -> list[mx.array]:  # [num_rows, P] each
        """The mask columns of each uncounted path, the oldest first: every row sees those of the P
        rows that count. They come between the step's own rows and the committed tokens."""
        return [mx.broadcast_to(path.counts, (num_rows, path.length)) for path in self._paths]

    def view(
        self,
        layer: int,
        positions: mx.array | Positions,  # [R] of the rows; or [1], the first one's
        map_values: ValueMap | None = None,  # changes the rows' values before attention reads them
    ) -> LayerView:
        """The cache that decoder layer `layer` gets for the R rows of a step: keys and values
        become scratch rows, and attention reads [R rows | P of each uncounted path | L tokens]."""
        return self._states[layer].step_view(
            positions, self._offset, [path.rows[layer] for path in self._paths], map_values
        )

    def _grow_buffers(self, scratch: int, capacity: int) -> None:
        """Grow all buffers, by a copy; neither size may become less."""
        if scratch == self.scratch and capacity == self.capacity:
            return
        for state in self._states.values():
            state.grow(scratch, capacity)
        self.scratch = scratch
        self.capacity = capacity

    def _write_path(self, path: AcceptedPath) -> None:
        """Write a path after the committed tokens; `offset` grows by its `num_tokens`."""
        for layer, state in self._states.items():
            state.write_path(path.rows[layer], self._offset)
        self._offset += path.num_tokens or 0


class TreeCache(RowsCache, TextCache):
    """Keys and values of every layer, for one text: the cache of a model with stages."""

    can_build_ahead = True

    def __init__(
        self,
        num_layers: int,
        *,
        # S, rows of a step and of the paths before it; grows when a step needs more
        scratch: int = 0,
        step: int = CACHE_STEP,  # tokens by which the room for committed ones grows
    ) -> None:
        super().__init__(range(num_layers), scratch)
        self._step = step

    @property
    def root_position(self) -> mx.array:  # [1]
        """The number of tokens before the next step's root: committed ones, and those of `paths`
        that count. On the device, not waited for."""
        position = mx.array([self._offset], mx.int32)
        for path in self._paths:
            position = position + path.count
        return position

    @property
    def paths(self) -> tuple[AcceptedPath, ...]:
        """Accepted paths that are not counted yet, the oldest first."""
        return tuple(self._paths)

    @property
    def has_uncounted_paths(self) -> bool:
        return bool(self._paths)

    @property
    def row_bytes(self) -> int:
        rows = self.scratch + self.capacity
        return self.nbytes // rows if rows else 0

    @property
    def state(self) -> list[mx.array]:
        kept = [array for state in self._states.values() for array in state.arrays]
        return kept + [array for path in self._paths for rows in path.rows for array in rows]

    def reserve(self, *, more_tokens: int, step_rows: int = 0) -> None:
        """Make room for tokens and a step's rows, and for all rows of uncounted paths. Buffers are
        copied only if one of them grows."""
        uncounted = sum(path.length for path in self._paths)
        capacity = self.capacity
        needed = self._offset + more_tokens + uncounted
        if needed > capacity:
            capacity = -(-needed // self._step) * self._step
        self._grow_buffers(max(step_rows + uncounted, self.scratch), capacity)

    def drop_paths(self) -> None:
        """Drop uncounted paths: their step was abandoned."""
        self._paths = []

    def append_view(self, layer: int) -> LayerView:
        """The cache that decoder layer `layer` gets when tokens are appended."""
        if self._paths:
            raise ValueError("there are uncounted paths: commit_accepted, or drop_paths first")
        return self._states[layer].append_view(self._offset)

    def hold_accepted_path(
        self,
        lower_path: mx.array,  # [P] rows of the accepted nodes in layers before `split`
        # [P] the same nodes' rows from layer `split` on, renumbered by pruning
        upper_path: mx.array,
        split: int,
        count: mx.array,  # [1] how many of the P rows count, from the first on
    ) -> None:
        """Copy the rows of an accepted path aside, as the newest of `paths`, until
        `commit_accepted` makes them text. Nothing is computed yet."""
        expect_shape("upper path", upper_path, lower_path.shape[0])
        known: PathIndices = {}
        rows = [
            state.copy_path_rows(lower_path if layer < split else upper_path, known)
            for layer, state in self._states.items()
        ]
        self._paths.append(AcceptedPath(rows, count, lower_path.shape[0]))

    def commit_accepted(self, num_tokens: int) -> None:
        """Write the first `num_tokens` of the oldest path after the committed tokens. This must not
        be evaluated with a step that was built before, which still reads the buffers: the next
        step's evaluation does it."""
        if not self._paths:
            raise ValueError("no accepted path waits to be committed")
        path = self._paths[0]
        if not 1 <= num_tokens <= path.length:
            raise ValueError(f"{num_tokens} tokens of a path of {path.length}")
        self._require_room(num_tokens)
        del self._paths[0]
        path.num_tokens = num_tokens
        self._write_path(path)

    def commit_appended(self, num_tokens: int) -> None:
        """Commit tokens that every layer wrote through its `append_view`."""
        self._require_room(num_tokens)
        self._offset += num_tokens

    def snapshot(self) -> TreeCache:
        """A copy that shares all arrays, and the masks. MLX cannot write in place into what it
        holds: drop it before evaluating."""
        held = copy.copy(self)
        held._states = {layer: state.copy() for layer, state in self._states.items()}
        held._paths = list(self._paths)
        return held

    def restore(self, held: Self) -> None:
        super().restore(held)
        self.lower_masks.forget()
        self.upper_masks.forget()

    @classmethod
    def of_rows(
        cls,
        rows: Sequence[Rows],  # by layer, of the L tokens; the cache takes over the arrays
    ) -> TreeCache:
        """A cache of L committed tokens, without scratch rows or free room."""
        cache = cls(len(rows))
        cache._states = {layer: AttentionState.of(own) for layer, own in enumerate(rows)}
        cache.capacity = cache._offset = count_rows(rows[0])
        return cache

    def rows(self, num_tokens: int, layers: range | None = None) -> list[Rows]:
        """The rows of the first `num_tokens` committed tokens by layer: slices of the buffers."""
        return [self._states[layer].first_rows(num_tokens) for layer in layers or self.layers]

    def keys_and_values(
        self,
        layer: int,
    ) -> tuple[mx.array, mx.array]:  # [1, H, R, Dh] and [1, H', R, Dh']
        (rows,) = self.rows(self._offset, range(layer, layer + 1))
        return split_key_values(rows)

    def fork(self, num_tokens: int) -> TreeCache:
        """A new cache of the first `num_tokens`. Both hold the same buffers, which MLX copies when
        one of them writes. If the tokens fill less than half of the buffers, only their rows are
        copied instead, without scratch rows or free room."""
        self._require_committed(num_tokens)
        if not num_tokens:
            return TreeCache(len(self.layers), step=self._step)
        if 2 * num_tokens < self.scratch + self.capacity:
            rows = self.rows(num_tokens)
            return TreeCache.of_rows([tuple([*map(mx.contiguous, own)]) for own in rows])
        fork = TreeCache(len(self.layers), scratch=self.scratch, step=self._step)
        fork._states = {layer: state.copy() for layer, state in self._states.items()}
        fork.capacity = self.capacity
        fork._offset = num_tokens
        return fork

    def longest_keepable(self, num_tokens: int) -> int:
        return min(num_tokens, self._offset)

    def keep_first(self, num_tokens: int) -> None:
        self._require_committed(num_tokens)
        self.drop_paths()
        self._offset = num_tokens

    def _require_committed(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= self._offset:
            raise ValueError(f"cannot keep {num_tokens} tokens of {self._offset}")

    def _require_room(self, num_tokens: int) -> None:
        total = self._offset + num_tokens
        if total > self.capacity:
            raise ValueError(f"{total} tokens in a cache with room for {self.capacity}")


class StreamCache(RowsCache):
    """Keys and values of the upper layers for a second pass, that of one node's streams.

    Each layer has its own copy of the keys and values that the streams see; L of these are
    committed:

    [2, Hkv, S + capacity, Dh]: | room | G streams | P paths | sinks | window | free room |

    The streams run in the same evaluation as the pass that verified the tree, whose attention still
    reads the rows of `TreeCache`. MLX would copy a whole buffer to write into it then; a buffer of
    its own is always written in place. It costs one copy of a window of these layers when it begins
    to follow, when the window moves, or when it has not followed for a while.
    """

    _skipped = 0  # tokens of the text between the sinks and the window, which it does not hold

    @property
    def end(self) -> int:
        return self._skipped + self._offset

    def _num_committed_before(self, position: int) -> int:
        return position if position <= SINKS else max(SINKS, position - self._skipped)

    def _positions_of(self, committed: mx.array) -> mx.array:
        if not self._skipped:
            return committed
        return mx.where(committed < SINKS, committed, committed + self._skipped)

    def catch_up_with_tree_cache(
        self,
        cache: TreeCache,  # of the same text; its newest path ends with the streams' node
        num_streams: int,  # G
        first_visible: int = 0,  # number of the first token after the sinks that the streams see
    ) -> None:
        """Take over the committed tokens and uncounted paths of `cache`, which stays as it is."""
        # Paths that both caches share, whose length the host has learned since.
        counted = [path for path in self._paths if path.num_tokens is not None]
        end_with_counted = self.end + sum(path.num_tokens or 0 for path in counted)
        skipped = max(0, first_visible - SINKS)
        scratch = num_streams + sum(path.length for path in cache.paths)
        has_followed = end_with_counted == cache.offset and self.capacity > 0
        if not has_followed or skipped != self._skipped or scratch > self.scratch:
            self.scratch = max(scratch, self.scratch)
            self.capacity = cache.capacity - skipped
            self._skipped = skipped
            self._offset = cache.offset - skipped
            rows = cache.rows(cache.offset, self.layers)
            for layer, own in zip(self.layers, rows, strict=True):
                kept = tuple([drop_rows(array, SINKS, SINKS + skipped) for array in own])
                self._states[layer] = AttentionState.of(kept)
                self._states[layer].grow(self.scratch, self.capacity)
        else:
            self._grow_buffers(self.scratch, max(self.capacity, cache.capacity - skipped))
            for path in counted:
                self._write_path(path)
        self._paths = list(cache.paths)
