"""Several answers at once: in turns, each with its drafts; or with a row each in plain calls.

Whichever of the two should bring more tokens is done (section 4 of 2404.19124), by what calls cost
on this machine and by how well each text is guessed (`ssmlx.policy`). An answer moves between its
calls, with its keys and values, and its tokens stay the same but for ties, for the noise that it
samples by belongs to a place in the text.

Nothing runs unless somebody reads: whoever asks for a token that is not there makes the call that
brings one to every row. A reader that falls behind leaves the batch until it has caught up.

Prompts take turns too, in pieces that are as short as this machine needs to be done with one in
`PIECE_SECONDS`, or twice that while nobody else is there; the first piece of a new prompt goes
before those of others. While answers are decoded, prompts get half of the time: what a piece took,
calls get before the next one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import mlx.core as mx

from ..decoding.batch import Batch, Mask, Row
from ..decoding.loop import CallCounts, Stops, never_stops, prefill
from ..decoding.sampling import TokenLogprobs
from ..loading.prompt_files import PromptKey
from ..model.cache import TreeCache
from ..model.streams import StreamFusedModel
from ..policy.costs import BATCH
from .learned import learned_of
from .memory import cache_size
from .plan import Plan, decode_plan

Fits = Callable[[int], bool]
"""Given bytes, whether there is so much memory for them."""


def always_fits(num_bytes: int) -> bool:
    """Where nobody counts."""
    return True


STAY = 1.05
"""What the present way is favoured by, times its tokens a second."""
TIMED_CALLS = 5
"""Calls for equally many texts, behind a first one, that teach what such calls cost."""
PIECE_SECONDS = 0.5
"""What a piece of a prompt takes at most, about: so long a turn may have to be waited for."""
PIECES_ALONE = 2
"""How many times as long a piece may take where nobody else is answered."""
LEAST_PIECE = 64
"""Tokens of a piece at least, unless the settings say less. On two cores of a CPU, 1,536 tokens of
SmolLM2-135M take 1.1 times as long in such pieces as in those of 512, and 1.7 times in those of 32.
"""
UNTIMED_PIECE = 128
"""Tokens of a piece at most while nobody knows what one takes."""
READER_TRIES = 5
READER_SECONDS = 0.001
"""How often, and for how long, a prompt waits for the readers of answers whose turn it is."""


@dataclass(eq=False, kw_only=True)
class _Answer(Row):
    plan: Plan
    group: _Group
    todo: list[int] = field(default_factory=list)  # of the prompt
    on_prompt: Callable[[], None] | None = None  # called when `cache` holds the prompt


class _Group:
    """The open answers of one model, and the batch that some of them have a row in."""

    def __init__(self, model: StreamFusedModel, fits: Fits = always_fits) -> None:
        self.batch = Batch(model)
        self._fits = fits
        self._token_bytes = cache_size(model).per_token
        self._learned, _ = learned_of(model)
        self.open: list[_Answer] = []
        self.together = False
        self._seconds: list[float] = []  # of calls in a row for as many texts as the last
        self._num_texts = 0

    def decide(self) -> None:
        """Settle whether the answers that are read go together from now on.

        In turns, each with its drafts, they bring the sum of their tokens in the sum of their
        costs; together, a token each in what a call for so many texts costs.
        """
        rows = [row for row in self.open if not row.is_paused]
        if len(rows) < 2 or not self.batch.shares_calls:
            self.together = False
            return
        outlooks = [row.plan.outlook for row in rows]
        in_turns = sum(tokens for tokens, _ in outlooks) / sum(cost for _, cost in outlooks)
        costs = self._learned.costs.frozen(self._context(rows))
        batched = len(rows) / costs.calls((BATCH, len(rows)))
        is_faster = batched * (STAY if self.together else 1 / STAY) >= in_turns
        self.together = is_faster and self._has_room(rows)

    def _has_room(self, rows: Sequence[Row]) -> bool:
        """Whether there is memory for rows in a batch, where all are as long as the longest."""
        lengths = [len(row.text) for row in rows]
        padding = len(lengths) * max(lengths) - sum(lengths)
        more = padding * self._token_bytes - self.batch.padding_bytes
        return more <= 0 or self._fits(more)

    def step(self) -> float:
        """A call of the batch; the seconds that it took."""
        members = self.batch.members
        started = time.perf_counter()
        self.batch.step()
        seconds = time.perf_counter() - started
        self._time(members, seconds)
        if any(row.is_paused for row in members):
            self.decide()
        return seconds

    def _time(self, members: Sequence[Row], seconds: float) -> None:
        """Learn what calls for so many texts cost, of those behind the first in a row."""
        if len(members) != self._num_texts:
            self._num_texts = len(members)
            self._seconds = []
            return
        self._seconds.append(seconds)
        if len(self._seconds) < TIMED_CALLS or len(members) < 2:
            return
        context = self._context(members)
        plain = self._learned.costs.plain_seconds(context)
        if plain is not None:
            cost = median(self._seconds) / plain
            self._learned.costs.learn((BATCH, len(members)), context, cost)
            self._learned.keep()
        self._seconds = []

    @staticmethod
    def _context(rows: Sequence[Row]) -> int:
        return sum(len(row.text) for row in rows) // len(rows)


class Batches:
    """Decodes the answers that are open at once. On the thread that runs MLX alone.

    Args:
        fits: whether there is memory for rows that are as long as the longest of them.
    """

    def __init__(self, fits: Fits = always_fits) -> None:
        self._fits = fits
        self._groups: dict[PromptKey, _Group] = {}
        self._prompts: deque[_Answer] = deque()
        self._prompt_rate: float | None = None  # tokens a second, of the last piece
        # seconds that pieces took while answers were decoded, and calls did not take since
        self._owed = 0.0
        self._num_calls = 0  # that decoded

    @property
    def cache_bytes(self) -> int:
        """Bytes that rows of batches take beside what their texts would alone."""
        return sum(group.batch.padding_bytes for group in self._groups.values())

    def drop_idle(self) -> None:
        """Nothing: all belongs to running answers."""

    def decode(
        self,
        plan: Plan,
        model: StreamFusedModel,
        prompt: list[int],
        cache: TreeCache,
        *,
        context: Sequence[int] = (),
        stops: Stops = never_stops,
        logprobs: list[TokenLogprobs] | None = None,
        counts: CallCounts | None = None,
        mask: Mask | None = None,
        on_prompt: Callable[[], None] | None = None,
    ) -> Iterator[list[int]]:
        """As `decode_plan`, beside others; with a `mask`, always without drafts.

        `on_prompt` is called when the cache holds the prompt but for its last token, before
        anything is decoded behind it.
        """
        cache.trim(cache.offset)
        key = PromptKey.of(model)
        text = [*context, *prompt]
        group = self._groups.get(key) or self._groups.setdefault(key, _Group(model, self._fits))
        row = _Answer(
            model,
            plan.sampling,
            cache,
            text,
            stops,
            mask,
            len(text),
            plan=plan,
            group=group,
            todo=prompt[:-1],
            on_prompt=on_prompt,
        )
        try:
            yield from self._read_prompt(row)
            while True:
                # It may have joined a batch that is no longer wanted.
                yield from self._together(row, logprobs)
                yield from self._alone(row, logprobs, counts)
        finally:
            with suppress(ValueError):
                self._prompts.remove(row)
            group.batch.leave(row)
            if row in group.open:
                group.open.remove(row)
                group.decide()

    def _read_prompt(self, row: _Answer) -> Iterator[list[int]]:
        if not row.todo:
            self._open(row)
            return
        self._prompts.appendleft(row)
        tries = READER_TRIES
        calls = self._num_calls
        while row.todo:
            yield []
            if row.error is not None:
                raise row.error
            if not row.todo:  # somebody else's turn has done the rest
                break
            if calls != self._num_calls:
                tries = READER_TRIES
                calls = self._num_calls
            if self._is_full and self._let_decode(tries):
                tries -= 1
            else:
                self._read_piece()
                tries = READER_TRIES
        yield []

    @property
    def _is_full(self) -> bool:
        """Whether calls that decode have to come before the next piece of a prompt."""
        if not self._prompts or not self._decodes:
            return False
        upcoming = len(self._piece(self._prompts[0]))
        rate = self._prompt_rate
        seconds = PIECE_SECONDS if rate is None else upcoming / rate
        return self._owed > 0 and self._owed + seconds > PIECE_SECONDS

    @property
    def _decodes(self) -> bool:
        return any(group.open for group in self._groups.values())

    def _let_decode(self, tries: int) -> bool:
        """Let answers be decoded, as it is their turn; whether the prompt waits for that.

        Those in a batch get a call. The readers of others have to come for theirs, and are waited
        for while there are `tries` left.
        """
        running = [group for group in self._groups.values() if group.batch.members]
        for group in running:
            self._count_call(group.step())
        if not running and tries < READER_TRIES:  # none came while others had the thread
            time.sleep(READER_SECONDS)
        return bool(running) or tries > 0

    def _count_call(self, seconds: float) -> None:
        self._num_calls += 1
        self._owed = max(0.0, self._owed - seconds)

    def _piece(self, row: _Answer) -> list[int]:
        """What is done at once of a prompt that waits for its turn."""
        most = UNTIMED_PIECE
        if self._prompt_rate is not None:
            is_alone = len(self._prompts) == 1 and not self._decodes
            seconds = PIECE_SECONDS * (PIECES_ALONE if is_alone else 1)
            most = int(self._prompt_rate * seconds) // LEAST_PIECE * LEAST_PIECE
        return row.todo[: min(row.plan.config.prefill_step_size, max(LEAST_PIECE, most))]

    def _read_piece(self) -> None:
        """Process a piece of the prompt whose turn it is."""
        row = self._prompts[0]
        piece = self._piece(row)
        self._prompts.popleft()
        started = time.perf_counter()
        try:
            prefill(row.model, piece, row.cache)
            seconds = time.perf_counter() - started
            del row.todo[: len(piece)]
            if not row.todo and row.on_prompt is not None:
                row.on_prompt()
        except Exception as error:
            row.error = error
            return
        if self._prompt_rate is None or len(piece) >= LEAST_PIECE:
            self._prompt_rate = len(piece) / max(seconds, 1e-6)
        if row.todo:
            self._prompts.append(row)
        else:
            self._open(row)
        self._owed = self._owed + seconds if self._decodes else 0.0

    def _open(self, row: _Answer) -> None:
        row.group.open.append(row)
        row.group.decide()
        if row.group.together or row.mask is not None:
            row.group.batch.join(row)

    def _together(self, row: _Answer, recorded: list[TokenLogprobs] | None) -> Iterator[list[int]]:
        """Its tokens by the calls of a batch, until answers no longer go together."""
        group = row.group
        batch = row.group.batch
        while row.unread or row.error or row.mask or group.together:
            while not row.unread:
                if row.error is not None:
                    raise RuntimeError("a call for several answers failed") from row.error
                if row not in batch.members:
                    batch.join(row)
                    group.decide()
                while self._prompts and not self._is_full:
                    self._read_piece()
                self._count_call(group.step())
            token, logprobs = row.unread.popleft()
            if recorded is not None:
                recorded += logprobs
            yield [token]
        batch.leave(row)

    def _alone(
        self,
        row: _Answer,
        logprobs: list[TokenLogprobs] | None,
        counts: CallCounts | None,
    ) -> Iterator[list[int]]:
        """Its tokens by calls of its own, until answers go together."""
        steps: Any = decode_plan(
            row.plan,
            row.model,
            row.text[-1:],
            row.cache,
            context=row.text[:-1],
            stops=row.stops,
            logprobs=logprobs,
            counts=counts,
        )
        with closing(steps):
            started = time.perf_counter()
            for step in steps:
                row.text += step
                self._count_call(time.perf_counter() - started)
                yield step
                row.group.decide()
                if row.group.together:
                    break
                started = time.perf_counter()
        row.cache.trim(len(row.text) - 1)
        mx.eval(row.cache.state)
