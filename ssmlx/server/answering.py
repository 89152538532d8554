"""From what is asked to the parts of an answer: so many at once, the others in their order."""

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..answers import Answer
from ..api import GenerationResponse
from ..decoding.sampling import TokenLogprobs
from ..engine import Engine
from ..errors import require
from ..prompt_cache import PromptCache
from ..prompts import encode, encode_prompt, plain_turns
from ..settings import GenerateConfig
from .asks import Ask, End, Logprob, Part, Text, Usage
from .metrics import Metrics

Segments = Answer[GenerationResponse]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one server does at most."""

    open: int = 8  # answers at once
    waiting: int = 64  # requests that wait for one of those to end
    wait: float = 60.0  # seconds that a request waits
    time: float = 600.0  # seconds of a request, all in all
    body: int = 8 * 2**20  # bytes of a request


class StatusError(Exception):
    """What is answered with an HTTP status other than 400."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})


class Admission:
    """Lets so many in at once, the others in the order in which they came."""

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self._limits, self._metrics = limits, metrics
        self._slots = asyncio.Semaphore(limits.open)
        self._waiting = 0

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Raises StatusError where too many wait, or it took too long."""
        again = {"Retry-After": "1"}
        if self._slots.locked() and self._waiting >= self._limits.waiting:
            raise StatusError(503, "too many requests wait already; try again later", again)
        self._waiting += 1
        try:
            with self._metrics.waiting.track_inprogress():
                async with asyncio.timeout(self._limits.wait):
                    await self._slots.acquire()
        except TimeoutError:
            raise StatusError(503, "no answer began in time; try again later", again) from None
        finally:
            self._waiting -= 1
        try:
            with self._metrics.open.track_inprogress():
                yield
        finally:
            self._slots.release()


class Answering:
    """Answers what is asked, by one engine.

    Args:
        engine: has the model, and is left open.
        name: what the model is called here.
        adapters: what `engine.model` knows the adapters by, of those that are offered beside the
            engine's own: by what follows the model's name and a colon.
        prompts: processed prompts of each user, whom nobody shares them with.
        drafts: what is loaded to draft with, as `Engine.stream` takes it.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        adapters: Mapping[str, str] | None = None,
        *,
        prompts: Sequence[PromptCache] = (),
        drafts: Mapping[str, Any] | None = None,
        limits: Limits | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.engine, self.name = engine, name
        own = {f"{name}:{adapter}": place for adapter, place in (adapters or {}).items()}
        self.models: dict[str, str | None] = {name: None, **own}
        self._prompts, self._drafts = prompts or (engine.prompt_cache,), drafts
        self.limits, self.metrics = limits or Limits(), metrics or Metrics()
        self._admission = Admission(self.limits, self.metrics)
        self._tokenizing = threading.Lock()

    def model_name(self, ask: Ask) -> str:
        """What the model that is asked is called; the server's own where none is named."""
        name = ask.model or self.name
        if name not in self.models:
            raise StatusError(404, f"no model {name[:80]!r}; there are {', '.join(self.models)}")
        return name

    def close(self) -> None:
        """Cancel what is open, keep the prompts where they are kept on disk, free the memory."""
        self.engine.close()
        for one in self._prompts:
            one.close()

    @asynccontextmanager
    async def opened(self, ask: Ask, user: int = 0) -> AsyncIterator[AsyncIterator[Part]]:
        """The parts of an answer that has begun; leaving the block ends it.

        Raises:
            InputError: it cannot be followed.
            StatusError: there is no such model, or no room.
        """
        name = self.model_name(ask)
        async with self._admission.slot():
            prompt = await asyncio.to_thread(self.tokens, ask)
            config = ask.config
            if config.seed is None and config.temp > 0:
                config = replace(config, seed=secrets.randbits(31))
            first = await self._begin(ask, name, prompt, config, user)
            async with first, aclosing(self._told(ask, name, prompt, config, user, first)) as told:
                yield sorted_parts(ask, self.engine.tokenizer, told)

    def tokens(self, ask: Ask) -> list[int]:
        """The prompt, under the template of the adapter or the model where it is turns."""
        model = self.engine.model(self.models[self.model_name(ask)])
        tokenizer, question = self.engine.tokenizer, ask.question
        with self._tokenizing:
            if isinstance(question, str):
                return encode(question, tokenizer)
            if question and isinstance(question[0], Mapping):
                turns = {"messages": plain_turns(question), "tools": ask.tools}
                return encode_prompt(turns, model, tokenizer, template_args=ask.template_args)
        size = model.backbone.vocab_size
        tokens: list[Any] = list(question)
        require(
            all(0 <= token < size for token in tokens),
            "the prompt has tokens that the model does not know",
            expected=f"ids below {size}", do="correct them",
        )  # fmt: skip
        return tokens

    async def _begin(
        self, ask: Ask, name: str, prompt: list[int], config: GenerateConfig, user: int
    ) -> Segments:
        """An answer's segments, from the engine; here goes what answers several in one batch."""
        require(
            ask.schema is None,
            "an answer in JSON is asked for", expected="text", do="drop the format",
        )  # fmt: skip

        def begin() -> Segments:
            return self.engine.stream(
                prompt, config, adapter=self.models[name], drafts=self._drafts,
                prompt_cache=self._prompts[user],
            )  # fmt: skip

        return await asyncio.to_thread(begin)

    async def _told(
        self, ask: Ask, name: str, prompt: list[int], config: GenerateConfig, user: int,
        first: Segments,
    ) -> AsyncGenerator[Text | End]:  # fmt: skip
        """The parts of all choices, one after the other; `first` is the first one's answer."""
        for choice in range(ask.choices):
            own = config
            if choice and config.seed is not None:
                own = replace(config, seed=(config.seed + choice) % 2**63)
            answer = first if choice == 0 else await self._begin(ask, name, prompt, own, user)
            async with answer:
                async for part in self._parts(answer, choice, config):
                    yield part

    async def _parts(
        self, answer: Segments, choice: int, config: GenerateConfig
    ) -> AsyncIterator[Text | End]:
        started, last = time.perf_counter(), None
        async for last in answer:
            if last.target_calls == 1:
                self.metrics.first_token.observe(time.perf_counter() - started)
            logprobs = None
            if last.logprobs is not None:
                logprobs = _logprobs(self.engine.tokenizer, last.logprobs)
            yield Text(last.text, len(last.tokens), logprobs, choice)
        if last is None or last.finish_reason is None:
            raise StatusError(503, "the server is being stopped")
        self.metrics.add(last)
        usage = Usage(last.prompt_tokens, last.generation_tokens, last.cached_tokens)
        yield End(
            "stop" if last.finish_reason == "stop" else "length",
            usage,
            None,
            timings_of(last),
            choice,
        )


def sorted_parts(
    ask: Ask, tokenizer: TokenizerWrapper, parts: AsyncIterator[Text | End]
) -> AsyncIterator[Part]:
    """The parts of an answer with what is reasoning, and what calls tools, told apart."""
    return parts


def timings_of(last: GenerationResponse) -> dict[str, Any]:
    """What an answer took, of its last segment, by llama.cpp's names where it has them."""
    return {
        "cache_n": last.cached_tokens,
        "prompt_n": last.prompt_tokens - last.cached_tokens,
        "prompt_ms": round(1000 * last.prefill_seconds, 3),
        "prompt_per_second": round(last.prompt_tps, 3),
        "predicted_n": last.generation_tokens,
        "predicted_ms": round(1000 * last.decode_seconds, 3),
        "predicted_per_second": round(last.generation_tps, 3),
        "draft_n_accepted": last.generation_tokens - last.target_calls,
        "target_calls": last.target_calls,
        "tokens_per_call": round(last.tokens_per_call, 4),
    }


def _logprobs(tokenizer: TokenizerWrapper, told: Sequence[TokenLogprobs]) -> tuple[Logprob, ...]:
    return tuple(
        Logprob(
            _token_text(tokenizer, one.token),
            one.logprob,
            tuple((_token_text(tokenizer, token), logprob) for token, logprob in one.top),
        )
        for one in told
        if one.token not in tokenizer.eos_token_ids
    )


def _token_text(tokenizer: TokenizerWrapper, token: int) -> str:
    """A token's text behind another one: alone, some would lose a space."""
    (*_, anchor) = tokenizer.encode("a", add_special_tokens=False)
    return tokenizer.decode([anchor, token])[len(tokenizer.decode([anchor])) :]
