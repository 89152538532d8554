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
"""Tokens of a row that its reader may leave unread before the row leaves the batch."""

Mask = Callable[[Sequence[int], mx.array], mx.array]
"""Maps the tokens of an answer so far, and logits [1, V], to the logits of its next token."""
Chosen = tuple[mx.array, mx.array | None]
"""A token [1], and what `Sampling.token_logprobs` gave for it."""


@dataclass(eq=False)
class Row:
    """An answer in a batch, until it ends or `MOST_UNREAD` of its steps are unread."""

    model: StreamFusedModel
    sampler: Sampling
    cache: TextCache  # empty while the row is in a batch that shares calls
    text: list[int]  # known tokens, read by the answer's reader or not
    take: Take = take_all
    mask: Mask | None = None
    first: int = 0  # index in `text` of the answer's first token
    unread: deque[Step] = field(default_factory=deque)  # what its reader has not taken yet
    position: int = 0  # of the token that the batch's next call decides after
    tail: mx.array | None = None  # [C] the last tokens before it

    def sync_cache(self) -> None:
        """Bring the cache to the text but its last token; waits for the device."""
        self.cache.keep_first(len(self.text) - 1)
        mx.eval(self.cache.state)

    def sample(
        self,
        token: mx.array,  # [1] the newest token
        logits: mx.array,  # [1, V] after it
    ) -> Chosen:
        """Decide the token after `token`, lazily; `tail` moves on by `token`."""
        sampler = self.sampler
        only = indices(1)
        assert self.tail is not None
        positions = row_positions(root_tree(token), mx.array([self.position], mx.int32), self.tail)
        if self.mask is not None:
            logits = self.mask(self.text[self.first :], logits)
        chosen = sample_on_rank0(self.model, logits, sampler, positions)
        chosen = resolve_row_on_rank0(self.model, chosen, logits, sampler, positions, only)
        self.tail = positions.tail_at(only)
        return chosen, sampler.token_logprobs(logits, positions, only, chosen)

    def kv_caches(self) -> list[KVCache]:
        """The committed keys and values by layer, as slices of the cache's buffers."""
        caches = [KVCache() for _ in range(self.model.num_layers)]
        if self.cache.offset:
            for layer, cache in enumerate(caches):
                cache.state = *self.cache.keys_and_values(layer), self.cache.offset
        return caches


class Batch:
    """Plain decoding of several texts by one model, with one call for a token of each.

    If the model cannot keep texts of different lengths apart, each text has calls of its own.
    """

    def __init__(self, model: StreamFusedModel) -> None:
        self._model = model
        self._joining: list[Row] = []
        self._clear()

    def _clear(self) -> None:
        self._rows: list[Row] = []
        self._caches: list[BatchKVCache] = []
        self._newest = indices(0)  # [b] the newest token of each row
        # what is under way: the rows, None for those that have left, and their tokens
        self._calls: deque[tuple[list[Row | None], mx.array, list[mx.array | None]]] = deque()

    @property
    def shares_calls(self) -> bool:
        """Whether a call has a row for each text; otherwise each text has its own calls and
        cache."""
        return self._model.backbone.capabilities.has("batches")

    @property
    def members(self) -> list[Row]:
        """Rows of the next call, joining ones included."""
        return self._rows + self._joining

    @property
    def padding_bytes(self) -> int:
        """Bytes, about, of padding in the shared caches, whose rows are as long as the longest."""
        keys = self._caches[0].keys if self._caches else None
        if keys is None or not self._rows:
            return 0
        length = keys.shape[2]
        # They grow by `BatchKVCache.step` tokens at once; room for one step counts as filled.
        filled = sum(min(length, len(row.text) + BatchKVCache.step) for row in self._rows)
        num_bytes = sum(one.nbytes for one in self._caches)
        return int(num_bytes * (1 - filled / (length * len(self._rows))))

    def add(self, row: Row) -> None:
        """Give an answer, whose cache lacks its last token, a row from the next `step` on."""
        row.position = len(row.text) - 1
        row.tail = last_tokens(row.text[:-1], row.sampler.context_size)
        self._joining.append(row)

    def remove(self, row: Row) -> None:
        """Take an answer out; its cache holds all but the last token again. Waits."""
        # A row that is still joining has not given its cache away.
        if row in self._joining:
            self._joining.remove(row)
        if row not in self._rows:
            return
        number = self._rows.index(row)
        if self.shares_calls:
            found = [cache.extract(number) for cache in self._caches]
            own = TreeCache.of_rows([join_key_values(one.keys, one.values) for one in found])
            row.cache.restore(own)
        row.sync_cache()
        self._rows.remove(row)
        if not self._rows:
            self._clear()
            return
        # Its tokens of calls under way are dropped.
        for rows, *_ in self._calls:
            rows[:] = [None if one is row else one for one in rows]
        keep = [n for n in range(len(self._rows) + 1) if n != number]
        self._newest = self._newest[mx.array(keep)]
        for cache in self._caches:
            cache.filter(keep)

    def step(self) -> list[Row]:
        """Admit joining rows, and read the next token of every row; returns the rows that left.

        A row leaves when its answer is over, or `MOST_UNREAD` of its steps are unread. If a call
        fails, the batch is empty.
        """
        try:
            return self._step()
        except Exception:
            self._joining = []
            self._clear()
            raise

    def _step(self) -> list[Row]:
        """Do what `step` does; if nothing has to wait, a call runs while the last is read."""
        # A first token is waited for, and a mask has to know the tokens before it.
        waits = bool(self._joining) or any(row.mask for row in self._rows) or not self.shares_calls
        self._admit()
        if waits or not self._calls:
            self._launch()
        if not waits:
            self._launch()  # to run while the tokens of the one before are read
        gone: list[Row] = []
        while len(self._calls) > (0 if waits else 1):
            gone += self._read()
        return gone

    def _admit(self) -> None:
        rows = self._joining
        if not rows:
            return
        if self.shares_calls:
            # Their keys and values move into the shared caches; their own caches are empty then.
            layers = zip(*(row.kv_caches() for row in rows), strict=True)
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

    def _launch(self) -> None:
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
            chosen = [row.sample(*pair) for row, pair in zip(rows, pairs, strict=True)]
            self._newest = mx.concatenate([token for token, _ in chosen])
            logprobs = [one for _, one in chosen]
        mx.async_eval(self._newest, [one for one in logprobs if one is not None])
        for row in rows:
            row.position += 1
        self._calls.append(([*rows], self._newest, logprobs))

    def _read(self) -> list[Row]:
        """Wait for the oldest call, and return the rows that left, see `step`."""
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
            self.remove(row)
        return gone
