"""From what is asked to the parts of an answer: so many at once, the others in their order."""

import asyncio
import secrets
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
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
        self.refused = Counter(
            "ssmlx_refused", "Requests refused or failed.", ["status"], registry=own
        )
        self.waiting = Gauge("ssmlx_waiting", "Requests that wait.", registry=own)
        self.open = Gauge("ssmlx_open", "Answers that are being written.", registry=own)
        self._prefill = Histogram("ssmlx_prefill_seconds", "Time to a first token.", registry=own)
        self._counts = Counter("ssmlx_tokens", "Tokens, and target calls.", ["kind"], registry=own)

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
    drafts: Mapping[str, Any] = field(default_factory=dict)  # as `Engine.stream` takes them
    template_args: Mapping[str, Any] = field(default_factory=dict)  # a request's own go first
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        self.prompts = self.prompts or (self.engine.prompt_cache,)
        self.metrics, self._batches = Metrics(), Batches()
        self._slots, self._waiting = asyncio.Semaphore(self.limits.open), 0
        self._tokenizing = threading.Lock()

    def close(self) -> None:
        """Cancel what is open, keep the prompts where they are kept on disk, free the memory."""
        self.engine.close()
        for one in self.prompts:
            one.close()

    def named(self, ask: Ask) -> Ask:
        """With the name of a model; the first one where the request has none."""
        name = ask.model or next(iter(self.models))
        if name not in self.models:
            raise HTTPException(404, f"no model {name[:80]!r}; there are {', '.join(self.models)}")
        return replace(ask, model=name)

    async def parts(self, ask: Ask, user: int = 0) -> AsyncGenerator[Part]:
        """An answer, choice after choice; to close the generator cancels it.

        Raises:
            InputError: it cannot be followed.
            HTTPException: there is no room.
        """
        async with self._slot():
            if not self.engine.adapters:  # it is closed
                raise _STOPPED
            prompt, config = await asyncio.to_thread(self.prepared, ask)
            tokenizer = self.engine.tokenizer
            for choice in range(ask.choices):
                own = replace(config, seed=((config.seed or 0) + choice) % 2**63)
                parser, last = Parser(tokenizer, ask, prompt), None
                async with await asyncio.to_thread(self._begun, ask, prompt, own, user) as answer:
                    async for last in answer:
                        told = logprobs_of(tokenizer, last.logprobs)
                        for part in parser.read(Text(last.text, len(last.tokens), told)):
                            yield part
                    if last is None or last.finish_reason is None:
                        raise _STOPPED
                    self.metrics.add(last)
                    reason: Any = "stop" if last.finish_reason == "stop" else "length"
                    for part in parser.read(End(reason, last, len(own.prompt_lookup.reference))):
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
        if config.seed is None:
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
            args = {**self.template_args, **(ask.template_args or {})}
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
        more: Any = {"adapter": self.models[ask.model], "prompt_cache": self.prompts[user]}
        return self.engine.stream(prompt, config, drafts={**self.drafts, "decode": decode}, **more)


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

    return [
        {**shape(one.token, one.logprob), "top_logprobs": [shape(*other) for other in one.top]}
        for one in told
        if one.token not in tokenizer.eos_token_ids
    ]
