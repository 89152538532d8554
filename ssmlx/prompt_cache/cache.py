"""Prompts that were processed once: their keys and values, shared between answers."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import mlx.core as mx

from ..decoding.loop import PromptPlace
from ..drafters.text_index import EarlierAnswers
from ..errors import InputError
from ..generation.pool import MemoryPool
from ..loading.identity import CacheKey
from ..mlx_thread import on_mlx_thread, run_on_mlx_thread, unless_forked
from ..model.cache import TreeCache
from ..model.streams import StreamFusedModel
from ..model.text_cache import TextCache
from ..prompts import common_prefix_length
from .prompt_files import PromptFolder, Tokens, mark_used, read_prompt

_log = logging.getLogger("ssmlx")


@dataclass(eq=False)
class _Entry:
    """A prompt's keys and values in memory; the cache is never written into, only forked."""

    key: CacheKey  # of the model that computed them
    tokens: Tokens
    cache: TextCache  # holds `tokens`
    owner: weakref.ref[PromptCache]
    is_written: bool = False  # to the folder, or need not be

    def __post_init__(self) -> None:
        self.nbytes = self.cache.nbytes

    def free_memory(self) -> None:
        """Leave the memory, for the owner's folder if it has one; see `pool.Kept`."""
        owner = self.owner()
        if owner is not None:
            owner._leave_memory(self)

    def shared(self, key: CacheKey, tokens: Sequence[int]) -> int:
        """The number of first `tokens` that a fork can hold; 0 under another key."""
        if key != self.key:
            return 0
        # Recurrent states and windows go back only to certain places.
        return self.cache.longest_keepable(common_prefix_length(self.tokens, tokens))

    def covers(self, other: _Entry) -> bool:
        return self.shared(other.key, other.tokens) == len(other.tokens)


def place_for_next_turn(
    prompts: PromptCache | None,
    model: StreamFusedModel,
    prompt: Sequence[int],  # tokens of the whole prompt
    cache: TextCache,  # which the prompt is processed into
    # tokens of the prompt before that offset; a function is asked only if `cache` has fixed places,
    # otherwise it is all but the last token
    length: int | Callable[[], int],
    *,
    # whether a copy goes to `prompts` in any case, for others that run meanwhile
    copies: bool = False,
) -> PromptPlace | None:
    """The offset in a prompt up to which a later one can begin with it, whatever follows here.

    None if `cache` can go back to any offset, and no copy is wanted. Nothing is kept yet: when the
    prompt is processed up to there, the cache marks the offset. If a layer keeps a window, the
    cache cannot come back, and a copy goes to `prompts` instead.
    """
    if not (copies or cache.has_fixed_places):
        return None
    if callable(length):
        length = length() if cache.has_fixed_places else len(prompt) - 1

    def keep() -> None:
        if (not cache.mark_here_alone() or copies) and prompts is not None:
            prompts.put(model, prompt, cache)

    return PromptPlace(length, keep)


class PromptCache:
    """Keys and values of prompts, for any prompt that begins with the same tokens.

    Any number of models, with any adapters, may share one: each finds what it would have computed
    itself. With a `folder`, models are identified by all bytes of their weights, which are read
    once and remembered (docs/decisions.md says how long that takes), else by the stamps of their
    files. A model whose weights were changed in memory needs a new `Backbone`.

    An answer to a cached prompt equals the answer to one that is processed again, token for token,
    except for near ties in less than float32. Any thread may call it.

    Args:
        max_bytes: limit of the prompts in memory, unused room in their buffers included. The least
            recently used prompt is dropped first. None: only the limit of the engine that uses the
            cache, or of the first open one of several. Each model's latest answers take up to 8 MB
            more.
        folder: where prompts are stored for other processes too, in files that only their owner can
            read; None for memory only. Prompts are written when they leave the memory, and by
            `flush` and `close`; a killed process loses the others. Models that are split over
            machines store none there, because all machines have to find the same; nor do models
            that are called as a whole, whose caches have no rows of tokens.
        max_disk_bytes: limit of these files; the least recently used are deleted first.
    """

    def __init__(
        self,
        max_bytes: int | None = 2**30,
        folder: str | Path | None = None,
        max_disk_bytes: int = 2**32,
    ) -> None:
        self.max_bytes = max_bytes
        self._pools: list[MemoryPool] = []  # of the engines that use it; it counts in the first
        self._folder = (
            None if folder is None else PromptFolder(Path(folder).expanduser(), max_disk_bytes)
        )
        self._entries: list[_Entry] = []  # the longest unused first
        self._answers: dict[CacheKey, EarlierAnswers] = {}
        self._lock = threading.Lock()  # never held while MLX runs

    @property
    def nbytes(self) -> int:
        """Bytes of the prompts and answers in memory."""
        with self._lock:
            prompts = sum(entry.nbytes for entry in self._entries)
            return prompts + sum(one.nbytes for one in self._answers.values())

    def __len__(self) -> int:
        return len(self._entries)

    @on_mlx_thread
    def take(
        self, model: StreamFusedModel, tokens: Sequence[int], scratch: int = 0
    ) -> tuple[TextCache, int]:
        """Find the prompt that shares most with `tokens`, in memory or in the folder.

        This counts as a use. A file is read into memory first; one that is damaged or does not fit
        the model is deleted.

        Args:
            model: which the cache is for.
            tokens: the prompt; its last token is always left to process.
            scratch: rows that a call may have; an empty cache has room for them.

        Returns:
            A cache of the caller's own, which may be changed, and how many of `tokens` it holds.
            An empty one, and 0, if nothing is known.
        """
        known = tuple(tokens[:-1])
        key, folder = self._key_and_folder(model)
        entry, count = self._find(key, known)
        if folder is not None:
            path, in_file = folder.find_longest_match(key, known)
            if path is not None and in_file > count:
                entry, count = self._load(path, model, key, known) or (entry, count)
        if entry is None:
            return model.make_cache(scratch), 0
        cache = entry.cache.fork(count)
        mx.eval(cache.state)
        return cache, count

    @on_mlx_thread
    def put(self, model: StreamFusedModel, tokens: Sequence[int], cache: TextCache) -> None:
        """Keep a copy of what `cache` holds of `tokens`, with which it begins.

        Nothing is added if an entry begins with these tokens already. Entries that are a beginning
        of the new one are dropped, and the least recently used leave the memory. For a model
        without stages, as many tokens are kept as its cache can be cut to, only in memory; if it
        keeps states or windows, an entry serves only prompts that begin with all of it, or with it
        up to a marked place.

        Args:
            model: which the cache is of.
            tokens: the prompt, or its beginning.
            cache: what the model computed of `tokens`; it may hold more of a text after them.
        """
        key, folder = self._key_and_folder(model)
        with self._lock:
            answers = self._answers.get(key)
        if self._pool is not None and answers is not None:  # they may have grown
            self._pool.keep_or_free(answers, answers.nbytes)
        held = tuple(tokens[: cache.longest_keepable(min(len(tokens), cache.offset))])
        _, count = self._find(key, held)
        if held and count < len(held):
            fork = cache.fork(len(held))
            mx.eval(fork.state)
            entry = _Entry(key, held, fork, weakref.ref(self), is_written=folder is None)
            self._add(entry)

    def identify(self, model: StreamFusedModel) -> None:
        """Compute the key that distinguishes a model's prompts now, before its first answer.

        If there is a folder, this reads all weights of the model once.

        Args:
            model: with any adapter, or without.
        """
        self._key_and_folder(model)

    @on_mlx_thread
    def count_in(self, pool: MemoryPool) -> None:
        """Count what is kept in `pool`, until `count_out`.

        If it already counts in another pool, it counts in this one after `count_out` of that one.

        Args:
            pool: of an engine whose answers begin with these prompts.
        """
        if pool not in self._pools:
            self._pools.append(pool)
            if pool is self._pool:
                self._count_all(pool)

    @on_mlx_thread
    def count_out(self, pool: MemoryPool) -> None:
        """Stop counting in `pool`, and count in the next one that `count_in` was called with.

        Args:
            pool: as `count_in` took it; nothing changes for another one.
        """
        if pool not in self._pools:
            return
        was_first = pool is self._pool
        self._pools.remove(pool)
        if was_first:
            for one in self._all_kept():
                pool.forget(one)
            if self._pool is not None:
                self._count_all(self._pool)

    @property
    def _pool(self) -> MemoryPool | None:
        """The pool that it counts in. MLX thread."""
        return self._pools[0] if self._pools else None

    def _count_all(self, pool: MemoryPool) -> None:
        """Count all that is kept in `pool`; what does not fit is dropped. MLX thread."""
        for one in self._all_kept():
            pool.keep_or_free(one, one.nbytes)

    def _all_kept(self) -> list[_Entry | EarlierAnswers]:
        with self._lock:
            return [*self._entries, *self._answers.values()]

    def answers(self, model: StreamFusedModel) -> EarlierAnswers:
        """The earlier answers of models with the same key, which later ones may repeat. MLX thread.

        Args:
            model: whose answers they are.
        """
        key, _ = self._key_and_folder(model)
        with self._lock:
            return self._answers.setdefault(key, EarlierAnswers())

    @unless_forked
    def flush(self) -> None:
        """Write to the folder, if there is one, what is not there yet; it stays in memory.

        What cannot be written is logged, and not tried again. In a forked process this does
        nothing: the process that it was forked from writes.
        """
        with self._lock:
            entries = list(self._entries)
        for entry in entries:
            self._save(entry)

    def close(self) -> None:
        """Write to the folder what is not there yet, and drop all prompts and answers in memory.

        A pool that counts them is not updated. The cache is empty, and can still be used.
        """
        self.flush()
        with self._lock:
            self._entries = []
            self._answers = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _key_and_folder(self, model: StreamFusedModel) -> tuple[CacheKey, PromptFolder | None]:
        """The key of a model's prompts, and the folder that they are kept in, or None."""
        backbone = model.backbone
        folder = self._folder
        if folder is not None and backbone.group is None and backbone.capabilities.has("stages"):
            try:
                return CacheKey.in_files(model), folder
            # The model was changed on disk after it was loaded.
            except (InputError, OSError) as error:
                _log.warning("prompts are kept in memory only: %s", error)
        return CacheKey.of(model), None

    def _load(
        self, path: Path, model: StreamFusedModel, key: CacheKey, tokens: Tokens
    ) -> tuple[_Entry, int] | None:
        """Read a file of the folder as the newest entry, and how many of `tokens` that shares."""
        try:
            found, cache = read_prompt(path, model)
        except InputError as error:
            _log.warning("%s", error)
            with suppress(OSError):
                path.unlink()
            return None
        mark_used(path)
        entry = _Entry(key, found, cache, weakref.ref(self), is_written=True)
        self._add(entry)
        return entry, entry.shared(key, tokens)

    def _find(self, key: CacheKey, tokens: Sequence[int]) -> tuple[_Entry | None, int]:
        """The entry in memory that shares most with `tokens`, marked as used, and how many."""
        with self._lock:
            counts = [entry.shared(key, tokens) for entry in self._entries]
            if not any(counts):
                return None, 0
            count = max(counts)
            entry = self._entries.pop(counts.index(count))
            self._entries.append(entry)
        if self._pool is not None:
            self._pool.mark_used(entry)
        return entry, count

    def _add(self, entry: _Entry) -> None:
        """Add an entry as the newest; entries that it covers, or that no longer fit, leave."""
        limits = [self.max_bytes, self._pool.limit if self._pool else None]
        # Too large for memory: written to the folder at once.
        if any(limit is not None and entry.nbytes > limit for limit in limits):
            self._save(entry)
            return
        with self._lock:
            covered = [one for one in self._entries if entry.covers(one)]
            self._entries = [one for one in self._entries if not entry.covers(one)] + [entry]
            evicted = self._pop_excess()
        if self._pool is not None:
            for one in (*covered, *evicted):
                self._pool.forget(one)
            self._pool.keep_or_free(entry, entry.nbytes)
        for one in evicted:
            self._save(one)

    def _pop_excess(self) -> list[_Entry]:
        """Take out the longest unused entries; the caller holds the lock, and saves them."""
        evicted = []
        total = sum(one.nbytes for one in self._entries)
        while self.max_bytes is not None and total > self.max_bytes:
            evicted.append(self._entries.pop(0))
            total -= evicted[-1].nbytes
        return evicted

    def _leave_memory(self, entry: _Entry) -> None:
        with self._lock:
            if entry not in self._entries:
                return
            self._entries.remove(entry)
        self._save(entry)

    def _save(self, entry: _Entry) -> None:
        """Write an entry to the folder, unless that was done or tried before."""
        cache = entry.cache
        if self._folder is None or entry.is_written or not isinstance(cache, TreeCache):
            return
        entry.is_written = True
        try:
            self._folder.save(entry.key, entry.tokens, cache, run_on_mlx_thread)
        except OSError as error:
            _log.warning("a prompt could not be written to %s: %s", self._folder.path, error)
