"""Anthropic's messages and OpenAI's responses, which are lists of typed blocks.

The server keeps no response: a request brings its whole conversation.
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from itertools import count
from secrets import token_hex
from time import time
from typing import Any

from ..api import GenerationResponse
from ..errors import quoted
from ..json_files import parse_json
from ..settings import GenerateConfig
from . import completions, requests
from .fields import OF_CHATS
from .requests import (
    AnswerRequest,
    Body,
    ChoiceEnd,
    Event,
    Part,
    ReasoningPart,
    RequestError,
    StreamItem,
    TextPart,
    ToolCallPart,
    Waiting,
)

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_SIGNATURE = "none"  # of thinking: nobody checks it, but it has to be there
_BLOCKS = {
    "message": ("add_text", "role", "content"),
    "thinking": ("add_reasoning", "thinking"),
    "redacted_thinking": ("skip",),
    "reasoning": ("add_reasoning", "content"),
    "tool_use": ("add_tool_call", "id", "name", "input"),
    "function_call": ("add_tool_call", "call_id", "name", "arguments"),
    "tool_result": ("add_tool_result", "tool_use_id", "content"),
    "function_call_output": ("add_tool_result", "call_id", "output"),
}
"""What becomes of a block or an item, by its type, and of which of its fields; others are texts."""


class _Turns(list[dict[str, Any]]):
    """The turns of a chat, a list of messages, built from typed blocks.

    Blocks of one role in a row become one turn; a tool's result is a turn of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[Any, str] = {}  # of tools, by the ids of their calls

    def add_block(self, role: Any, block: Body) -> None:
        """Add a block or item by its type, as `_BLOCKS` says; a type that is not listed there is
        read as a text.

        Args:
            role: whose text it is, for types that do not say so.
            block: the block.

        Raises:
            RequestError: it is broken, or its type is unknown and it has no text.
        """
        does, *names = _BLOCKS.get(str(block.get("type", "message")), ["add_text"])
        if does == "skip":
            return
        fields = [block.get(name) for name in names] or [role, [block]]
        getattr(self, does)(*fields)

    def add_text(self, role: Any, content: Any) -> None:
        """Add text to the last turn if that is `role`'s, behind a blank line, else to a new one.

        Args:
            role: "developer" counts as "system".
            content: a text, or a list of parts with text.

        Raises:
            RequestError: a part is no text.
        """
        turn = self._turn_of("system" if role == "developer" else role)
        said = requests.content_text(content)
        turn["content"] = "\n\n".join(one for one in (turn["content"], said) if one)

    def add_reasoning(self, content: Any) -> None:
        """Set what the assistant's turn thought, in the place of what was there; nothing for empty
        text.

        Raises:
            RequestError: a part of it is no text.
        """
        if thought := requests.content_text(content or ""):
            self._turn_of("assistant")["reasoning_content"] = thought

    def add_tool_call(self, id: Any, name: Any, arguments: Any) -> None:
        """Add a call to the assistant's turn, the last one if it is the assistant's.

        Args:
            id: of the call, by which a result names it.
            name: of the tool.
            arguments: an object, or its JSON text.

        Raises:
            RequestError: one of them is missing or of another type.
        """
        ok = isinstance(id, str) and isinstance(name, str) and isinstance(arguments, str | dict)
        requests.check_field(ok, f"a call of {quoted(name)}", "an id, a name and arguments")
        self._names[id] = name
        function = {"name": name, "arguments": arguments}
        calls = self._turn_of("assistant").setdefault("tool_calls", [])
        calls.append({"id": id, "type": "function", "function": function})

    def add_tool_result(self, id: Any, content: Any) -> None:
        """Add a turn with a tool's result, and the tool's name.

        Args:
            id: of the call.
            content: a text, a list of parts with text, or None.

        Raises:
            RequestError: no call before it has this id, or a part is no text.
        """
        is_known = isinstance(id, str) and id in self._names
        requests.check_field(is_known, f"a result of the call {quoted(id)}", "that call before it")
        told = {"role": "tool", "content": requests.content_text(content or "")}
        self.append({**told, "tool_call_id": id, "name": self._names[id]})

    def _turn_of(self, role: str) -> dict[str, Any]:
        """Return the last turn if it is `role`'s, else a new, empty one, which is added."""
        if not self or self[-1]["role"] != role:
            self.append({"role": role, "content": ""})
        return self[-1]


def _read_tools(body: Body, schema_field: str) -> list[dict[str, Any]]:
    """Return the `tools` of a request in the form that chat templates take, OpenAI's chat form.

    Args:
        body: the request; without tools the list is empty.
        schema_field: the field of a tool that has the JSON schema of its arguments; an empty one
            becomes that of any object.

    Raises:
        RequestError: a tool has no such field and is not of type "function", as the API's own
            server would run it; or one has no name.
    """
    tools = requests.content_parts(body.get("tools") or [], "tools")
    for tool in tools:
        what = f"tools has {quoted(tool.get('type') or tool.get('name'))}"
        expected = (
            f"tools that the client runs, each with its {schema_field}: this server runs none"
        )
        requests.check_field(
            schema_field in tool or tool.get("type") == "function", what, expected, "tools"
        )
    ok = all(isinstance(one.get("name"), str) for one in tools)
    requests.check_field(ok, "tools", "a name for each", "tools")
    found = []
    for tool in tools:
        function = {"name": tool["name"], "description": tool.get("description") or ""}
        function["parameters"] = tool.get(schema_field) or {"type": "object", "properties": {}}
        found.append({"type": "function", "function": function})
    return found


def read_message(body: Body, config: GenerateConfig) -> AnswerRequest:
    """Read a request to /v1/messages (Anthropic) or to its token count; it becomes a chat
    completion's.

    `max_tokens` may be missing, as it is in a token count. `thinking` becomes the template's
    `enable_thinking`, unless `chat_template_kwargs` has one.

    Args:
        body: the request.
        config: the server's settings, for what the request does not say; `max_tokens` is a maximum.

    Raises:
        RequestError: a field cannot be followed; it has this API's name.
    """
    if body.get("thread") is not None:  # clients send the whole conversation then
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        found = "thread is not supported"
        expected = "the whole conversation: nothing is kept"
        raise RequestError("thread", found, expected, "send it without thread", details)
    turns = _Turns()
    if system := body.get("system"):
        turns.add_text("system", system)
    for message in requests.content_parts(body.get("messages"), "messages"):
        for block in requests.content_parts(message.get("content")):
            turns.add_block(message.get("role"), block)
    thinking = requests.read_typed(body, "thinking", dict, {}).get("type")
    template_args = requests.read_typed(body, "chat_template_kwargs", dict, {})
    if thinking:
        template_args = {"enable_thinking": thinking != "disabled", **template_args}
    form = requests.read_typed(body, "output_config", dict, {}).get("format")
    translated = {
        "messages": [*turns],
        "tools": _read_tools(body, "input_schema"),
        "stop": body.get("stop_sequences"),
        "response_format": _value_under_several_names(
            {"output_config.format": form, "output_format": body.get("output_format")}
        ),
        "chat_template_kwargs": template_args,
    }
    names = {"stop": "stop_sequences", "response_format": "output_config"}
    return _read_as_chat(body, translated, config, names)


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
    turns = _Turns()
    if instructions := body.get("instructions"):
        turns.add_text("system", instructions)
    for item in requests.content_parts(body.get("input"), "input"):
        turns.add_block("user", item)
    effort = requests.read_typed(body, "reasoning", dict, {}).get("effort")
    translated = {
        "messages": [*turns],
        "tools": _read_tools(body, "parameters"),
        "max_tokens": body.get("max_output_tokens"),
        "response_format": requests.read_typed(body, "text", dict, {}).get("format"),
        "reasoning_effort": _value_under_several_names(
            {"reasoning.effort": effort, "reasoning_effort": body.get("reasoning_effort")}
        ),
    }
    names = {"max_tokens": "max_output_tokens", "response_format": "text"}
    return _read_as_chat(body, translated, config, names)


def _value_under_several_names(values: Mapping[str, Any]) -> Any:
    """Return the value of a setting that an API has several names for; None where it is not given.

    Args:
        values: the request's, by name; None or empty where it has none.

    Raises:
        RequestError: two of them differ; the later one is named.
    """
    given = {name: value for name, value in values.items() if value}
    first = next(iter(given), "")
    for name, value in given.items():
        expected = f"{first} or {name}, or the same for both"
        requests.check_field(value == given[first], f"{name} is {quoted(value)}", expected, name)
    return given.get(first)


def _read_as_chat(
    body: Body, translated: Body, config: GenerateConfig, names: Mapping[str, str]
) -> AnswerRequest:
    """Read a request by its translation into a chat completion.

    Args:
        body: the request, which the result keeps; its fields of `OF_CHATS` are those of the chat
            completion.
        translated: further fields of the chat completion, or others in place of the request's.
        config: the server's settings.
        names: this API's names of fields, by the chat's, for error messages.

    Raises:
        RequestError: a field cannot be followed; it is called by `names`.
    """
    shared = {name: body.get(name) for name in OF_CHATS if name not in translated}
    try:
        ask = completions.read_chat({**shared, **translated}, config)
    except RequestError as error:
        raise error.renamed(names) from error
    return replace(ask, body=body)


async def _group_parts(parts: AsyncIterator[StreamItem]) -> AsyncIterator[tuple[str, Any]]:
    """Group parts of the same type in a row, such as text, reasoning, or a call.

    Yields:
        (event, part): "begins" once, with the first item, which may be a `Waiting`; then for each
        group "opens", with its first part, "adds" for each of its parts, and "closes", with the
        part after the group; in the end "ends", with the `ChoiceEnd`. Empty texts and every
        `Waiting` are left out otherwise; each call is a group of its own.
    """
    run: type | None = None
    async for part in parts:
        if run is None:
            run = type(None)
            yield "begins", part
        if isinstance(part, Waiting) or (isinstance(part, TextPart) and not part.text):
            continue
        if type(part) is not run or isinstance(part, ToolCallPart):
            if run is not type(None):
                yield "closes", part
            run = type(part)
            yield "ends" if isinstance(part, ChoiceEnd) else "opens", part
        if not isinstance(part, ChoiceEnd):
            yield "adds", part


_DELTA_USAGE = (
    "input_tokens",
    "cache_read_input_tokens",
    "cache_creation_input_tokens",
    "output_tokens",
    "output_tokens_details",
    "server_tool_use",
)
"""What the end of a stream says of a message's usage."""


class MessagesWriter:
    """Writes Anthropic's messages: events for each part, and `reply`, the whole object.

    `reply` is complete once `events` has ended.
    """

    @staticmethod
    def keep_alive(waiting: Waiting) -> str:
        """The event that a stream sends while no part comes."""
        return 'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, ask: AnswerRequest) -> None:
        """Begin an empty message for a request."""
        self._blocks: list[dict[str, Any]] = []
        self.reply: dict[str, Any] = {"id": f"msg_{token_hex(12)}", "type": "message"}
        self.reply |= {"role": "assistant", "model": ask.model, "content": self._blocks}
        self.reply |= {"stop_reason": None, "stop_sequence": None}
        self.reply |= {"stop_details": None, "container": None, "diagnostics": None}
        self.reply["usage"] = _message_usage()  # known at the end

    async def events(self, parts: AsyncIterator[StreamItem]) -> AsyncIterator[Event]:
        """Yield the events of a message; each group of parts becomes a block of its content.

        Every part is added to `reply`, which has usage and timings in the end.

        Args:
            parts: of the request's only choice, with its `ChoiceEnd`.
        """
        thought = 0
        async for does, part in _group_parts(parts):
            match does:
                case "begins":
                    yield _event("message_start", message=self.reply)
                case "opens":
                    self._blocks.append(_empty_block(part))
                    yield self._block_event("start", content_block=self._blocks[-1])
                case "adds":
                    thought += part.tokens if isinstance(part, ReasoningPart) else 0
                    yield self._block_event("delta", delta=_extend_block(self._blocks[-1], part))
                case "closes":
                    if "signature" in self._blocks[-1]:
                        delta = {"type": "signature_delta", "signature": _SIGNATURE}
                        yield self._block_event("delta", delta=delta)
                    yield self._block_event("stop")
                case "ends":
                    reason = "stop_sequence" if part.last.stop else _REASONS[part.reason]
                    stop: Body = {"stop_reason": reason, "stop_sequence": part.last.stop}
                    usage = _message_usage(part.last, thought)
                    self.reply |= {**stop, "usage": usage, "timings": part.timings}
                    end_delta: Body = {**stop, "stop_details": None, "container": None}
                    told = {name: usage[name] for name in _DELTA_USAGE}
                    yield _event("message_delta", delta=end_delta, usage=told, timings=part.timings)
                    yield _event("message_stop")

    def _block_event(self, name: str, **data: Any) -> Event:
        """Return an event `content_block_{name}` of the last block, with its index and `data`."""
        return _event(f"content_block_{name}", index=len(self._blocks) - 1, **data)


def _message_usage(last: GenerationResponse | None = None, thought: int = 0) -> dict[str, Any]:
    """Return the `usage` object of a message; all counts are 0 before there is an answer.

    Args:
        last: the answer's last response; None before there is one.
        thought: how many of its tokens are reasoning.
    """
    return {
        "input_tokens": last.prompt_tokens - last.cached_tokens if last else 0,
        "cache_read_input_tokens": last.cached_tokens if last else 0,
        "cache_creation_input_tokens": 0,
        "cache_creation": None,
        "output_tokens": last.generation_tokens if last else 0,
        "output_tokens_details": {"thinking_tokens": thought},
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
        "speed": "standard",
    }


def _event(name: str, **data: Any) -> Event:
    return name, {"type": name, **data}


def _empty_block(part: TextPart | ToolCallPart) -> dict[str, Any]:
    """Return the block of a message for a group of parts, before any is added: a call, thinking or
    text.
    """
    if isinstance(part, ToolCallPart):
        used = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
        return used | {"caller": {"type": "direct"}, "toolset_name": None}
    if isinstance(part, ReasoningPart):
        return {"type": "thinking", "thinking": "", "signature": _SIGNATURE}
    return {"type": "text", "text": "", "citations": None}


def _extend_block(block: dict[str, Any], part: TextPart | ToolCallPart) -> dict[str, Any]:
    """Add a part to its block, in place; return the event's `delta`.

    Args:
        block: as `_empty_block` made it, with the parts before.
        part: of the block's type.
    """
    if isinstance(part, ToolCallPart):
        block["input"] = parse_json(part.text)
        return {"type": "input_json_delta", "partial_json": part.text}
    kind = block["type"]
    block[kind] += part.text
    return {"type": f"{kind}_delta", kind: part.text}


class ResponsesWriter:
    """Writes OpenAI's responses: events for each part, and `reply`, the whole object.

    `reply` is complete once `events` has ended.
    """

    keep_alive = staticmethod(completions.keep_alive_comment)

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
        async for does, part in _group_parts(parts):
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
        return _event(f"response.{name}", sequence_number=next(self._sequence), **data)


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
