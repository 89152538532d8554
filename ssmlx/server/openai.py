"""OpenAI's chat and text completions.

`/v1/completions` takes one prompt or a list of them, as texts or token ids; `n` choices of each are
decoded beside each other, and stand in the order of the prompts. With `echo` a choice's text and
`logprobs` begin with its prompt, the first of whose tokens has null; with `max_tokens` 0 nothing
stands behind it. So lm-eval's `local-completions` can score texts.

A stream has its headers as soon as its answer is begun, and a comment whenever nothing was to be
told for a while. What fails then is told by an event `error`.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import fields, replace
from secrets import token_hex
from time import time
from typing import Any, cast

from .. import __version__
from ..errors import quoted
from ..settings import MAX_STOP, Allowed, GenerateConfig, SamplingConfig
from . import asks
from .asks import Ask, Body, End, Event, Heard, Part, Reasoning, Text, ToolCall, Waiting
from .grammars import grammar_of
from .tool_choice import read_tool_choice

_FIELDS = {one.name: one for one in fields(GenerateConfig) if "allowed" in one.metadata}
SETTINGS = {
    **{one.name: one.name for one in fields(SamplingConfig) if one.name in _FIELDS},
    "temperature": "temp",
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
}
"""Fields of a request that are settings with bounds; the names are OpenAI's, or mlx-lm's."""
del SETTINGS["seed"], SETTINGS["logprobs"]  # which mean more in a request
FINGERPRINT = f"ssmlx-{__version__}"
"""What decodes: the package, for all that may change an answer comes with it."""
_BIAS = Allowed(least=-100, most=100)
MOST_ANSWERS = 256
"""Answers that a request may ask for: choices of all its prompts."""


def read_chat(body: Body, config: GenerateConfig) -> Ask:
    choice = read_tool_choice(body)
    turns = asks.parts_of(body.get("messages"), "messages")
    asks.check(bool(turns), "messages is empty", "a turn at least")
    turns = [{**one, "role": "system"} if one.get("role") == "developer" else one for one in turns]
    wants = asks.typed(body, "logprobs", bool, False)
    return Ask(
        question=turns,
        tools=choice.tools,
        forced_tools=choice.forced,
        parallel_calls=choice.is_parallel,
        template_args=_template_args(body),
        **_turn_fields(body, turns),
        **_common(body, config, (asks.number(body, "top_logprobs", 0, 20) or 0) if wants else None),
    )


def read_completion(body: Body, config: GenerateConfig) -> Ask:
    """A prompt to go on from, or several; with `max_tokens` 0, only to be told of."""
    first, *others = _prompts(body.get("prompt"))
    asks.check(not body.get("suffix"), "suffix", "none")
    most = body.get("max_tokens")
    writes = type(most) is not int or most != 0
    body = body if writes else {**body, "max_tokens": 1}
    ask = Ask(
        question=first,
        others=others,
        is_chat=False,
        echoes=asks.typed(body, "echo", bool, False),
        writes=writes,
        **_common(body, config, asks.number(body, "logprobs", 0, 20)),
    )
    found = f"{1 + len(others)} prompts and n {ask.choices}"
    asks.check(ask.num_answers <= MOST_ANSWERS, found, f"{MOST_ANSWERS} answers at most")
    return ask


def _prompts(prompt: Any) -> list[str | list[int]]:
    """A text or token ids, or several of them, as a list."""

    def is_one(value: Any) -> bool:
        is_tokens = isinstance(value, list) and all(type(one) is int for one in value)
        return isinstance(value, str) or is_tokens

    prompts = [prompt] if is_one(prompt) else prompt
    ok = isinstance(prompts, list) and all(map(is_one, prompts))
    asks.check(ok, f"prompt is {quoted(prompt)}", "a text or token ids, or a list of them")
    return cast("list[str | list[int]]", prompts)


def _common(body: Body, config: GenerateConfig, logprobs: int | None) -> dict[str, Any]:
    """What both ask for; an answer is no longer than the server's settings say."""
    own = replace(config, **_settings(body, config), logprobs=logprobs)
    return {
        "config": replace(own, max_tokens=min(own.max_tokens, config.max_tokens)),
        "model": asks.typed(body, "model", str, ""),
        "choices": asks.number(body, "n", 1, 16) or 1,
        "grammar": grammar_of(body),
        "ignores_end": asks.typed(body, "ignore_eos", bool, False),
        "prediction": asks.text_of(asks.typed(body, "prediction", dict, {}).get("content") or ""),
        "stream": asks.typed(body, "stream", bool, False),
        "body": body,
    }


def _settings(body: Body, config: GenerateConfig) -> dict[str, Any]:
    """The settings that a request brings, each checked under the name that the request has."""
    found: dict[str, Any] = {}
    for name, own in SETTINGS.items():
        if body.get(name) is not None:
            one = _FIELDS[own]
            whole = "int" in str(one.type)
            found[own] = asks.checked(name, body[name], one.metadata["allowed"], whole=whole)
    is_greedy = found.get("temp", config.temp) == 0
    ok = not is_greedy or config.acceptance.kind == "exact"
    found_temp = f"temperature is {found.get('temp')}"
    asks.check(ok, found_temp, "more than 0: this server accepts typical tokens", "temperature")
    if asks.number(body, "seed", -(2**63), 2**63 - 1) is not None:
        found["seed"] = body["seed"] % 2**63
    return found | {"stop": _stop(body, config), "logit_bias": _bias(body, config)}


def _stop(body: Body, config: GenerateConfig) -> Sequence[str]:
    stop = body.get("stop")
    texts = [stop] if isinstance(stop, str) else asks.typed(body, "stop", list, config.stop)
    ok = all(isinstance(one, str) and 0 < len(one) <= MAX_STOP for one in texts)
    expected = f"texts of 1 to {MAX_STOP} characters"
    asks.check(ok, f"stop is {quoted(stop)}", expected, "stop")
    return texts


def _bias(body: Body, config: GenerateConfig) -> Mapping[int, float] | None:
    bias = asks.typed(body, "logit_bias", dict, {})
    ok = all(one.isdecimal() and len(one) < 10 for one in bias)
    ok = ok and all(_BIAS.holds(one, whole=False) for one in bias.values())
    expected = f"token ids, each with a number of {_BIAS.text()}"
    asks.check(ok, f"logit_bias is {quoted(bias)}", expected, "logit_bias")
    return {int(token): float(one) for token, one in bias.items()} or config.logit_bias


def _template_args(body: Body) -> dict[str, Any]:
    """Of the chat template, which may read an effort; an effort of none is no thought."""
    given = asks.typed(body, "chat_template_kwargs", dict, {})
    effort = asks.typed(body, "reasoning_effort", str)
    if effort == "none":
        return {"enable_thinking": False, **given}
    return {"reasoning_effort": effort, **given} if effort else given


def _turn_fields(body: Body, turns: Sequence[Body]) -> dict[str, Any]:
    """Whether the answer continues the last turn.

    It does where that is the assistant's and has a text, as llama.cpp's server has it, unless
    `continue_final_message` is false or `add_generation_prompt` is true; by vLLM's rule they are
    never both true.
    """
    wants = asks.typed(body, "continue_final_message", bool)
    opens = asks.typed(body, "add_generation_prompt", bool)
    found = "continue_final_message is True"
    expected = "add_generation_prompt to be false"
    asks.check(not (wants and opens), found, expected, "continue_final_message")
    last = turns[-1]
    can = last.get("role") == "assistant" and bool(last.get("content"))
    can = can and not last.get("tool_calls")
    expected = "a last turn of the assistant's, with a text"
    asks.check(can or not wants, found, expected, "continue_final_message")
    continues = can and wants is not False and opens is not True
    return {"continues": continues, "opens_turn": opens is not False and not continues}


def comment(waiting: Waiting) -> str:
    """What a stream says while there is nothing to tell, as mlx-lm's server does."""
    return f": keepalive {waiting.done}/{waiting.total}\n\n"


class Texts:
    """Tells choices of plain texts: a chunk a part."""

    keep_alive = staticmethod(comment)
    prefix = "cmpl-"
    kind = "text_completion"
    kind_of_chunk = "text_completion"

    def __init__(self, ask: Ask) -> None:
        options = asks.typed(ask.body, "stream_options", dict, {})
        self._has_usage = options.get("include_usage")
        self._choices_each = ask.choices  # of a prompt
        self._thought = 0  # tokens of reasoning
        self._ends: dict[int, End] = {}
        numbers = range(ask.num_answers)
        choices = [{"index": n, "finish_reason": None, "logprobs": None} for n in numbers]
        self.reply: dict[str, Any] = {"id": self.prefix + token_hex(12), "object": self.kind}
        self.reply |= {"created": int(time()), "model": ask.model, "choices": choices}
        self.reply["system_fingerprint"] = FINGERPRINT

    async def events(self, parts: AsyncIterator[Heard]) -> AsyncIterator[Event]:
        head = {**self.reply, "object": self.kind_of_chunk}
        if self._has_usage:
            head["usage"] = None
        async for part in parts:
            if isinstance(part, Waiting):
                continue
            self._thought += part.tokens if isinstance(part, Reasoning) else 0
            chunk = {**head, "choices": [self._choice(part)]}
            if isinstance(part, End):
                self._ends[part.choice] = part
                chunk["timings"] = part.timings
            elif isinstance(part, Text):
                chunk["ssmlx"] = {"tokens": part.tokens}
            yield None, chunk
        ends = [end for _, end in sorted(self._ends.items())]
        totals = {"usage": _usage(ends, self._choices_each), "timings": ends[-1].timings}
        totals["usage"]["completion_tokens_details"]["reasoning_tokens"] = self._thought
        self.reply |= totals
        if self._has_usage:
            yield None, {**head, "choices": [], **totals}
        yield None, "[DONE]"

    def _choice(self, part: Part) -> dict[str, Any]:
        """What a part brings to its choice, after it was added to the whole one."""
        whole = self.reply["choices"][part.choice]
        logprobs = None
        if isinstance(part, Text) and part.logprobs is not None:
            logprobs = self._logprobs(part.logprobs, len(whole.get("text", "")))
            whole["logprobs"] = _added(whole["logprobs"] or {}, logprobs)
        reason = part.reason if isinstance(part, End) else None
        whole["finish_reason"] = reason
        own = {"index": part.choice, "finish_reason": reason, "logprobs": logprobs}
        return own | self._said(whole, part)

    def _said(self, whole: dict[str, Any], part: Part) -> dict[str, Any]:
        more = {"text": part.text if isinstance(part, Text) else ""}
        _added(whole, more)
        return more

    def _logprobs(self, told: list[dict[str, Any]], offset: int) -> dict[str, Any]:
        """Of tokens whose text begins at `offset` of a choice's, as vLLM counts it.

        The token itself is among the likeliest, whether or not it is one of them.
        """
        sizes = [len(one["token"]) for one in told]
        return {
            "tokens": [one["token"] for one in told],
            "token_logprobs": [one["logprob"] for one in told],
            "top_logprobs": [_likeliest(one) for one in told],
            "text_offset": [offset + sum(sizes[:count]) for count in range(len(sizes))],
        }


class Chats(Texts):
    """Tells choices of messages."""

    prefix = "chatcmpl-"
    kind = "chat.completion"
    kind_of_chunk = "chat.completion.chunk"

    def __init__(self, ask: Ask) -> None:
        super().__init__(ask)
        self.reply["service_tier"] = "default"

    def _said(self, whole: dict[str, Any], part: Part) -> dict[str, Any]:
        delta: dict[str, Any] = {} if "message" in whole else {"role": "assistant"}
        message = whole.setdefault("message", {"refusal": None, "annotations": []})
        match part:
            case Reasoning():
                delta["reasoning_content"] = part.text
            case Text():
                delta["content"] = part.text
            case ToolCall():
                message |= delta
                function = {"name": part.name, "arguments": part.text}
                call = {"id": part.id, "type": "function", "function": function}
                _added(message, {"tool_calls": [call]})
                number = len(message["tool_calls"]) - 1
                return {"delta": {**delta, "tool_calls": [{"index": number, **call}]}}
            case End() if not message.get("content"):
                message["content"] = None if "tool_calls" in message else ""
        _added(message, delta)
        return {"delta": delta}

    def _logprobs(self, told: list[dict[str, Any]], offset: int) -> dict[str, Any]:
        return {"content": told, "refusal": None}


def _likeliest(one: dict[str, Any]) -> dict[str, float] | None:
    """Log probabilities by text; of tokens of the same text the likeliest one's."""
    if one["top_logprobs"] is None:
        return None
    found: dict[str, float] = {}
    for top in (*one["top_logprobs"], one):
        found.setdefault(top["token"], top["logprob"])
    return found


def _added(whole: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """A whole with more of its texts and lists."""
    for name, value in more.items():
        whole.setdefault(name, None if value is None else type(value)())
        if value is not None:
            whole[name] += value
    return whole


def _usage(ends: Sequence[End], choices_each: int) -> dict[str, Any]:
    """Over all choices; a prompt counts once."""
    firsts = [end.last for end in ends[::choices_each]]
    prompt = sum(last.prompt_tokens for last in firsts)
    completion = sum(end.last.generation_tokens for end in ends)
    right = sum(end.right for end in ends)
    guesses = {"accepted_prediction_tokens": right}
    guesses["rejected_prediction_tokens"] = sum(end.predicted for end in ends) - right
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(last.cached_tokens for last in firsts)},
        "completion_tokens_details": guesses,
    }
