"""OpenAI's chat and text completions."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from ..errors import InputError, require
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

DONE: Event = (None, "[DONE]")
MAX_CHOICES = 16


def read_chat(body: Mapping[str, Any], config: GenerateConfig) -> Ask:
    config = _settings(body, config)
    if typed(body, "logprobs", bool, False):
        config = replace(config, logprobs=number(body, "top_logprobs", whole=True, least=0) or 0)
    return Ask(
        question=turns_of(body),
        tools=None if body.get("tool_choice") == "none" else typed(body, "tools", list) or None,
        template_args=typed(body, "chat_template_kwargs", dict),
        schema=_schema(typed(body, "response_format", dict)),
        config=config,
        **_common(body),
    )


def read_completion(body: Mapping[str, Any], config: GenerateConfig) -> Ask:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    is_tokens = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    require(
        isinstance(prompt, str) or is_tokens,
        f"prompt is {shown(prompt)}", expected="a text or token ids", do="ask for one at a time",
    )  # fmt: skip
    for name in ("echo", "suffix"):
        require(not body.get(name), f"{name} is given", expected="none", do="drop it")
    require(
        number(body, "best_of", whole=True) in (None, body.get("n") or 1),
        "best_of is given", expected="as many as n", do="drop it",
    )  # fmt: skip
    config = _settings(body, config)
    config = replace(config, logprobs=number(body, "logprobs", whole=True, least=0))
    return Ask(question=cast("str | list[int]", prompt), config=config, **_common(body))


def _common(body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": typed(body, "model", str, ""),
        "choices": number(body, "n", whole=True, least=1, most=MAX_CHOICES) or 1,
        "prediction": _prediction(typed(body, "prediction", dict)),
        "stream": typed(body, "stream", bool, False),
        "body": body,
    }


def _settings(body: Mapping[str, Any], config: GenerateConfig) -> GenerateConfig:
    """The server's settings with those of a request; those behind the first rows are mlx-lm's."""
    longest = body.get("max_completion_tokens", body.get("max_tokens"))
    stop = body.get("stop")
    given = {
        "temp": number(body, "temperature", least=0, most=2),
        "top_p": number(body, "top_p", least=0, most=1),
        "seed": number(body, "seed", whole=True, least=-(2**63), most=2**63 - 1),
        "presence_penalty": number(body, "presence_penalty", least=-2, most=2),
        "frequency_penalty": number(body, "frequency_penalty", least=-2, most=2),
        "logit_bias": _bias(typed(body, "logit_bias", dict)),
        "max_tokens": number({"max_tokens": longest}, "max_tokens", whole=True, least=1),
        "stop": [stop] if isinstance(stop, str) else typed(body, "stop", list),
        "top_k": number(body, "top_k", whole=True, least=0),
        "min_p": number(body, "min_p", least=0, most=1),
        "repetition_penalty": number(body, "repetition_penalty") or None,
        **{
            f"{name}_context_size": number(body, f"{name}_context_size", whole=True, least=1)
            for name in ("repetition", "presence", "frequency")
        },
    }
    if given["seed"] is not None:
        given["seed"] %= 2**63
    if given["max_tokens"] is not None:
        given["max_tokens"] = min(given["max_tokens"], config.max_tokens)
    return replace(config, **{name: one for name, one in given.items() if one is not None})


def _bias(given: Mapping[str, Any] | None) -> dict[int, float] | None:
    if given is None:
        return None
    found = {}
    for token, value in given.items():
        require(
            token.isascii() and token.isdecimal() and len(token) < 10,
            f"logit_bias has {shown(token)}", expected="token ids", do="correct or drop it",
        )  # fmt: skip
        found[int(token)] = number({"logit_bias": value}, "logit_bias", least=-100, most=100) or 0.0
    return found


def _prediction(given: Mapping[str, Any] | None) -> str | None:
    if given is None:
        return None
    content = given.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise InputError(
            f"prediction is {shown(given)}", expected="content: a text", do="correct or drop it"
        )
    return "".join(map(str, texts))


def _schema(given: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    kind = None if given is None else given.get("type")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return {}
    schema = given.get("json_schema")
    schema = schema.get("schema") if isinstance(schema, dict) else None
    require(
        kind == "json_schema" and isinstance(schema, dict),
        f"response_format is {shown(given)}",
        expected="type text, json_object, or json_schema with a schema",
        do="correct or drop it",
    )
    return schema


def whole_chat(ask: Ask, parts: list[Part], ids: Ids) -> dict[str, Any]:
    choices = []
    for choice in range(ask.choices):
        own = [part for part in parts if part.choice == choice]
        message: dict[str, Any] = {"role": "assistant", "content": _said(own, Text)}
        if thought := _said(own, Reasoning):
            message["reasoning_content"] = thought
        if calls := [part for part in own if isinstance(part, ToolCall)]:
            message["tool_calls"] = [_call(call) for call in calls]
            message["content"] = message["content"] or None
        logprobs = _chat_logprobs(own)
        choices.append(
            {"index": choice, "message": message, "logprobs": logprobs, "finish_reason": _end(own)}
        )
    return {**_head(ask, ids, "chat.completion"), "choices": choices, **_totals(parts)}


def whole_completion(ask: Ask, parts: list[Part], ids: Ids) -> dict[str, Any]:
    choices = [
        _text_choice(choice, [part for part in parts if part.choice == choice])
        for choice in range(ask.choices)
    ]
    return {**_head(ask, ids, "text_completion"), "choices": choices, **_totals(parts)}


async def chat_events(ask: Ask, parts: AsyncIterator[Part], ids: Ids) -> AsyncIterator[Event]:
    """A chunk for each part; each that brought tokens tells how many, as "ssmlx"."""
    head, begun, calls = _head(ask, ids, "chat.completion.chunk"), set(), [0] * ask.choices
    ends: list[Part] = []
    async for part in parts:
        delta: dict[str, Any] = {} if part.choice in begun else {"role": "assistant"}
        begun.add(part.choice)
        match part:
            case Text(text=text):
                delta["content"] = text
            case Reasoning(text=text):
                delta["reasoning_content"] = text
            case ToolCall():
                delta["tool_calls"] = [{"index": calls[part.choice], **_call(part)}]
                calls[part.choice] += 1
            case End():
                ends.append(part)
        choice = {"index": part.choice, "delta": delta, "finish_reason": _end([part])}
        if (logprobs := _chat_logprobs([part])) is not None:
            choice["logprobs"] = logprobs
        yield None, {**head, "choices": [choice], **_brought(part)}
    for event in _closing(ask, head, ends):
        yield event


async def completion_events(ask: Ask, parts: AsyncIterator[Part], ids: Ids) -> AsyncIterator[Event]:
    head, ends = _head(ask, ids, "text_completion"), []
    places = [0] * ask.choices
    async for part in parts:
        if isinstance(part, End):
            ends.append(part)
        choice = _text_choice(part.choice, [part], places[part.choice])
        places[part.choice] += len(choice["text"])
        yield None, {**head, "choices": [choice], **_brought(part)}
    for event in _closing(ask, head, ends):
        yield event


def _closing(ask: Ask, head: dict[str, Any], ends: Sequence[Part]) -> list[Event]:
    """The chunk of usage, where it was asked for, and the mark of the end."""
    options = ask.body.get("stream_options")
    wanted = isinstance(options, dict) and options.get("include_usage")
    return [*([(None, {**head, "choices": [], **_totals(ends)})] if wanted else []), DONE]


def _head(ask: Ask, ids: Ids, kind: str) -> dict[str, Any]:
    prefix = "cmpl-" if kind == "text_completion" else "chatcmpl-"
    return {"id": prefix + ids.id, "object": kind, "created": ids.created, "model": ids.model}


def _said(parts: Sequence[Part], kind: type[Text] | type[Reasoning]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))


def _end(parts: Sequence[Part]) -> str | None:
    return next((part.reason for part in parts if isinstance(part, End)), None)


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _brought(part: Part) -> dict[str, Any]:
    if isinstance(part, End):
        return {"timings": dict(part.timings)}
    return {} if isinstance(part, ToolCall) else {"ssmlx": {"tokens": part.tokens}}


def _text_choice(choice: int, parts: Sequence[Part], place: int = 0) -> dict[str, Any]:
    """Of what was said from `place` on, in characters of the answer."""
    found = _logprobs(parts)
    logprobs = None
    if found is not None:
        lengths = [0, *(len(one.text) for one in found)]
        logprobs = {
            "tokens": [one.text for one in found],
            "token_logprobs": [one.logprob for one in found],
            "top_logprobs": [dict(one.top) for one in found],
            "text_offset": [place + sum(lengths[: n + 1]) for n in range(len(found))],
        }
    text = _said(parts, Text)
    return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": _end(parts)}


def _logprobs(parts: Sequence[Part]) -> list[Logprob] | None:
    told = [part.logprobs for part in parts if isinstance(part, Text) and part.logprobs is not None]
    return [one for some in told for one in some] if told else None


def _chat_logprobs(parts: Sequence[Part]) -> dict[str, Any] | None:
    found = _logprobs(parts)
    if found is None:
        return None
    return {"content": [
        {**_token(one.text, one.logprob), "top_logprobs": [_token(*other) for other in one.top]}
        for one in found
    ]}  # fmt: skip


def _token(text: str, logprob: float) -> dict[str, Any]:
    # A part of a character has no text of its own.
    is_whole = "\N{REPLACEMENT CHARACTER}" not in text
    return {"token": text, "logprob": logprob, "bytes": [*text.encode()] if is_whole else None}


def _totals(parts: Sequence[Part]) -> dict[str, Any]:
    """Usage over all choices, of one prompt, and the timings of the last."""
    ends = [part for part in parts if isinstance(part, End)]
    first, used = ends[0].usage, [end.usage for end in ends]
    completion = sum(one.completion_tokens for one in used)
    details = {
        name: sum(getattr(one, name) for one in used)
        for name in ("accepted_prediction_tokens", "rejected_prediction_tokens")
        if getattr(first, name) is not None
    }
    usage = {
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": first.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": first.cached_tokens},
        **({"completion_tokens_details": details} if details else {}),
    }
    return {"usage": usage, "timings": dict(ends[-1].timings)}


def error(status: int, message: str) -> dict[str, Any]:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
    usual = "server_error" if status >= 500 else "invalid_request_error"
    codes = {401: "invalid_api_key", 404: "not_found"}
    told = {"message": message, "type": kinds.get(status, usual), "param": None}
    return {"error": {**told, "code": codes.get(status)}}


CHAT = Api(read_chat, whole_chat, chat_events, error)
COMPLETIONS = Api(read_completion, whole_completion, completion_events, error)
