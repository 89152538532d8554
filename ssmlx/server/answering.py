"""From what is asked to the parts of an answer: so many at once, the others in their order."""

import asyncio
import secrets
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.exceptions import HTTPException

from ..answers import Answer
from ..api import GenerationResponse
from ..decoding.sampling import TokenLogprobs
from ..engine import Engine
from ..prompt_cache import PromptCache
from ..prompts import check_text, encode, encode_prompt, plain_turns
from ..settings import GenerateConfig, PromptLookupConfig, check_settings, setting
from .asks import Ask, End, Part, Text, check
from .batch import Batches
from .parsing import Parser, processor

_AGAIN = {"Retry-After": "1"}
_STOPPED = HTTPException(503, "the server is being stopped", _AGAIN)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one server does at most."""

    open: int = setting(8, least=1, option="--max-open")  # answers at once
    waiting: int = setting(64, least=0, option="--max-waiting")  # requests that wait for that
    # seconds that a request waits, or takes to come, or an event of its reply to be taken
    wait: float = setting(60.0, above=0)
    time: float = setting(600.0, above=0, option="--timeout")  # seconds of a request in all
    body: int = setting(8 * 2**20, least=1)  # bytes of a request

    def __post_init__(self) -> None:
        check_settings(self)


class Metrics:
    """One server's counts: numbers alone, of all users together."""

    def __init__(self) -> None:
        own = self.registry = CollectorRegistry()
        about = "Requests that were refused, or failed, by status."
        self.refused = Counter("ssmlx_refused", about, ["status"], registry=own)
        self.waiting = Gauge("ssmlx_waiting", "Requests that wait.", registry=own)
        self.open = Gauge("ssmlx_open", "Answers that are being written.", registry=own)
        about = "Seconds to the first token, of answers that ended by themselves."
        self._prefill = Histogram("ssmlx_prefill_seconds", about, registry=own)
        about = "Their tokens, and target calls, by kind."
        self._counts = Counter("ssmlx_tokens", about, ["kind"], registry=own)

    def add(self, last: GenerationResponse) -> None:
        """Count an answer, of its last segment."""
        self._prefill.observe(last.prefill_seconds)
        self._counts.labels("prompt").inc(last.prompt_tokens)
        self._counts.labels("cached").inc(last.cached_tokens)
        self._counts.labels("completion").inc(last.generation_tokens)
        self._counts.labels("calls").inc(last.target_calls)


class Answering:
    """Answers what is asked, by an engine whose model is called `name` here.

    Args:
        adapters: those offered beside the engine's own, by what follows the name and a colon.
        prompts: processed prompts of each user, which nobody else's answers begin with.
        drafts, template_args: as `Engine.stream` takes them; a request's own arguments go first.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        adapters: Mapping[str, str] | None = None,
        *,
        prompts: Sequence[PromptCache] = (),
        drafts: Mapping[str, Any] | None = None,
        template_args: Mapping[str, Any] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.engine, self.name = engine, name
        own = {f"{name}:{adapter}": place for adapter, place in (adapters or {}).items()}
        self.models: dict[str, str | None] = {name: None, **own}
        self._prompts, self._drafts = prompts or (engine.prompt_cache,), drafts or {}
        self.limits, self.metrics = limits or Limits(), Metrics()
        self._slots, self._waiting = asyncio.Semaphore(self.limits.open), 0
        self._is_closed, self._template_args = False, template_args or {}
        self._tokenizing, self._batches = threading.Lock(), Batches()

    def close(self) -> None:
        """Cancel what is open, keep the prompts where they are kept on disk, free the memory."""
        self._is_closed = True
        self.engine.close()  # and its own prompt cache
        for one in self._prompts:
            if one is not self.engine.prompt_cache:
                one.close()

    def model_name(self, ask: Ask) -> str:
        """What the model that is asked is called; the server's own where none is named."""
        name = ask.model or self.name
        if name not in self.models:
            raise HTTPException(404, f"no model {name[:80]!r}; there are {', '.join(self.models)}")
        return name

    async def parts(self, ask: Ask, user: int = 0) -> AsyncGenerator[Part]:
        """An answer, choice after choice; to close the generator cancels it.

        Raises:
            InputError: it cannot be followed.
            HTTPException: there is no room.
        """
        async with self._slot():
            if self._is_closed:
                raise _STOPPED
            prompt, config = await asyncio.to_thread(self.prepared, ask)
            for choice in range(ask.choices):
                seed = None if config.seed is None else (config.seed + choice) % 2**63
                own = replace(config, seed=seed)
                parser, last = Parser(self.engine.tokenizer, ask, prompt), None
                async with await asyncio.to_thread(self._begun, ask, prompt, own, user) as answer:
                    async for last in answer:
                        logprobs = logprobs_of(self.engine.tokenizer, last.logprobs)
                        for part in parser.read(Text(last.text, len(last.tokens), logprobs)):
                            yield part
                    if last is None or last.finish_reason is None:
                        raise _STOPPED
                    self.metrics.add(last)
                    for part in parser.read(end_of(last, config)):
                        yield part

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        """One of the answers that may be open; they are let in as they came."""
        if self._slots.locked() and self._waiting >= self.limits.waiting:
            raise HTTPException(503, "too many requests wait already; try again later", _AGAIN)
        self._waiting += 1
        try:
            with self.metrics.waiting.track_inprogress():
                async with asyncio.timeout(self.limits.wait):
                    await self._slots.acquire()
        except TimeoutError as error:
            raise HTTPException(503, "no answer ended in time; try again later", _AGAIN) from error
        finally:
            self._waiting -= 1
        try:
            with self.metrics.open.track_inprogress():
                yield
        finally:
            self._slots.release()

    def prepared(self, ask: Ask) -> tuple[list[int], GenerateConfig]:
        """The prompt's tokens, and how to answer it."""
        config, tokenizer = ask.config, self.engine.tokenizer
        if config.seed is None and config.temp > 0:
            config = replace(config, seed=secrets.randbits(31))
        with self._tokenizing:
            if ask.prediction and config.decoding != "plain":
                check_text(ask.prediction)
                text = tuple(tokenizer.encode(ask.prediction, add_special_tokens=False))
                lookup = PromptLookupConfig(size=32, num_draft_tokens=16, reference=text)
                config = replace(config, drafter="prompt-lookup", prompt_lookup=lookup)
            return self._tokens(ask), config

    def _tokens(self, ask: Ask) -> list[int]:
        """The prompt's; turns are under the template of the adapter or the model."""
        model, tokenizer = self.engine.model(self.models[ask.model]), self.engine.tokenizer
        if isinstance(ask.question, str):
            return encode(ask.question, tokenizer)
        if ask.is_chat:
            prompt = {"messages": plain_turns(ask.question), "tools": ask.tools}
            args = {**self._template_args, **(ask.template_args or {})}
            if "enable_thinking" not in str(tokenizer.chat_template):
                args.pop("enable_thinking", None)
            elif ask.schema is not None:
                args["enable_thinking"] = False
            return encode_prompt(prompt, model, tokenizer, template_args=args)
        tokens, size = list[Any](ask.question), model.backbone.vocab_size
        check(all(0 <= token < size for token in tokens), "the prompt", f"ids below {size}")
        return tokens

    def _begun(
        self, ask: Ask, prompt: list[int], config: GenerateConfig, user: int
    ) -> Answer[GenerationResponse]:
        """The segments of a choice."""
        decode: Any = self._batches.decode
        if ask.schema is not None:
            with self._tokenizing:
                mask = processor(self.engine.tokenizer, ask.schema)
            decode = partial(decode, mask=mask)
        more: Any = {"adapter": self.models[ask.model], "prompt_cache": self._prompts[user]}
        return self.engine.stream(prompt, config, drafts={**self._drafts, "decode": decode}, **more)


def end_of(last: GenerationResponse, config: GenerateConfig) -> End:
    """How an answer ended, of its last segment."""
    predicted = len(config.prompt_lookup.reference)
    accepted = min(last.generation_tokens - last.target_calls, predicted)
    return End(
        "stop" if last.finish_reason == "stop" else "length",
        last.prompt_tokens,
        last.generation_tokens,
        last.cached_tokens,
        predicted=(accepted, predicted - accepted),
        stop=last.stop,
        timings=timings_of(last),
    )


def timings_of(last: GenerationResponse) -> dict[str, Any]:
    """What an answer took, of its last segment, by llama.cpp's names where it has them."""
    return {
        "cache_n": last.cached_tokens,
        "prompt_n": last.prompt_tokens - last.cached_tokens,
        "prompt_ms": round(1000 * last.prefill_seconds, 3),
        "predicted_n": last.generation_tokens,
        "predicted_ms": round(1000 * last.decode_seconds, 3),
        "predicted_per_second": round(last.generation_tps, 3),
        "draft_n": last.drafted_tokens,
        "draft_n_accepted": last.generation_tokens - last.target_calls,
        "target_calls": last.target_calls,
        "tokens_per_call": round(last.tokens_per_call, 4),
    }


def logprobs_of(
    tokenizer: TokenizerWrapper, told: Sequence[TokenLogprobs] | None
) -> list[dict[str, Any]] | None:
    """Of each token its text with its log probability, and the likeliest in its place."""
    if told is None:
        return None
    (*_, anchor) = tokenizer.encode("a", add_special_tokens=False)

    def shape(token: int, logprob: float) -> dict[str, Any]:
        # Behind another one: alone, some would lose a space.
        text = tokenizer.decode([anchor, token])[len(tokenizer.decode([anchor])) :]
        # A part of a character has no text of its own.
        known = None if "\N{REPLACEMENT CHARACTER}" in text else [*text.encode()]
        return {"token": text, "logprob": logprob, "bytes": known}

    texts = [one for one in told if one.token not in tokenizer.eos_token_ids]
    tops = [[shape(*other) for other in one.top] for one in texts]
    pairs = zip(texts, tops, strict=True)
    return [{**shape(one.token, one.logprob), "top_logprobs": top} for one, top in pairs]
