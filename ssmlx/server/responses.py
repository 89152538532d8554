"""OpenAI's responses: reads their requests, and writes their replies."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from itertools import count
from secrets import token_hex
from time import time
from typing import Any, NamedTuple

from ..settings import GenerateConfig
from .completions import keep_alive_comment
from .fields import Body, check_value, list_parts, read_typed
from .requests import (
    AnswerRequest,
    ChoiceEnd,
    Event,
    Part,
    ReasoningPart,
    StreamItem,
    TextPart,
    ToolCallPart,
)
from .typed_blocks import (
    Named,
    Turns,
    listed_tools,
    mark_groups,
    offered_name,
    only_value,
    read_as_chat,
    read_offered_tools,
    typed_event,
)

# As OpenAI's API bounds them; lengths are in characters.
_MOST_METADATA = 16
_MOST_NAME = 64
_MOST_VALUE = 512


def read_response(body: Body, config: GenerateConfig) -> AnswerRequest:
    """Read a request to /v1/responses, by way of a chat completion."""
    # These refer to a conversation that a server would keep.
    for name in ("previous_response_id", "conversation", "prompt", "background"):
        value = body.get(name)
        expected = "the whole conversation as input, as the server stores none"
        check_value(not value, name, value, expected)
    turns = Turns()
    if instructions := body.get("instructions"):
        turns.add_text("system", instructions, "instructions")
    for number, item in enumerate(list_parts(body.get("input"), "input")):
        turns.add_block("user", item, f"input[{number}]")
    offered = read_offered_tools([*listed_tools(body), *turns.tools], "parameters")
    effort = read_typed(body, "reasoning", dict, {}).get("effort")
    translated = {
        "messages": Named("input", turns.joined()),
        "tools": Named("tools", offered.tools),
        "tool_choice": Named("tool_choice", _with_offered_names(body.get("tool_choice"))),
        "max_tokens": Named("max_output_tokens", body.get("max_output_tokens")),
        "response_format": Named("text.format", read_typed(body, "text", dict, {}).get("format")),
        "reasoning_effort": only_value(
            Named("reasoning.effort", effort),
            Named("reasoning_effort", body.get("reasoning_effort")),
        ),
    }
    left_out = (*turns.left_out, *offered.left_out)
    ask = read_as_chat(body, translated, config)
    ask = replace(ask, left_out=left_out, namespaced=offered.namespaced)
    return replace(ask, echoed=_read_echoed_fields(body, ask))


def _with_offered_names(choice: Any) -> Any:
    """Return a choice of tools with the names under which those of namespaces are offered."""
    if isinstance(choice, list):
        return [_with_offered_names(one) for one in choice]
    if not isinstance(choice, Mapping):
        return choice
    own = {**choice, "tools": _with_offered_names(choice["tools"])} if "tools" in choice else choice
    name = choice.get("name")
    if not isinstance(name, str) or "namespace" not in choice:
        return own
    return {**own, "name": offered_name(choice["namespace"], name)}


class _OpenItem(NamedTuple):
    """An item of a response's output that parts are still added to."""

    event: str  # how names of its events begin, such as "output_text"
    item: dict[str, Any]
    text_object: dict[str, Any]  # which has the text: the item itself, or a part of its content
    text_field: str  # the text's name there

    @property
    def has_content(self) -> bool:
        """Whether the text is a part of the item's content; a call's is in the item itself."""
        return self.text_object is not self.item


class ResponsesWriter:
    """Writes OpenAI's responses; `reply` is whole once `events` has ended."""

    keep_alive = staticmethod(keep_alive_comment)

    def __init__(self, ask: AnswerRequest) -> None:
        self._items = list[dict[str, Any]]()
        self._sequence = count()
        self._namespaced = ask.namespaced
        self.reply: dict[str, Any] = {"id": f"resp_{token_hex(12)}", "object": "response"}
        self.reply |= {"created_at": int(time()), "status": "in_progress", "model": ask.model}
        self.reply |= {"output": self._items, "error": None, "incomplete_details": None}
        self.reply |= {"completed_at": None, "usage": None, **ask.echoed}

    async def events(
        self,
        parts: AsyncIterator[StreamItem],  # of the only choice, with its `ChoiceEnd`
    ) -> AsyncIterator[Event]:
        group = _OpenItem("", {}, {}, "")
        async for mark, part in mark_groups(parts):
            match mark:
                case "answer begins":
                    yield self._next_event("created", response=self.reply)
                    yield self._next_event("in_progress", response=self.reply)
                case "group begins":
                    group = self._add_item(part)
                    yield self._item_event("output_item.added", item=group.item)
                    if group.has_content:
                        group.item["content"].append(group.text_object)
                        yield self._item_event("content_part.added", part=group.text_object)
                case "part":
                    group.text_object[group.text_field] += part.text
                    yield self._item_event(f"{group.event}.delta", delta=part.text)
                case "group ends":
                    group.item["status"] = _status_before(part)
                    whole = {group.text_field: group.text_object[group.text_field]}
                    yield self._item_event(f"{group.event}.done", **whole)
                    if group.has_content:
                        yield self._item_event("content_part.done", part=group.text_object)
                    yield self._item_event("output_item.done", item=group.item)
                case "answer ends":
                    self._complete(part)
                    yield self._next_event(_status_before(part), response=self.reply)

    def failure(self, error: Mapping[str, Any]) -> list[Event]:
        """Return the events of an answer that fails after a part of it was sent."""
        for item in self._items:
            if item["status"] == "in_progress":
                item["status"] = "incomplete"
        own = {"code": "server_error", "message": error["message"]}
        self.reply |= {"status": "failed", "error": own}
        numbered = {**error, "sequence_number": next(self._sequence)}
        # OpenAI's clients raise the first one; others, such as Codex, wait for the second.
        return [("error", numbered), self._next_event("failed", response=self.reply)]

    def _add_item(self, part: TextPart | ToolCallPart) -> _OpenItem:
        """Append an empty item to the output for a group of parts, of which `part` is the first."""
        item: dict[str, Any] = {"id": f"item_{token_hex(12)}", "status": "in_progress"}
        self._items.append(item)
        if isinstance(part, ToolCallPart):
            item |= {"type": "function_call", "call_id": part.id, "name": part.name}
            if (own := self._namespaced.get(part.name)) is not None:
                item |= own._asdict()
            item["arguments"] = ""
            return _OpenItem("function_call_arguments", item, item, "arguments")
        if isinstance(part, ReasoningPart):
            item |= {"type": "reasoning", "summary": [], "content": [], "encrypted_content": None}
            text_object: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            return _OpenItem("reasoning_text", item, text_object, "text")
        item |= {"type": "message", "role": "assistant", "content": []}
        text_object = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return _OpenItem("output_text", item, text_object, "text")

    def _complete(self, end: ChoiceEnd) -> None:
        last = end.last
        is_cut = end.reason == "length"
        cached = {"cached_tokens": last.cached_tokens, "cache_write_tokens": 0}
        usage = {"input_tokens": last.prompt_tokens, "input_tokens_details": cached}
        usage["output_tokens"] = last.generation_tokens
        usage["output_tokens_details"] = {"reasoning_tokens": end.reasoning_tokens}
        usage["total_tokens"] = last.prompt_tokens + last.generation_tokens
        self.reply |= {
            "status": _status_before(end),
            "usage": usage,
            "timings": end.timings,
        }
        self.reply["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        self.reply["completed_at"] = None if is_cut else int(time())

    def _item_event(self, name: str, **data: Any) -> Event:
        where: dict[str, Any] = {"output_index": len(self._items) - 1}
        if not name.startswith("output_item"):
            where["item_id"] = self._items[-1]["id"]
            if not name.startswith("function_call"):
                where["content_index"] = 0
        if name.startswith("output_text"):
            where["logprobs"] = []
        return self._next_event(name, **where, **data)

    def _next_event(self, name: str, **data: Any) -> Event:
        return typed_event(f"response.{name}", sequence_number=next(self._sequence), **data)


def _read_echoed_fields(body: Body, ask: AnswerRequest) -> dict[str, Any]:
    """Return the fields of a response that repeat its request, or are the same for every one."""
    offered = ask.tools or ()
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
        "metadata": _read_metadata(body),
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


def _read_metadata(body: Body) -> dict[str, str]:
    metadata: dict[str, Any] = read_typed(body, "metadata", dict, {})
    ok = len(metadata) <= _MOST_METADATA and all(
        len(name) <= _MOST_NAME and isinstance(value, str) and len(value) <= _MOST_VALUE
        for name, value in metadata.items()
    )
    texts = f"at most {_MOST_METADATA} strings of up to {_MOST_VALUE} characters"
    expected = f"{texts}, with names of up to {_MOST_NAME}"
    check_value(ok, "metadata", metadata, expected)
    return metadata


def _status_before(next_part: Part) -> str:
    """Return the status of what `next_part` ends: the length limit may have cut it."""
    is_cut = isinstance(next_part, ChoiceEnd) and next_part.reason == "length"
    return "incomplete" if is_cut else "completed"
