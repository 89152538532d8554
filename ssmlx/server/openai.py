"""OpenAI's chat and text completions."""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from ..errors import quoted, require
from ..settings import GenerateConfig
from .asks import (
    Api,
    Ask,
    Body,
    End,
    Event,
    Ids,
    Logprob,
    Part,
    Reasoning,
    Text,
    ToolCall,
    number,
    turns_of,
    typed,
)

MAX_CHOICES = 16
Choice = Callable[..., dict[str, Any]]
"""Of the parts of a choice, or of new ones and a count of those before: how it is told."""
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
}
"""Numbers of a request, OpenAI's and those that mlx-lm's server adds: which settings they are, and
from where to where they may go."""


def read_chat(body: Body, config: GenerateConfig) -> Ask:
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    found, do = f"tool_choice is {quoted(choice)}", "ask for a JSON schema, to have a form"
    require(kind in (None, "auto", "none"), found, expected="auto or none", do=do)
    config = _settings(body, config)
    if typed(body, "logprobs", bool, False):
        config = replace(config, logprobs=number(body, "top_logprobs", 0, 20, whole=True) or 0)
    return Ask(
        question=turns_of(body),
        tools=None if kind == "none" else typed(body, "tools", list) or None,
        template_args=typed(body, "chat_template_kwargs", dict),
        schema=_schema(typed(body, "response_format", dict, {})),
        config=config,
        **_common(body),
    )


def read_completion(body: Body, config: GenerateConfig) -> Ask:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    is_tokens = isinstance(prompt, list) and all(type(one) is int for one in prompt)
    found, do = f"prompt is {quoted(prompt)}", "ask for one at a time"
    require(is_tokens or isinstance(prompt, str), found, expected="a text or token ids", do=do)
    for name, usual in (("echo", False), ("suffix", None), ("best_of", body.get("n"))):
        given = body.get(name) in (None, usual, "")
        require(given, f"{name} is {quoted(body.get(name))}", expected="none", do="drop it")
    config = _settings(body, config)
    config = replace(config, logprobs=number(body, "logprobs", 0, 20, whole=True))
    return Ask(question=cast("str | list[int]", prompt), config=config, **_common(body))


def _settings(body: Body, config: GenerateConfig) -> GenerateConfig:
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
    require(ids, f"logit_bias is {quoted(bias)}", expected="token ids", do="correct or drop it")
    if bias:
        found["logit_bias"] = {int(one): number(bias, one, -100, 100) or 0.0 for one in bias}
    return replace(config, **found)


def _common(body: Body) -> dict[str, Any]:
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


def _schema(form: Body) -> Body | None:
    """A format's, which may be a level down; {} for any object, None for text."""
    kind, named = form.get("type", "text"), form.get("json_schema", form)
    if kind in ("text", "json_object"):
        return None if kind == "text" else {}
    schema = named.get("schema") if isinstance(named, dict) else None
    expected = "type text, json_object, or json_schema with a schema"
    ok = kind == "json_schema" and isinstance(schema, dict)
    require(ok, f"the format is {quoted(form)}", expected=expected, do="correct or drop it")
    return schema


def _whole(kind: str, choice: Choice, ask: Ask, parts: list[Part], ids: Ids) -> dict[str, Any]:
    by_choice = [[part for part in parts if part.choice == n] for n in range(ask.choices)]
    choices = [choice(own) for own in by_choice]
    return {**_head(ids, kind), "choices": choices, **_totals(parts)}


async def _events(
    kind: str, choice: Choice, ask: Ask, parts: AsyncIterator[Part], ids: Ids
) -> AsyncIterator[Event]:
    """A chunk a part; then that of usage, where it was asked for, and the mark of the end."""
    head, ends, seen = _head(ids, kind), list[Part](), Counter[Any]()
    async for part in parts:
        ends += [part] if isinstance(part, End) else []
        yield None, {**head, "choices": [choice([part], seen)], **_brought(part)}
        seen.update([part.choice, (part.choice, type(part))])
    if (ask.body.get("stream_options") or {}).get("include_usage"):
        yield None, {**head, "choices": [], **_totals(ends)}
    yield None, "[DONE]"


def _brought(part: Part) -> dict[str, Any]:
    """What a chunk tells beside OpenAI's: the tokens of its target call, or the timings."""
    if isinstance(part, End):
        return {"timings": part.timings}
    return {} if isinstance(part, ToolCall) else {"ssmlx": {"tokens": part.tokens}}


def _head(ids: Ids, kind: str) -> dict[str, Any]:
    prefix = "cmpl-" if kind == "text_completion" else "chatcmpl-"
    return {"id": prefix + ids.id, "object": kind, "created": ids.created, "model": ids.model}


def _said(parts: Sequence[Part], kind: type[Text] | type[Reasoning]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))


def _finish(parts: Sequence[Part]) -> dict[str, Any]:
    reason = next((part.reason for part in parts if isinstance(part, End)), None)
    return {"index": parts[0].choice, "finish_reason": reason}


def _chat_choice(parts: Sequence[Part], seen: Counter[Any] | None = None) -> dict[str, Any]:
    """A choice, or what is new of one behind the parts that were `seen`, counted."""
    choice, message = parts[0].choice, dict[str, Any]()
    if seen is None or not seen[choice]:
        message["role"] = "assistant"
    if any(isinstance(part, Text) for part in parts):
        message["content"] = _said(parts, Text)
    if thought := _said(parts, Reasoning):
        message["reasoning_content"] = thought
    calls = [_call(one) for one in parts if isinstance(one, ToolCall)]
    for index, call in enumerate(calls, seen[choice, ToolCall] if seen else 0):
        call["index"] = index
    if calls:
        message["tool_calls"] = calls
    if seen is None:
        message["content"] = message.get("content") or (None if calls else "")
    name, logprobs = "message" if seen is None else "delta", _chat_logprobs(parts)
    return {**_finish(parts), name: message, "logprobs": logprobs}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _text_choice(parts: Sequence[Part], seen: object = None) -> dict[str, Any]:
    logprobs, found = None, _logprobs(parts)
    if found is not None:
        logprobs = {
            "tokens": [one.text for one in found],
            "token_logprobs": [one.logprob for one in found],
            "top_logprobs": [dict(one.top) for one in found],
        }
    return {**_finish(parts), "text": _said(parts, Text), "logprobs": logprobs}


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


CHAT = Api(
    read_chat,
    partial(_whole, "chat.completion", _chat_choice),
    partial(_events, "chat.completion.chunk", _chat_choice),
    error,
)
COMPLETIONS = Api(
    read_completion,
    partial(_whole, "text_completion", _text_choice),
    partial(_events, "text_completion", _text_choice),
    error,
)
