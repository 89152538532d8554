"""OpenAI's responses: reads their requests, and writes their replies."""

from collections.abc import AsyncIterator, Mapping
from itertools import count
from secrets import token_hex
from time import time
from typing import Any

from ..settings import GenerateConfig
from . import requests
from .completions import keep_alive_comment
from .requests import (
    AnswerRequest,
    Body,
    ChoiceEnd,
    Event,
    Part,
    ReasoningPart,
    StreamItem,
    TextPart,
    ToolCallPart,
)
from .typed_blocks import (
    Turns,
    group_parts,
    read_as_chat,
    read_tools,
    typed_event,
    value_under_several_names,
)


def read_response(body: Body, config: GenerateConfig) -> AnswerRequest:
    """Read a request to /v1/responses (OpenAI); it has to bring its whole conversation, and becomes
    a chat completion's.

    Args:
        body: the request.
        config: the server's settings, for what the request does not say; `max_tokens` is a maximum.

    Raises:
        RequestError: a field cannot be followed, or refers to a conversation that a server would
            keep; it has this API's name.
    """
    for name in ("previous_response_id", "conversation", "prompt", "background"):
        requests.check_field(
            not body.get(name), name, "the whole conversation as input: nothing is kept"
        )
    turns = Turns()
    if instructions := body.get("instructions"):
        turns.add_text("system", instructions)
    for item in requests.content_parts(body.get("input"), "input"):
        turns.add_block("user", item)
    effort = requests.read_typed(body, "reasoning", dict, {}).get("effort")
    translated = {
        "messages": [*turns],
        "tools": read_tools(body, "parameters"),
        "max_tokens": body.get("max_output_tokens"),
        "response_format": requests.read_typed(body, "text", dict, {}).get("format"),
        "reasoning_effort": value_under_several_names(
            {"reasoning.effort": effort, "reasoning_effort": body.get("reasoning_effort")}
        ),
    }
    names = {"max_tokens": "max_output_tokens", "response_format": "text"}
    return read_as_chat(body, translated, config, names)


class ResponsesWriter:
    """Writes OpenAI's responses: events for each part, and `reply`, the whole object.

    `reply` is complete once `events` has ended.
    """

    keep_alive = staticmethod(keep_alive_comment)

    def __init__(self, ask: AnswerRequest) -> None:
        """Begin an empty response for a request, with the fields that repeat it."""
        self._items = list[dict[str, Any]]()
        self._sequence = count()
        self.reply: dict[str, Any] = {"id": f"resp_{token_hex(12)}", "object": "response"}
        self.reply |= {"created_at": int(time()), "status": "in_progress", "model": ask.model}
        self.reply |= {"output": self._items, "error": None, "incomplete_details": None}
        self.reply |= {"completed_at": None, "usage": None, **_echoed_fields(ask)}

    async def events(self, parts: AsyncIterator[StreamItem]) -> AsyncIterator[Event]:
        """Yield the events of a response; each group of parts becomes an item of its output.

        Every part is added to `reply`, which has status, usage and timings in the end.

        Args:
            parts: of the request's only choice, with its `ChoiceEnd`.
        """
        thought = 0
        kind = ""
        item = dict[str, Any]()
        held = dict[str, Any]()
        name = ""
        async for does, part in group_parts(parts):
            match does:
                case "begins":
                    yield self._event("created", response=self.reply)
                    yield self._event("in_progress", response=self.reply)
                case "opens":
                    kind, item, held, name = self._open_item(part)
                    yield self._item_event("output_item.added", item=item)
                    if held is not item:
                        item["content"].append(held)
                        yield self._item_event("content_part.added", part=held)
                case "adds":
                    thought += part.tokens if isinstance(part, ReasoningPart) else 0
                    held[name] += part.text
                    yield self._item_event(f"{kind}.delta", delta=part.text)
                case "closes":
                    item["status"] = _status_before(part)
                    yield self._item_event(f"{kind}.done", **{name: held[name]})
                    if held is not item:
                        yield self._item_event("content_part.done", part=held)
                    yield self._item_event("output_item.done", item=item)
                case "ends":
                    self._finish_reply(part, thought)
                    yield self._event(_status_before(part), response=self.reply)

    def _open_item(
        self, part: TextPart | ToolCallPart
    ) -> tuple[str, dict[str, Any], dict[str, Any], str]:
        """Append an empty item for a group of parts to the output.

        Args:
            part: the group's first part, which is not added yet.

        Returns:
            (kind of its events, the item, the object that has its text, the name of the text
            there). Of a call that object is the item itself.
        """
        item: dict[str, Any] = {"id": f"item_{token_hex(12)}", "status": "in_progress"}
        self._items.append(item)
        if isinstance(part, ToolCallPart):
            item |= {"type": "function_call", "call_id": part.id, "name": part.name}
            item["arguments"] = ""
            return "function_call_arguments", item, item, "arguments"
        if isinstance(part, ReasoningPart):
            item |= {"type": "reasoning", "summary": [], "content": [], "encrypted_content": None}
            return "reasoning_text", item, {"type": "reasoning_text", "text": ""}, "text"
        item |= {"type": "message", "role": "assistant", "content": []}
        held = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return "output_text", item, held, "text"

    def _finish_reply(self, end: ChoiceEnd, thought: int) -> None:
        """Set usage, status and timings of the whole response.

        Args:
            end: of the answer.
            thought: how many of its tokens are reasoning.
        """
        last = end.last
        is_cut = end.reason == "length"
        cached = {"cached_tokens": last.cached_tokens, "cache_write_tokens": 0}
        usage = {"input_tokens": last.prompt_tokens, "input_tokens_details": cached}
        usage["output_tokens"] = last.generation_tokens
        usage["output_tokens_details"] = {"reasoning_tokens": thought}
        usage["total_tokens"] = last.prompt_tokens + last.generation_tokens
        self.reply |= {"status": _status_before(end), "usage": usage, "timings": end.timings}
        self.reply["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        self.reply["completed_at"] = None if is_cut else int(time())

    def _item_event(self, name: str, **data: Any) -> Event:
        """Return an event about the last item, with its position in the output, the next number,
        and `data`.
        """
        where: dict[str, Any] = {"output_index": len(self._items) - 1}
        if not name.startswith("output_item"):
            where["item_id"] = self._items[-1]["id"]
            if not name.startswith("function_call"):
                where["content_index"] = 0
        if name.startswith("output_text"):
            where["logprobs"] = []
        return self._event(name, **where, **data)

    def _event(self, name: str, **data: Any) -> Event:
        return typed_event(f"response.{name}", sequence_number=next(self._sequence), **data)


def _echoed_fields(ask: AnswerRequest) -> dict[str, Any]:
    """Return the fields of a response that repeat its request, with defaults for those it lacks,
    and those that are the same for every request.
    """
    body = ask.body
    offered = ask.tools or ()
    metadata = body.get("metadata")
    text = body.get("text")
    form = text.get("format") if isinstance(text, Mapping) else None
    instructions = body.get("instructions")
    reasoning = body.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, Mapping) else None
    return {
        "background": False,
        "instructions": instructions if isinstance(instructions, str) else None,
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": None,
        "metadata": metadata if isinstance(metadata, Mapping) else {},
        "parallel_tool_calls": ask.parallel_calls,
        "previous_response_id": None,
        "reasoning": {"effort": effort, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": ask.config.temp,
        "text": {"format": {"name": "answer", **form} if form else {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [{"type": "function", "strict": False, **one["function"]} for one in offered],
        "top_logprobs": 0,
        "top_p": ask.config.top_p or 1.0,
        "truncation": "disabled",
    }


def _status_before(next: Part) -> str:
    """Return "incomplete" if `next` is the end of an answer that was cut, else "completed"."""
    is_cut = isinstance(next, ChoiceEnd) and next.reason == "length"
    return "incomplete" if is_cut else "completed"
