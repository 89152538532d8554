"""Several answers at once: in turns, each with its drafts; or with a row each in plain calls.

Answers that draft in turns bring tokens(n) / T(n) in sum, by tokens a call and the time of a call
of n rows; b answers with a row each bring b / T(b) (section 4 of 2404.19124). The larger of the two
is done, by the row costs of the machine, what the clock made of them, and how well each text is
guessed (`decoding.pace`). An answer moves between its calls, with its keys and values, and its
tokens stay the same but for ties, for the noise that it samples by belongs to a place in the text.

Nothing runs unless somebody reads: whoever asks for a token that is not there makes the call that
brings one to every row. A reader that falls behind leaves the batch until it has caught up. Prompts
take turns too: between two calls there is a piece of one, or several that are no longer together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..api import planned_steps
from ..decoding.batch import Batch, Mask, Row
from ..decoding.loop import Ends, never, prefill
from ..decoding.sampling import TokenLogprobs
from ..loading.prompt_files import PromptKey
from ..model.cache import TreeCache
from ..model.streams import StreamFusedModel
from ..tuning.ladder import known_costs
from ..tuning.plan import Plan

STAY = 1.05  # what the present way is favoured by, times its tokens a second


@dataclass(eq=False, kw_only=True)
class _Answer(Row):
    plan: Plan
    group: _Group
    todo: list[int] = field(default_factory=list)  # of the prompt

    @property
    def piece(self) -> list[int]:
        """What is done of the prompt at once."""
        return self.todo[: self.plan.config.prefill_step_size]


class _Group:
    """The open answers of one model, and the batch that some of them have a row in."""

    def __init__(self, model: StreamFusedModel) -> None:
        self.batch = Batch(model)
        self._costs = known_costs(model)
        self.open: list[_Answer] = []
        self.together = False

    def decide(self) -> None:
        """Settle whether the answers that are read go together from now on."""
        rows = [row for row in self.open if not row.rests]
        if len(rows) < 2 or not self.batch.shares_calls:
            self.together = False
            return
        outlooks = [row.plan.pace.outlook for row in rows]
        in_turns = sum(tokens for tokens, _ in outlooks) / sum(cost for _, cost in outlooks)
        context = sum(len(row.text) for row in rows) / len(rows)
        plain = self._costs.plain_seconds(context)
        batched = len(rows) * plain / self._costs.batch_seconds(len(rows), context)
        self.together = batched * (STAY if self.together else 1 / STAY) >= in_turns

    def step(self) -> None:
        """A call of the batch."""
        members = self.batch.members
        self.batch.step()
        if any(row.rests for row in members):
            self.decide()


class Batches:
    """Decodes the answers that are open at once. On the thread that runs MLX alone."""

    def __init__(self) -> None:
        self._groups: dict[PromptKey, _Group] = {}
        self._prompts: deque[_Answer] = deque()
        self._since = 0  # prompt tokens since a call that decodes

    def decode(
        self,
        plan: Plan,
        model: StreamFusedModel,
        prompt: list[int],
        cache: TreeCache,
        *,
        context: Sequence[int] = (),
        ends: Ends = never,
        told: list[TokenLogprobs] | None = None,
        mask: Mask | None = None,
    ) -> Iterator[list[int]]:
        """As `api.planned_steps`, beside others; with a `mask`, always without drafts."""
        cache.trim(cache.offset)
        key = PromptKey.of(model)
        text = [*context, *prompt]
        group = self._groups.get(key) or self._groups.setdefault(key, _Group(model))
        row = _Answer(
            model,
            plan.sampling,
            cache,
            text,
            ends,
            mask,
            len(text),
            plan=plan,
            group=group,
            todo=prompt[:-1],
        )
        try:
            yield from self._read_prompt(row)
            while True:
                # It may have joined a batch that is no longer wanted.
                yield from self._together(row, told)
                yield from self._alone(row, told)
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
        self._prompts.append(row)
        waited = False
        while row.todo:
            yield []
            if row.error is not None:
                raise row.error
            if self._is_full and not waited:
                running = [group for group in self._groups.values() if group.batch.members]
                waited = not running  # but for those that decode alone
                for group in running:
                    self._since = 0
                    group.step()
            elif row.todo:
                waited = False
                self._read_piece()

    @property
    def _is_full(self) -> bool:
        """Whether a call that decodes has to come before the next piece of a prompt."""
        decodes = any(group.open for group in self._groups.values())
        if not (decodes and self._since and self._prompts):
            return False
        upcoming = self._prompts[0]
        return self._since + len(upcoming.piece) > upcoming.plan.config.prefill_step_size

    def _read_piece(self) -> None:
        """Process a piece of the prompt whose turn it is."""
        row = self._prompts.popleft()
        piece = row.piece
        self._since += len(piece)
        try:
            prefill(row.model, piece, row.cache)
        except Exception as error:
            row.error = error
            return
        del row.todo[: len(piece)]
        if row.todo:
            self._prompts.append(row)
        else:
            self._open(row)

    def _open(self, row: _Answer) -> None:
        row.group.open.append(row)
        row.group.decide()
        if row.group.together or row.mask is not None:
            row.group.batch.join(row)

    def _together(self, row: _Answer, told: list[TokenLogprobs] | None) -> Iterator[list[int]]:
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
                self._since = 0
                group.step()
            token, logprobs = row.unread.popleft()
            if told is not None:
                told += logprobs
            yield [token]
        batch.leave(row)

    def _alone(self, row: _Answer, told: list[TokenLogprobs] | None) -> Iterator[list[int]]:
        """Its tokens by calls of its own, until answers go together."""
        more: Any = {"context": row.text[:-1], "ends": row.ends, "told": told}
        steps: Any = planned_steps(row.plan, row.model, row.text[-1:], row.cache, **more)
        with closing(steps):
            for step in steps:
                row.text += step
                self._since = 0
                yield step
                row.group.decide()
                if row.group.together:
                    break
        row.cache.trim(len(row.text) - 1)
        mx.eval(row.cache.state)
