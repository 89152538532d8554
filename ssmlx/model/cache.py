"""The caches of a step that verifies a tree: which rows of a text count, and where they go.

Each layer keeps its state itself (`layer_state`); a cache knows which tokens are committed, and
which paths are not counted yet. A step's rows (tree nodes, and in the upper layers the streams)
are written before the committed tokens. `hold_accepted_path` copies the accepted path's rows, a
handful, and `commit_accepted` writes them behind the committed ones. Nothing else is ever moved:
the rows that were not accepted, and all stream rows, are simply overwritten by the next step.

How many rows of a path count is known to the device at once and to the host when it has read the
result. A step may be built before that: it sees the path's rows between its own and the committed
ones, and a mask hides those that do not count. So nothing has to wait for the host, and a buffer
is only ever written when no work in flight reads it: MLX would copy it otherwise.
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
    """The rows of an accepted path in every layer: kept, and not yet written behind the committed
    tokens.
    """

    rows: list[Rows]  # what its P nodes left in each layer
    count: mx.array  # [1] how many of the P rows count
    length: int  # P
    num_tokens: int | None = None  # `count` on the host, once it has learned it

    @cached_property
    def counts(self) -> mx.array:
        """[P] bool: which of the rows count."""
        return indices(self.length) < self.count


class RowsCache:
    """The states of some layers, with the masks of their steps.

    Args:
        layers: the numbers of the layers.
        scratch: S, rows for a step and for paths that are not counted yet, before the committed
            tokens.

    Attributes:
        capacity: the most committed tokens that there is room for.
        lower_masks: kept for the nodes' masks in lower layers.
        upper_masks: kept for nodes and streams in upper layers.
    """

    def __init__(self, layers: range, scratch: int = 0) -> None:
        """Begin without tokens or buffers; a layer makes its buffers when it is written first."""
        self.layers = layers
        self.scratch = scratch
        self.capacity = 0
        self._offset = 0
        self._states: dict[int, AttentionState] = {n: AttentionState(scratch, 0) for n in layers}
        self._paths: list[AcceptedPath] = []
        self.lower_masks = StepMasks()
        self.upper_masks = StepMasks()

    @property
    def mask_bytes(self) -> int:
        """Bytes of the masks that are kept from step to step."""
        return self.lower_masks.nbytes + self.upper_masks.nbytes

    @property
    def offset(self) -> int:
        """L, the committed tokens that the host knows of."""
        return self._offset

    @property
    def end(self) -> int:
        """The position in the text behind the committed tokens."""
        return self._offset

    def keys_in_window(self, row_positions: mx.array, window: int) -> WindowKeys:
        """The positions in the text of the keys that attention reads in a layer with a window.

        Args:
            row_positions: [R] of the step's rows, none before `end`.
            window: W, tokens that the layer sees, a row's own among them.

        Returns:
            The positions of the step's rows, of all rows of each uncounted path, and of the
            committed tokens that are not left out, in this order; and how many of the first
            committed tokens are left out, because the window hides them from every row.
        """
        dropped = self._num_committed_before(max(0, self.end + 1 - window))
        return WindowKeys(self.key_positions(row_positions, dropped), dropped)

    def key_positions(self, row_positions: mx.array, num_left_out: int = 0) -> mx.array:
        """The positions in the text of the keys that attention reads in a step.

        Args:
            row_positions: [R] of the step's rows.
            num_left_out: how many of the first committed tokens are left out.

        Returns:
            Those of the step's rows, of all rows of each uncounted path, and of the committed
            tokens from number `num_left_out` on, in this order.
        """
        columns = [row_positions]
        start = mx.array([self.end])
        for path in self._paths:
            columns.append(start + indices(path.length))
            start = start + path.count
        held = mx.arange(num_left_out, self._offset)
        return mx.concatenate([*columns, self._positions_of(held)])

    def _num_committed_before(self, position: int) -> int:
        """How many of the committed tokens stand before a position in the text."""
        return position

    def _positions_of(self, committed: mx.array) -> mx.array:
        """The positions in the text of committed tokens [K], of which the numbers are given."""
        return committed

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' states."""
        return sum(state.nbytes for state in self._states.values())

    def path_masks(self, num_rows: int) -> list[mx.array]:
        """A mask [num_rows, P] bool for each uncounted path, the oldest first.

        Every row sees those of the path's P rows that count. In a step's mask these columns stand
        between the step's own rows and the committed tokens.
        """
        return [mx.broadcast_to(path.counts, (num_rows, path.length)) for path in self._paths]

    def view(
        self, layer: int, positions: mx.array | Positions, map_values: ValueMap | None = None
    ) -> LayerView:
        """The cache object that decoder layer `layer` is handed for the R rows of a step.

        When the layer runs, its keys and values become scratch rows, and attention reads
        [R rows | P of each uncounted path | L tokens].

        Args:
            layer: its number in the model.
            positions: [R] rotary positions of the rows; or [1], the first one's.
            map_values: changes the rows' values before attention reads them; None for as they are.
        """
        return self._states[layer].step_view(
            positions, self._offset, [path.rows[layer] for path in self._paths], map_values
        )

    def _grow_buffers(self, scratch: int, capacity: int) -> None:
        """Give every layer room for `scratch` rows of a step and `capacity` committed tokens.

        Neither may become less. Does nothing where both are as they were.
        """
        if scratch == self.scratch and capacity == self.capacity:
            return
        for state in self._states.values():
            state.grow(scratch, capacity)
        self.scratch = scratch
        self.capacity = capacity

    def _write_path(self, path: AcceptedPath) -> None:
        """Write all rows of a path behind the committed tokens, in every layer.

        `offset` grows by the path's `num_tokens`, and not at all where that is None.
        """
        for layer, state in self._states.items():
            state.write_path(path.rows[layer], self._offset)
        self._offset += path.num_tokens or 0


class TreeCache(RowsCache, TextCache):
    """Keys and values of every layer, for one text: the cache of a model with stages.

    Args:
        num_layers: of the model.
        scratch: S, the most rows that a step will have, paths of the step before included; it grows
            when a step needs more.
        step: how many tokens the room for committed ones grows by.
    """

    can_build_ahead = True

    def __init__(self, num_layers: int, *, scratch: int = 0, step: int = CACHE_STEP) -> None:
        super().__init__(range(num_layers), scratch)
        self._step = step

    @property
    def root_position(self) -> mx.array:
        """[1] int, not waited for: tokens before the next step's root, the committed ones and
        those of `paths` that count.
        """
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
        """The layers' states and what paths left, for `mx.eval`."""
        kept = [array for state in self._states.values() for array in state.arrays]
        return kept + [array for path in self._paths for rows in path.rows for array in rows]

    def reserve(self, *, more_tokens: int, step_rows: int = 0) -> None:
        """Make room for `more_tokens` beside the committed ones, and a step of `step_rows` rows.

        Room for all rows of paths that are not counted yet is made beside both. The room for
        committed tokens grows to a multiple of `step`, that for a step to what is needed; neither
        becomes less. Buffers are copied only when one of them grows.
        """
        uncounted = sum(path.length for path in self._paths)
        capacity = self.capacity
        needed = self._offset + more_tokens + uncounted
        if needed > capacity:
            capacity = -(-needed // self._step) * self._step
        self._grow_buffers(max(step_rows + uncounted, self.scratch), capacity)

    def drop_paths(self) -> None:
        """Forget the accepted paths that are not counted yet: they are of a step that was
        abandoned."""
        self._paths = []

    def append_view(self, layer: int) -> LayerView:
        """The cache object that decoder layer `layer` is handed when tokens are appended.

        Raises:
            ValueError: there are paths that are not counted yet, which would come before them.
        """
        if self._paths:
            raise ValueError("there are uncounted paths: commit_accepted, or drop_paths first")
        return self._states[layer].append_view(self._offset)

    def hold_accepted_path(
        self, lower_path: mx.array, upper_path: mx.array, split: int, count: mx.array
    ) -> None:
        """Copy the rows of an accepted path aside, until `commit_accepted` makes them text.

        The path is the newest of `paths` then; `offset` stays as it is. Nothing is computed yet.

        Pruning numbers the nodes anew half-way up, so the same path has two sets of indices.

        Args:
            lower_path: [P] rows of the accepted nodes in layers before `split`.
            upper_path: [P] the same nodes' rows from layer `split` on.
            split: the first layer after pruning.
            count: [1] how many of the P rows count, from the first on.

        Raises:
            ValueError: the two paths are of different lengths.
        """
        expect_shape("upper path", upper_path, lower_path.shape[0])
        known: PathIndices = {}
        rows = [
            state.copy_path_rows(lower_path if layer < split else upper_path, known)
            for layer, state in self._states.items()
        ]
        self._paths.append(AcceptedPath(rows, count, lower_path.shape[0]))

    def commit_accepted(self, num_tokens: int) -> None:
        """Commit the first `num_tokens` rows of the oldest path, and take it off `paths`.

        What it writes must not be evaluated together with a step that was built before: that
        one still reads the buffers. The next step's evaluation does it.

        Raises:
            ValueError: there is no path, `num_tokens` is not from 1 to the number of its rows, or
                there is no room for so many; nothing is changed then.
        """
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
        """Commit `num_tokens` tokens that every layer wrote through its `append_view`.

        Raises:
            ValueError: there is no room for so many; nothing is changed then.
        """
        self._require_room(num_tokens)
        self._offset += num_tokens

    def snapshot(self) -> TreeCache:
        """A copy of what the cache holds now, to `restore` should the next step not be run.

        What is done to this cache later does not change the copy; the masks are shared. Both share
        their arrays. MLX cannot write in place into what a copy holds: drop the copy before
        evaluating.
        """
        held = copy.copy(self)
        held._states = {layer: state.copy() for layer, state in self._states.items()}
        held._paths = list(self._paths)
        return held

    def restore(self, held: Self) -> None:
        """Take over everything from `held`, a snapshot or another cache of the same model.

        Nothing of the present is kept, nor any mask: one of a step that was built and never run
        would hold the whole cache. `held` must not be used any more.
        """
        super().restore(held)
        self.lower_masks.forget()
        self.upper_masks.forget()

    @classmethod
    def of_rows(cls, rows: Sequence[Rows]) -> TreeCache:
        """A cache of L committed tokens, without scratch rows or free room.

        Args:
            rows: for every layer, in order, its keys and values of the L tokens, L the same in all.
                The cache takes over the arrays, and later writes into them.
        """
        cache = cls(len(rows))
        cache._states = {layer: AttentionState.of(own) for layer, own in enumerate(rows)}
        cache.capacity = cache._offset = count_rows(rows[0])
        return cache

    def rows(self, num_tokens: int, layers: range | None = None) -> list[Rows]:
        """Keys and values of the first `num_tokens` committed tokens.

        Returns:
            By layer, for all layers or those given: slices of the cache's buffers.
        """
        return [self._states[layer].first_rows(num_tokens) for layer in layers or self.layers]

    def keys_and_values(self, layer: int) -> tuple[mx.array, mx.array]:
        """What one layer's attention keeps of the committed tokens, for others to read.

        Args:
            layer: its number; its keys carry their rotary positions.

        Returns:
            Keys [1, H, R, Dh] and values [1, H', R, Dh'] of all R committed tokens, in their order:
            slices of the buffers, so drop them before the cache is written to, or it is copied.
        """
        (rows,) = self.rows(self._offset, range(layer, layer + 1))
        return split_key_values(rows)

    def fork(self, num_tokens: int) -> TreeCache:
        """A new cache of the first `num_tokens` committed tokens, without uncounted paths.

        It goes on by itself; this one stays as it is. Both hold the same buffers, of which MLX
        makes a copy when one of them writes. Where the tokens fill less than half of the buffers,
        their rows alone are copied instead, and the new cache has neither scratch rows nor free
        room.

        Raises:
            ValueError: `num_tokens` is negative, or more than are committed.
        """
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
        """How many of a text's first `num_tokens` tokens `keep_first` and `fork` can keep: all that
        are committed.
        """
        return min(num_tokens, self._offset)

    def keep_first(self, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` committed tokens, and every uncounted path.

        Raises:
            ValueError: `num_tokens` is negative, or more than are committed.
        """
        self._require_committed(num_tokens)
        self.drop_paths()
        self._offset = num_tokens

    def _require_committed(self, num_tokens: int) -> None:
        """Raise ValueError where `num_tokens` is negative, or more than are committed."""
        if not 0 <= num_tokens <= self._offset:
            raise ValueError(f"cannot keep {num_tokens} tokens of {self._offset}")

    def _require_room(self, num_tokens: int) -> None:
        """Raise ValueError where `num_tokens` more would be more tokens than `capacity`."""
        total = self._offset + num_tokens
        if total > self.capacity:
            raise ValueError(f"{total} tokens in a cache with room for {self.capacity}")


class StreamCache(RowsCache):
    """Keys and values of the upper layers for a second pass, that of one node's streams.

    A layer's buffer holds what these streams see, once more, L of them committed:

        [2, Hkv, S + capacity, Dh]:   | room | G streams | P paths | sinks | window | free room |

    The streams run in the same evaluation as the pass that verified the tree, whose attention
    still reads the rows of `TreeCache`. MLX would copy a whole buffer to write into it then; a
    buffer of its own is always written in place. It costs one copy of a window of these layers
    when it begins to follow, when the window moves, or when it has not followed for a while.
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
        self, cache: TreeCache, num_streams: int, first_visible: int = 0
    ) -> None:
        """Take over the committed tokens of `cache`, and its uncounted paths.

        Where all that `cache` has committed is held here, or in the paths of the call before, only
        those paths are written. Else, and where `first_visible` has moved or more scratch rows are
        needed, the committed rows of this cache's layers are copied anew, but for those from the
        first `SINKS` up to `first_visible`.

        Args:
            cache: of the same text, after `hold_accepted_path` of a step: its newest path ends with
                the streams' node. It stays as it is.
            num_streams: G, the stream rows that the second pass will have.
            first_visible: number of the first token behind the sinks that the streams see.
        """
        known = [path for path in self._paths if path.num_tokens is not None]
        held = self.end + sum(path.num_tokens or 0 for path in known)
        skipped = max(0, first_visible - SINKS)
        scratch = num_streams + sum(path.length for path in cache.paths)
        as_before = held == cache.offset and skipped == self._skipped and self.capacity > 0
        if not as_before or scratch > self.scratch:
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
            for path in known:
                self._write_path(path)
        self._paths = list(cache.paths)
