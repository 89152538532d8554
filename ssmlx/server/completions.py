"""OpenAI's chat and text completions.

`/v1/completions` takes one prompt or a list of them, as texts or token ids. With `echo` a choice's
text and `logprobs` begin with its prompt, and with `max_tokens` 0 nothing comes after it: so
lm-eval's `local-completions` scores texts.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import accumulate
from secrets import token_hex
from time import time
from typing import Any, TypedDict, cast

from .. import __version__
from ..settings import MAX_STOP, WIRE_NAMES, Allowed, GenerateConfig, allowed_values
from .fields import (
    Body,
    check_field,
    check_number,
    check_value,
    list_parts,
    read_typed,
    read_whole_number,
    with_fields,
)
from .requests import (
    AnswerRequest,
    ChoiceEnd,
    Event,
    Part,
    ReasoningPart,
    StreamItem,
    TextPart,
    ToolCallPart,
    Waiting,
    read_shared_fields,
)
from .tool_choice import read_tool_choice

_ALLOWED = {
    one.name: allowed
    for one in fields(GenerateConfig)
    if (allowed := allowed_values(GenerateConfig, one))
}
# What decodes: the package, for all that may change an answer comes with it.
FINGERPRINT = f"ssmlx-{__version__}"
_MOST_STOPS = 256  # texts are looked for with every token
_BIAS = Allowed(least=-100, most=100)
_LIKELIEST = Allowed(least=0, most=20, whole=True)  # tokens that are reported at each position
# Answers that a request may ask for: choices of all its prompts.
MOST_ANSWERS = 256


def read_chat(body: Body, config: GenerateConfig) -> AnswerRequest:
    """Read a request to /v1/chat/completions; the server's `config` has what it does not say."""
    top = body.get("top_logprobs")  # counts only beside `logprobs`
    wants = read_typed(body, "logprobs", bool, False)
    logprobs = (check_number("top_logprobs", top, _LIKELIEST) or 0) if wants else None
    return replace(read_turns(body, config, logprobs), **_read_choices(body))


def read_turns(body: Body, config: GenerateConfig, logprobs: int | None = None) -> AnswerRequest:
    """Read the fields that all APIs of chats share, under the names that chat completions have."""
    choice = read_tool_choice(body)
    turns = list_parts(body.get("messages"), "messages")
    check_field(bool(turns), "messages is empty", "at least one message", "messages")
    return AnswerRequest(
        question=turns,
        tools=choice.tools,
        forced_tools=choice.forced,
        parallel_calls=choice.is_parallel,
        left_out=choice.left_out,
        template_args=_read_template_args(body),
        config=_read_config(body, config, logprobs),
        **_read_continuation(body, turns),
        **read_shared_fields(body),
    )


def read_completion(body: Body, config: GenerateConfig) -> AnswerRequest:
    """Read a request to /v1/completions; the server's `config` has what it does not say."""
    first, *others = _read_prompts(body.get("prompt"))
    suffix = body.get("suffix")
    check_value(not suffix, "suffix", suffix, "an empty string")
    most = body.get("max_tokens")
    writes = type(most) is not int or most != 0
    logprobs = check_number("logprobs", body.get("logprobs"), _LIKELIEST)
    if not writes:
        body = with_fields(body, {"max_tokens": 1})  # 0 is no setting
    ask = AnswerRequest(
        question=first,
        others=others,
        is_chat=False,
        echoes=read_typed(body, "echo", bool, False),
        writes=writes,
        config=_read_config(body, config, logprobs),
        **read_shared_fields(body),
        **_read_choices(body),
    )
    found = f"{1 + len(others)} prompts and n {ask.choices}"
    expected = f"at most {MOST_ANSWERS} answers"
    param = "n" if ask.choices > 1 else "prompt"
    check_field(ask.num_answers <= MOST_ANSWERS, found, expected, param)
    return ask


def _read_prompts(prompt: Any) -> list[str | list[int]]:
    """Return the prompts, each a text or token ids; an empty list is one prompt without tokens."""

    def is_one(value: Any) -> bool:
        is_tokens = isinstance(value, list) and all(type(one) is int for one in value)
        return isinstance(value, str) or is_tokens

    prompts = [prompt] if is_one(prompt) else prompt
    ok = isinstance(prompts, list) and all(map(is_one, prompts))
    expected = "a string, a list of token ids, or a list of these"
    check_value(ok, "prompt", prompt, expected)
    return cast("list[str | list[int]]", prompts)


def _read_config(
    body: Body,
    config: GenerateConfig,
    logprobs: int | None,  # likeliest tokens that are reported at each position
) -> GenerateConfig:
    own = replace(config, **_read_settings(body, config), logprobs=logprobs)
    return replace(own, max_tokens=min(own.max_tokens, config.max_tokens))


def _read_choices(body: Body) -> dict[str, Any]:
    """Return the arguments of `AnswerRequest` that chat and text completions alone have."""
    options = read_typed(body, "stream_options", dict, {})
    return {
        "choices": read_whole_number(body, "n", 1, 16) or 1,
        "reports_usage": bool(options.get("include_usage")),
    }


def _read_settings(body: Body, config: GenerateConfig) -> dict[str, Any]:
    """Return the arguments of `GenerateConfig` that a request changes."""
    found: dict[str, Any] = {}
    for name, own in WIRE_NAMES.items():
        if body.get(name) is not None:
            found[own] = check_number(name, body[name], _ALLOWED[own])
    is_greedy = found.get("temp", config.temp) == 0
    ok = not is_greedy or config.acceptance.kind == "exact"
    expected = "more than 0, as this server uses typical acceptance"
    check_value(ok, "temperature", found.get("temp"), expected)
    if read_whole_number(body, "seed", -(2**63), 2**63 - 1) is not None:
        found["seed"] = body["seed"] % 2**63  # a negative one too becomes one of 63 bits
    return found | {
        "stop": _read_stop(body, config),
        "logit_bias": _read_logit_bias(body, config),
    }


def _read_stop(body: Body, config: GenerateConfig) -> Sequence[str]:
    stop = body.get("stop")
    texts = [stop] if isinstance(stop, str) else read_typed(body, "stop", list, config.stop)
    ok = len(texts) <= _MOST_STOPS
    ok = ok and all(isinstance(one, str) and 0 < len(one) <= MAX_STOP for one in texts)
    expected = f"at most {_MOST_STOPS} strings of 1 to {MAX_STOP} characters"
    check_value(ok, "stop", stop, expected)
    return texts


def _read_logit_bias(body: Body, config: GenerateConfig) -> Mapping[int, float] | None:
    bias = read_typed(body, "logit_bias", dict, {})
    ok = all(one.isdecimal() and len(one) < 10 for one in bias)
    ok = ok and all(_BIAS.holds(one) for one in bias.values())
    expected = f"a number from {_BIAS.in_words()} for each token id"
    check_value(ok, "logit_bias", bias, expected)
    return {int(token): float(one) for token, one in bias.items()} or config.logit_bias


def _read_template_args(body: Body) -> dict[str, Any]:
    """Return variables of the chat template; `chat_template_kwargs` overrides other fields."""
    given = read_typed(body, "chat_template_kwargs", dict, {})
    effort = read_typed(body, "reasoning_effort", str)
    if effort == "none":
        return {"enable_thinking": False, **given}
    return {"reasoning_effort": effort, **given} if effort else given


class _Continuation(TypedDict):
    """Arguments of `AnswerRequest`: how the answer's turn begins."""

    continues: bool
    opens_turn: bool


def _read_continuation(body: Body, turns: Sequence[Body]) -> _Continuation:
    """Return whether the answer continues the last turn: an assistant's with text and no calls,
    unless a field says no."""
    wants = read_typed(body, "continue_final_message", bool)
    opens = read_typed(body, "add_generation_prompt", bool)
    found = "continue_final_message is true"
    expected = "add_generation_prompt to be false"
    # as in vLLM's server
    check_field(not (wants and opens), found, expected, "continue_final_message")
    last = turns[-1]
    can = last.get("role") == "assistant" and bool(last.get("content"))
    can = can and not last.get("tool_calls")
    expected = "a last message of the assistant that has text and no calls"
    check_field(can or not wants, found, expected, "continue_final_message")
    continues = can and wants is not False and opens is not True  # as in llama.cpp's server
    return {"continues": continues, "opens_turn": opens is not False and not continues}


def keep_alive_comment(waiting: Waiting) -> str:
    """The progress of prompts as a comment of an event stream, as in mlx-lm's server."""
    return f": keepalive {waiting.done}/{waiting.total}\n\n"


def error_event(error: Mapping[str, Any]) -> list[Event]:
    return [("error", error)]


class TextCompletionWriter:
    """Writes text completions: a chunk for each part; `reply` is whole once `events` has ended."""

    keep_alive = staticmethod(keep_alive_comment)
    failure = staticmethod(error_event)
    prefix = "cmpl-"
    kind = "text_completion"
    kind_of_chunk = "text_completion"

    def __init__(self, ask: AnswerRequest) -> None:
        self._has_usage = ask.reports_usage
        self._is_stream = ask.stream
        self._choices_per_prompt = ask.choices
        self._ends: dict[int, ChoiceEnd] = {}
        numbers = range(ask.num_answers)
        choices = [{"index": n, "finish_reason": None, "logprobs": None} for n in numbers]
        self.reply: dict[str, Any] = {"id": self.prefix + token_hex(12), "object": self.kind}
        self.reply |= {"created": int(time()), "model": ask.model, "choices": choices}
        self.reply["system_fingerprint"] = FINGERPRINT

    async def events(
        self,
        parts: AsyncIterator[StreamItem],  # of all choices, each with its `ChoiceEnd`
    ) -> AsyncIterator[Event]:
        head = {**self.reply, "object": self.kind_of_chunk}
        if self._has_usage:
            head["usage"] = None
        async for part in parts:
            if not isinstance(part, Part):
                continue
            chunk = {**head, "choices": [self._add_part(part)]}
            if isinstance(part, ChoiceEnd):
                self._ends[part.choice] = part
                chunk["timings"] = part.timings
            elif isinstance(part, TextPart):
                chunk["ssmlx"] = {"tokens": part.tokens}
            yield None, chunk
        ends = [end for _, end in sorted(self._ends.items())]
        totals = {
            "usage": _total_usage(ends, self._choices_per_prompt),
            "timings": ends[-1].timings,
        }
        self.reply |= totals
        if self._has_usage:
            yield None, {**head, "choices": [], **totals}
        yield None, "[DONE]"

    def _add_part(self, part: Part) -> dict[str, Any]:
        """Add a part to its choice in `reply`; return that choice's entry of a chunk."""
        whole = self.reply["choices"][part.choice]
        logprobs = None
        if isinstance(part, TextPart) and part.logprobs is not None:
            logprobs = self._logprobs_entry(part.logprobs, len(whole.get("text", "")))
            if not self._is_stream:  # a stream's are not read again, and may be many
                whole["logprobs"] = _append(whole["logprobs"] or {}, logprobs)
        reason = part.reason if isinstance(part, ChoiceEnd) else None
        whole["finish_reason"] = reason
        own = {"index": part.choice, "finish_reason": reason, "logprobs": logprobs}
        return own | self._add_content(whole, part)

    def _add_content(self, whole: dict[str, Any], part: Part) -> dict[str, Any]:
        """Add a part to a choice of `reply`; return what a chunk has of it."""
        more = {"text": part.text if isinstance(part, TextPart) else ""}
        _append(whole, more)
        return more

    def _logprobs_entry(
        self,
        token_entries: list[dict[str, Any]],  # by `TokenEntries.of_segment`
        text_offset: int,  # characters of the choice's text before them
    ) -> dict[str, Any]:
        """Return the `logprobs` object of some tokens, as vLLM's server has it."""
        sizes = (len(one["token"]) for one in token_entries)
        return {
            "tokens": [one["token"] for one in token_entries],
            "token_logprobs": [one["logprob"] for one in token_entries],
            "top_logprobs": [_logprobs_by_text(one) for one in token_entries],
            "text_offset": [*accumulate(sizes, initial=text_offset)][:-1],
        }


class ChatCompletionWriter(TextCompletionWriter):
    """Writes chat completions: messages with reasoning and tool calls."""

    prefix = "chatcmpl-"
    kind = "chat.completion"
    kind_of_chunk = "chat.completion.chunk"

    def __init__(self, ask: AnswerRequest) -> None:
        super().__init__(ask)
        self.reply["service_tier"] = "default"

    def _add_content(self, whole: dict[str, Any], part: Part) -> dict[str, Any]:
        delta: dict[str, Any] = {} if "message" in whole else {"role": "assistant"}
        message = whole.setdefault("message", {"refusal": None, "annotations": []})
        match part:
            case ReasoningPart():
                delta["reasoning_content"] = part.text
            case TextPart():
                delta["content"] = part.text
            case ToolCallPart():
                message |= delta
                function = {"name": part.name, "arguments": part.text}
                call = {"id": part.id, "type": "function", "function": function}
                _append(message, {"tool_calls": [call]})
                number = len(message["tool_calls"]) - 1
                return {"delta": {**delta, "tool_calls": [{"index": number, **call}]}}
            case ChoiceEnd() if not message.get("content"):
                message["content"] = None if "tool_calls" in message else ""
        _append(message, delta)
        return {"delta": delta}

    def _logprobs_entry(
        self, token_entries: list[dict[str, Any]], text_offset: int
    ) -> dict[str, Any]:
        return {"content": token_entries, "refusal": None}


def _logprobs_by_text(one: dict[str, Any]) -> dict[str, float] | None:
    """Return log probabilities of the likeliest tokens, and the token's own, by text."""
    if one["top_logprobs"] is None:
        return None
    found: dict[str, float] = {}
    for top in (*one["top_logprobs"], one):  # of tokens with one text the likeliest counts
        found.setdefault(top["token"], top["logprob"])
    return found


def _append(whole: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Append the texts and lists of `more` to those of `whole`, in place; None adds nothing."""
    for name, value in more.items():
        whole.setdefault(name, None if value is None else type(value)())
        if value is not None:
            whole[name] += value
    return whole


def _total_usage(ends: Sequence[ChoiceEnd], choices_per_prompt: int) -> dict[str, Any]:
    """Return the `usage` object over all choices, whose `ends` are in order."""
    firsts = [end.last for end in ends[::choices_per_prompt]]  # each prompt counts once
    prompt = sum(last.prompt_tokens for last in firsts)
    completion = sum(end.last.generation_tokens for end in ends)
    predicted = sum(end.num_predicted for end in ends)
    accepted = sum(end.accepted_prediction for end in ends)
    details = {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": predicted - accepted,
        "reasoning_tokens": sum(end.reasoning_tokens for end in ends),
    }
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(last.cached_tokens for last in firsts)},
        "completion_tokens_details": details,
    }
