"""From what is asked to the parts of an answer: so many at once, the others in their order."""

import asyncio
import secrets
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from mlx_lm.tokenizer_utils import TokenizerWrapper
from starlette.exceptions import HTTPException

from ..answers import Answer
from ..api import Decode, GenerationResponse
from ..decoding.sampling import TokenLogprobs
from ..engine import Engine
from ..errors import require
from ..prompt_cache import PromptCache
from ..prompts import check_text, encode, encode_prompt, plain_turns
from ..settings import GenerateConfig, PromptLookupConfig, check_settings, setting
from . import grammar
from .asks import Ask, End, Logprob, Part, Text, Usage
from .batch import Batches
from .metrics import Metrics
from .parsing import Parser, parsed

Segments = Answer[GenerationResponse]
_AGAIN = {"Retry-After": "1"}
_STOPPED = HTTPException(503, "the server is being stopped", _AGAIN)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one server does at most."""

    # answers at once
    open: int = setting(8, least=1, option="--max-open")
    # requests that wait for one of those to end
    waiting: int = setting(64, least=0, option="--max-waiting")
    wait: float = setting(60.0, above=0)  # seconds that a request waits, or takes to come
    # seconds of a request, all in all
    time: float = setting(600.0, above=0, option="--timeout")
    body: int = setting(8 * 2**20, least=1)  # bytes of a request

    def __post_init__(self) -> None:
        check_settings(self)


class Answering:
    """Answers what is asked, by one engine.

    Args:
        engine: has the model.
        name: what the model is called here.
        adapters: what `engine.model` knows the adapters by that are offered beside the engine's
            own: by what follows the model's name and a colon.
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
        self._prompts, self._drafts = prompts or (engine.prompt_cache,), drafts
        self.limits, self.metrics = limits or Limits(), Metrics()
        self._slots, self._waiting = asyncio.Semaphore(self.limits.open), 0
        self._is_closed, self._template_args = False, template_args or {}
        self._tokenizing, self._batches = threading.Lock(), Batches()

    def close(self) -> None:
        """Cancel what is open, keep the prompts where they are kept on disk, free the memory."""
        self._is_closed = True
        self.engine.close()
        for one in self._prompts:
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
            HTTPException: there is no such model, or no room.
        """
        name = self.model_name(ask)
        async with self._slot():
            if self._is_closed:
                raise _STOPPED
            prompt, config = await asyncio.to_thread(self.prepared, ask, name)
            for choice in range(ask.choices):
                seed = None if config.seed is None else (config.seed + choice) % 2**63
                answer = await self._begin(ask, name, prompt, replace(config, seed=seed), user)
                async with answer, aclosing(self._told(answer, config, choice)) as told:
                    async for part in sorted_parts(ask, self.engine.tokenizer, prompt, told):
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

    def prepared(self, ask: Ask, name: str) -> tuple[list[int], GenerateConfig]:
        """The prompt's tokens, and how to answer it."""
        config, tokenizer = ask.config, self.engine.tokenizer
        if config.seed is None and config.temp > 0:
            config = replace(config, seed=secrets.randbits(31))
        with self._tokenizing:
            if ask.prediction is not None and config.decoding != "plain":
                check_text(ask.prediction)
                text = tuple(tokenizer.encode(ask.prediction, add_special_tokens=False))
                lookup = PromptLookupConfig(size=32, num_draft_tokens=16, reference=text)
                config = replace(config, drafter="prompt-lookup", prompt_lookup=lookup)
            return self._tokens(ask, name), config

    def _tokens(self, ask: Ask, name: str) -> list[int]:
        """The prompt's; turns are under the template of the adapter or the model."""
        model, tokenizer = self.engine.model(self.models[name]), self.engine.tokenizer
        if isinstance(ask.question, str):
            return encode(ask.question, tokenizer)
        if ask.question and isinstance(ask.question[0], Mapping):
            prompt = {"messages": plain_turns(ask.question), "tools": ask.tools}
            args = {**self._template_args, **(ask.template_args or {})}
            if "enable_thinking" not in str(tokenizer.chat_template):
                args.pop("enable_thinking", None)
            elif ask.schema is not None:
                args["enable_thinking"] = False
            return encode_prompt(prompt, model, tokenizer, template_args=args)
        tokens, size = list[Any](ask.question), model.backbone.vocab_size
        found, expected = "the prompt has ids of no tokens", f"ids below {size}"
        known = all(0 <= token < size for token in tokens)
        require(known, found, expected=expected, do="correct them")
        return tokens

    async def _begin(
        self, ask: Ask, name: str, prompt: list[int], config: GenerateConfig, user: int
    ) -> Segments:
        """The segments of a choice."""

        def begin() -> Segments:
            decode: Decode = self._batches.decode
            if ask.schema is not None:
                with self._tokenizing:
                    mask = grammar.processor(self.engine.tokenizer, ask.schema)
                decode = partial(decode, mask=mask)
            drafts = {**(self._drafts or {}), "decode": decode}
            return self.engine.stream(
                prompt, config, adapter=self.models[name], drafts=drafts,
                prompt_cache=self._prompts[user],
            )  # fmt: skip

        return await asyncio.to_thread(begin)

    async def _told(
        self, answer: Segments, config: GenerateConfig, choice: int
    ) -> AsyncGenerator[Text | End]:
        """A choice as it is written, whatever its text may stand for."""
        last = None
        async for last in answer:
            logprobs = logprobs_of(self.engine.tokenizer, last.logprobs)
            yield Text(last.text, len(last.tokens), logprobs, choice)
        if last is None or last.finish_reason is None:
            raise _STOPPED
        self.metrics.add(last)
        predicted = len(config.prompt_lookup.reference)
        accepted = min(last.generation_tokens - last.target_calls, predicted)
        counts = (accepted, predicted - accepted) if predicted else ()
        usage = Usage(last.prompt_tokens, last.generation_tokens, last.cached_tokens, *counts)
        reason: Literal["stop", "length"] = "stop" if last.finish_reason == "stop" else "length"
        yield End(reason, usage, last.stop, timings_of(last), choice)


def sorted_parts(
    ask: Ask, tokenizer: TokenizerWrapper, prompt: Sequence[int], parts: AsyncGenerator[Text | End]
) -> AsyncGenerator[Part]:
    """A choice's parts; of a chat's, what is reasoning, and what calls tools, told apart."""
    is_chat = isinstance(ask.question, list) and isinstance(ask.question[0], Mapping)
    has_markers = tokenizer.has_thinking or tokenizer.has_tool_calling
    if not (is_chat and has_markers) or ask.schema is not None:
        return parts
    return parsed(parts, Parser(tokenizer, ask.tools, prompt))


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
        "draft_n": last.drafted_tokens,
        "draft_n_accepted": last.generation_tokens - last.target_calls,
        "target_calls": last.target_calls,
        "tokens_per_call": round(last.tokens_per_call, 4),
    }


def logprobs_of(
    tokenizer: TokenizerWrapper, told: Sequence[TokenLogprobs] | None
) -> tuple[Logprob, ...] | None:
    """With texts in place of ids; an end token is no text."""
    if told is None:
        return None
    (*_, anchor) = tokenizer.encode("a", add_special_tokens=False)

    def text(token: int) -> str:
        # Behind another one: alone, some would lose a space.
        return tokenizer.decode([anchor, token])[len(tokenizer.decode([anchor])) :]

    return tuple(
        Logprob(text(one.token), one.logprob, tuple((text(other), lp) for other, lp in one.top))
        for one in told
        if one.token not in tokenizer.eos_token_ids
    )
