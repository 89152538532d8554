"""Several answers at once: in turns, each with its drafts; or with a row each in plain calls.

Whichever of the two should bring more tokens is done (section 4 of 2404.19124), by what calls cost
on this machine and by how well each text is guessed (`ssmlx.policy`). An answer moves between its
calls, with its keys and values, and its tokens stay the same but for ties, for the noise that it
samples by belongs to a place in the text.

Nothing runs unless somebody reads: whoever asks for a token that is not there makes the call that
brings one to every row. A reader that falls behind leaves the batch until it has caught up.

Prompts take turns too, in pieces; the first piece of a new prompt goes before those of others. How
long a piece is, and when calls come before it, `prompt_pieces` says. A piece is processed by the
answer's own decoding loop, which shows it to the drafters that need to see prompts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import mlx.core as mx

from ..decoding.batch import Batch, Mask, Row
from ..decoding.step import Step, Steps, Take, take_all
from ..model.cache_key import CacheKey
from ..model.streams import StreamFusedModel
from ..model.text_cache import TextCache
from ..policy.costs import BATCH
from .learned import learned_of
from .memory import cache_size_of
from .plan import Plan, decode_plan
from .prompt_pieces import PieceSchedule

Fits = Callable[[int], bool]
"""Called with a number of bytes: whether there is memory for them."""


def always_fits(num_bytes: int) -> bool:
    """True: a `Fits` for where memory is not counted."""
    return True


STAY = 1.05
"""Factor by which the other mode has to be faster for answers to change: a change costs calls."""
TIMED_CALLS = 5
"""Calls for equally many texts, behind a first one, whose median teaches what such a call costs."""
READER_TRIES = 5
READER_SECONDS = 0.001
"""How often, and for how long, a prompt waits for the readers of answers whose turn it is."""


@dataclass(eq=False, kw_only=True)
class _OpenAnswer(Row):
    """An open answer: its row in a batch, its plan, and its own decoding loop."""

    plan: Plan
    group: _Group
    # of `decode_plan`, on the whole prompt; None once it decodes, and where it has joined a batch
    steps: Any = None
    on_prompt: Callable[[], None] | None = None  # called when `cache` holds the prompt

    @property
    def num_left(self) -> int:
        """Tokens of its prompt that are not processed yet; the last one is never counted."""
        return len(self.text) - 1 - self.cache.offset

    def close_own_loop(self) -> None:
        """End its own loop, if there is one; the cache stays as it is."""
        if self.steps is not None:
            self.steps.close()
            self.steps = None


class _Group:
    """The open answers of one model, and the batch that some of them have a row in.

    Attributes:
        batch: rows of answers that share calls.
        open: answers that decode, whose prompts are processed.
        is_batched: whether answers share calls; `update_is_batched` sets it.
    """

    def __init__(self, model: StreamFusedModel, fits: Fits = always_fits) -> None:
        """Begin a group of `model` without answers, whose batch has no rows.

        Args:
            model: the target of all its answers; what was learned for it is read.
            fits: whether there is memory for so many bytes.
        """
        self.batch = Batch(model)
        self._fits = fits
        self._token_bytes = cache_size_of(model).per_token
        self._learned, _ = learned_of(model)
        self.open: list[_OpenAnswer] = []
        self.is_batched = False
        self._seconds: list[float] = []  # of calls in a row for as many texts as the last
        self._num_texts = 0

    def update_is_batched(self) -> None:
        """Set `is_batched`: whether the answers that are read share calls from now on.

        In turns, each with its drafts, they bring the sum of their expected tokens in the sum of
        their costs; batched, a token each in what a call for so many texts costs. The faster mode
        is taken, the present one being favoured by `STAY`; never batched where fewer than two are
        read, the model cannot share calls, or there is no memory for the padding. No row is moved.
        """
        rows = [row for row in self.open if not row.is_paused]
        if len(rows) < 2 or not self.batch.shares_calls:
            self.is_batched = False
            return
        expected_calls = [row.plan.expected_fastest_call for row in rows]
        in_turns = sum(call.tokens for call in expected_calls) / sum(
            call.plain_calls for call in expected_calls
        )
        costs = self._learned.costs.frozen(self._mean_length(rows))
        batched = len(rows) / costs.calls((BATCH, len(rows)))
        is_faster = batched * (STAY if self.is_batched else 1 / STAY) >= in_turns
        self.is_batched = is_faster and self._has_memory_for_padding(rows)

    def _has_memory_for_padding(self, rows: Sequence[Row]) -> bool:
        """Whether there is memory for a batch of `rows`, each padded to the longest.

        What its padding takes now is not asked for again. What is kept for later answers may be
        dropped.
        """
        lengths = [len(row.text) for row in rows]
        padding = len(lengths) * max(lengths) - sum(lengths)
        more = padding * self._token_bytes - self.batch.padding_bytes
        return more <= 0 or self._fits(more)

    def make_and_time_call(self) -> float:
        """Make a call of the batch, learn from its seconds, and return them.

        It brings a token to every row of the batch. Where a reader has fallen behind, the mode is
        chosen anew.
        """
        members = self.batch.members
        started = time.perf_counter()
        self.batch.step_or_note_error()
        seconds = time.perf_counter() - started
        self._learn_cost_every_few_calls(members, seconds)
        if any(row.is_paused for row in members):
            self.update_is_batched()
        return seconds

    def _learn_cost_every_few_calls(self, members: Sequence[Row], seconds: float) -> None:
        """Add a call's seconds to those of calls for as many texts in a row.

        The first call for another number of texts is not counted, and forgets the others. When
        `TIMED_CALLS` are counted they are forgotten, and their median teaches what a call for so
        many texts costs, in plain calls, if plain calls were timed in this context. Nothing is
        learned of calls for a single text.

        Args:
            members: the rows of the call.
            seconds: that it took.
        """
        if len(members) != self._num_texts:
            self._num_texts = len(members)
            self._seconds = []
            return
        self._seconds.append(seconds)
        if len(self._seconds) < TIMED_CALLS or len(members) < 2:
            return
        context = self._mean_length(members)
        plain = self._learned.costs.plain_seconds(context)
        if plain is not None:
            cost = median(self._seconds) / plain
            self._learned.costs.learn_cost_and_return_change((BATCH, len(members)), context, cost)
            self._learned.keep()
        self._seconds = []

    @staticmethod
    def _mean_length(rows: Sequence[Row]) -> int:
        """Tokens of the rows' texts, in the mean, rounded down."""
        return sum(len(row.text) for row in rows) // len(rows)


class Batches:
    """Decodes the answers that are open at once. On the thread that runs MLX alone.

    Args:
        fits: called with the bytes that padding rows of a batch would take; whether there is
            memory for them.
    """

    def __init__(self, fits: Fits = always_fits) -> None:
        """Begin without answers; nothing is run."""
        self._fits = fits
        self._groups: dict[CacheKey, _Group] = {}
        self._prompts: deque[_OpenAnswer] = deque()
        self._schedule = PieceSchedule()

    @property
    def cache_bytes(self) -> int:
        """Bytes that rows of batches take beside what their texts would alone."""
        return sum(group.batch.padding_bytes for group in self._groups.values())

    def drop_idle(self) -> None:
        """Does nothing, as all belongs to running answers; see `pool.Shared`."""

    def decode(
        self,
        plan: Plan,
        model: StreamFusedModel,
        prompt: list[int],
        cache: TextCache,
        *,
        context: Sequence[int] = (),
        take: Take = take_all,
        mask: Mask | None = None,
        on_prompt: Callable[[], None] | None = None,
    ) -> Steps:
        """Decode an answer as `decode_plan` does, in turns or in calls shared with other answers.

        Nothing is done before the first tokens are asked for. Then it goes on without end, until
        the iterator is closed, which takes the answer out of the batch.

        Args:
            plan, model, prompt, cache, context, take: see `decode_plan`.
            mask: changes the logits of each token; such an answer is always batched, and never
                drafts.
            on_prompt: called when the cache holds the prompt but for its last token, before
                anything is decoded behind it; not where the prompt is one token.

        Yields:
            A step for each call; None between pieces of the prompt.

        Raises:
            RuntimeError: a call that it shared has failed; the cause is the call's error.
            Exception: what processing its prompt or `on_prompt` has raised.
        """
        cache.keep_first(cache.offset)
        key = CacheKey.of(model)
        text = [*context, *prompt]
        group = self._groups.get(key) or self._groups.setdefault(key, _Group(model, self._fits))
        row = _OpenAnswer(
            model,
            plan.sampling,
            cache,
            text,
            take,
            mask,
            len(text),
            plan=plan,
            group=group,
            on_prompt=on_prompt,
        )
        row.steps = decode_plan(
            plan if mask is None else replace(plan, drafters=()),
            model,
            prompt,
            cache,
            context=context,
            take=take,
            prefill_step_size=lambda: self._next_piece_length(row),
        )
        try:
            yield from self._process_prompt_in_turns(row)
            while True:
                # It may have joined a batch that is no longer wanted.
                yield from self._decode_batched(row)
                yield from self._decode_alone(row)
        finally:
            with suppress(ValueError):
                self._prompts.remove(row)
            row.close_own_loop()
            group.batch.remove_and_restore_cache(row)
            if row in group.open:
                group.open.remove(row)
                group.update_is_batched()

    def _process_prompt_in_turns(self, row: _OpenAnswer) -> Iterator[None]:
        """Have the prompt of `row` processed, in turns with other prompts and with calls.

        Its first piece goes before those of others. A turn processes the next piece in line, this
        prompt's or another's, or makes calls where these have to come first. Nothing is yielded for
        a prompt of one token, whose answer begins to decode at once.

        Yields:
            None before each turn and behind the last.

        Raises:
            Exception: what processing a piece of it has raised, in whichever answer's turn.
        """
        if not row.num_left:
            self._start_decoding(row)
            return
        self._prompts.appendleft(row)
        tries = READER_TRIES
        calls = self._schedule.num_calls
        while row in self._prompts:
            yield
            if row not in self._prompts:  # somebody else's turn has done the rest
                break
            if calls != self._schedule.num_calls:
                tries = READER_TRIES
                calls = self._schedule.num_calls
            if self._must_decode_first and self._make_batch_calls_or_wait(tries):
                tries -= 1
            else:
                self._process_next_piece_or_note_error()
                tries = READER_TRIES
        yield
        if row.error is not None and row not in row.group.open:
            raise row.error

    @property
    def _must_decode_first(self) -> bool:
        """Whether decoding calls have to come before the next piece of a prompt.

        True where a prompt waits, an answer decodes, and the schedule says so.
        """
        if not self._prompts or not self._is_decoding:
            return False
        return self._schedule.are_calls_first(self._next_piece_length(self._prompts[0]))

    @property
    def _is_decoding(self) -> bool:
        """Whether any answer has its prompt behind it."""
        return any(group.open for group in self._groups.values())

    def _make_batch_calls_or_wait(self, tries_left: int) -> bool:
        """Make a call for every batch that has rows; without one, let readers of other answers make
        theirs.

        Args:
            tries_left: how often readers are still waited for; below `READER_TRIES` it sleeps
                `READER_SECONDS` first, where there is no batch.

        Returns:
            Whether the prompt waits another turn; False where no call was made and no tries are
            left.
        """
        running = [group for group in self._groups.values() if group.batch.members]
        for group in running:
            self._schedule.record_call(group.make_and_time_call())
        if not running and tries_left < READER_TRIES:  # none came while others had the thread
            time.sleep(READER_SECONDS)
        return bool(running) or tries_left > 0

    def _next_piece_length(self, row: _OpenAnswer) -> int:
        """Tokens of a row's prompt that its next turn is to process."""
        is_alone = len(self._prompts) == 1 and not self._is_decoding
        step_size = row.plan.config.prefill_step_size
        return self._schedule.next_piece_length(row.num_left, step_size, is_alone=is_alone)

    def _process_next_piece_or_note_error(self) -> None:
        """Process a piece of the first prompt in line, which then goes to the end of the line.

        When it has no more, `on_prompt` is called and its answer begins to decode. An error, of
        either, is not raised: it is kept in `row.error` for the row's reader, and takes the prompt
        out of the line. The schedule is told what the piece took.
        """
        row = self._prompts[0]
        before = row.num_left
        started = time.perf_counter()
        try:
            while row.num_left == before:  # the loop stops once before its first piece
                next(row.steps)
            seconds = time.perf_counter() - started
            if not row.num_left and row.on_prompt is not None:
                row.on_prompt()
        except Exception as error:
            row.error = error
            return
        finally:
            self._prompts.popleft()
        self._schedule.record_piece(before - row.num_left, seconds)
        if row.num_left:
            self._prompts.append(row)
        else:
            self._start_decoding(row)
        self._schedule.owe_seconds(seconds, is_decoding=self._is_decoding)

    def _start_decoding(self, row: _OpenAnswer) -> None:
        """Count `row` among the answers that decode, and choose its group's mode anew.

        It joins the batch at once where answers share calls, or where it has a mask. Nothing is
        decoded.
        """
        row.group.open.append(row)
        row.group.update_is_batched()
        if row.group.is_batched or row.mask is not None:
            self._join_batch(row)

    @staticmethod
    def _join_batch(row: _OpenAnswer) -> None:
        """Have `row` join its group's batch, which takes its cache: its own loop ends."""
        row.close_own_loop()
        row.group.batch.queue_to_join(row)

    def _decode_batched(self, row: _OpenAnswer) -> Iterator[Step]:
        """Yield steps of a token each of `row`, by calls of its batch, as long as answers share
        calls.

        An answer with a mask never stops sharing. Where the row's next token is not there yet, it
        makes the batch's call itself, for all members, and before it the pieces of waiting prompts
        that are due. When answers stop sharing calls and all tokens are read, the row leaves the
        batch, even if nothing was yielded. Closed or failing, it leaves the row to `decode`.

        Args:
            row: joins the batch where it is not in it.

        Raises:
            RuntimeError: a call that it shared has failed.
        """
        group = row.group
        batch = row.group.batch
        while row.unread or row.error or row.mask or group.is_batched:
            while not row.unread:
                if row.error is not None:
                    raise RuntimeError("a call for several answers failed") from row.error
                if row not in batch.members:
                    self._join_batch(row)
                    group.update_is_batched()
                while self._prompts and not self._must_decode_first:
                    self._process_next_piece_or_note_error()
                self._schedule.record_call(group.make_and_time_call())
            yield row.unread.popleft()
        batch.remove_and_restore_cache(row)

    def _decode_alone(self, row: _OpenAnswer) -> Steps:
        """Yield a step for each call of `row` alone, with drafts, until answers share calls.

        Its own loop goes on, or a new one begins behind its text, if it was in a batch. In the end
        its cache holds all of its text but the last token, computed. The mode is chosen anew
        behind each call. The tokens are appended to `row.text`.

        Args:
            row: has no row in the batch.
        """
        steps: Any = row.steps or decode_plan(
            row.plan,
            row.model,
            row.text[-1:],
            row.cache,
            context=row.text[:-1],
            take=row.take,
        )
        row.steps = None
        with closing(steps):
            started = time.perf_counter()
            for step in steps:
                row.text += step.tokens if step is not None else ()
                self._schedule.record_call(time.perf_counter() - started)
                yield step
                row.group.update_is_batched()
                if row.group.is_batched:
                    break
                started = time.perf_counter()
        row.cache.keep_first(len(row.text) - 1)
        mx.eval(row.cache.state)
