"""One bound for all memory that grows with use: what running answers hold, and what is kept.

Weights are there before anything is asked, and activations are gone after a call. Between the two
are keys and values of texts, and what drafters know of a text. What is kept for later answers goes,
the longest unused first, before a running answer has to do without or is refused.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

import mlx.core as mx

from ..decoding.drafter import Drafter
from ..decoding.step import Steps
from ..errors import NoRoomError, require
from ..model.text_cache import TextCache
from .memory import CacheSize

SHARE = 2 / 3
"""Share of the memory left beside weights that a pool has by default; the rest is for activations,
for buffers while they grow, and for other programs."""
_LEAST = 2**28  # bytes that a pool has by default, at least
_MARGIN = 64
"""Tokens after a text for which there is always room: more than a call advances by."""
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def usable_memory() -> int:
    """Bytes of memory that one process can use."""
    # What MLX recommends for the GPU, or all that it has.
    if mx.default_device() == mx.gpu:
        info = mx.device_info(mx.gpu)
        for name in ("max_recommended_working_set_size", "total_memory", "memory_size"):
            if int(info.get(name, 0)):
                return int(info[name])
    # Otherwise the machine's, or its container's if that has less.
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # it is "max" if there is no limit
        whole = min(whole, int(CGROUP_LIMIT.read_text(encoding="ascii")))
    return whole


def check_memory(gib: float | None) -> None:
    found = f"memory of {gib} GiB"
    ok = gib is None or 0 < gib < math.inf
    require(ok, found, expected="a number above 0", do="use a larger value, or omit the option")


def default_limit() -> int:
    """Bytes that a pool has by default."""
    return max(_LEAST, int(SHARE * (usable_memory() - mx.get_active_memory())))


class Kept(Protocol):
    """Something in memory that is kept for later answers, and may be dropped at any time."""

    def free_memory(self) -> None:
        """Drop what is kept; it is no longer counted."""


@runtime_checkable
class Shared(Protocol):
    """Something in memory that several running answers share, beside what each of them holds."""

    @property
    def cache_bytes(self) -> int:
        """Bytes that it takes now."""


@runtime_checkable
class SharedWithIdlePart(Shared, Protocol):
    """Such a thing that also keeps what no running answer uses, for a next one."""

    def drop_idle(self) -> None:
        """Free what no running answer uses."""


class Holding:
    """The memory of one running answer, counted until `release` or as long as it lives."""

    def __init__(
        self,
        pool: MemoryPool,
        cache: TextCache,
        size: CacheSize,  # what such caches take
        scratch: int = 0,  # rows that the cache has for steps
        drafters: Sequence[Drafter] = (),  # whose knowledge of the text counts too
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._size = size
        self._scratch = scratch
        self._drafters = drafters
        self._provided = 0  # tokens that there is room for
        self._claimed = 0  # bytes of these
        self.num_bytes = 0  # as they were counted last

    def claim(self, num_tokens: int) -> None:
        """Claim memory for a text of so many tokens and `_MARGIN` more, or raise NoRoomError."""
        if num_tokens + _MARGIN <= self._provided:
            return
        before = self._provided, self._claimed
        self._provided = self._size.rounded(num_tokens + _MARGIN)
        self._claimed = self._size.of(self._provided, self._scratch)
        try:
            self._pool.fit(self)
        except NoRoomError:
            self._provided, self._claimed = before
            raise

    def follow(
        self,
        steps: Steps,
        num_tokens: int,  # of the text before the first step
    ) -> Steps:
        """Yield `steps`, and claim memory for the text after each, before the next is computed."""
        try:
            with closing(steps):
                for step in steps:
                    yield step
                    num_tokens += 0 if step is None else len(step.tokens)
                    self.claim(num_tokens)
        finally:
            self.release()

    def count_bytes(self) -> int:
        """Bytes that it holds, or has claimed if that is more. MLX thread."""
        drafters = sum(one.cache_bytes for one in self._drafters)
        self.num_bytes = max(self._cache.nbytes, self._claimed) + drafters
        return self.num_bytes

    def release(self) -> None:
        """Count it no longer: the answer has ended, or was given up."""
        self._pool.release(self)


class MemoryPool:
    """Bytes that grow with use, of one engine, and how many there may be at once.

    What is kept is known here by weak references, so to let go of it elsewhere is enough. All but
    the counts is for the MLX thread.
    """

    def __init__(
        self,
        limit: int,  # bytes
    ) -> None:
        self.limit = limit
        self._lock = threading.RLock()  # of the three below; never held while MLX runs
        self._kept: dict[weakref.ref[Kept], int] = {}  # bytes; the longest unused first
        self._running: weakref.WeakSet[Holding] = weakref.WeakSet()
        self._shared: weakref.WeakSet[Shared] = weakref.WeakSet()

    @property
    def kept(self) -> int:
        """Bytes that are kept for later answers."""
        with self._lock:
            return sum(size for one, size in list(self._kept.items()) if one() is not None)

    @property
    def running(self) -> int:
        """Bytes that running answers held when they were counted last, without what they share."""
        with self._lock:
            return sum(one.num_bytes for one in self._running)

    # --- what is kept ---

    def keep_or_free(self, one: Kept, num_bytes: int) -> None:
        """Count `one` as the newest of what is kept; drop it if it does not fit beside answers."""
        self.forget(one)
        left = self.limit - self._count_running_bytes()
        if num_bytes > left:  # in vain: nothing else has to go for it
            one.free_memory()
            return
        self._evict_down_to(left - num_bytes)
        with self._lock:
            self._kept[weakref.ref(one)] = num_bytes

    def mark_used(self, one: Kept) -> None:
        with self._lock:
            if size := self._kept.pop(weakref.ref(one), 0):
                self._kept[weakref.ref(one)] = size

    def forget(self, one: Kept) -> None:
        """Count `one` no longer; it is not dropped."""
        with self._lock:
            self._kept.pop(weakref.ref(one), None)

    # --- what runs ---

    def share(self, one: Shared) -> None:
        """Count `one`, which answers share, as long as it lives."""
        with self._lock:
            self._shared.add(one)

    def add_running(self, holding: Holding, num_tokens: int) -> Holding:
        """Count a new answer, whose text has `num_tokens`; NoRoomError if there is no room."""
        with self._lock:
            self._running.add(holding)
        try:
            holding.claim(num_tokens)
        except NoRoomError:
            self.release(holding)
            raise
        return holding

    def fit(self, holding: Holding) -> None:
        """Make room for what `holding`, counted here, has claimed."""
        wanted = holding.count_bytes()
        if not self.make_room():
            free = self.limit - self._count_running_bytes() + wanted
            raise NoRoomError(wanted, free, self.limit)

    def make_room(self, num_bytes: int = 0) -> bool:
        """Whether `num_bytes` fit beside what runs, once some of what is kept is dropped."""
        # Nothing is dropped in vain: idle parts go first, and what is kept only if that is enough.
        left = self.limit - self._count_running_bytes() - num_bytes
        if left < 0:
            self._drop_idle()
            left = self.limit - self._count_running_bytes() - num_bytes
        if left < 0:
            return False
        self._evict_down_to(left)
        return True

    def release(self, holding: Holding) -> None:
        with self._lock:
            self._running.discard(holding)

    def _count_running_bytes(self) -> int:
        """Bytes of running answers and of what they share, counted anew. MLX thread."""
        with self._lock:
            running = list(self._running)
            shared = list(self._shared)
        return sum(one.count_bytes() for one in running) + sum(one.cache_bytes for one in shared)

    def _drop_idle(self) -> None:
        with self._lock:
            shared = list(self._shared)
        for one in shared:
            if isinstance(one, SharedWithIdlePart):
                one.drop_idle()

    def _evict_down_to(self, num_bytes: int) -> None:
        """Drop what is kept, the longest unused first, until it has at most `num_bytes`."""
        has_gone = False
        while (one := self._pop_oldest_above(num_bytes)) is not None:
            one.free_memory()
            has_gone = True
        if has_gone:
            mx.clear_cache()

    def _pop_oldest_above(self, num_bytes: int) -> Kept | None:
        """The longest unused of what is kept, if that has more than `num_bytes` in all."""
        with self._lock:
            alive = [(one, size) for one, size in self._kept.items() if one() is not None]
            self._kept = dict(alive)
            if sum(size for _, size in alive) <= num_bytes:
                return None
            oldest, _ = alive[0]
            del self._kept[oldest]
            return oldest()
