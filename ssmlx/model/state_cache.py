"""The cache of a model called as a whole: mlx-lm's caches, and the way back from drafted tokens.

A `cache.TreeCache` holds rows of attention, which this package writes. Models whose layers cannot
be run one by one, those with recurrent layers for example, are called as a whole, with caches of
their own kinds. They verify drafted tokens as a chain: by a call on them as if they were the text.
Then each layer's cache drops what the tokens that were not accepted have left:

    KVCache            forgets its newest rows
    RotatingKVCache    is set to what it was, and gets the accepted rows again
    ArraysCache        gets the states after the last accepted row, see `recurrent`
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from .recurrent import RECURRENCES, Recording, recording
from .shapes import arrays_in
from .text_cache import TextCache

# A model of mlx-lm's: tokens [1, R] and `cache=`, its caches by layer, to logits [1, R, V].
ModelCall = Callable[..., mx.array]


class Rollback(Protocol):
    """Takes back from one mlx-lm cache the last rows of a call on a chain."""

    def keep_first(self, count: int) -> None:
        """Take back all rows but the first `count`; once, before the cache is used again."""


class _RowsRollback:
    """Takes back rows of attention over the whole text, which are at the cache's end."""

    def __init__(self, cache: KVCache, num_rows: int) -> None:
        self._cache = cache
        self._num_rows = num_rows

    def keep_first(self, count: int) -> None:
        self._cache.trim(self._num_rows - count)


class _WindowRollback:
    """Takes back rows of attention over a window: a call of several rows leaves new arrays in the
    cache. To be made before the call, as it holds the arrays from before."""

    def __init__(self, cache: RotatingKVCache, num_rows: int) -> None:
        self._cache = cache
        self._num_rows = num_rows
        self._before = dict(vars(cache))

    def keep_first(self, count: int) -> None:
        cache = self._cache
        keys = cache.keys[..., -self._num_rows :, :][..., :count, :]
        values = cache.values[..., -self._num_rows :, :][..., :count, :]
        vars(cache).update(self._before)
        if count:
            cache.update_and_fetch(keys, values)


# Gives the state after the first so many rows of a call; None if there is none.
StateAfterFirst = Callable[[int], mx.array | None]


class _StatesRollback:
    """Takes back a recurrent layer's states: each can be had after any row of the call."""

    def __init__(self, cache: ArraysCache, states_after_first: list[StateAfterFirst]) -> None:
        self._cache = cache
        self._states_after_first = states_after_first

    def keep_first(self, count: int) -> None:
        self._cache.cache = [state_after(count) for state_after in self._states_after_first]


class _StateSources:
    """Finds the source of each state that a call left in a cache.

    A recurrence's state is the very array that the recurrence returned. All others are windows: the
    last rows of the convolutions' inputs, in the order in which the convolutions ran.
    """

    def __init__(self, recorded: Recording, num_rows: int) -> None:
        self._recurrences = {id(run.state): run for run in recorded.recurrences}
        self._convolutions = list(recorded.convolutions)
        self._num_rows = num_rows

    def find(
        self,
        state: mx.array | None,  # that a cache holds after the call
    ) -> StateAfterFirst:
        """How to get `state` after any row of the call; asked once each, in the caches' order."""
        if state is None:
            return lambda count: None
        recurrence = self._recurrences.get(id(state))
        if recurrence is not None:
            return recurrence.state_after_first
        given = self._convolutions.pop(0) if self._convolutions else state
        width = int(state.shape[1])
        if state.ndim != 3 or given.shape[1:] != (width + self._num_rows, state.shape[2]):
            known = ", ".join(RECURRENCES)
            raise ValueError(f"one of its recurrences cannot be run again (known: {known})")
        return lambda count: mx.contiguous(given[:, count : count + width])


class StateCache(TextCache):
    """A text's cache of a model without stages: mlx-lm's own caches, by layer.

    It takes only chains, and none after a call that the host has not read. After `verify` these
    hold rejected tokens too. They are taken back when the caches are used next: until then
    `keep_first` may still go back to any accepted token of the chain.
    """

    def __init__(self, make_caches: Callable[[], list[Any]]) -> None:
        self._offset = 0
        self._make_caches = make_caches
        self._caches = make_caches()
        self._chain: _PendingChain | None = None
        self._marks: dict[int, list[list[Any]]] = {}  # states by the tokens before them

    @property
    def offset(self) -> int:
        return self._offset

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)

    @property
    def state(self) -> list[mx.array]:
        kept = [cache.state for cache in self._caches], list(self._marks.values())
        return list({id(array): array for array in arrays_in(kept)}.values())

    def reserve(self, *, more_tokens: int, step_rows: int = 0) -> None:
        """Nothing to do: mlx-lm's caches grow by themselves."""

    def append(
        self,
        model: ModelCall,
        tokens: mx.array,  # [R] that follow the committed ones
    ) -> mx.array:  # [1, R, V]
        self._take_back_rejected()
        logits = model(tokens[None], cache=self._caches)
        self._offset += tokens.shape[0]
        return logits

    def verify(
        self,
        model: ModelCall,  # `recurrent.hook_recurrences` has seen it
        tokens: mx.array,  # [R], at least two: the newest token, then drafted ones
    ) -> mx.array:  # [1, R, V]
        """Run a chain, of which `commit_accepted` says how much stays; a chain before it of which
        nothing was committed is rejected whole.

        ValueError if a layer's cache is of an unknown kind, before anything has run; or if a state
        comes from no recorded recurrence: then the caches hold the chain, and this object is of no
        use any more.
        """
        if tokens.shape[0] < 2:
            raise ValueError("a chain of one token is appended, not verified")
        self._take_back_rejected()
        chain = _PendingChain(self._offset, tokens.shape[0], self._caches)
        with recording() as recorded:
            logits = model(tokens[None], cache=self._caches)
        chain.end_call(recorded)
        self._chain = chain
        return logits

    def commit_accepted(self, num_tokens: int) -> None:
        """The caches still hold the rejected tokens until they are used next."""
        if self._chain is None or self._offset != self._chain.start:
            raise ValueError("no chain waits to be committed")
        if not 1 <= num_tokens <= self._chain.num_rows:
            raise ValueError(f"{num_tokens} tokens of a chain of {self._chain.num_rows}")
        self._offset += num_tokens

    @property
    def has_fixed_places(self) -> bool:
        return any(type(cache) is not KVCache for cache in flatten_caches(self._caches))

    def mark(self) -> bool:
        """Let `keep_first` come back to here, until it goes back further. Returns whether it can:
        not if a layer keeps a window, whose rows are overwritten."""
        self._take_back_rejected()
        if any(type(one) not in (KVCache, ArraysCache) for one in flatten_caches(self._caches)):
            return False
        self._marks[self._offset] = [list(cache.cache) for cache in self._state_caches]
        return True

    def forget_marks(self) -> None:
        self._marks.clear()

    def mark_here_alone(self) -> bool:
        self.forget_marks()
        return self.mark()

    def longest_keepable(self, num_tokens: int) -> int:
        """`num_tokens` within the last chain, or if every layer keeps the rows of the whole text;
        otherwise the last mark before, the text's end, or 0."""
        num_tokens = min(num_tokens, self._offset)
        if self._is_in_chain(num_tokens) or not self.has_fixed_places:
            return num_tokens
        places = (0, self._offset, *self._marks)
        return max(place for place in places if place <= num_tokens)

    def keep_first(self, num_tokens: int) -> None:
        """Go back to the first `num_tokens`; marks after them are forgotten."""
        if num_tokens < 0 or num_tokens != self.longest_keepable(num_tokens):
            raise ValueError(f"cannot keep {num_tokens} tokens of {self._offset}")
        self._marks = {place: kept for place, kept in self._marks.items() if place <= num_tokens}
        if num_tokens != self._offset and not self._is_in_chain(num_tokens):
            self._restore(num_tokens)
        self._offset = num_tokens

    def keys_and_values(
        self,
        layer: int,  # its number among the layers that have a cache of their own
    ) -> tuple[mx.array, mx.array]:  # [1, H, R, Dh] and [1, H', R, Dh']
        """Keys and values of a layer; with a window of W tokens, of the newest ones, at least W or
        all, in the text's order only if there are more than W."""
        self._take_back_rejected()
        cache = self._caches[layer]
        if type(cache) not in (KVCache, RotatingKVCache) or cache.keys is None:
            raise ValueError(f"layer {layer} keeps no keys and values")
        held = min(cache.offset, cache.keys.shape[2])
        return cache.keys[..., :held, :], cache.values[..., :held, :]

    def fork(self, num_tokens: int) -> StateCache:
        """A new cache of the first `num_tokens`, without rejected tokens; it cannot go back into
        the last chain."""
        fork = self.snapshot()
        fork.keep_first(num_tokens)
        fork._take_back_rejected()
        return fork

    def snapshot(self) -> StateCache:
        held = copy.copy(self)
        # In one go, so that the chain's way back leads to the copies.
        held._caches, held._chain = copy.deepcopy((self._caches, self._chain))
        held._marks = dict(self._marks)
        return held

    def drop_free_room(self) -> None:
        """Free the rows after the text, of a fork that is shorter than its origin. Waits for it."""
        for cache in flatten_caches(self._caches):
            if type(cache) is KVCache and cache.keys is not None:
                cache.keys = mx.contiguous(cache.keys[..., : cache.offset, :])
                cache.values = mx.contiguous(cache.values[..., : cache.offset, :])
        mx.eval(self.state)

    @property
    def _state_caches(self) -> list[ArraysCache]:
        """The caches of recurrent layers."""
        return [one for one in flatten_caches(self._caches) if isinstance(one, ArraysCache)]

    def _is_in_chain(self, num_tokens: int) -> bool:
        """Whether the text's first `num_tokens` end in the chain that was verified last."""
        return self._chain is not None and self._chain.start <= num_tokens <= self._offset

    def _restore(self, num_tokens: int) -> None:
        """Go back to a marked offset or the beginning; to any offset if all layers keep the rows of
        the whole text. `offset` stays."""
        self._take_back_rejected()
        if num_tokens == 0:
            self._caches = self._make_caches()
            return
        for cache in flatten_caches(self._caches):
            if type(cache) is KVCache:
                cache.trim(self._offset - num_tokens)
        state_caches = self._state_caches
        if state_caches:
            for cache, kept in zip(state_caches, self._marks[num_tokens], strict=True):
                cache.cache = list(kept)

    def _take_back_rejected(self) -> None:
        if self._chain is not None:
            self._chain.keep_first(self._offset - self._chain.start)
            self._chain = None


class _PendingChain:
    """A call on a chain, of which some rows may have to be taken back. To be made before the call,
    since it holds what windows keep; `end_call` follows it."""

    def __init__(
        self,
        start: int,  # tokens before the chain
        num_rows: int,  # tokens of the chain
        caches: Iterable[Any],
    ) -> None:
        self.start = start
        self.num_rows = num_rows
        self._rollbacks: list[Rollback] = []
        self._state_caches: list[ArraysCache] = []
        for cache in flatten_caches(caches):
            if type(cache) is KVCache:
                self._rollbacks.append(_RowsRollback(cache, num_rows))
            elif type(cache) is RotatingKVCache:
                self._rollbacks.append(_WindowRollback(cache, num_rows))
            elif type(cache) is ArraysCache:
                self._state_caches.append(cache)
            else:
                raise ValueError(
                    f"it keeps a {type(cache).__name__}, from which no token can be taken back"
                )

    def end_call(self, recorded: Recording) -> None:
        """Record how to undo the recurrent states of the call that just ran; ValueError for an
        unknown recurrence."""
        sources = _StateSources(recorded, self.num_rows)
        for cache in self._state_caches:
            states_after_first = [sources.find(state) for state in cache.cache]
            self._rollbacks.append(_StatesRollback(cache, states_after_first))

    def keep_first(self, count: int) -> None:
        if count < self.num_rows:
            for rollback in self._rollbacks:
                rollback.keep_first(count)


def flatten_caches(caches: Iterable[Any]) -> Iterator[Any]:
    """Yield caches, those in a `CacheList` one by one."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from flatten_caches(cache.caches)
        else:
            yield cache
