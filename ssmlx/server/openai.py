"""OpenAI's chat and text completions."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, cast

from ..errors import require
from ..settings import GenerateConfig
from .asks import (
    Api,
    Ask,
    End,
    Event,
    Ids,
    Logprob,
    Part,
    Reasoning,
    Text,
    ToolCall,
    number,
    shown,
    turns_of,
    typed,
)

MAX_CHOICES = 16
_NUMBERS = {
    "temperature": ("temp", 0, 2),
    "top_p": ("top_p", 0, 1),
    "min_p": ("min_p", 0, 1),
    "presence_penalty": ("presence_penalty", -2, 2),
    "frequency_penalty": ("frequency_penalty", -2, 2),
    "repetition_penalty": ("repetition_penalty", 0, 1000),
}
_WHOLE = {
    "top_k": ("top_k", 0, 2**31),
    "seed": ("seed", -(2**63), 2**63 - 1),
    "max_tokens": ("max_tokens", 1, 2**31),
    "max_completion_tokens": ("max_tokens", 1, 2**31),
    "repetition_context_size": ("repetition_context_size", 1, 2**16),
    "presence_context_size": ("presence_context_size", 1, 2**16),
    "frequency_context_size": ("frequency_context_size", 1, 2**16),
}
"""Numbers of a request, OpenAI's and those that mlx-lm's server adds: which settings they are, and
from where to where they may go."""


def read_chat(body: Mapping[str, Any], config: GenerateConfig) -> Ask:
    config = settings_of(body, config)
    if typed(body, "logprobs", bool, False):
        config = replace(config, logprobs=number(body, "top_logprobs", 0, 20, whole=True) or 0)
    return Ask(
        question=turns_of(body),
        tools=None if body.get("tool_choice") == "none" else typed(body, "tools", list) or None,
        template_args=typed(body, "chat_template_kwargs", dict),
        schema=_schema(typed(body, "response_format", dict, {})),
        config=config,
        **_common(body),
    )


def read_completion(body: Mapping[str, Any], config: GenerateConfig) -> Ask:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    is_tokens = isinstance(prompt, list) and all(type(one) is int for one in prompt)
    found, do = f"prompt is {shown(prompt)}", "ask for one at a time"
    require(is_tokens or isinstance(prompt, str), found, expected="a text or token ids", do=do)
    for name, usual in (("echo", False), ("suffix", None), ("best_of", body.get("n"))):
        given = body.get(name) in (None, usual, "")
        require(given, f"{name} is {shown(body.get(name))}", expected="none", do="drop it")
    config = settings_of(body, config)
    config = replace(config, logprobs=number(body, "logprobs", 0, 20, whole=True))
    return Ask(question=cast("str | list[int]", prompt), config=config, **_common(body))


def settings_of(body: Mapping[str, Any], config: GenerateConfig) -> GenerateConfig:
    """The server's settings with those of a request; an answer is no longer than theirs."""
    found: dict[str, Any] = {
        name: number(body, theirs, *bounds, whole=table is _WHOLE)
        for table in (_NUMBERS, _WHOLE)
        for theirs, (name, *bounds) in table.items()
        if body.get(theirs) is not None
    }
    found["max_tokens"] = min(found.get("max_tokens", config.max_tokens), config.max_tokens)
    if "seed" in found:
        found["seed"] %= 2**63
    if body.get("stop") is not None:
        found["stop"] = [body["stop"]] if isinstance(body["stop"], str) else body["stop"]
        typed(found, "stop", list)
    bias = typed(body, "logit_bias", dict, {})
    ids = all(one.isascii() and one.isdecimal() and len(one) < 10 for one in bias)
    require(ids, f"logit_bias is {shown(bias)}", expected="token ids", do="correct or drop it")
    if bias:
        found["logit_bias"] = {int(one): number(bias, one, -100, 100) or 0.0 for one in bias}
    return replace(config, **found)


def _common(body: Mapping[str, Any]) -> dict[str, Any]:
    content = typed(body, "prediction", dict, {}).get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    typed(body, "stream_options", dict)
    return {
        "model": typed(body, "model", str, ""),
        "choices": number(body, "n", 1, MAX_CHOICES, whole=True) or 1,
        "prediction": "".join(typed({"content": one}, "content", str, "") for one in texts) or None,
        "stream": typed(body, "stream", bool, False),
        "body": body,
    }


def _schema(given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    kind = given.get("type", "text")
    if kind in ("text", "json_object"):
        return None if kind == "text" else {}
    schema = given.get("json_schema")
    schema = schema.get("schema") if isinstance(schema, dict) else None
    expected = "type text, json_object, or json_schema with a schema"
    ok = kind == "json_schema" and isinstance(schema, dict)
    require(ok, f"response_format is {shown(given)}", expected=expected, do="correct or drop it")
    return schema


def whole_chat(ask: Ask, parts: list[Part], ids: Ids) -> dict[str, Any]:
    choices = []
    for own in _by_choice(ask, parts):
        message = {"role": "assistant", "content": "", **_message(own)}
        if "tool_calls" in message:
            message["content"] = message["content"] or None
        choices.append({**_choice(own), "message": message, "logprobs": _chat_logprobs(own)})
    return {**_head(ids, "chat.completion"), "choices": choices, **_totals(parts)}


def whole_completion(ask: Ask, parts: list[Part], ids: Ids) -> dict[str, Any]:
    choices = [_text_choice(own) for own in _by_choice(ask, parts)]
    return {**_head(ids, "text_completion"), "choices": choices, **_totals(parts)}


async def chat_events(ask: Ask, parts: AsyncIterator[Part], ids: Ids) -> AsyncIterator[Event]:
    head = _head(ids, "chat.completion.chunk")
    begun, num_calls, ends = set[int](), [0] * ask.choices, list[Part]()
    async for part in parts:
        delta = _message([part])
        if part.choice not in begun:
            delta = {"role": "assistant", **delta}
            begun.add(part.choice)
        if isinstance(part, ToolCall):
            delta["tool_calls"][0]["index"] = num_calls[part.choice]
            num_calls[part.choice] += 1
        ends += [part] if isinstance(part, End) else []
        choice = {**_choice([part]), "delta": delta, "logprobs": _chat_logprobs([part])}
        yield None, {**head, "choices": [choice], **_brought(part)}
    for event in _closing(ask, head, ends):
        yield event


async def completion_events(ask: Ask, parts: AsyncIterator[Part], ids: Ids) -> AsyncIterator[Event]:
    head, ends, places = _head(ids, "text_completion"), list[Part](), [0] * ask.choices
    async for part in parts:
        ends += [part] if isinstance(part, End) else []
        choice = _text_choice([part], places[part.choice])
        places[part.choice] += len(choice["text"])
        yield None, {**head, "choices": [choice], **_brought(part)}
    for event in _closing(ask, head, ends):
        yield event


def _closing(ask: Ask, head: dict[str, Any], ends: Sequence[Part]) -> list[Event]:
    """The chunk of usage, where it was asked for, and the mark of the end."""
    wanted = (ask.body.get("stream_options") or {}).get("include_usage")
    usage: list[Event] = [(None, {**head, "choices": [], **_totals(ends)})] if wanted else []
    return [*usage, (None, "[DONE]")]


def _brought(part: Part) -> dict[str, Any]:
    """What a chunk tells beside OpenAI's: the tokens of its target call, or the timings."""
    if isinstance(part, End):
        return {"timings": part.timings}
    return {} if isinstance(part, ToolCall) else {"ssmlx": {"tokens": part.tokens}}


def _head(ids: Ids, kind: str) -> dict[str, Any]:
    prefix = "cmpl-" if kind == "text_completion" else "chatcmpl-"
    return {"id": prefix + ids.id, "object": kind, "created": ids.created, "model": ids.model}


def _by_choice(ask: Ask, parts: Sequence[Part]) -> list[list[Part]]:
    return [[part for part in parts if part.choice == choice] for choice in range(ask.choices)]


def _choice(parts: Sequence[Part]) -> dict[str, Any]:
    reason = next((part.reason for part in parts if isinstance(part, End)), None)
    return {"index": parts[0].choice, "finish_reason": reason}


def _said(parts: Sequence[Part], kind: type[Text] | type[Reasoning]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))


def _message(parts: Sequence[Part]) -> dict[str, Any]:
    """A message, or what is new of it."""
    found: dict[str, Any] = {}
    if any(isinstance(part, Text) for part in parts):
        found["content"] = _said(parts, Text)
    if thought := _said(parts, Reasoning):
        found["reasoning_content"] = thought
    calls = [part for part in parts if isinstance(part, ToolCall)]
    told = [{"name": one.name, "arguments": one.arguments} for one in calls]
    if calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": function}
            for call, function in zip(calls, told, strict=True)
        ]
    return found


def _text_choice(parts: Sequence[Part], place: int = 0) -> dict[str, Any]:
    """Of what was said from `place` on, in characters of the answer."""
    logprobs, found = None, _logprobs(parts)
    if found is not None:
        places = [*accumulate((len(one.text) for one in found), initial=place)][:-1]
        logprobs = {
            "tokens": [one.text for one in found],
            "token_logprobs": [one.logprob for one in found],
            "top_logprobs": [dict(one.top) for one in found],
            "text_offset": places,
        }
    return {**_choice(parts), "text": _said(parts, Text), "logprobs": logprobs}


def _logprobs(parts: Sequence[Part]) -> list[Logprob] | None:
    told = [part.logprobs for part in parts if isinstance(part, Text) and part.logprobs is not None]
    return [one for some in told for one in some] if told else None


def _chat_logprobs(parts: Sequence[Part]) -> dict[str, Any] | None:
    found = _logprobs(parts)
    if found is None:
        return None
    tops = [[_token(*other) for other in one.top] for one in found]
    pairs = zip(found, tops, strict=True)
    told = [{**_token(one.text, one.logprob), "top_logprobs": top} for one, top in pairs]
    return {"content": told}


def _token(text: str, logprob: float) -> dict[str, Any]:
    # A part of a character has no text of its own.
    is_whole = "\N{REPLACEMENT CHARACTER}" not in text
    return {"token": text, "logprob": logprob, "bytes": [*text.encode()] if is_whole else None}


def _totals(parts: Sequence[Part]) -> dict[str, Any]:
    """Usage over all choices, of one prompt, and the timings of the last."""
    ends = [part for part in parts if isinstance(part, End)]
    first, used = ends[0].usage, [end.usage for end in ends]
    completion = sum(one.completion_tokens for one in used)
    names = ("accepted_prediction_tokens", "rejected_prediction_tokens")
    sums = {name: sum(getattr(one, name) or 0 for one in used) for name in names}
    has_prediction = first.accepted_prediction_tokens is not None
    usage = {
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": first.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": first.cached_tokens},
        **({"completion_tokens_details": sums} if has_prediction else {}),
    }
    return {"usage": usage, "timings": ends[-1].timings}


_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


def error(status: int, message: str) -> dict[str, Any]:
    usual = "server_error" if status >= 500 else "invalid_request_error"
    told = {"message": message, "type": _KINDS.get(status, usual), "param": None, "code": None}
    return {"error": told}


CHAT = Api(read_chat, whole_chat, chat_events, error)
COMPLETIONS = Api(read_completion, whole_completion, completion_events, error)
