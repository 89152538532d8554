"""Anthropic's messages: reads their requests, and writes their replies."""

from collections.abc import AsyncIterator
from dataclasses import replace
from secrets import token_hex
from typing import Any

from ..json_files import parse_json
from ..settings import GenerateConfig
from .completions import error_event
from .fields import Body, list_parts, read_typed
from .refusals import RequestError
from .requests import (
    AnswerRequest,
    ChoiceEnd,
    Event,
    ReasoningPart,
    StreamItem,
    TextPart,
    ToolCallPart,
    Waiting,
)
from .typed_blocks import (
    Named,
    Turns,
    listed_tools,
    mark_groups,
    only_value,
    read_as_chat,
    read_offered_tools,
    typed_event,
)

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_SIGNATURE = "none"  # of thinking: clients require the field, and do not check it


def read_message(body: Body, config: GenerateConfig) -> AnswerRequest:
    """Read a request to /v1/messages or to its token count, by way of a chat completion."""
    if body.get("thread") is not None:  # clients send the whole conversation then
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        found = "thread is not supported"
        expected = "the whole conversation, as the server stores none"
        raise RequestError("thread", found, expected, "send it without thread", details)
    turns = Turns()
    if system := body.get("system"):
        turns.add_text("system", system, "system")
    listed = list_parts(body.get("messages"), "messages")
    for number, message in enumerate(listed):
        place = f"messages[{number}].content"
        for n, block in enumerate(list_parts(message.get("content"), place)):
            turns.add_block(message.get("role"), block, f"{place}[{n}]")
    offered = read_offered_tools([*listed_tools(body), *turns.tools], "input_schema")
    thinking = read_typed(body, "thinking", dict, {}).get("type")
    template_args = read_typed(body, "chat_template_kwargs", dict, {})
    if thinking:  # `chat_template_kwargs` overrides it
        template_args = {"enable_thinking": thinking != "disabled", **template_args}
    form = read_typed(body, "output_config", dict, {}).get("format")
    translated = {
        "messages": Named("messages", turns.joined()),
        "tools": Named("tools", offered.tools),
        "stop": Named("stop_sequences", body.get("stop_sequences")),
        "response_format": only_value(
            Named("output_config.format", form), Named("output_format", body.get("output_format"))
        ),
        "chat_template_kwargs": Named("chat_template_kwargs", template_args),
    }
    left_out = (*turns.left_out, *offered.left_out)
    ask = read_as_chat(body, translated, config)
    return replace(ask, left_out=left_out, namespaced=offered.namespaced)


# What the end of a stream says of a message's usage.
_DELTA_USAGE = (
    "input_tokens",
    "cache_read_input_tokens",
    "cache_creation_input_tokens",
    "output_tokens",
    "output_tokens_details",
    "server_tool_use",
)


class MessagesWriter:
    """Writes Anthropic's messages; `reply` is whole once `events` has ended."""

    failure = staticmethod(error_event)

    @staticmethod
    def keep_alive(waiting: Waiting) -> str:
        return 'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, ask: AnswerRequest) -> None:
        self._blocks: list[dict[str, Any]] = []
        self.reply: dict[str, Any] = {"id": f"msg_{token_hex(12)}", "type": "message"}
        self.reply |= {"role": "assistant", "model": ask.model, "content": self._blocks}
        self.reply |= {"stop_reason": None, "stop_sequence": None}
        self.reply |= {"stop_details": None, "container": None, "diagnostics": None}
        self.reply["usage"] = _usage()  # known at the end

    async def events(
        self,
        parts: AsyncIterator[StreamItem],  # of the only choice, with its `ChoiceEnd`
    ) -> AsyncIterator[Event]:
        async for mark, part in mark_groups(parts):
            match mark:
                case "answer begins":
                    yield typed_event("message_start", message=self.reply)
                case "group begins":
                    self._blocks.append(_empty_block(part))
                    yield self._block_event("start", content_block=self._blocks[-1])
                case "part":
                    yield self._block_event("delta", delta=_extend_block(self._blocks[-1], part))
                case "group ends":
                    if "signature" in self._blocks[-1]:
                        delta = {"type": "signature_delta", "signature": _SIGNATURE}
                        yield self._block_event("delta", delta=delta)
                    yield self._block_event("stop")
                case "answer ends":
                    reason = "stop_sequence" if part.last.stop else _REASONS[part.reason]
                    stop: Body = {"stop_reason": reason, "stop_sequence": part.last.stop}
                    usage = _usage(part)
                    self.reply |= {**stop, "usage": usage, "timings": part.timings}
                    end_delta: Body = {**stop, "stop_details": None, "container": None}
                    end_usage = {name: usage[name] for name in _DELTA_USAGE}
                    yield typed_event(
                        "message_delta", delta=end_delta, usage=end_usage, timings=part.timings
                    )
                    yield typed_event("message_stop")

    def _block_event(self, name: str, **data: Any) -> Event:
        return typed_event(f"content_block_{name}", index=len(self._blocks) - 1, **data)


def _usage(end: ChoiceEnd | None = None) -> dict[str, Any]:
    """Return the `usage` object of a message; before there is an answer, all counts are 0."""
    last = end.last if end else None
    return {
        "input_tokens": last.prompt_tokens - last.cached_tokens if last else 0,
        "cache_read_input_tokens": last.cached_tokens if last else 0,
        "cache_creation_input_tokens": 0,
        "cache_creation": None,
        "output_tokens": last.generation_tokens if last else 0,
        "output_tokens_details": {"thinking_tokens": end.reasoning_tokens if end else 0},
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
        "speed": "standard",
    }


def _empty_block(part: TextPart | ToolCallPart) -> dict[str, Any]:
    if isinstance(part, ToolCallPart):
        used = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
        return used | {"caller": {"type": "direct"}, "toolset_name": None}
    if isinstance(part, ReasoningPart):
        return {"type": "thinking", "thinking": "", "signature": _SIGNATURE}
    return {"type": "text", "text": "", "citations": None}


def _extend_block(block: dict[str, Any], part: TextPart | ToolCallPart) -> dict[str, Any]:
    """Add a part to its block, in place; return the event's `delta`."""
    if isinstance(part, ToolCallPart):
        block["input"] = parse_json(part.text)
        return {"type": "input_json_delta", "partial_json": part.text}
    kind = block["type"]
    block[kind] += part.text
    return {"type": f"{kind}_delta", kind: part.text}
