"""From what is asked to the parts of an answer: so many at once, the others in their order.

Reasoning and tool calls are told by mlx-lm's parsers; forms are held to by llguidance.
"""

import asyncio
import json
import math
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, cast

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tokenizer_utils import TokenizerWrapper
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.exceptions import HTTPException

from ..answers import Answer
from ..api import GenerationResponse, check_prompt, check_tokens, end_token_ids
from ..bars import Progress
from ..decoding.batch import Mask
from ..drafters.registry import Loaded
from ..engine import Engine
from ..generation.scoring import ScoredPrompt
from ..json_files import parse_json
from ..model.streams import StreamFusedModel
from ..prompt_cache import PromptCache
from ..prompts import chat_tokens, check_text, encode, encode_prompt
from ..settings import GenerateConfig, PromptLookupConfig, check_settings, setting
from .asks import (
    Ask,
    End,
    Heard,
    Part,
    Reasoning,
    Refusal,
    RequestError,
    Text,
    ToolCall,
    Waiting,
    check,
)
from .calls import MAX_CALLS, call_grammar
from .grammars import processor
from .logprobs import logprobs_of, prompt_logprobs
from .together import OwnPlaces, Places, PromptProgress, read_together

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
        self._counts = Counter("ssmlx_tokens", "Tokens, and target calls.", ["kind"], registry=own)

    def add(self, last: GenerationResponse) -> None:
        """Count an answer, of its last segment."""
        self._prefill.observe(last.prefill_seconds)
        self._counts.labels("prompt").inc(last.prompt_tokens)
        self._counts.labels("cached").inc(last.cached_tokens)
        self._counts.labels("completion").inc(last.generation_tokens)
        self._counts.labels("calls").inc(last.target_calls)


@dataclass(eq=False)
class Prompt:
    """One of the prompts of a request."""

    tokens: list[int]
    text: str  # what is echoed of it
    # whether other answers to it find it in the prompt cache, as far as it can be kept there
    is_read: asyncio.Event = field(default_factory=asyncio.Event)
    logprobs: list[dict[str, Any]] | None = None  # of its tokens, once it is scored
    seconds: float = 0.0  # that it took to score it

    def unanswered(self) -> GenerationResponse:
        """The end of an answer of no tokens."""
        return GenerationResponse(
            text="",
            tokens=(),
            finish_reason="length",
            prompt_tokens=len(self.tokens),
            generation_tokens=0,
            target_calls=0,
            prefill_seconds=0.0,
            decode_seconds=0.0,
            peak_memory=0.0,
        )


class Choice:
    """One answer to one of a request's prompts, from segments to parts."""

    def __init__(
        self,
        ask: Ask,
        number: int,
        prompt: Prompt,
        config: GenerateConfig,
        tokenizer: TokenizerWrapper,
        user: int,
    ) -> None:
        """`number` is its place among all of the request, those of one prompt together."""
        own = number % ask.choices
        self.ask = ask
        self.number = number
        self.prompt = prompt
        self.config = replace(config, seed=((config.seed or 0) + own) % 2**63)
        self.user = user
        self.is_first = own == 0  # of its prompt
        self._tokenizer = tokenizer
        self._parser = Parser(tokenizer, ask, prompt.tokens)

    def read(self, said: GenerationResponse) -> list[Part]:
        """What a segment says."""
        # A text completion tells its end token, too, as OpenAI's and vLLM's do.
        told = logprobs_of(self._tokenizer, said, with_end=not self.ask.is_chat)
        return self._own(self._parser.read(Text(said.text, len(said.tokens), told)))

    def end(self, last: GenerationResponse) -> list[Part]:
        """What is left behind the last segment."""
        reason: Any = "stop" if last.finish_reason == "stop" else "length"
        foretold = len(self.config.prompt_lookup.reference)
        return self._own(self._parser.read(End(reason, last, foretold)))

    def whole(self, last: GenerationResponse) -> GenerationResponse:
        """The last segment, with what was done for it before."""
        if self.prompt.logprobs is None or not self.is_first:
            return last
        seconds = last.prefill_seconds + self.prompt.seconds
        return replace(last, cached_tokens=0, prefill_seconds=seconds)

    def _own(self, parts: Sequence[Part]) -> list[Part]:
        return [replace(part, choice=self.number) for part in parts]


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
        self.metrics = Metrics()
        self._places = Places(self.limits.open, self.metrics.open)
        self._waiting = 0
        self._tokenizing = threading.Lock()

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

    async def parts(self, ask: Ask, user: int = 0) -> AsyncGenerator[Heard]:
        """The parts of all choices as they come; to close the generator cancels them.

        Before anything else comes `Waiting`, once it is known that the request can be followed.

        Raises:
            InputError: it cannot be followed.
            HTTPException: there is no room.
        """
        await self._admit()
        places = OwnPlaces(self._places)
        progress = PromptProgress()
        try:
            prompts, config = await asyncio.to_thread(self._prompts_of, ask)
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
                    raise _STOPPED
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
                raise _STOPPED
            prompt.logprobs = await asyncio.to_thread(self._told, prompt, scored[0])
            prompt.seconds = time.perf_counter() - started
        return Text(prompt.text, 0, prompt.logprobs, choice.number)

    async def _admit(self) -> None:
        """Take the place of a request's first answer; requests are let in as they came."""
        if self._places.is_full and self._waiting >= self.limits.waiting:
            raise HTTPException(503, "too many requests wait already; try again later", _AGAIN)
        self._waiting += 1
        try:
            with self.metrics.waiting.track_inprogress():
                async with asyncio.timeout(self.limits.wait):
                    await self._places.take()
        except TimeoutError as error:
            raise HTTPException(503, "no answer ended in time; try again later", _AGAIN) from error
        finally:
            self._waiting -= 1

    def _prompts_of(self, ask: Ask) -> tuple[list[Prompt], GenerateConfig]:
        """What is answered, and how; refused now, while a refusal has a status of its own."""
        first, config = self.prepared(ask)
        tokenizer = self.engine.tokenizer
        with self._tokenizing:
            model = self.engine.model(self.models[ask.model])
            others = [self._tokens(replace(ask, question=one), model) for one in ask.others]
            found: list[Prompt] = []
            for question, tokens in zip((ask.question, *ask.others), (first, *others), strict=True):
                check_prompt(model, len(tokens))
                check_tokens(model, tokens)
                is_text = isinstance(question, str)
                echoed = question if is_text else tokenizer.decode(tokens) if ask.echoes else ""
                found.append(Prompt(tokens, cast("str", echoed)))
            return found, config

    def prepared(self, ask: Ask) -> tuple[list[int], GenerateConfig]:
        """The prompt's tokens, and how to answer it."""
        self._check_open()
        config = ask.config
        tokenizer = self.engine.tokenizer
        if config.seed is None:
            config = replace(config, seed=secrets.randbits(31))
        with self._tokenizing:
            model = self.engine.model(self.models[ask.model])
            highest = max(config.logit_bias or (), default=0)
            size = model.backbone.vocab_size
            check(highest < size, f"logit_bias has {highest}", f"ids below {size}", "logit_bias")
            can_draft = model.backbone.capabilities.has("trees")
            if ask.prediction and config.decoding != "plain" and can_draft:
                check_text(ask.prediction)
                text = tuple(tokenizer.encode(ask.prediction, add_special_tokens=False))
                lookup = PromptLookupConfig(size=32, num_draft_tokens=16, reference=text)
                config = replace(
                    config, decoding="streaming", drafter="prompt-lookup", prompt_lookup=lookup
                )
            if ask.ignores_end:
                ends = dict.fromkeys(end_token_ids(model, tokenizer), -math.inf)
                config = replace(config, logit_bias={**(config.logit_bias or {}), **ends})
            return self._tokens(ask, model), config

    def _check_open(self) -> None:
        if not self.engine.adapters:
            raise _STOPPED

    def _tokens(self, ask: Ask, model: StreamFusedModel) -> list[int]:
        """The prompt's; turns are under the template of the adapter or the model."""
        tokenizer = self.engine.tokenizer
        if isinstance(ask.question, str):
            return encode(ask.question, tokenizer)
        if ask.is_chat:
            _check_template(ask, tokenizer)
            prompt = {"messages": ask.question, "tools": ask.tools}
            args = {**self.template_args, **(ask.template_args or {})}
            if "enable_thinking" not in str(tokenizer.chat_template):
                args.pop("enable_thinking", None)
            elif ask.grammar is not None or ask.forced_tools:
                args["enable_thinking"] = False
            if "reasoning_effort" not in str(tokenizer.chat_template):
                args.pop("reasoning_effort", None)
            if ask.continues or not ask.opens_turn:
                own = {"continues": ask.continues, "add_generation_prompt": ask.opens_turn}
                turns: Any = ask.question
                return chat_tokens(tokenizer, turns, tools=ask.tools, template_args=args, **own)
            return encode_prompt(prompt, model, tokenizer, template_args=args)
        return list[Any](ask.question)

    def _begun(self, choice: Choice, progress: Progress) -> Answer[GenerationResponse]:
        """The segments of a choice."""
        self._check_open()
        ask = choice.ask
        mask: Mask | None = None
        if ask.grammar is not None or ask.forced_tools:
            with self._tokenizing:
                mask = _mask(ask, self.engine.tokenizer)
        return self.engine.stream(
            choice.prompt.tokens,
            choice.config,
            adapter=self.models[ask.model],
            prompt_cache=self.prompts[choice.user],
            drafter=self.loaded,
            mask=mask,
            progress=progress,
            shares_prompt=choice.is_first and ask.choices > 1,
            joins_prompt=ask.continues or not ask.is_chat,
        )

    def _told(self, prompt: Prompt, scored: ScoredPrompt) -> list[dict[str, Any]]:
        with self._tokenizing:
            return prompt_logprobs(self.engine.tokenizer, prompt.tokens[0], scored.logprobs)

    def _scoring(self, choice: Choice, progress: Progress) -> Answer[ScoredPrompt]:
        """A choice's prompt as the model sees it; kept where something is written behind it."""
        self._check_open()
        return self.engine.score(
            choice.prompt.tokens,
            top=choice.config.logprobs or 0,
            adapter=self.models[choice.ask.model],
            prompt_cache=self.prompts[choice.user] if choice.ask.writes else None,
            progress=progress,
        )


def _mask(ask: Ask, tokenizer: TokenizerWrapper) -> Mask:
    """What holds an answer to its form: that of a tool's call goes before others."""
    if not ask.forced_tools:
        return processor(tokenizer, ask.grammar or "")
    most = MAX_CALLS if ask.parallel_calls else 1
    return processor(tokenizer, call_grammar(tokenizer, ask.tools or (), ask.forced_tools, most))


def _check_template(ask: Ask, tokenizer: TokenizerWrapper) -> None:
    """Raises RequestError where the model's chat template has no place for what is asked."""
    turns = [one for one in ask.question if isinstance(one, Mapping)]
    is_text = len(turns) == 1 and turns[0].get("role") == "user" and not ask.tools
    if not tokenizer.has_chat_template and not is_text:
        found = "messages are turns of a chat"
        expected = "one text of a user's: this model has no chat template"
        raise RequestError("messages", found, expected, "ask /v1/completions, or another model")
    template = tokenizer.chat_template
    if not isinstance(template, str):  # it is code, of a model made for tools
        return
    has_calls = any(one.get("role") == "tool" or one.get("tool_calls") for one in turns)
    for name, is_asked, word in (("tools", ask.tools, "tools"), ("messages", has_calls, "tool")):
        if is_asked and word not in template:
            what = "tools are offered" if name == "tools" else "messages have calls of tools"
            expected = "none: this model's chat template has no form for tools"
            raise RequestError(name, what, expected, "drop them, or ask a model made for tools")


class Parser:
    """Tells a choice's text as text, reasoning and tool calls.

    Text goes on as it comes, but for an end that may begin a marker, and for space behind markers.
    A call is held until it is whole. One that cannot be parsed is text, as is any without tools.
    """

    def __init__(self, tokenizer: TokenizerWrapper, ask: Ask, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._tools = ask.tools
        self._most_calls = None if ask.parallel_calls else 1
        self._call = ""
        self._is_behind_marker = False
        self._has_called = False
        self._name = "normal"
        machine = TextStateMachine()
        if (ask.is_chat and ask.grammar is None) or ask.forced_tools:
            # A template may open reasoning at the prompt's end.
            machine = make_text_state_machine(tokenizer)
            end = tokenizer.decode([*prompt[-16:]])
            opens = tokenizer.has_thinking and end.rstrip().endswith(tokenizer.think_start)
            begun = "reasoning" if opens else "normal"
            is_new = not ask.continues and not ask.forced_tools
            self._name = (is_new and tokenizer.response_initial_state) or begun
        self._state = machine.make_state(self._name)

    def read(self, part: Text | End) -> list[Part]:
        """What another part of the text says, or its end."""
        if isinstance(part, Text):
            self._state, segments = TextStateMachine.split(self._state, part.text)
            first, *more = self._told(segments) or [Text("")]
            if isinstance(first, Text):  # tells of the whole part
                first = replace(first, tokens=part.tokens, logprobs=part.logprobs)
            return [first, *more]
        self._state, text, _ = TextStateMachine.flush(self._state)
        found = self._told([(self._name, text)])
        if self._name == "tool":
            # Where the text was cut, only a call without an end marker can be whole.
            is_cut = part.reason == "length" and bool(self._tokenizer.tool_call_end)
            found += self._calls(is_cut=is_cut)
        is_call = self._has_called and part.reason == "stop"
        return [*found, replace(part, reason="tool_calls") if is_call else part]

    def _told(self, segments: Sequence[tuple[str, str]]) -> list[Part]:
        found: list[Part] = []
        for name, text in segments:
            if name != self._name:
                found += self._calls() if self._name == "tool" else []
                self._name = name
                self._is_behind_marker = True
            if name == "tool":
                self._call += text
            elif name == "reasoning":
                found += [Reasoning(text)] if text else []
            elif said := text.lstrip() if self._is_behind_marker else text:
                self._is_behind_marker = False
                found.append(Text(said))
        return found

    def _calls(self, *, is_cut: bool = False) -> list[Part]:
        """The calls in the text between markers, or that text."""
        text = self._call
        self._call = ""
        try:
            if is_cut or self._tools is None:
                raise ValueError("it is no call")
            found = self._tokenizer.tool_parser(text, self._tools)
            found = found if isinstance(found, list) else [found]
            calls = [*map(_tool_call, found)][: self._most_calls]
        except Exception:  # whatever a parser makes of a model's words
            return [Text(text)] if text.strip() else []
        if self._has_called and self._most_calls:
            return []
        self._has_called = True
        return [*calls]


def _tool_call(parsed: Mapping[str, Any]) -> ToolCall:
    """Raises an error of some kind where what was parsed is no call."""
    name = parsed["name"]
    arguments = parsed.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parse_json(arguments)
    if not isinstance(arguments, dict) or not isinstance(name, str):
        raise ValueError("a call has a name, and an object of arguments")
    told = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return ToolCall(str(parsed.get("id") or f"call_{secrets.token_hex(12)}"), name, told)
