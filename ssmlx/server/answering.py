"""From what is asked to the parts of an answer: so many at once, the others in their order."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.exceptions import HTTPException

from ..answers import Answer
from ..api import GenerationResponse
from ..bars import Progress
from ..drafters.registry import Loaded
from ..engine import Engine
from ..generation.pool import MemoryPool
from ..generation.scoring import ScoredPrompt
from ..prompt_cache import PromptCache
from ..settings import GenerateConfig, check_settings, setting
from .asks import Ask, Heard, Refusal, Text, Waiting
from .choices import Choice
from .prompts import AGAIN, STOPPED, PromptReader
from .together import OwnPlaces, Places, PromptProgress, read_together


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one server does at most."""

    open: int = setting(8, least=1, option="--max-open")  # answers at once
    waiting: int = setting(64, least=0, option="--max-waiting")  # requests that wait for that
    # seconds that a request waits, or takes to come, or an event of its reply to be taken
    wait: float = setting(60.0, above=0)
    time: float = setting(600.0, above=0, option="--timeout")  # seconds of a request in all
    silence: float = setting(5.0, above=0)  # seconds before a stream says that it is there
    body: int = setting(8 * 2**20, least=1)  # bytes of a request

    def __post_init__(self) -> None:
        check_settings(self)


class Metrics:
    """One server's counts: numbers alone, of all users together."""

    def __init__(self) -> None:
        own = self.registry = CollectorRegistry()
        self.refused = Counter("ssmlx_refused", "Requests, by status.", ["status"], registry=own)
        self.waiting = Gauge("ssmlx_waiting", "Requests that wait.", registry=own)
        self.open = Gauge("ssmlx_open", "Answers that are being written.", registry=own)
        self._prefill = Histogram("ssmlx_prefill_seconds", "Time to a first token.", registry=own)
        self._memory = Gauge("ssmlx_memory_bytes", "Of texts.", ["kind"], registry=own)
        self._counts = Counter("ssmlx_tokens", "Tokens, and target calls.", ["kind"], registry=own)

    def watch(self, pool: MemoryPool) -> None:
        """Tell what texts take: of running answers, of what is kept, and at most."""
        self._memory.labels("running").set_function(lambda: pool.running)
        self._memory.labels("kept").set_function(lambda: pool.kept)
        self._memory.labels("limit").set_function(lambda: pool.limit)

    def add(self, last: GenerationResponse) -> None:
        """Count an answer, of its last segment."""
        self._prefill.observe(last.prefill_seconds)
        self._counts.labels("prompt").inc(last.prompt_tokens)
        self._counts.labels("cached").inc(last.cached_tokens)
        self._counts.labels("completion").inc(last.generation_tokens)
        self._counts.labels("calls").inc(last.target_calls)


@dataclass(eq=False)
class Answering:
    """Answers what is asked, by an engine."""

    engine: Engine
    models: Mapping[str, str | None]  # adapters, by what the model with each is called here
    # processed prompts of each user, which nobody else's answers begin with
    prompts: Sequence[PromptCache] = ()
    loaded: Sequence[Loaded] = ()  # what was loaded to draft with
    template_args: Mapping[str, Any] = field(default_factory=dict)  # a request's own go first
    limits: Limits = field(default_factory=Limits)
    any_model: bool = False  # whether the first model answers for names that are not known

    def __post_init__(self) -> None:
        self.context_length: int | None = self.engine.model().backbone.context_length
        self.prompts = self.prompts or (self.engine.prompt_cache,)
        self.reader = PromptReader(self.engine, self.models, self.template_args)
        self.metrics = Metrics()
        self.metrics.watch(self.engine.memory_pool)
        self._places = Places(self.limits.open, self.metrics.open)
        self._waiting = 0

    def close(self) -> None:
        """Cancel what is open, keep the prompts where they are kept on disk, free the memory."""
        self.engine.close()
        for one in self.prompts:
            one.close()

    def named(self, ask: Ask) -> Ask:
        """With the name of a model; the first one where the request has none, or may have any."""
        first = next(iter(self.models))
        name = ask.model or first
        if self.any_model and name not in self.models:
            name = first
        if name not in self.models:
            raise self.unknown_model(name)
        return replace(ask, model=name)

    def unknown_model(self, name: str) -> HTTPException:
        found = f"no model {name[:80]!r}; there are {', '.join(self.models)}"
        return Refusal(404, found, param="model", code="model_not_found")

    def prepared(self, ask: Ask) -> tuple[list[int], GenerateConfig]:
        """The prompt's tokens, and how to answer it."""
        return self.reader.prepared(ask)

    async def parts(self, ask: Ask, user: int = 0) -> AsyncGenerator[Heard]:
        """The parts of all choices as they come; to close the generator cancels them.

        Before anything else comes `Waiting`, once it is known that the request can be followed.

        Raises:
            InputError: it cannot be followed.
            NoRoomError: there is no memory for it.
            HTTPException: too many others wait.
        """
        await self._admit()
        places = OwnPlaces(self._places)
        progress = PromptProgress()
        try:
            prompts, config = await asyncio.to_thread(self.reader.read, ask)
            tokenizer = self.engine.tokenizer
            own = [one for one in prompts for _ in range(ask.choices)]
            choices = [
                Choice(ask, number, prompt, config, tokenizer, user)
                for number, prompt in enumerate(own)
            ]
            answers = [self._answer(one, places, progress.of(one.number)) for one in choices]
            async with aclosing(read_together(answers, self.limits.silence, progress)) as parts:
                async for part in parts:
                    yield part
        finally:
            places.close()

    async def _answer(
        self, choice: Choice, places: OwnPlaces, progress: Progress
    ) -> AsyncGenerator[Heard]:
        """The parts of one choice. The first one of a prompt processes it for the others."""
        prompt = choice.prompt
        if not choice.is_first:
            await prompt.is_read.wait()
        try:
            async with places.one():
                if choice.ask.echoes:
                    yield await self._echo(choice, progress)
                last = None if choice.ask.writes else prompt.unanswered()
                if choice.ask.writes:
                    async with await asyncio.to_thread(self._begun, choice, progress) as answer:
                        if choice.number == 0:
                            yield Waiting()
                        async for last in answer:
                            prompt.is_read.set()
                            for part in choice.read(last):
                                yield part
                if last is None or last.finish_reason is None:
                    raise STOPPED
                last = choice.whole(last)
                self.metrics.add(last)
                for part in choice.end(last):
                    yield part
        finally:
            prompt.is_read.set()

    async def _echo(self, choice: Choice, progress: Progress) -> Text:
        """The prompt, as what its answer begins with; scored where log probabilities are wanted."""
        prompt = choice.prompt
        if choice.config.logprobs is not None and prompt.logprobs is None:
            started = time.perf_counter()
            async with await asyncio.to_thread(self._scoring, choice, progress) as answer:
                scored = [one async for one in answer]
            if not scored:
                raise STOPPED
            prompt.logprobs = await asyncio.to_thread(self.reader.scored, prompt, scored[0])
            prompt.seconds = time.perf_counter() - started
        return Text(prompt.text, 0, prompt.logprobs, choice.number)

    async def _admit(self) -> None:
        """Take the place of a request's first answer; requests are let in as they came."""
        if self._places.is_full and self._waiting >= self.limits.waiting:
            raise HTTPException(503, "too many requests wait already; try again later", AGAIN)
        self._waiting += 1
        try:
            with self.metrics.waiting.track_inprogress():
                async with asyncio.timeout(self.limits.wait):
                    await self._places.take()
        except TimeoutError as error:
            raise HTTPException(503, "no answer ended in time; try again later", AGAIN) from error
        finally:
            self._waiting -= 1

    def _begun(self, choice: Choice, progress: Progress) -> Answer[GenerationResponse]:
        """The segments of a choice."""
        self.reader.check_open()
        ask = choice.ask
        return self.engine.stream(
            choice.prompt.tokens,
            choice.config,
            adapter=self.models[ask.model],
            prompt_cache=self.prompts[choice.user],
            drafter=self.loaded,
            mask=self.reader.mask(ask),
            progress=progress,
            shares_prompt=choice.is_first and ask.choices > 1,
            joins_prompt=ask.continues or not ask.is_chat,
        )

    def _scoring(self, choice: Choice, progress: Progress) -> Answer[ScoredPrompt]:
        """A choice's prompt as the model sees it; kept where something is written behind it."""
        self.reader.check_open()
        return self.engine.score(
            choice.prompt.tokens,
            top=choice.config.logprobs or 0,
            adapter=self.models[choice.ask.model],
            prompt_cache=self.prompts[choice.user] if choice.ask.writes else None,
            progress=progress,
        )
