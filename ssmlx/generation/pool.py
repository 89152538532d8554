"""One bound for all memory that grows with use: what running answers hold, and what is kept.

Weights are there before anything is asked, and activations are gone behind a call. Between the two
are the keys and values of texts, of running answers and of prompts that are kept for later ones,
and what drafters know of a text. A `MemoryPool` counts them. What is kept goes, the longest unused
first, before a running answer has to do without; where that is not enough, an answer is refused.
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
"""Of the memory that is left beside weights, what a pool has by default; the rest is for
activations, for buffers while they grow, and for other programs."""
_LEAST = 2**28  # bytes that a pool has by default, at least
_MARGIN = 64
"""Tokens behind a text for which there is room at least: more than a call advances by."""
_CGROUP = Path("/sys/fs/cgroup/memory.max")


def usable_memory() -> int:
    """Bytes of memory that one process can use.

    Where the GPU is MLX's default device, what MLX recommends for it, or all that it has; else, and
    where MLX says nothing, those of the machine, or of its container where that has fewer.
    """
    if mx.default_device() == mx.gpu:
        told = mx.device_info(mx.gpu)
        for name in ("max_recommended_working_set_size", "total_memory", "memory_size"):
            if int(told.get(name, 0)):
                return int(told[name])
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # it is "max" where there is no limit
        whole = min(whole, int(_CGROUP.read_text(encoding="ascii")))
    return whole


def check_memory(gib: float | None) -> None:
    """Raise InputError unless `gib`, a bound on memory in GiB, is None or a number above 0."""
    found = f"memory of {gib} GiB"
    ok = gib is None or 0 < gib < math.inf
    require(ok, found, expected="a number above 0", do="give more, or drop it")


def default_limit() -> int:
    """Bytes that a pool has by default: `SHARE` of what is usable and not in use now, 256 MiB at
    least."""
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
    """The memory of one running answer, counted in a pool until `release` or as long as it lives.

    Args:
        pool: where it counts, from `MemoryPool.add_running` on.
        cache: the answer's own.
        size: what such caches take.
        scratch: rows that the cache has for steps.
        drafters: whose knowledge of the text counts too.
    """

    def __init__(
        self,
        pool: MemoryPool,
        cache: TextCache,
        size: CacheSize,
        scratch: int = 0,
        drafters: Sequence[Drafter] = (),
    ) -> None:
        """Begin with nothing claimed; it is not counted in `pool` before `MemoryPool.add_running`.

        The arguments are kept as they are, see the class.
        """
        self._pool = pool
        self._cache = cache
        self._size = size
        self._scratch = scratch
        self._drafters = drafters
        self._provided = 0  # tokens that there is room for
        self._claimed = 0  # bytes of these
        self.num_bytes = 0  # as they were counted last

    def claim_memory(self, num_tokens: int) -> None:
        """Claim memory for a text of `num_tokens` and 64 more, unless that or more was claimed
        before.

        Room is for a multiple of 256 tokens. What the pool keeps for later answers may be dropped
        for it.

        Raises:
            NoRoomError: there is none, even if all that is kept were dropped; what was claimed
                stays as it was.
        """
        if num_tokens + _MARGIN <= self._provided:
            return
        before = self._provided, self._claimed
        self._provided = self._size.rounded(num_tokens + _MARGIN)
        self._claimed = self._size.of(self._provided, self._scratch)
        try:
            self._pool.drop_kept_to_fit_or_raise(self)
        except NoRoomError:
            self._provided, self._claimed = before
            raise

    def claim_memory_while_decoding(self, steps: Steps, num_tokens: int) -> Steps:
        """Yield `steps`, and claim memory for the text behind each, before the next is computed.

        When it ends, fails or is closed, `steps` are closed and this is released.

        Args:
            steps: of a decoding loop.
            num_tokens: of the text before the first step.

        Raises:
            NoRoomError: there is no memory for more.
        """
        try:
            with closing(steps):
                for step in steps:
                    yield step
                    num_tokens += 0 if step is None else len(step.tokens)
                    self.claim_memory(num_tokens)
        finally:
            self.release()

    def count_bytes(self) -> int:
        """Bytes that it holds, or has claimed where that is more; also kept in `num_bytes`.

        On the thread that runs MLX.
        """
        drafters = sum(one.cache_bytes for one in self._drafters)
        self.num_bytes = max(self._cache.nbytes, self._claimed) + drafters
        return self.num_bytes

    def release(self) -> None:
        """Count it no longer: the answer has ended, or was given up."""
        self._pool.release(self)


class MemoryPool:
    """Bytes that grow with use, of one engine, and how many there may be at once.

    What is kept is known here by weak references, so to let go of it elsewhere is enough. All but
    the counts is for the thread that runs MLX.

    Args:
        limit: bytes.
    """

    def __init__(self, limit: int) -> None:
        """Begin with nothing counted, of `limit` bytes."""
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
        """Count `one` as the newest of what is kept; the longest unused are dropped until it fits.

        Where it does not fit beside running answers at all, it is dropped itself (`free_memory`),
        and the others stay.

        Args:
            one: held by a weak reference; one that is counted already is counted anew.
            num_bytes: bytes that it takes.
        """
        self.forget(one)
        left = self.limit - self._count_running_bytes()
        if num_bytes > left:  # in vain: nothing else has to go for it
            one.free_memory()
            return
        self._evict_down_to(left - num_bytes)
        with self._lock:
            self._kept[weakref.ref(one)] = num_bytes

    def mark_used(self, one: Kept) -> None:
        """Make `one` the newest of what is kept, if it is counted."""
        with self._lock:
            if size := self._kept.pop(weakref.ref(one), 0):
                self._kept[weakref.ref(one)] = size

    def forget(self, one: Kept) -> None:
        """Count `one` no longer, if it was; it is not dropped."""
        with self._lock:
            self._kept.pop(weakref.ref(one), None)

    # --- what runs ---

    def share(self, one: Shared) -> None:
        """Count `one`, which answers share, as long as it lives."""
        with self._lock:
            self._shared.add(one)

    def add_running(self, holding: Holding, num_tokens: int) -> Holding:
        """Count a new answer, whose text has `num_tokens`, and claim its memory; returns `holding`.

        Raises:
            NoRoomError: there is no room for it; it is not counted then.
        """
        with self._lock:
            self._running.add(holding)
        try:
            holding.claim_memory(num_tokens)
        except NoRoomError:
            self.release(holding)
            raise
        return holding

    def drop_kept_to_fit_or_raise(self, holding: Holding) -> None:
        """Drop what is kept until there is room for what `holding`, counted here, has claimed.

        Raises:
            NoRoomError: there is none, even if all were dropped; then nothing that is kept is, but
                what answers share has dropped its idle part.
        """
        wanted = holding.count_bytes()
        if not self.make_room():
            free = self.limit - self._count_running_bytes() + wanted
            raise NoRoomError(wanted, free, self.limit)

    def make_room(self, num_bytes: int = 0) -> bool:
        """Drop what is kept, the longest unused first, until running answers and `num_bytes` fit.

        Where even without all that is kept there is no room, what answers share drops its idle part
        first; where that is not enough, nothing that is kept is dropped. Nothing is claimed.

        Args:
            num_bytes: bytes that are wanted beside what runs.

        Returns:
            Whether there is room for them.
        """
        left = self.limit - self._count_running_bytes() - num_bytes
        if left < 0:
            self._make_shared_drop_idle()
            left = self.limit - self._count_running_bytes() - num_bytes
        if left < 0:
            return False
        self._evict_down_to(left)
        return True

    def release(self, holding: Holding) -> None:
        """Count `holding` no longer."""
        with self._lock:
            self._running.discard(holding)

    def _count_running_bytes(self) -> int:
        """Bytes of running answers and of what they share, counted anew; what is kept is left out.

        On the thread that runs MLX.
        """
        with self._lock:
            running = list(self._running)
            shared = list(self._shared)
        return sum(one.count_bytes() for one in running) + sum(one.cache_bytes for one in shared)

    def _make_shared_drop_idle(self) -> None:
        """Have what answers share drop its idle part, if it has one."""
        with self._lock:
            shared = list(self._shared)
        for one in shared:
            if isinstance(one, SharedWithIdlePart):
                one.drop_idle()

    def _evict_down_to(self, num_bytes: int) -> None:
        """Drop what is kept, the longest unused first, until it has `num_bytes` at most.

        MLX's cache of free buffers is emptied where anything was dropped.
        """
        has_gone = False
        while (one := self._pop_oldest_above(num_bytes)) is not None:
            one.free_memory()
            has_gone = True
        if has_gone:
            mx.clear_cache()

    def _pop_oldest_above(self, num_bytes: int) -> Kept | None:
        """Take out and return what is unused the longest, if all that is kept has more than
        `num_bytes`.

        Else None. What is no longer alive is forgotten.
        """
        with self._lock:
            alive = [(one, size) for one, size in self._kept.items() if one() is not None]
            self._kept = dict(alive)
            if sum(size for _, size in alive) <= num_bytes:
                return None
            oldest, _ = alive[0]
            del self._kept[oldest]
            return oldest()
