"""Plain decoding of several texts at once: a call has a row for each, in mlx-lm's batched caches.

Texts join and leave between calls with their keys and values, and each is decided as it would be
alone: by its own settings, and noise that belongs to a position in the text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from ..model.cache import TreeCache
from ..model.layer_state import join_key_values
from ..model.shapes import indices, to_list
from ..model.streams import StreamFusedModel
from ..model.text_cache import TextCache
from ..model.tree import root_tree
from .call import resolve_row_on_rank0, sample_on_rank0
from .sampling import Sampling, last_tokens, read_logprobs, row_positions
from .step import Step, Take, take_all

MOST_UNREAD = 32
"""Tokens that a reader may be behind its row."""

Mask = Callable[[Sequence[int], mx.array], mx.array]
"""The tokens of an answer so far, and logits [1, V], to the logits that its next one is of."""
Chosen = tuple[mx.array, mx.array | None]
"""A token [1], and what `Sampling.token_logprobs_or_none` has of it."""


@dataclass(eq=False)
class Row:
    """An answer that a batch decodes, endlessly; `unread` holds what its reader has not taken
    yet."""

    model: StreamFusedModel
    sampler: Sampling
    cache: TextCache  # empty while it is in a batch that shares calls
    text: list[int]  # that is known, tokens that were not read yet among it
    take: Take = take_all
    mask: Mask | None = None
    first: int = 0  # where in `text` the answer begins
    unread: deque[Step] = field(default_factory=deque)
    position: int = 0  # of the token that the next call of a batch decides behind
    tail: mx.array | None = None  # [C] the last tokens before it

    def compute_cache_without_last_token(self) -> None:
        """Have its cache hold its text but the last token, computed; waits for the device."""
        self.cache.keep_first(len(self.text) - 1)
        mx.eval(self.cache.state)

    def sample_masked_and_move_tail(self, token: mx.array, logits: mx.array) -> Chosen:
        """Decide the token after `token`, by the row's own settings, mask and noise.

        Changes `tail`, whose last token is `token` then, and nothing else.

        Args:
            token: [1] the row's newest token.
            logits: [1, V] of the target after it.

        Returns:
            The next token [1], and what `Sampling.token_logprobs_or_none` has of it: None where the
            settings ask for no log probabilities. Both lazy.
        """
        sampler = self.sampler
        only = indices(1)
        assert self.tail is not None
        positions = row_positions(root_tree(token), mx.array([self.position], mx.int32), self.tail)
        if self.mask is not None:
            logits = self.mask(self.text[self.first :], logits)
        chosen = sample_on_rank0(self.model, logits, sampler, positions)
        chosen = resolve_row_on_rank0(self.model, chosen, logits, sampler, positions, only)
        self.tail = positions.tail_at(only)
        return chosen, sampler.token_logprobs_or_none(logits, positions, only, chosen)

    def committed_rows_as_kv_caches(self) -> list[KVCache]:
        """The row's committed keys and values, as one of mlx-lm's caches for each layer.

        They hold slices of its cache's buffers. Empty caches where no token is committed, as of a
        text of one token.
        """
        caches = [KVCache() for _ in range(self.model.num_layers)]
        if self.cache.offset:
            for layer, cache in enumerate(caches):
                cache.state = *self.cache.keys_and_values(layer), self.cache.offset
        return caches


class Batch:
    """Plain decoding of several texts by one model, with one call for a token of each.

    Where the model cannot keep texts of different lengths apart, each text has calls of its own.
    """

    def __init__(self, model: StreamFusedModel) -> None:
        self._model = model
        self._joining: list[Row] = []
        self._forget_rows_and_calls()

    def _forget_rows_and_calls(self) -> None:
        """Forget all rows, their caches and the calls under way."""
        self._rows: list[Row] = []
        self._caches: list[BatchKVCache] = []
        self._newest = indices(0)  # [b] the newest token of each row
        # what is under way: the rows, None for those that have left, and their tokens
        self._calls: deque[tuple[list[Row | None], mx.array, list[mx.array | None]]] = deque()

    @property
    def shares_calls(self) -> bool:
        """Whether one call has a row for each text; else each text has calls and a cache of its
        own.
        """
        return self._model.backbone.capabilities.has("batches")

    @property
    def members(self) -> list[Row]:
        """The answers that the next call has a row for, those that are joining among them."""
        return self._rows + self._joining

    @property
    def padding_bytes(self) -> int:
        """About how many bytes padding takes in the shared caches.

        All rows of these are as long as the longest text, and grow by `BatchKVCache.step` tokens at
        once; room for one such step counts as filled. 0 without rows, or where calls are not
        shared.
        """
        keys = self._caches[0].keys if self._caches else None
        if keys is None or not self._rows:
            return 0
        length = keys.shape[2]
        filled = sum(min(length, len(row.text) + BatchKVCache.step) for row in self._rows)
        num_bytes = sum(one.nbytes for one in self._caches)
        return int(num_bytes * (1 - filled / (length * len(self._rows))))

    def queue_to_join(self, row: Row) -> None:
        """Give an answer a row in the calls to come, from the next `step` on.

        Its cache must hold its text but the last token. Sets the row's `position` and `tail` by its
        text.
        """
        row.position = len(row.text) - 1
        row.tail = last_tokens(row.text[:-1], row.sampler.context_size)
        self._joining.append(row)

    def remove_and_restore_cache(self, row: Row) -> None:
        """Take an answer out of the batch; its cache holds its text but the last token again.

        Its tokens of calls under way are dropped; waits for the device. An answer that is still
        joining has not given its cache away, and only stops joining. Does nothing for an answer
        that is not in the batch.
        """
        if row in self._joining:
            self._joining.remove(row)
        if row not in self._rows:
            return
        number = self._rows.index(row)
        if self.shares_calls:
            found = [cache.extract(number) for cache in self._caches]
            own = TreeCache.of_rows([join_key_values(one.keys, one.values) for one in found])
            row.cache.restore(own)
        row.compute_cache_without_last_token()
        self._rows.remove(row)
        if not self._rows:
            self._forget_rows_and_calls()
            return
        for rows, *_ in self._calls:
            rows[:] = [None if one is row else one for one in rows]
        keep = [n for n in range(len(self._rows) + 1) if n != number]
        self._newest = self._newest[mx.array(keep)]
        for cache in self._caches:
            cache.filter(keep)

    def step(self) -> list[Row]:
        """Admit rows that are joining, and read the next token of every row into its `unread`.

        One answer or more must have a row or be joining. Two tokens are read where a call was still
        under way when a row joined.

        Returns:
            The rows that have left the batch: those that are over, or whose reader is `MOST_UNREAD`
            tokens behind.

        Raises:
            Exception: what a call has raised; the batch is empty then.
        """
        try:
            return self._launch_and_read_calls()
        except Exception:
            self._joining = []
            self._forget_rows_and_calls()
            raise

    def _launch_and_read_calls(self) -> list[Row]:
        """Admit those that join, launch calls, and read the oldest; see `step`.

        Mostly a call runs while the one before it is read. Where a text has just joined, a row has
        a mask, or calls are not shared, each call is read at once.
        """
        # A first token is waited for, and a mask has to know the tokens before it.
        waits = bool(self._joining) or any(row.mask for row in self._rows) or not self.shares_calls
        self._admit_joining_rows()
        if waits or not self._calls:
            self._launch_next_call()
        if not waits:
            self._launch_next_call()  # to run while the tokens of the one before are read
        gone: list[Row] = []
        while len(self._calls) > (0 if waits else 1):
            gone += self._read_oldest_call()
        return gone

    def _admit_joining_rows(self) -> None:
        """Make rows of the answers that are joining.

        Where calls are shared, their keys and values are moved into the shared caches, and their
        own caches are empty then. Does nothing where none is joining.
        """
        rows = self._joining
        if not rows:
            return
        if self.shares_calls:
            layers = zip(*(row.committed_rows_as_kv_caches() for row in rows), strict=True)
            merged = [BatchKVCache.merge(list(layer)) for layer in layers]
            for row in rows:
                row.cache.restore(TreeCache(row.model.num_layers))
            for cache, more in zip(self._caches, merged, strict=False):
                cache.extend(more)
            self._caches = self._caches or merged
        newest = mx.array([row.text[-1] for row in rows], mx.int32)
        self._newest = mx.concatenate([self._newest, newest])
        self._rows = self.members
        self._joining = []

    def _launch_next_call(self) -> None:
        """Build the next call of all rows, decide its tokens, and start computing them.

        Where calls are not shared, each row has a call of its own. The rows' newest tokens are the
        decided ones then, the rows' `position` is one further on, and the call is under way.
        """
        rows = self._rows
        newest = self._newest
        backbone = self._model.backbone
        if self.shares_calls:
            logits = backbone.model(newest[:, None], cache=self._caches)[:, -1]
        else:
            calls = zip(mx.split(newest, len(rows)), rows, strict=True)
            own = [backbone.append(token, row.cache) for token, row in calls]
            logits = mx.concatenate([one.logits for one in own])
        logprobs: list[mx.array | None] = [None] * len(rows)
        if all(row.sampler.is_argmax and row.mask is None for row in rows):
            self._newest = mx.argmax(logits, axis=-1).astype(mx.int32)
        else:
            pairs = zip(mx.split(newest, len(rows)), mx.split(logits, len(rows)), strict=True)
            chosen = [
                row.sample_masked_and_move_tail(*pair)
                for row, pair in zip(rows, pairs, strict=True)
            ]
            self._newest = mx.concatenate([token for token, _ in chosen])
            logprobs = [one for _, one in chosen]
        mx.async_eval(self._newest, [one for one in logprobs if one is not None])
        for row in rows:
            row.position += 1
        self._calls.append(([*rows], self._newest, logprobs))

    def _read_oldest_call(self) -> list[Row]:
        """Wait for the oldest call; add each row's token to its text, and a step to its `unread`.

        Rows that have left the batch since the launch get nothing.

        Returns:
            Rows whose answer is over, or whose reader is `MOST_UNREAD` tokens behind: they have
            left the batch.
        """
        rows, tokens, logprob_rows = self._calls.popleft()
        gone: list[Row] = []
        for row, token, row_logprobs in zip(rows, to_list(tokens), logprob_rows, strict=True):
            if row is None:
                continue
            logprobs = None if row_logprobs is None else read_logprobs([token], row_logprobs)
            row.text.append(token)
            part = row.take([token])
            row.unread.append(Step((token,), part, logprobs))
            if part.is_last or len(row.unread) >= MOST_UNREAD:
                gone.append(row)
        for row in gone:
            self.remove_and_restore_cache(row)
        return gone
