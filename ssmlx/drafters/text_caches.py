"""Caches of texts that outlive the answers that filled them: a next answer takes one over."""

import weakref
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, Self, TypeVar

from ..prompts import common_prefix_length

_MOST_IDLE = 2  # caches that are kept for a next answer, beside the one in use


class OwnedCache(Protocol):
    """A drafter's cache of one text."""

    text: list[int]

    @property
    def nbytes(self) -> int: ...

    def copy_beginning(self, num_tokens: int) -> Self:
        """A new cache of the first `num_tokens` of the text, at least 1, with as much of them as
        can be had."""


_Cache = TypeVar("_Cache", bound=OwnedCache)


class TextCacheOwner(Generic[_Cache]):
    """Keeps caches of texts for a loaded model or head, each owned by one drafter until that
    drafter is freed.

    So answers may be open at once, and a chat's next turn finds what the last one left, even if
    others have been answered meanwhile.
    """

    def __init__(self, make_cache: Callable[[], _Cache]) -> None:
        self._make_cache = make_cache
        # each with a weak reference to its owner, None once that is freed; the latest taken first
        self._caches: list[tuple[_Cache, Callable[[], object]]] = []

    @property
    def cache_bytes(self) -> int:
        """Bytes of all caches, also of those that wait for a next answer."""
        return sum(cache.nbytes for cache, _ in self._caches)

    def drop_idle(self) -> None:
        """Drop the caches without a living owner."""
        self._caches = [pair for pair in self._caches if pair[1]() is not None]

    def claim_idle_or_new_cache(self, tokens: Sequence[int], drafter: object) -> _Cache:
        """Give `drafter`, of which only a weak reference is kept, a cache of its own for as long as
        it lives.

        It is the idle one whose text shares the longest beginning with `tokens`: itself, untrimmed,
        if at least half of its text is shared; else a copy of what is shared, because another chat,
        with the same system prompt, may go on after the rest. The `_MOST_IDLE` others used last are
        kept.
        """
        self._caches = [  # a drafter that was started before lets go of what it had
            (cache, (lambda: None) if owner() is drafter else owner)
            for cache, owner in self._caches
        ]
        idle = [cache for cache, owner in self._caches if owner() is None]
        shared = {id(cache): common_prefix_length(cache.text, tokens) for cache in idle}
        found = max(idle, key=lambda one: shared[id(one)], default=None)
        num_shared = 0 if found is None else shared[id(found)]
        if found is None or not num_shared:
            cache = self._make_cache()
        elif 2 * num_shared >= len(found.text):
            cache = found
        else:
            cache = found.copy_beginning(num_shared)
        spare = [one for one in idle if one is not cache]
        dropped = {id(one) for one in (cache, *spare[_MOST_IDLE:])}
        others = [pair for pair in self._caches if id(pair[0]) not in dropped]
        self._caches = [(cache, weakref.ref(drafter)), *others]
        return cache
