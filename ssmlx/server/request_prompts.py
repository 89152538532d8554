"""A request's prompts as tokens: turns under a chat template, texts, or token ids."""

import asyncio
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

from llguidance import LLMatcher, LLTokenizer
from mlx_lm.tokenizer_utils import TokenizerWrapper
from starlette.exceptions import HTTPException

from ..decoding.batch import Mask
from ..engine import Engine
from ..errors import InputError
from ..formats.answer_grammars import MAX_CALLS, form_grammar, thought_end, tool_call_grammar
from ..formats.families import find_format
from ..formats.reader import Begins, begins_after
from ..generation.answer_end import end_token_ids
from ..generation.scoring import ScoredPrompt
from ..generation.segments import GenerationResponse, check_prompt
from ..model.streams import StreamFusedModel
from ..prompts import (
    chat_tokens,
    check_text,
    encode,
    encode_prompt,
    length_before_answer_opens,
)
from ..settings import GenerateConfig
from .concurrency import READING
from .fields import check_field
from .grammars import (
    GrammarMask,
    SchemaTooLargeError,
    ThoughtLimit,
    check_schema_size,
    compiled_matcher,
    llguidance_tokenizer,
)
from .logprobs import TokenEntries
from .refusals import AGAIN, RequestError
from .requests import AnswerRequest
from .text_lengths import most_bytes_per_token, with_length_check

# Log probabilities of a request: of the prompts that it echoes and, if its reply is sent whole, of
# its answers; some hundred MB.
MOST_LOGPROBS = 1_000_000
# Characters of a prediction that are looked at for each token of the answer that it may draft.
_CHARS_PER_TOKEN = 16


@dataclass(eq=False)
class Prompt:
    """A prompt of a request, as tokens, with what its choices share."""

    tokens: list[int]
    text: str  # what is echoed of it
    keep_at: int | None  # see `Engine.stream`
    begins: Begins = "text"  # what its answers begin with
    matcher: LLMatcher | None = None  # of the form of its answers, at the beginning
    # whether other answers to it find it in the prompt cache, as far as it can be kept there
    is_read: asyncio.Event = field(default_factory=asyncio.Event)
    logprobs: list[dict[str, Any]] | None = None  # of its tokens, once it is scored
    seconds: float = 0.0  # that it took to score it

    def empty_answer(self) -> GenerationResponse:
        """Return the response to a prompt that is only echoed or scored."""
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


@dataclass(eq=False)
class PromptReader:
    """Turns requests into tokens, settings and masks for an engine's models; on any thread."""

    engine: Engine
    models: Mapping[str, str | None]  # adapters, by what the model with each is called here
    template_args: Mapping[str, Any]  # a request's own go first

    def __post_init__(self) -> None:
        self.token_entries = TokenEntries(self.engine.tokenizer)
        # The first text sets the tokenizer up; after it, texts may be encoded at the same time.
        self.engine.tokenizer.encode("")
        self._bytes_per_token = most_bytes_per_token(self.engine.tokenizer)

    async def read_prompts(self, ask: AnswerRequest) -> tuple[list[Prompt], GenerateConfig]:
        """Return all prompts of a request, with the compiled form of answers, and its settings."""
        # In pieces, so that the rest is left out if the request was cancelled.
        size = ask.num_bytes
        first, config = await READING.run(size, self.read_first_prompt, ask)
        prompts = [await READING.run(size, self._check_prompt, ask, first)]
        for one in ask.others:
            other = replace(ask, question=one)
            prompts.append(await READING.run(size, self._read_prompt, other))
        config = _with_bounded_logprobs(ask, prompts, config)
        matchers: dict[Begins, LLMatcher | None] = {}
        for prompt in prompts:
            if prompt.begins not in matchers:
                asked = replace(ask, begins=prompt.begins)
                matchers[prompt.begins] = await READING.run(size, self._compile_form, asked)
            prompt.matcher = matchers[prompt.begins]
        return prompts, config

    def _read_prompt(self, ask: AnswerRequest) -> Prompt:
        model = self.engine.model(self.models[ask.model])
        return self._check_prompt(ask, self._encode_text_ids_or_turns(ask, model))

    def _check_prompt(self, ask: AnswerRequest, tokens: list[int]) -> Prompt:
        """Return the prompt of `ask.question`, whose tokens are known."""
        model = self.engine.model(self.models[ask.model])
        check_prompt(model, tokens)  # before any answer of the request begins
        is_text = isinstance(ask.question, str)
        decode = self.engine.tokenizer.decode
        echoed = ask.question if is_text else decode(tokens) if ask.echoes else ""
        keep_at = self._length_before_answer_opens(ask, model, tokens)
        return Prompt(tokens, cast("str", echoed), keep_at, self._answer_begins(ask, tokens))

    def _answer_begins(self, ask: AnswerRequest, prompt: list[int]) -> Begins:
        """Return what an answer begins with: its prompt may have opened a thought."""
        last = ask.question[-1] if ask.continues else ""
        prefill = str(last.get("content")) if isinstance(last, Mapping) else ""
        return begins_after(prompt, self.engine.tokenizer, prefill)

    def _compile_form(self, ask: AnswerRequest) -> LLMatcher | None:
        """Compile the form of the answers; a forced call takes precedence over another form."""
        if ask.grammar is None and not ask.forced_tools:
            return None
        if ask.forced_tools:
            try:
                check_schema_size(ask.tools)
            except SchemaTooLargeError as error:
                found = f"tools are too large: {error}"
                raise RequestError("tools", found, "smaller schemas") from error
        return compiled_matcher(self._llguidance_tokenizer, self._grammar_of_answer(ask))

    def read_first_prompt(self, ask: AnswerRequest) -> tuple[list[int], GenerateConfig]:
        """Return the tokens of a request's first prompt, and the settings of its answer."""
        self.check_open()
        config = ask.config
        tokenizer = self.engine.tokenizer
        if config.seed is None:
            config = replace(config, seed=secrets.randbits(31))
        model = self.engine.model(self.models[ask.model])
        highest = max(config.logit_bias or (), default=0)
        size = model.backbone.vocab_size
        check_field(highest < size, f"logit_bias has {highest}", f"ids below {size}", "logit_bias")
        if ask.ignores_end:
            ends = dict.fromkeys(end_token_ids(model, tokenizer), -math.inf)
            config = replace(config, logit_bias={**(config.logit_bias or {}), **ends})
        prompt = self._encode_text_ids_or_turns(ask, model)
        if ask.prediction:  # no more of it than an answer can be long
            check_text(ask.prediction)
            most = _most_answer_tokens(config, model, len(prompt))
            text = ask.prediction[: _CHARS_PER_TOKEN * most]
            expected = tuple(tokenizer.encode(text, add_special_tokens=False)[:most])
            lookup = replace(config.prompt_lookup, reference=expected)
            config = replace(config, prompt_lookup=lookup)
        return prompt, config

    def count_prompt_tokens(self, ask: AnswerRequest) -> int:
        self.check_open()
        model = self.engine.model(self.models[ask.model])
        return len(self._encode_text_ids_or_turns(ask, model))

    def check_open(self) -> None:
        """Raise HTTPException if the server is shutting down (503)."""
        if self.engine.is_closed:
            raise HTTPException(503, "the server is shutting down", AGAIN)

    def _encode_text_ids_or_turns(self, ask: AnswerRequest, model: StreamFusedModel) -> list[int]:
        """Return the tokens of a request's prompt; `model` may have a template of its own."""
        limit = model.backbone.context_length
        tokenizer = with_length_check(self.engine.tokenizer, self._bytes_per_token, limit)
        if isinstance(ask.question, str):
            return encode(ask.question, tokenizer)
        if ask.is_chat:
            _require_template_for_turns(ask, tokenizer)
            prompt = {"messages": ask.question, "tools": ask.tools}
            args = {**self.template_args, **(ask.template_args or {})}
            # These two are left out if the template does not name them; others are refused then.
            # A template that is code of mlx-lm's reads the first one.
            is_code = tokenizer._chat_template is not None
            named = "enable_thinking" if is_code else str(tokenizer.chat_template)
            if "enable_thinking" not in named:
                args.pop("enable_thinking", None)
            elif ask.grammar is not None or ask.forced_tools:  # even if it was requested
                args["enable_thinking"] = False
            if "reasoning_effort" not in named:
                args.pop("reasoning_effort", None)
            if ask.continues or not ask.opens_turn:
                own = {"continues": ask.continues, "add_generation_prompt": ask.opens_turn}
                turns: Any = ask.question
                return chat_tokens(tokenizer, turns, tools=ask.tools, template_args=args, **own)
            return encode_prompt(prompt, model, tokenizer, template_args=args)
        return list[Any](ask.question)

    def _length_before_answer_opens(
        self, ask: AnswerRequest, model: StreamFusedModel, prompt: list[int]
    ) -> int | None:
        """Return how many tokens of a chat's prompt are before its template opens the answer."""
        opens = ask.is_chat and ask.opens_turn and not ask.continues
        # With stages, the cache can go back to any position.
        if not opens or model.backbone.capabilities.has("stages"):
            return None
        turns_alone = replace(ask, opens_turn=False)
        return length_before_answer_opens(
            prompt, lambda: self._encode_text_ids_or_turns(turns_alone, model)
        )

    def make_mask_or_none(self, ask: AnswerRequest) -> Mask | None:
        """Return a new mask that holds an answer to its form; one that was not compiled is now."""
        matcher = ask.matcher or self._compile_form(ask)
        if matcher is None:
            return None
        tokenizer = self.engine.tokenizer
        mask = GrammarMask(matcher)
        end_mark = thought_end(find_format(tokenizer))
        if ask.begins == "text" or not end_mark:  # a thought that it opened is free
            return mask
        most = ask.config.max_tokens * 3 // 4  # the rest is for what comes after the thought
        return ThoughtLimit(mask, tokenizer, end_mark, most)

    def _grammar_of_answer(self, ask: AnswerRequest) -> str:
        """Return the grammar of a whole answer, of a thought that it begins with too."""
        tokenizer = self.engine.tokenizer
        if not ask.forced_tools:
            return form_grammar(ask.grammar or "", tokenizer, ask.begins)
        most = MAX_CALLS if ask.parallel_calls else 1
        try:
            return tool_call_grammar(tokenizer, ask.tools or (), ask.forced_tools, most, ask.begins)
        except InputError as error:
            param = next((one for one in ("tool_choice", "tools") if one in error.found), None)
            raise RequestError(param, error.found, error.expected, error.do) from error

    @cached_property
    def _llguidance_tokenizer(self) -> LLTokenizer:
        return llguidance_tokenizer(self.engine.tokenizer)

    def scored_entries(self, prompt: Prompt, found: ScoredPrompt) -> list[dict[str, Any]]:
        return self.token_entries.of_prompt(prompt.tokens[0], found.logprobs)


def _most_answer_tokens(config: GenerateConfig, model: StreamFusedModel, num_prompt: int) -> int:
    limit = model.backbone.context_length
    room = config.max_tokens if limit is None else limit - num_prompt
    return max(0, min(config.max_tokens, room))


def _with_bounded_logprobs(
    ask: AnswerRequest, prompts: Sequence[Prompt], config: GenerateConfig
) -> GenerateConfig:
    """Return settings by which a reply that is sent whole ends at `MOST_LOGPROBS`."""
    if config.logprobs is None:
        return config
    most = MOST_LOGPROBS // (1 + config.logprobs)
    echoed = ask.choices * sum(len(one.tokens) for one in prompts) if ask.echoes else 0
    found = f"logprobs of {echoed} tokens of prompts"
    check_field(echoed <= most, found, f"at most {most}, over all choices", "logprobs")
    if ask.stream or not ask.writes:
        return config
    room = (most - echoed) // (ask.choices * len(prompts))
    return replace(config, max_tokens=max(1, min(config.max_tokens, room)))


def _require_template_for_turns(ask: AnswerRequest, tokenizer: TokenizerWrapper) -> None:
    """Refuse anything but a text of a user's if the model has no chat template."""
    turns = [one for one in ask.question if isinstance(one, Mapping)]
    is_text = len(turns) == 1 and turns[0].get("role") == "user" and not ask.tools
    if not tokenizer.has_chat_template and not is_text:
        found = "messages need a chat template, which this model lacks"
        expected = "a single user message"
        raise RequestError("messages", found, expected, "use /v1/completions, or another model")
