"""Several answers at once: in turns, each with its drafts; or with a row each in plain calls.

The way that should bring more tokens is taken (section 4 of 2404.19124), by what calls cost on this
machine and by how well each text is guessed. An answer moves between its calls, with its keys and
values; its tokens stay the same but for ties, for sampling noise belongs to a text position.

Nothing runs unless a reader asks. A reader that finds no token takes turns until there is one, see
`Batches._take_turn`; a turn's tokens, and its error, go to the answers that they belong to.

While answers decode, prompts get half of the time (`prompt_pieces`). If calls come first, a waiting
prompt's reader makes them: for all batches, and for each answer alone whose reader has taken all
there was, so at most one call ahead. The prompt that has waited longest is next, but a first piece
goes before the others every second time: so a short question is soon answered, and a long prompt
goes on however many come after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from statistics import median

from ..decoding.batch import Batch, Mask, Row
from ..decoding.loop import PromptPlace
from ..decoding.step import Steps, Take, take_all
from ..loading.identity import CacheKey
from ..model.streams import StreamFusedModel
from ..model.text_cache import TextCache
from ..policy.controller import ExpectedCall
from ..policy.costs import BATCH
from .learned import learned_of
from .memory import cache_size_of
from .plan import Plan, decode_plan
from .prompt_pieces import PieceSchedule

Fits = Callable[[int], bool]
"""Called with a number of bytes: whether there is memory for them."""


def always_fits(num_bytes: int) -> bool:
    """A `Fits` for when memory is not counted."""
    return True


STAY = 1.05
"""Factor by which the other mode has to be faster for answers to change: a change costs calls."""
TIMED_CALLS = 5
"""Calls for equally many texts, after a first one, whose median teaches what such a call costs."""
READER_SECONDS = 0.005
"""How long a prompt waits for a reader that has just taken a step: the longest that a reader
usually needs to ask again."""


def is_sharing_faster(
    expected_calls: Sequence[ExpectedCall],  # of each answer, when it has calls of its own
    shared_cost: float,  # of one call for all of them, in plain calls
    *,
    is_shared_now: bool,
) -> bool:
    """Whether answers should share calls, each with a row, rather than take turns."""
    # In turns: the sum of their expected tokens in the sum of their costs. Shared: a token each.
    in_turns = sum(call.tokens for call in expected_calls) / sum(
        call.plain_calls for call in expected_calls
    )
    shared = len(expected_calls) / shared_cost
    return shared >= in_turns * (1 / STAY if is_shared_now else STAY)


class Status(Enum):
    """The state of an open answer.

    From     To       When
    NEW      WAITING  it is first read
             ALONE    the same, if at most one token of its prompt is left
    WAITING  ALONE    its prompt is processed
    ALONE    BATCHED  its group shares calls, or it has a mask
             PAUSED   its group shares calls, and its reader stays away
    BATCHED  ALONE    its group shares no calls any more, and its steps are read
             PAUSED   it has ended, or `MOST_UNREAD` of its steps are unread
    PAUSED   ALONE    its reader asks for more
    any      FAILED   an error
             OVER     its generator is closed, or has raised the error
    """

    NEW = auto()  # not read yet
    WAITING = auto()  # in line, a piece of its prompt at a time
    ALONE = auto()  # calls of its own loop, with drafts
    BATCHED = auto()  # calls of its group's batch
    PAUSED = auto()  # no calls; its reader reads what there is
    FAILED = auto()  # its reader reads what there is, then gets the error
    OVER = auto()


@dataclass(eq=False, kw_only=True)
class _OpenAnswer(Row):
    """An open answer: its status, its row in a batch, its plan, and its own decoding loop."""

    plan: Plan
    group: _Group
    status: Status = Status.NEW
    had_piece: bool = False  # whether a piece of its prompt was processed, or begun
    # of `decode_plan`: on the whole prompt, or after the text if it was in a batch; None in a
    # batch, and after that until it makes a call alone
    steps: Steps | None = None
    error: Exception | None = None  # for its reader, once it has failed
    num_missed_calls: int = 0  # of its group's batch, while its reader has not taken a step
    read_at: float = 0.0  # when its reader took a step, of `time.perf_counter`

    @property
    def num_prompt_tokens_left(self) -> int:
        """Tokens of its prompt that are not processed yet, but for the last one."""
        return len(self.text) - 1 - self.cache.offset

    @property
    def is_decoding(self) -> bool:
        """Whether calls bring it tokens now."""
        return self.status in (Status.ALONE, Status.BATCHED)

    def end_own_loop(self) -> None:
        """End its own loop, if there is one; nothing is done to its cache."""
        if self.steps is not None:
            self.steps.close()
            self.steps = None


class _Group:
    """The answers of one model whose prompts are processed, and the batch of some of them."""

    def __init__(self, model: StreamFusedModel, fits: Fits = always_fits) -> None:
        # Rows that are BATCHED. They share calls, if the model can; a masked answer of a model that
        # cannot has calls and a cache of its own.
        self.batch = Batch(model)
        self._fits = fits
        self._token_bytes = cache_size_of(model).per_token
        self._learned, _ = learned_of(model)
        # Those that are ALONE, BATCHED or PAUSED.
        self.answers: list[_OpenAnswer] = []
        self.is_batched = False
        self._seconds: list[float] = []  # of calls in a row for as many texts as the last
        self._num_texts = 0

    def with_status(self, status: Status) -> list[_OpenAnswer]:
        return [row for row in self.answers if row.status is status]

    def update_is_batched(self) -> None:
        """Set whether the answers that are read share calls from now on. No row is moved."""
        rows = [row for row in self.answers if row.is_decoding]
        if len(rows) < 2 or not self.batch.shares_calls:
            self.is_batched = False
            return
        expected_calls = [row.plan.expected_fastest_call for row in rows]
        costs = self._learned.costs.frozen(self._mean_length(rows))
        shared = costs.calls((BATCH, len(rows)))
        is_faster = is_sharing_faster(expected_calls, shared, is_shared_now=self.is_batched)
        self.is_batched = is_faster and self._has_memory_for_padding(rows)

    def _has_memory_for_padding(self, rows: Sequence[Row]) -> bool:
        """Whether there is memory for a batch of `rows`, each padded to the longest."""
        lengths = [len(row.text) for row in rows]
        padding = len(lengths) * max(lengths) - sum(lengths)
        more = padding * self._token_bytes - self.batch.padding_bytes
        return more <= 0 or self._fits(more)

    def learn_cost(self, rows: Sequence[Row], seconds: float) -> None:
        """Learn what a batched call costs: the median of `TIMED_CALLS` for equally many texts.

        Not learned: calls for one text, the first call after their number changed, and all until
        plain calls were timed.
        """
        if len(rows) != self._num_texts:
            self._num_texts = len(rows)
            self._seconds = []
            return
        if len(rows) < 2:
            return
        self._seconds.append(seconds)
        if len(self._seconds) < TIMED_CALLS:
            return
        context = self._mean_length(rows)
        plain = self._learned.costs.plain_seconds(context)
        if plain is not None:
            cost = median(self._seconds) / plain
            self._learned.costs.learn((BATCH, len(rows)), context, cost)
            self._learned.keep()
        self._seconds = []

    @staticmethod
    def _mean_length(rows: Sequence[Row]) -> int:
        return sum(len(row.text) for row in rows) // len(rows)


class Batches:
    """Decodes the answers that are open at once. On the MLX thread alone."""

    def __init__(
        self,
        # whether there is memory for so many bytes that padding rows of a batch would take
        fits: Fits = always_fits,
    ) -> None:
        self._fits = fits
        self._groups: dict[CacheKey, _Group] = {}
        self._waiting: list[_OpenAnswer] = []  # the first one has waited longest
        self._has_overtaken = False  # whether the last piece was of another than the first one
        self._schedule = PieceSchedule()

    @property
    def cache_bytes(self) -> int:
        """Bytes that rows of batches take beside what their texts would alone."""
        return sum(group.batch.padding_bytes for group in self._groups.values())

    def decode(
        self,
        plan: Plan,
        model: StreamFusedModel,
        prompt: list[int],
        # empty while the answer is in a batch that shares calls; later it holds the text but the
        # last token
        cache: TextCache,
        *,
        context: Sequence[int] = (),
        take: Take = take_all,
        place: PromptPlace | None = None,
        # changes the logits of each token; such an answer is always batched, and never drafts
        mask: Mask | None = None,
    ) -> Steps:
        """Decode an answer as `decode_plan` does, in turns or in calls shared with other answers.

        Nothing is done, nor checked, before the first tokens are asked for; closing the generator
        takes the answer out. Yields a step for each call, and None when others may go first: before
        each turn while the prompt waits, and after a turn that gave an answer alone no step.
        """
        cache.keep_first(cache.offset)
        key = CacheKey.of(model)
        text = [*context, *prompt]
        group = self._groups.get(key) or self._groups.setdefault(key, _Group(model, self._fits))
        row = _OpenAnswer(
            model=model,
            sampler=plan.sampling,
            cache=cache,
            text=text,
            take=take,
            mask=mask,
            first=len(text),
            plan=plan,
            group=group,
        )
        row.steps = decode_plan(
            plan if mask is None else replace(plan, drafters=()),
            model,
            prompt,
            cache,
            context=context,
            take=take,
            place=place,
            prefill_step_size=lambda: self._next_piece_length(row),
        )
        try:
            if row.num_prompt_tokens_left:
                self._set_status(row, Status.WAITING)
                while row.status is Status.WAITING:
                    yield None
                    if row.status is Status.WAITING:  # otherwise another reader's turn did the rest
                        self._take_turn(row)
                yield None
            else:
                self._start_decoding(row)
            while True:
                while not row.unread:
                    if row.error is not None:
                        raise row.error
                    self._take_turn(row)
                    if row.status is Status.ALONE and not row.unread:
                        yield None
                row.read_at = time.perf_counter()
                row.num_missed_calls = 0
                yield row.unread.popleft()
        finally:
            self._set_status(row, Status.OVER)

    # --- what is next ---

    def _take_turn(self, row: _OpenAnswer) -> None:
        """Do what is next, for the reader of `row`, which has no step to read.

        If a piece is due, it is the next piece, of any prompt. Otherwise, if `row` decodes, it is
        the call that brings its token; if its prompt waits, the calls that other readers need, or
        else the next piece, unless the reader of an ALONE answer may be back at once: then nothing.
        Errors are kept for the answers that they belong to.
        """
        if self._is_piece_due:
            self._process_piece()
        elif row.status is not Status.WAITING:
            self._bring_token(row)
        elif not self._make_due_calls() and not self._is_reader_expected:
            self._process_piece()

    @property
    def _is_piece_due(self) -> bool:
        """Whether a prompt waits, and no calls have to come before its next piece."""
        if not self._waiting:
            return False
        length = self._next_piece_length(self._next_in_line)
        return not self._is_decoding or not self._schedule.are_calls_first(length)

    @property
    def _next_in_line(self) -> _OpenAnswer:
        """The answer whose piece is next; every second time, one that has had none yet."""
        longest = self._waiting[0]
        if self._has_overtaken:
            return longest
        return next((row for row in self._waiting if not row.had_piece), longest)

    @property
    def _is_decoding(self) -> bool:
        """Whether calls bring any answer tokens now."""
        return any(row.is_decoding for group in self._groups.values() for row in group.answers)

    @property
    def _is_reader_expected(self) -> bool:
        """Whether a reader of an answer alone took a step just now, and may ask for more."""
        since = time.perf_counter() - READER_SECONDS
        alone = (row for group in self._groups.values() for row in group.with_status(Status.ALONE))
        return any(row.read_at > since for row in alone)

    def _next_piece_length(self, row: _OpenAnswer) -> int:
        is_alone = len(self._waiting) == 1 and not self._is_decoding
        step_size = row.plan.config.prefill_step_size
        num_left = row.num_prompt_tokens_left
        return self._schedule.next_piece_length(num_left, step_size, is_alone=is_alone)

    # --- statuses ---

    def _set_status(self, row: _OpenAnswer, status: Status) -> None:
        """Move `row` between queue, batch and group to match its new status."""
        group = row.group
        before = row.status
        if before is Status.WAITING:
            self._waiting.remove(row)
        elif before is Status.BATCHED:
            group.batch.remove(row)
        if status not in (Status.WAITING, Status.ALONE):
            row.end_own_loop()
        row.status = status
        if status is Status.WAITING:
            self._waiting.append(row)
            return
        # A batch, and a later loop of its own, need its cache to hold the text but the last token.
        if before is Status.ALONE and status in (Status.BATCHED, Status.PAUSED):
            row.sync_cache()
        if status is Status.BATCHED:
            group.batch.add(row)
        is_in_group = status in (Status.ALONE, Status.BATCHED, Status.PAUSED)
        if is_in_group and row not in group.answers:
            group.answers.append(row)
        elif not is_in_group and row in group.answers:
            group.answers.remove(row)
        group.update_is_batched()

    def _fail(self, row: _OpenAnswer, error: Exception) -> None:
        """Keep `error` for the reader of `row`, once it has taken the remaining steps."""
        row.error = error
        self._set_status(row, Status.FAILED)

    def _start_decoding(self, row: _OpenAnswer) -> None:
        """Make `row` one of the answers that decode, alone or batched. Nothing is decoded."""
        self._set_status(row, Status.ALONE)
        self._join_or_leave_batch(row)

    def _join_or_leave_batch(self, row: _OpenAnswer) -> None:
        """Make `row` BATCHED if its group shares calls, or it has a mask; else ALONE."""
        is_batched = row.group.is_batched or row.mask is not None
        wanted = Status.BATCHED if is_batched else Status.ALONE
        if row.status is not wanted:
            self._set_status(row, wanted)

    # --- turns ---

    def _process_piece(self) -> None:
        """Process a piece of the prompt that is next, which then goes to the end of the line."""
        row = self._next_in_line
        self._has_overtaken = row is not self._waiting[0]
        row.had_piece = True
        assert row.steps is not None  # its own loop processes its prompt
        before = row.num_prompt_tokens_left
        started = time.perf_counter()
        try:
            # The loop yields before its first piece and after each: the first takes two steps.
            while row.num_prompt_tokens_left == before:
                next(row.steps)
        except Exception as error:
            self._fail(row, error)
            return
        seconds = time.perf_counter() - started
        self._schedule.record_piece(before - row.num_prompt_tokens_left, seconds)
        if row.num_prompt_tokens_left:
            self._waiting.remove(row)
            self._waiting.append(row)
        else:
            self._start_decoding(row)
        self._schedule.owe_seconds(seconds, is_decoding=self._is_decoding)

    def _bring_token(self, row: _OpenAnswer) -> None:
        """Make the call that is to bring `row` its next token: its own, or its batch's."""
        if row.status is Status.PAUSED:
            self._set_status(row, Status.ALONE)
        elif row.status is Status.ALONE:
            row.group.update_is_batched()
        self._join_or_leave_batch(row)
        if row.status is Status.BATCHED:
            self._call_batch(row.group)
        else:
            self._call_alone(row)

    def _make_due_calls(self) -> bool:
        """Make the calls whose tokens readers ask for next; False if there are none."""
        groups = self._groups.values()
        batched = [group for group in groups if group.with_status(Status.BATCHED)]
        alone = [row for group in groups for row in group.with_status(Status.ALONE)]
        alone = [row for row in alone if not row.unread]
        for group in batched:
            self._call_batch(group)
        for row in alone:
            self._call_alone(row)
        return bool(batched or alone)

    def _call_batch(self, group: _Group) -> None:
        """Make a call of the group's batch, which gives every BATCHED answer one more step."""
        rows = group.with_status(Status.BATCHED)
        started = time.perf_counter()
        try:
            paused = group.batch.step()
        except Exception as error:
            for row in rows:
                failure = error
                if len(rows) > 1:
                    failure = RuntimeError("a call for several answers failed")
                    failure.__cause__ = error
                self._fail(row, failure)
            return
        seconds = time.perf_counter() - started
        group.learn_cost(rows, seconds)
        for row in rows:
            if row in paused:
                self._set_status(row, Status.PAUSED)
        self._pause_unread(group)
        self._schedule.record_call(seconds)

    def _pause_unread(self, group: _Group) -> None:
        """Pause ALONE answers whose readers stay away: they must not keep others from drafts."""
        if not group.is_batched:
            return
        alone = group.with_status(Status.ALONE)
        # A reader that returns within one call per decoding answer was merely waiting its turn.
        most = len(alone) + len(group.with_status(Status.BATCHED))
        for row in alone:
            row.num_missed_calls += 1
            if row.num_missed_calls < most:
                continue
            try:
                self._set_status(row, Status.PAUSED)
            except Exception as error:  # of a call of its own loop that was under way
                self._fail(row, error)

    def _call_alone(self, row: _OpenAnswer) -> None:
        """Make a call of a row that is ALONE, with drafts, or start one of its drafters."""
        if row.steps is None:
            row.steps = decode_plan(
                row.plan,
                row.model,
                row.text[-1:],
                row.cache,
                context=row.text[:-1],
                take=row.take,
            )
        started = time.perf_counter()
        try:
            step = next(row.steps)
        except Exception as error:
            self._fail(row, error)
            return
        self._schedule.record_call(time.perf_counter() - started)
        if step is not None:
            row.text += step.tokens
            row.unread.append(step)
