"""Anthropic's messages."""

from dataclasses import replace
from typing import Any

from ..errors import require
from ..settings import GenerateConfig, parse_json
from . import openai
from .asks import Ask, Body, End, Event, Part, Reasoning, ToolCall, turns_of, typed
from .blocks import SHARED, Run, Teller, Turns, event, parts_of, told_by, tools_of

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_SIGNATURE = "none"  # of thinking: nobody checks it, but it has to be there


def read(body: Body, config: GenerateConfig) -> Ask:
    """What is asked for; `max_tokens` may be missing, as it is where tokens are counted."""
    thinking = typed(body, "thinking", dict, {}).get("type")
    chat = {
        **{name: body.get(name) for name in SHARED},
        "messages": [*_turns(body)],
        "tools": tools_of(body, "input_schema"),
        "stop": body.get("stop_sequences"),
        "response_format": typed(body, "output_config", dict, {}).get("format"),
        "chat_template_kwargs": {"enable_thinking": thinking != "disabled"} if thinking else None,
    }
    return replace(openai.read_chat(chat, config), body=body)


def _turns(body: Body) -> Turns:
    turns = Turns()
    if system := body.get("system"):
        turns.say("system", system)
    for message in turns_of(body):
        for block in parts_of(message.get("content")):
            _add(turns, message["role"], block)
    ok = bool(turns) and turns[-1]["role"] != "assistant"
    expected = "a user's: an answer is not gone on from"
    require(ok, "the last message is not the user's", expected=expected, do="drop it")
    return turns


def _add(turns: Turns, role: str, block: Body) -> None:
    match role, block.get("type"):
        case "user", "tool_result":
            turns.result(block.get("tool_use_id"), block.get("content") or "")
        case "assistant", "tool_use":
            turns.call(block.get("id"), block.get("name"), block.get("input"))
        case "assistant", "thinking" | "redacted_thinking":
            turns.think(block.get("thinking") or "")
        case _:
            turns.say(role, [block])


class _Message(Teller):
    """Runs are the blocks of its content."""

    def begun(self) -> list[Event]:
        usage = {"input_tokens": 0, "output_tokens": 0}  # known at the end
        head = {**self._head(), "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [event("message_start", message=head)]

    def opened(self, part: Run) -> list[Event]:
        block: dict[str, Any] = {"type": "text", "text": ""}
        if isinstance(part, ToolCall):
            block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
        elif isinstance(part, Reasoning):
            block = {"type": "thinking", "thinking": "", "signature": ""}
        self.runs.append(block)
        return [self._event("start", content_block=block)]

    def added(self, part: Run) -> list[Event]:
        block = self.runs[-1]
        if isinstance(part, ToolCall):
            block["input"] = parse_json(part.arguments)
            return [self._delta("input_json", partial_json=part.arguments)]
        block[block["type"]] += part.text
        return [self._delta(block["type"], **{block["type"]: part.text})]

    def closed(self, next: Part) -> list[Event]:
        events = [self._event("stop")]
        if "signature" in self.runs[-1]:
            self.runs[-1]["signature"] = _SIGNATURE
            events.insert(0, self._delta("signature", signature=_SIGNATURE))
        return events

    def ended(self, end: End) -> list[Event]:
        return [event("message_delta", delta=_stop(end), **_totals(end)), event("message_stop")]

    def reply(self, end: End) -> dict[str, Any]:
        return {**self._head(), **_stop(end), **_totals(end)}

    def _head(self) -> dict[str, Any]:
        more = {"type": "message", "role": "assistant", "model": self.ids.model}
        return {"id": f"msg_{self.ids.id}", **more, "content": self.runs}

    def _delta(self, kind: str, **more: str) -> Event:
        return self._event("delta", delta={"type": f"{kind}_delta", **more})

    def _event(self, kind: str, **data: Any) -> Event:
        return event(f"content_block_{kind}", index=len(self.runs) - 1, **data)


def _stop(end: End) -> dict[str, Any]:
    reason = "stop_sequence" if end.stop else _REASONS[end.reason]
    return {"stop_reason": reason, "stop_sequence": end.stop}


def _totals(end: End) -> dict[str, Any]:
    """Tokens, those of the prompt that a cache held apart from its others; and timings."""
    usage = {
        "input_tokens": end.usage.prompt_tokens - end.usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": end.usage.cached_tokens,
        "output_tokens": end.usage.completion_tokens,
    }
    return {"usage": usage, "timings": dict(end.timings)}


def error(status: int, message: str) -> dict[str, Any]:
    own = {413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
    kind = own.get(status, openai.error(status, message)["error"]["type"])
    told = {"type": kind.replace("server_error", "api_error"), "message": message}
    return {"type": "error", "error": told}


MESSAGES = told_by(_Message, read, error)
