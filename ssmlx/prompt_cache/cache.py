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
from ..mlx_thread import is_forked, run_on_mlx_thread
from ..model.cache import TreeCache
from ..model.streams import StreamFusedModel
from ..model.text_cache import TextCache
from ..prompts import common_prefix_length
from .prompt_files import PromptFolder, Tokens, mark_used, read_prompt

_log = logging.getLogger("ssmlx")


@dataclass(eq=False)
class _Entry:
    """A prompt's keys and values in memory; the cache is never written into, only forked.

    Attributes:
        key: of the model that computed them.
        tokens: the prompt.
        cache: holds these tokens.
        owner: the prompt cache that it is in, by a weak reference.
        is_written: to the folder, or need not be.
        nbytes: bytes of the cache.
    """

    key: CacheKey
    tokens: Tokens
    cache: TextCache
    owner: weakref.ref[PromptCache]
    is_written: bool = False

    def __post_init__(self) -> None:
        self.nbytes = self.cache.nbytes

    def free_memory(self) -> None:
        """Leave the memory, for the owner's folder if it has one; see `pool.Kept`."""
        owner = self.owner()
        if owner is not None:
            owner._move_to_folder(self)

    def shared(self, key: CacheKey, tokens: Sequence[int]) -> int:
        """How many tokens of the beginning of `tokens` a fork of it can hold; 0 under another key.

        They are all that both have in common, but where recurrent states or windows can go back to
        certain places alone.
        """
        if key != self.key:
            return 0
        return self.cache.longest_keepable(common_prefix_length(self.tokens, tokens))

    def covers(self, other: _Entry) -> bool:
        """Whether it begins with all of another entry's tokens, under the same key."""
        return self.shared(other.key, other.tokens) == len(other.tokens)


def place_to_keep_for_next_turn(
    prompts: PromptCache | None,
    model: StreamFusedModel,
    prompt: Sequence[int],
    cache: TextCache,
    length: int | Callable[[], int],
    *,
    copies: bool = False,
) -> PromptPlace | None:
    """Make the place of a prompt that a later one can begin with, whatever follows it in this text.

    Nothing is kept yet. When the prompt is processed up to there, `cache` marks the place, if it
    has to, and forgets other marks, so that copies of it can go back there too. Where a layer keeps
    a window, the cache cannot come back, and a copy goes to `prompts` instead. Nothing is done
    where `cache` holds more than `length` tokens from the beginning.

    Args:
        prompts: where copies go; None for nowhere.
        model: which the cache is of.
        prompt: tokens of the whole prompt.
        cache: which the prompt is processed into.
        length: tokens of the prompt before the place; or a function that finds them, which is asked
            only where `cache` cannot go back to any place: else they are all but the last.
        copies: whether a copy goes to `prompts` in any case, for others that run meanwhile.

    Returns:
        The place; None where `cache` can go back to any, and no copy is wanted.
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
    """Keys and values of prompts, for whoever's prompt begins with the same tokens.

    Any number of models share one, of any adapter: each finds what it would have computed itself.
    That is told by all bytes of the weights where there is a `folder`: they are read once, which is
    remembered (docs/decisions.md says how long that takes), and by the stamps of their files where
    there is none. A model whose weights were changed in memory needs a new `Backbone`.

    An answer from it is that of a prompt processed anew, token for token, but for near ties in
    less than float32. Any thread may call it.

    Args:
        max_bytes: of the prompts in memory, buffers with their free room counted whole. The
            longest unused goes first. None for no bound but that of the engine that it serves, of
            several the first that is not closed.
            The latest answers of each model are beside them, in 8 MB at most.
        folder: where prompts are kept that other processes may use too, in files that their
            owner alone can read; None for memory alone. Prompts are written when they leave the
            memory, and by `flush` and `close`; a killed process loses the others. Not those of
            models that are split over machines, which have to find the same on all of them, or
            that are called as a whole, whose caches have no rows of tokens.
        max_disk_bytes: of the files there; the longest unused go first.
    """

    def __init__(
        self,
        max_bytes: int | None = 2**30,
        folder: str | Path | None = None,
        max_disk_bytes: int = 2**32,
    ) -> None:
        """Begin with nothing in memory; `folder` is neither made nor read yet."""
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
        """Prompts in memory."""
        return len(self._entries)

    def take(
        self, model: StreamFusedModel, tokens: Sequence[int], scratch: int = 0
    ) -> tuple[TextCache, int]:
        """Find the prompt that shares most with `tokens`, in memory or in the folder.

        It is then the latest used. A file is read into the memory first; one that is damaged or
        does not fit the model is deleted.

        Args:
            model: the cache is for it.
            tokens: the prompt; its last token is always left to process.
            scratch: rows that calls may have; an empty cache gets room for them.

        Returns:
            A cache of the caller's own, which may be changed, and how many of `tokens` it holds.
            An empty one, and 0, where nothing is known.
        """
        return run_on_mlx_thread(
            lambda: self._take_on_mlx_thread(model, tuple(tokens[:-1]), scratch)
        )

    def put(self, model: StreamFusedModel, tokens: Sequence[int], cache: TextCache) -> None:
        """Keep a copy of what `cache` holds of `tokens`, with which it begins.

        Nothing is added where an entry begins with these tokens already. Of a model without
        stages as many tokens are kept as its cache can go back to, and only in memory; where it
        keeps states or windows, an entry serves prompts alone that begin with all of it, or with it
        up to a marked place, and shorter entries stay beside longer ones. Otherwise entries that
        the new one begins with are dropped. The longest unused leave the memory where there are
        more than `max_bytes`.

        Args:
            model: which the cache is of.
            tokens: the prompt, or its beginning.
            cache: what the model computed of `tokens`; it may hold more of a text behind them.
        """
        run_on_mlx_thread(lambda: self._put_on_mlx_thread(model, tuple(tokens), cache))

    def identify(self, model: StreamFusedModel) -> None:
        """Find out now by what prompts of a model are told from others', so that its first answer
        need not wait for that.

        Reads all its weights once, where there is a folder.

        Args:
            model: with any adapter, or without.
        """
        self._key_and_folder(model)

    def count_in(self, pool: MemoryPool) -> None:
        """Count what is kept in `pool`, until `count_out`.

        Where it counts in another pool already, it counts in this one when that is left.

        Args:
            pool: of an engine whose answers begin with these prompts.
        """

        def count_on_mlx_thread() -> None:
            """Add the pool, unless it is there already; if it is the only one, count in it all that
            is kept, by which it may drop some. On the MLX thread.
            """
            if pool not in self._pools:
                self._pools.append(pool)
                if pool is self._pool:
                    self._count_all(pool)

        run_on_mlx_thread(count_on_mlx_thread)

    def count_out(self, pool: MemoryPool) -> None:
        """Count nothing in `pool` any more, but in the next that `count_in` was called with.

        Args:
            pool: as `count_in` took it; nothing changes for another one.
        """

        def count_out_on_mlx_thread() -> None:
            """Take the pool out; if it was the first, it forgets all that is kept here, and the
            next pool, if any, counts it. On the MLX thread."""
            if pool not in self._pools:
                return
            was_first = pool is self._pool
            self._pools.remove(pool)
            if was_first:
                for one in self._all_kept():
                    pool.forget(one)
                if self._pool is not None:
                    self._count_all(self._pool)

        run_on_mlx_thread(count_out_on_mlx_thread)

    @property
    def _pool(self) -> MemoryPool | None:
        """The pool that it counts in, if any. On the MLX thread."""
        return self._pools[0] if self._pools else None

    def _count_all(self, pool: MemoryPool) -> None:
        """Count all that is kept in `pool`, which drops what does not fit. On the MLX thread."""
        for one in self._all_kept():
            pool.keep_or_free(one, one.nbytes)

    def _all_kept(self) -> list[_Entry | EarlierAnswers]:
        """The prompts, the longest unused first, and the answers that are in memory."""
        with self._lock:
            return [*self._entries, *self._answers.values()]

    def answers(self, model: StreamFusedModel) -> EarlierAnswers:
        """The earlier answers of models with the same key, which later ones may repeat.

        Made where there are none. On the MLX thread.

        Args:
            model: whose answers they are.
        """
        key, _ = self._key_and_folder(model)
        with self._lock:
            return self._answers.setdefault(key, EarlierAnswers())

    def flush(self) -> None:
        """Write to the folder, if there is one, what is not there yet; it stays in memory.

        What cannot be written is logged, and not tried again. In a forked process this does
        nothing: the process that it was forked from writes.
        """
        if is_forked():
            return
        with self._lock:
            entries = list(self._entries)
        for entry in entries:
            self._write_to_folder_once(entry)

    def close(self) -> None:
        """Write to the folder what is not there yet, and drop all prompts and answers in memory.

        A pool that counts them is not told. The cache can still be used, and is empty.
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
        """The key of a model's prompts here, and the folder where they are kept; None for memory
        alone, as of a model that is split over machines, is called as a whole, or was changed on
        disk after it was loaded.
        """
        backbone = model.backbone
        folder = self._folder
        if folder is not None and backbone.group is None and backbone.capabilities.has("stages"):
            try:
                return CacheKey.in_files(model), folder
            except (InputError, OSError) as error:
                _log.warning("prompts are kept in memory alone: %s", error)
        return CacheKey.of(model), None

    def _take_on_mlx_thread(
        self, model: StreamFusedModel, tokens: Tokens, scratch: int
    ) -> tuple[TextCache, int]:
        """`take` on the MLX thread: a cache of the caller's own, and how many of `tokens` it holds.

        The cache is a computed copy. A file of the folder that shares more with `tokens` than what
        is in memory is read into memory first. Where nothing shares any, the cache is empty.

        Args:
            model: the cache is for it.
            tokens: the prompt without its last one.
            scratch: rows that an empty cache gets room for.
        """
        key, folder = self._key_and_folder(model)
        entry, count = self._use_longest_match(key, tokens)
        if folder is not None:
            path, in_file = folder.find_longest_match(key, tokens)
            if path is not None and in_file > count:
                entry, count = self._read_file_or_delete(path, model, key, tokens) or (entry, count)
        if entry is None:
            return model.make_cache(scratch), 0
        cache = entry.cache.fork(count)
        mx.eval(cache.state)
        return cache, count

    def _read_file_or_delete(
        self, path: Path, model: StreamFusedModel, key: CacheKey, tokens: Tokens
    ) -> tuple[_Entry, int] | None:
        """Read a file of the folder into the memory, as its newest prompt, and mark the file as
        used.

        A file that is damaged, or does not fit the model, is logged and deleted. A prompt that is
        too large for the memory is returned, but not kept there.

        Args:
            path: the file.
            model, key: that the cache is for.
            tokens: a prompt.

        Returns:
            The new entry, and how many of `tokens` it begins with; None where the file is deleted.
        """
        try:
            found, cache = read_prompt(path, model)
        except InputError as error:
            _log.warning("%s", error)
            with suppress(OSError):
                path.unlink()
            return None
        mark_used(path)
        entry = _Entry(key, found, cache, weakref.ref(self), is_written=True)
        self._add_and_evict(entry)
        return entry, entry.shared(key, tokens)

    def _put_on_mlx_thread(self, model: StreamFusedModel, tokens: Tokens, cache: TextCache) -> None:
        """`put` on the MLX thread: keep a computed copy of what `cache` holds of `tokens`.

        Nothing is kept of an empty cache, or where an entry begins with all of it already, which is
        the latest used then. The earlier answers of the model's key are counted anew in the pool in
        any case.
        """
        key, folder = self._key_and_folder(model)
        with self._lock:
            answers = self._answers.get(key)
        if self._pool is not None and answers is not None:
            self._pool.keep_or_free(answers, answers.nbytes)
        tokens = tokens[: cache.longest_keepable(min(len(tokens), cache.offset))]
        _, count = self._use_longest_match(key, tokens)
        if tokens and count < len(tokens):
            fork = cache.fork(len(tokens))
            mx.eval(fork.state)
            entry = _Entry(key, tokens, fork, weakref.ref(self), is_written=folder is None)
            self._add_and_evict(entry)

    def _use_longest_match(self, key: CacheKey, tokens: Sequence[int]) -> tuple[_Entry | None, int]:
        """The entry in memory that shares most with the beginning of `tokens`, and how many these
        are.

        It is the latest used then, in the pool too. None and 0 where no entry shares any.
        """
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

    def _add_and_evict(self, entry: _Entry) -> None:
        """Add an entry as the newest, and drop those whose tokens and key it covers.

        The longest unused that no longer fit into `max_bytes` leave the memory, and are written to
        the folder; the pool may have more leave. An entry that alone is larger than either bound is
        written to the folder at once, and not kept.
        """
        limits = [self.max_bytes, self._pool.limit if self._pool else None]
        if any(limit is not None and entry.nbytes > limit for limit in limits):
            self._write_to_folder_once(entry)
            return
        with self._lock:
            covered = [one for one in self._entries if entry.covers(one)]
            self._entries = [one for one in self._entries if not entry.covers(one)] + [entry]
            evicted = self._pop_above_limit()
        if self._pool is not None:
            for one in (*covered, *evicted):
                self._pool.forget(one)
            self._pool.keep_or_free(entry, entry.nbytes)
        for one in evicted:
            self._write_to_folder_once(one)

    def _pop_above_limit(self) -> list[_Entry]:
        """Take out and return the longest unused entries, until the others fit into `max_bytes`.

        The caller holds the lock, and saves them.
        """
        evicted = []
        total = sum(one.nbytes for one in self._entries)
        while self.max_bytes is not None and total > self.max_bytes:
            evicted.append(self._entries.pop(0))
            total -= evicted[-1].nbytes
        return evicted

    def _move_to_folder(self, entry: _Entry) -> None:
        """Take an entry out of the memory, and write it to the folder; nothing where it is not
        there."""
        with self._lock:
            if entry not in self._entries:
                return
            self._entries.remove(entry)
        self._write_to_folder_once(entry)

    def _write_to_folder_once(self, entry: _Entry) -> None:
        """Write an entry to the folder, if there is one, unless that was done or tried before.

        An entry counts as written even if this fails; errors of the file system are logged.
        """
        cache = entry.cache
        if self._folder is None or entry.is_written or not isinstance(cache, TreeCache):
            return
        entry.is_written = True
        try:
            self._folder.write_if_new(entry.key, entry.tokens, cache, run_on_mlx_thread)
        except OSError as error:
            _log.warning("a prompt is not kept in %s: %s", self._folder.path, error)
