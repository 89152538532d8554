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
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Protocol, cast

import mlx.core as mx

from ..decoding.drafter import Drafter
from ..drafters.draft_model import DraftModel
from ..errors import NoRoomError, require
from ..model.cache import TreeCache
from ..model.streams import StreamFusedModel
from .memory import CacheSize, cache_size_of
from .plan import Decode, Plan

SHARE = 2 / 3
"""Of the memory that is left beside weights, what a pool has unless it is told; the rest is for
activations, for buffers while they grow, and for other programs."""
_LEAST = 2**28  # bytes that a pool has unless it is told
_MARGIN = 64
"""Tokens behind a text for which there is room at least: more than a call advances by."""
_CGROUP = Path("/sys/fs/cgroup/memory.max")


def usable_memory() -> int:
    """Bytes that one process may use well: of the GPU where that computes, else of the machine, or
    of the container that it runs in."""
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
    """Raises InputError where GiB are asked for that none can have."""
    found = f"memory of {gib} GiB"
    ok = gib is None or 0 < gib < math.inf
    require(ok, found, expected="a number above 0", do="give more, or drop it")


def default_limit() -> int:
    """Bytes of a pool that is not told: a share of what is left beside what is in use now."""
    return max(_LEAST, int(SHARE * (usable_memory() - mx.get_active_memory())))


class Kept(Protocol):
    """What is kept for later answers."""

    def free_memory(self) -> None:
        """It is no longer counted: free its memory."""


class Shared(Protocol):
    """What several answers use at once and grows with them, beside what each of them holds."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of it."""

    def drop_idle(self) -> None:
        """Free what no running answer uses."""


class Holding:
    """What one running answer holds, as long as somebody has it, or until `release`.

    Args:
        pool: where it counts, from `MemoryPool.hold` on.
        cache: the answer's own.
        size: what such caches take.
        scratch: rows that the cache has for steps.
        drafters: whose knowledge of the text counts too.
    """

    def __init__(
        self,
        pool: MemoryPool,
        cache: TreeCache,
        size: CacheSize,
        scratch: int = 0,
        drafters: Sequence[Drafter] = (),
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._size = size
        self._scratch = scratch
        self._drafters = drafters
        self._provided = 0  # tokens that there is room for
        self._claimed = 0  # bytes of these
        self.num_bytes = 0  # as they were counted last

    def provide(self, num_tokens: int) -> None:
        """Make sure of room for a text of `num_tokens` and the next call's.

        Raises:
            NoRoomError: there is none, whatever else is let go.
        """
        if num_tokens + _MARGIN <= self._provided:
            return
        self._provided = self._size.rounded(num_tokens + _MARGIN)
        before = self._claimed
        self._claimed = self._size.of(self._provided, self._scratch)
        try:
            self._pool.admit(self)
        except NoRoomError:
            self._claimed = before
            raise

    def count(self) -> int:
        """Bytes that it holds, or has claimed and not filled yet. On the thread that runs MLX."""
        drafters = sum(one.cache_bytes for one in self._drafters)
        self.num_bytes = max(self._cache.nbytes, self._claimed) + drafters
        return self.num_bytes

    def release(self) -> None:
        """The answer is over, or was given up."""
        self._pool.release(self)


class MemoryPool:
    """Bytes that grow with use, of one engine, and how many there may be at once.

    What is kept is known here by weak references, so to let go of it elsewhere is enough. All but
    the counts is for the thread that runs MLX.

    Args:
        limit: bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.RLock()  # of the three below; never held while MLX runs
        self._kept: dict[weakref.ref[Kept], int] = {}  # bytes; the longest unused first
        self._running: weakref.WeakSet[Holding] = weakref.WeakSet()
        self._shared: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def kept(self) -> int:
        """Bytes that are kept for later answers."""
        with self._lock:
            return sum(size for one, size in list(self._kept.items()) if one() is not None)

    @property
    def running(self) -> int:
        """Bytes that running answers held when they were counted last."""
        with self._lock:
            return sum(one.num_bytes for one in self._running)

    # --- what is kept ---

    def keep(self, one: Kept, num_bytes: int) -> None:
        """Count what is kept, as the newest; what is older goes until there is room for it.

        Args:
            one: known by its identity; known already, it is counted anew.
            num_bytes: that it holds.
        """
        self.forget(one)
        left = self.limit - self._count()
        if num_bytes > left:  # in vain: nothing else has to go for it
            one.free_memory()
            return
        self._evict_down_to(left - num_bytes)
        with self._lock:
            self._kept[weakref.ref(one)] = num_bytes

    def use(self, one: Kept) -> None:
        """What is kept was used: it is the newest now."""
        with self._lock:
            if size := self._kept.pop(weakref.ref(one), 0):
                self._kept[weakref.ref(one)] = size

    def forget(self, one: Kept) -> None:
        """Count what was kept no longer."""
        with self._lock:
            self._kept.pop(weakref.ref(one), None)

    # --- what runs ---

    def share(self, one: Shared) -> None:
        """Count what answers share, as long as somebody has it."""
        with self._lock:
            self._shared.add(one)

    def hold(self, holding: Holding, num_tokens: int) -> Holding:
        """Count a new answer, whose text has so many tokens.

        Raises:
            NoRoomError: there is no room for it.
        """
        with self._lock:
            self._running.add(holding)
        try:
            holding.provide(num_tokens)
        except NoRoomError:
            self.release(holding)
            raise
        return holding

    def admit(self, holding: Holding) -> None:
        """Let go of what is kept until there is room for what a running answer has claimed.

        Raises:
            NoRoomError: there is none.
        """
        wanted = holding.count()
        if not self.make_room():
            free = self.limit - self._count() + wanted
            raise NoRoomError(wanted, free, self.limit)

    def make_room(self, num_bytes: int = 0) -> bool:
        """Let go of what is kept as far as that has to be, and not at all where it is in vain.

        Args:
            num_bytes: that are wanted beside what runs.

        Returns:
            Whether there are so many.
        """
        left = self.limit - self._count() - num_bytes
        if left < 0:
            self._drop_idle()
            left = self.limit - self._count() - num_bytes
        if left < 0:
            return False
        self._evict_down_to(left)
        return True

    def release(self, holding: Holding) -> None:
        """An answer is over."""
        with self._lock:
            self._running.discard(holding)

    def within_limit(self, decode: Decode) -> Decode:
        """`decode`, with its answers counted: one begins, and goes on, where there is room.

        Raises:
            NoRoomError: there is none for the prompt; or, as tokens are asked for, for more.
        """

        def decoded(
            plan: Plan,
            model: StreamFusedModel,
            prompt: list[int],
            cache: TreeCache,
            *,
            context: Sequence[int] = (),
            **more: Any,
        ) -> Iterator[list[int]]:
            for one in plan.loaded:
                if isinstance(one, DraftModel):
                    self.share(one)
            size = cache_size_of(model)
            holding = Holding(self, cache, size, plan.scratch, plan.drafters)
            num_tokens = cache.offset + len(prompt)
            self.hold(holding, num_tokens)
            steps = decode(plan, model, prompt, cache, context=context, **more)
            return _reserve_while_decoding(steps, holding, num_tokens)

        return decoded

    def _count(self) -> int:
        """Bytes of what runs, as they are now."""
        with self._lock:
            running = list(self._running)
            shared = list(self._shared)
        return sum(one.count() for one in running) + sum(one.cache_bytes for one in shared)

    def _drop_idle(self) -> None:
        with self._lock:
            shared = list(self._shared)
        for one in shared:
            one.drop_idle()

    def _evict_down_to(self, num_bytes: int) -> None:
        """Let go of what is kept, the longest unused first, until it has `num_bytes` at most."""
        has_gone = False
        while (one := self._pop_oldest_above(num_bytes)) is not None:
            one.free_memory()
            has_gone = True
        if has_gone:
            mx.clear_cache()

    def _pop_oldest_above(self, num_bytes: int) -> Kept | None:
        """Take out what is unused the longest, if all together have more than `num_bytes`."""
        with self._lock:
            alive = [(one, size) for one, size in self._kept.items() if one() is not None]
            self._kept = dict(alive)
            if sum(size for _, size in alive) <= num_bytes:
                return None
            oldest, _ = alive[0]
            del self._kept[oldest]
            return oldest()


def _reserve_while_decoding(
    steps: Iterator[list[int]], holding: Holding, num_tokens: int
) -> Iterator[list[int]]:
    try:
        with closing(cast("Generator[list[int]]", steps)):
            for step in steps:
                yield step
                num_tokens += len(step)
                holding.provide(num_tokens)
    finally:
        holding.release()
