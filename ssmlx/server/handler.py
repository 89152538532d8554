"""Answers requests with an engine: a bounded number at once, the others wait in their order."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.exceptions import HTTPException

from ..answers import Answer, Segment
from ..drafters.base import Loaded
from ..engine import Engine
from ..generation.pool import MemoryPool
from ..generation.scoring import ScoredPrompt
from ..generation.segments import GenerationResponse
from ..prompt_cache import PromptCache
from ..rendering import has_unknown_calls
from ..settings import check_settings, setting
from .choices import Choice
from .concurrency import READING, AnswerSlots, PromptProgress, RequestSlots, merge_answers
from .refusals import AGAIN, DetailedHTTPException
from .request_prompts import PromptReader
from .requests import AnswerRequest, Begun, StreamItem

_FULL = "the request queue is full; try again later"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one server; one that is out of range raises InputError."""

    open: int = setting(8, least=1, option="--max-open")  # answers at once
    waiting: int = setting(64, least=0, option="--max-waiting")  # requests that wait for that
    # seconds that a request waits for a slot, and that a client may neither send more of a request
    # nor read more of a reply
    wait: float = setting(60.0, above=0)
    time: float = setting(600.0, above=0, option="--timeout")  # seconds of a request in all
    silence: float = setting(5.0, above=0)  # seconds before a silent stream sends a sign of life
    body: int = setting(8 * 2**20, least=1)  # bytes of a request
    bodies: int = setting(64 * 2**20, least=1)  # bytes of all requests but small ones
    head: float = setting(10.0, above=0)  # seconds for the head of a request to come
    idle: float = setting(75.0, above=0)  # seconds between a reply and the next request
    connections: int = setting(1000, least=1)

    def __post_init__(self) -> None:
        check_settings(self)


class PrometheusMetrics:
    """The Prometheus counters of one server, over all users."""

    def __init__(self) -> None:
        own = self.registry = CollectorRegistry()
        self.refused = Counter("ssmlx_refused", "Requests, by status.", ["status"], registry=own)
        self.waiting = Gauge("ssmlx_waiting", "Requests that wait.", registry=own)
        self.open = Gauge("ssmlx_open", "Answers that are being written.", registry=own)
        self._prefill = Histogram("ssmlx_prefill_seconds", "Time to a first token.", registry=own)
        self._memory = Gauge("ssmlx_memory_bytes", "Of texts.", ["kind"], registry=own)
        self._counts = Counter("ssmlx_tokens", "Tokens, and target calls.", ["kind"], registry=own)

    def report_pool(self, pool: MemoryPool) -> None:
        """Report a pool's bytes whenever metrics are requested."""
        self._memory.labels("running").set_function(lambda: pool.running)
        self._memory.labels("kept").set_function(lambda: pool.kept)
        self._memory.labels("limit").set_function(lambda: pool.limit)

    def count_ended_answer(self, last: GenerationResponse) -> None:
        self._prefill.observe(last.prefill_seconds)
        self._counts.labels("prompt").inc(last.prompt_tokens)
        self._counts.labels("cached").inc(last.cached_tokens)
        self._counts.labels("completion").inc(last.generation_tokens)
        self._counts.labels("calls").inc(last.target_calls)


@dataclass(eq=False)
class RequestHandler:
    """Answers requests with one engine, at most `limits.open` answers at once."""

    engine: Engine
    models: Mapping[str, str | None]  # adapters, by what the model with each is called here
    # of each API key: its processed prompts, which only its own answers begin with
    prompt_caches: Sequence[PromptCache] = ()
    loaded: Sequence[Loaded] = ()  # what was loaded to draft with
    template_args: Mapping[str, Any] = field(default_factory=dict)  # a request's own go first
    limits: Limits = field(default_factory=Limits)
    any_model: bool = False  # whether the first model answers for names that are not known

    def __post_init__(self) -> None:
        # This loads the engine's default model.
        self.context_length: int | None = self.engine.model().backbone.context_length
        self.has_unknown_calls = has_unknown_calls(self.engine.tokenizer)
        self.prompt_caches = self.prompt_caches or (self.engine.prompt_cache,)
        self.reader = PromptReader(self.engine, self.models, self.template_args)
        self.metrics = PrometheusMetrics()
        self.metrics.report_pool(self.engine.memory_pool)
        self._slots = AnswerSlots(self.limits.open, self.metrics.open)
        self._waiting = 0  # requests that are read or wait for a slot
        self._num_counts = 0  # of tokens, under way

    def close(self) -> None:
        self.engine.close()  # cancels open answers, and waits for their end
        for one in self.prompt_caches:
            one.close()

    def with_served_model(self, ask: AnswerRequest) -> AnswerRequest:
        """Return the request with the name of a served model, or raise HTTPException (404)."""
        first = next(iter(self.models))
        name = ask.model or first
        if self.any_model and name not in self.models:
            name = first
        if name not in self.models:
            raise self.unknown_model_error(name)
        return replace(ask, model=name)

    def unknown_model_error(self, name: str) -> HTTPException:
        found = f"unknown model {name[:80]!r}; expected one of {', '.join(self.models)}"
        return DetailedHTTPException(404, found, param="model", code="model_not_found")

    async def count_prompt_tokens(self, ask: AnswerRequest) -> int:
        """Return how many tokens the prompt has; as many counts may wait as requests."""
        if self._num_counts > self.limits.waiting:
            raise HTTPException(503, _FULL, AGAIN)
        self._num_counts += 1
        try:
            return await READING.run(ask.num_bytes, self.reader.count_prompt_tokens, ask)
        finally:
            self._num_counts -= 1

    async def answer_parts(
        self, ask: AnswerRequest, prompt_cache: PromptCache
    ) -> AsyncGenerator[StreamItem]:
        """Yield the parts of all choices as they come; closing the generator cancels them."""
        with self._count_waiting():
            async with asyncio.timeout_at(ask.deadline):
                prompts, config = await self.reader.read_prompts(ask)
                await self._take_first_slot()
        # What was read as tokens is not kept beside them.
        ask = replace(ask, config=config, question="", others=(), prediction="")
        slots = RequestSlots(self._slots, ask.deadline)
        progress = PromptProgress()
        try:
            own = [one for one in prompts for _ in range(ask.choices)]
            choices = [
                Choice(
                    ask, number, prompt, prompt_cache, progress.callback_for(number), self.reader
                )
                for number, prompt in enumerate(own)
            ]
            answers = [self._choice_parts(one, slots) for one in choices]
            async with aclosing(merge_answers(answers, self.limits.silence, progress)) as parts:
                async for part in parts:
                    yield part
        finally:
            slots.close()

    async def _choice_parts(
        self, choice: Choice, slots: RequestSlots
    ) -> AsyncGenerator[StreamItem]:
        """Yield the parts of one choice; the last one is its `ChoiceEnd`."""
        prompt = choice.prompt
        if not choice.is_first:  # it then finds the prompt in the prompt cache
            await prompt.is_read.wait()
        try:
            async with slots.hold():
                await self._score_prompt(choice)
                for echoed in choice.echoed_parts():
                    yield echoed
                last = None if choice.ask.writes else prompt.empty_answer()
                if choice.ask.writes:
                    async with self._open_until_deadline(self._open_answer, choice) as answer:
                        if choice.number == 0:
                            yield Begun()
                        async for last in answer:
                            prompt.is_read.set()
                            for part in choice.response_parts(last):
                                yield part
                if last is None or last.finish_reason is None:
                    self.reader.check_open()  # if it is open, the deadline ended the answer
                if last is None:
                    raise TimeoutError  # a choice that has a token ends there, by its length
                choice.check_form()
                last = choice.with_scoring_time(last)
                self.metrics.count_ended_answer(last)
                for part in choice.end_parts(last):
                    yield part
        finally:
            prompt.is_read.set()

    @asynccontextmanager
    async def _open_until_deadline(
        self, open_: Callable[[Choice], Answer[Segment]], choice: Choice
    ) -> AsyncIterator[Answer[Segment]]:
        """Open an answer for the block; the deadline cancels it, which its reader sees as an
        end."""
        async with await asyncio.to_thread(open_, choice) as answer:
            loop = asyncio.get_running_loop()
            timer = loop.call_at(choice.ask.deadline, answer.cancel)
            try:
                yield answer
            finally:
                timer.cancel()

    async def _score_prompt(self, choice: Choice) -> None:
        """Score a choice's prompt if its log probabilities are wanted and not there yet."""
        prompt = choice.prompt
        # It is scored for the first of its choices, which the others wait for.
        is_asked = choice.ask.echoes and choice.ask.config.logprobs is not None
        if not is_asked or prompt.logprobs is not None:
            return
        started = time.perf_counter()
        async with self._open_until_deadline(self._open_scoring, choice) as answer:
            scored = [one async for one in answer]
        if not scored:
            self.reader.check_open()
            raise TimeoutError
        prompt.logprobs = await READING.run(
            choice.ask.num_bytes, self.reader.scored_entries, prompt, scored[0]
        )
        prompt.seconds = time.perf_counter() - started

    @contextmanager
    def _count_waiting(self) -> Iterator[None]:
        """Count a request as waiting inside the block, or raise HTTPException (503)."""
        if self._waiting >= self._slots.num_free + self.limits.waiting:
            raise HTTPException(503, _FULL, AGAIN)
        self._waiting += 1
        try:
            with self.metrics.waiting.track_inprogress():
                yield
        finally:
            self._waiting -= 1

    async def _take_first_slot(self) -> None:
        """Take the slot of a request's first answer, or raise HTTPException (503)."""
        try:
            async with asyncio.timeout(self.limits.wait):
                await self._slots.take()
        except TimeoutError as error:
            detail = "timed out waiting for a free slot; try again later"
            raise HTTPException(503, detail, AGAIN) from error

    def _open_answer(self, choice: Choice) -> Answer[GenerationResponse]:
        self.reader.check_open()
        ask = choice.ask
        choice.mask = self.reader.make_mask_or_none(ask)
        return self.engine.stream(
            choice.prompt.tokens,
            ask.config,
            adapter=self.models[ask.model],
            prompt_cache=choice.prompt_cache,
            drafter=self.loaded,
            mask=choice.mask,
            progress=choice.progress,
            shares_prompt=choice.is_first and ask.choices > 1,
            keep_at=choice.prompt.keep_at,
            joins_prompt=ask.continues or not ask.is_chat,
        )

    def _open_scoring(self, choice: Choice) -> Answer[ScoredPrompt]:
        """Begin to score a choice's prompt: the log probability of each of its tokens."""
        self.reader.check_open()
        return self.engine.score(
            choice.prompt.tokens,
            top=choice.ask.config.logprobs or 0,
            adapter=self.models[choice.ask.model],
            # for the tokens that are generated after it
            prompt_cache=choice.prompt_cache if choice.ask.writes else None,
            progress=choice.progress,
        )
