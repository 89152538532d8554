"""Anthropic's messages and OpenAI's responses: turns of typed blocks, answers in runs of a kind.

Of responses nothing is kept: a request brings its whole conversation.
"""

from collections.abc import AsyncIterator, Mapping
from itertools import count
from secrets import token_hex
from time import time
from typing import Any

from ..api import GenerationResponse
from ..errors import quoted
from ..json_files import parse_json
from ..settings import GenerateConfig
from . import asks, openai
from .asks import (
    Ask,
    Body,
    End,
    Event,
    Heard,
    Part,
    Reasoning,
    RequestError,
    Text,
    ToolCall,
    Waiting,
)

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_SIGNATURE = "none"  # of thinking: nobody checks it, but it has to be there
_BLOCKS = {
    "message": ("say", "role", "content"),
    "thinking": ("think", "thinking"),
    "redacted_thinking": ("skip",),
    "reasoning": ("think", "content"),
    "tool_use": ("call", "id", "name", "input"),
    "function_call": ("call", "call_id", "name", "arguments"),
    "tool_result": ("result", "tool_use_id", "content"),
    "function_call_output": ("result", "call_id", "output"),
}
"""What becomes of a block or an item, by its type, and of which of its fields; others are texts."""


class _Turns(list[dict[str, Any]]):
    """A chat's turns. What one role says at once is one turn, as templates want it."""

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[Any, str] = {}  # of tools, by the ids of their calls

    def add(self, role: Any, block: Body) -> None:
        """What a role said, thought or called, or what a call brought."""
        does, *names = _BLOCKS.get(str(block.get("type", "message")), ["say"])
        if does == "skip":
            return
        fields = [block.get(name) for name in names] or [role, [block]]
        getattr(self, does)(*fields)

    def say(self, role: Any, content: Any) -> None:
        turn = self._turn("system" if role == "developer" else role)
        said = asks.text_of(content)
        turn["content"] = "\n\n".join(one for one in (turn["content"], said) if one)

    def think(self, content: Any) -> None:
        if thought := asks.text_of(content or ""):
            self._turn("assistant")["reasoning_content"] = thought

    def call(self, id: Any, name: Any, arguments: Any) -> None:
        """`arguments` are an object, or its JSON."""
        ok = isinstance(id, str) and isinstance(name, str) and isinstance(arguments, str | dict)
        asks.check(ok, f"a call of {quoted(name)}", "an id, a name and arguments")
        self._names[id] = name
        function = {"name": name, "arguments": arguments}
        calls = self._turn("assistant").setdefault("tool_calls", [])
        calls.append({"id": id, "type": "function", "function": function})

    def result(self, id: Any, content: Any) -> None:
        is_known = isinstance(id, str) and id in self._names
        asks.check(is_known, f"a result of the call {quoted(id)}", "that call before it")
        told = {"role": "tool", "content": asks.text_of(content or "")}
        self.append({**told, "tool_call_id": id, "name": self._names[id]})

    def _turn(self, role: str) -> dict[str, Any]:
        if not self or self[-1]["role"] != role:
            self.append({"role": role, "content": ""})
        return self[-1]


def _tools_of(body: Body, schema: str) -> list[dict[str, Any]]:
    """Tools as templates take them; `schema` is the field that has that of their arguments.

    One without is run by the API's own server, or is known to its own models.
    """
    tools = asks.parts_of(body.get("tools") or [], "tools")
    for tool in tools:
        what = f"tools has {quoted(tool.get('type') or tool.get('name'))}"
        expected = f"tools that the client runs, each with its {schema}: this server runs none"
        asks.check(schema in tool or tool.get("type") == "function", what, expected, "tools")
    ok = all(isinstance(one.get("name"), str) for one in tools)
    asks.check(ok, "tools", "a name for each", "tools")
    found = []
    for tool in tools:
        function = {"name": tool["name"], "description": tool.get("description") or ""}
        function["parameters"] = tool.get(schema) or {"type": "object", "properties": {}}
        found.append({"type": "function", "function": function})
    return found


def read_message(body: Body, config: GenerateConfig) -> Ask:
    """What is asked for; `max_tokens` may be missing, as it is where tokens are counted."""
    if body.get("thread") is not None:  # clients send the whole conversation then
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        found = "thread is not supported"
        expected = "the whole conversation: nothing is kept"
        raise RequestError("thread", found, expected, "send it without thread", details)
    turns = _Turns()
    if system := body.get("system"):
        turns.say("system", system)
    for message in asks.parts_of(body.get("messages"), "messages"):
        for block in asks.parts_of(message.get("content")):
            turns.add(message.get("role"), block)
    thinking = asks.typed(body, "thinking", dict, {}).get("type")
    chat = {
        **body,
        "n": 1,
        "messages": [*turns],
        "tools": _tools_of(body, "input_schema"),
        "stop": body.get("stop_sequences"),
        "response_format": asks.typed(body, "output_config", dict, {}).get("format")
        or body.get("output_format"),
        "chat_template_kwargs": {"enable_thinking": thinking != "disabled"}
        if thinking
        else body.get("chat_template_kwargs"),
    }
    names = {"stop": "stop_sequences", "response_format": "output_config"}
    return _read_chat(chat, config, names)


def read_response(body: Body, config: GenerateConfig) -> Ask:
    for name in ("previous_response_id", "conversation", "prompt", "background"):
        asks.check(not body.get(name), name, "the whole conversation as input: nothing is kept")
    turns = _Turns()
    if instructions := body.get("instructions"):
        turns.say("system", instructions)
    for item in asks.parts_of(body.get("input"), "input"):
        turns.add("user", item)
    chat = {
        **body,
        "n": 1,
        "messages": [*turns],
        "tools": _tools_of(body, "parameters"),
        "max_tokens": body.get("max_output_tokens"),
        "response_format": asks.typed(body, "text", dict, {}).get("format"),
        "reasoning_effort": asks.typed(body, "reasoning", dict, {}).get("effort")
        or body.get("reasoning_effort"),
    }
    return _read_chat(chat, config, {"max_tokens": "max_output_tokens", "response_format": "text"})


def _read_chat(chat: Body, config: GenerateConfig, names: Mapping[str, str]) -> Ask:
    """What is asked for by a chat's fields, of which some have other `names` in this API."""
    try:
        return openai.read_chat(chat, config)
    except RequestError as error:
        raise error.renamed(names) from error


async def _runs(parts: AsyncIterator[Heard]) -> AsyncIterator[tuple[str, Any]]:
    """What parts do to runs: one opens a run and adds to it, the one behind a run closes it.

    A reply begins with whatever comes first, which may be that nothing is said yet.
    """
    run: type | None = None
    async for part in parts:
        if run is None:
            run = type(None)
            yield "begins", part
        if isinstance(part, Waiting) or (isinstance(part, Text) and not part.text):
            continue
        if type(part) is not run or isinstance(part, ToolCall):
            if run is not type(None):
                yield "closes", part
            run = type(part)
            yield "ends" if isinstance(part, End) else "opens", part
        if not isinstance(part, End):
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


class Messages:
    """Runs are the blocks of a message's content."""

    @staticmethod
    def keep_alive(waiting: Waiting) -> str:
        return 'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, ask: Ask) -> None:
        self._blocks: list[dict[str, Any]] = []
        self.reply: dict[str, Any] = {"id": f"msg_{token_hex(12)}", "type": "message"}
        self.reply |= {"role": "assistant", "model": ask.model, "content": self._blocks}
        self.reply |= {"stop_reason": None, "stop_sequence": None}
        self.reply |= {"stop_details": None, "container": None, "diagnostics": None}
        self.reply["usage"] = _message_usage()  # known at the end

    async def events(self, parts: AsyncIterator[Heard]) -> AsyncIterator[Event]:
        thought = 0
        async for does, part in _runs(parts):
            match does:
                case "begins":
                    yield _event("message_start", message=self.reply)
                case "opens":
                    self._blocks.append(_block(part))
                    yield self._of_block("start", content_block=self._blocks[-1])
                case "adds":
                    thought += part.tokens if isinstance(part, Reasoning) else 0
                    yield self._of_block("delta", delta=_added(self._blocks[-1], part))
                case "closes":
                    if "signature" in self._blocks[-1]:
                        delta = {"type": "signature_delta", "signature": _SIGNATURE}
                        yield self._of_block("delta", delta=delta)
                    yield self._of_block("stop")
                case "ends":
                    reason = "stop_sequence" if part.last.stop else _REASONS[part.reason]
                    stop: Body = {"stop_reason": reason, "stop_sequence": part.last.stop}
                    usage = _message_usage(part.last, thought)
                    self.reply |= {**stop, "usage": usage, "timings": part.timings}
                    end_delta: Body = {**stop, "stop_details": None, "container": None}
                    told = {name: usage[name] for name in _DELTA_USAGE}
                    yield _event("message_delta", delta=end_delta, usage=told, timings=part.timings)
                    yield _event("message_stop")

    def _of_block(self, name: str, **data: Any) -> Event:
        return _event(f"content_block_{name}", index=len(self._blocks) - 1, **data)


def _message_usage(last: GenerationResponse | None = None, thought: int = 0) -> dict[str, Any]:
    """Of an answer up to its last segment, so many tokens of it reasoning; of none yet."""
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


def _block(part: Text | ToolCall) -> dict[str, Any]:
    if isinstance(part, ToolCall):
        used = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
        return used | {"caller": {"type": "direct"}, "toolset_name": None}
    if isinstance(part, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": _SIGNATURE}
    return {"type": "text", "text": "", "citations": None}


def _added(block: dict[str, Any], part: Text | ToolCall) -> dict[str, Any]:
    """What a part adds to its block, after it was added."""
    if isinstance(part, ToolCall):
        block["input"] = parse_json(part.text)
        return {"type": "input_json_delta", "partial_json": part.text}
    kind = block["type"]
    block[kind] += part.text
    return {"type": f"{kind}_delta", kind: part.text}


class Responses:
    """Runs are the items of a response's output."""

    keep_alive = staticmethod(openai.comment)

    def __init__(self, ask: Ask) -> None:
        self._items = list[dict[str, Any]]()
        self._sequence = count()
        self.reply: dict[str, Any] = {"id": f"resp_{token_hex(12)}", "object": "response"}
        self.reply |= {"created_at": int(time()), "status": "in_progress", "model": ask.model}
        self.reply |= {"output": self._items, "error": None, "incomplete_details": None}
        self.reply |= {"completed_at": None, "usage": None, **_repeated(ask)}

    async def events(self, parts: AsyncIterator[Heard]) -> AsyncIterator[Event]:
        thought = 0
        kind = ""
        item = dict[str, Any]()
        held = dict[str, Any]()
        name = ""
        async for does, part in _runs(parts):
            match does:
                case "begins":
                    yield self._event("created", response=self.reply)
                    yield self._event("in_progress", response=self.reply)
                case "opens":
                    kind, item, held, name = self._opened(part)
                    yield self._inside("output_item.added", item=item)
                    if held is not item:
                        item["content"].append(held)
                        yield self._inside("content_part.added", part=held)
                case "adds":
                    thought += part.tokens if isinstance(part, Reasoning) else 0
                    held[name] += part.text
                    yield self._inside(f"{kind}.delta", delta=part.text)
                case "closes":
                    item["status"] = _status(part)
                    yield self._inside(f"{kind}.done", **{name: held[name]})
                    if held is not item:
                        yield self._inside("content_part.done", part=held)
                    yield self._inside("output_item.done", item=item)
                case "ends":
                    self._end(part, thought)
                    yield self._event(_status(part), response=self.reply)

    def _opened(self, part: Text | ToolCall) -> tuple[str, dict[str, Any], dict[str, Any], str]:
        """Of what is made a new item, that item, what has its text, and by what name."""
        item: dict[str, Any] = {"id": f"item_{token_hex(12)}", "status": "in_progress"}
        self._items.append(item)
        if isinstance(part, ToolCall):
            item |= {"type": "function_call", "call_id": part.id, "name": part.name}
            item["arguments"] = ""
            return "function_call_arguments", item, item, "arguments"
        if isinstance(part, Reasoning):
            item |= {"type": "reasoning", "summary": [], "content": [], "encrypted_content": None}
            return "reasoning_text", item, {"type": "reasoning_text", "text": ""}, "text"
        item |= {"type": "message", "role": "assistant", "content": []}
        held = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return "output_text", item, held, "text"

    def _end(self, end: End, thought: int) -> None:
        last = end.last
        is_cut = end.reason == "length"
        cached = {"cached_tokens": last.cached_tokens, "cache_write_tokens": 0}
        usage = {"input_tokens": last.prompt_tokens, "input_tokens_details": cached}
        usage["output_tokens"] = last.generation_tokens
        usage["output_tokens_details"] = {"reasoning_tokens": thought}
        usage["total_tokens"] = last.prompt_tokens + last.generation_tokens
        self.reply |= {"status": _status(end), "usage": usage, "timings": end.timings}
        self.reply["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        self.reply["completed_at"] = None if is_cut else int(time())

    def _inside(self, name: str, **data: Any) -> Event:
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


def _repeated(ask: Ask) -> dict[str, Any]:
    """What a response repeats of its request, with what holds where that says nothing."""
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


def _status(next: Part) -> str:
    """What becomes of a run before it, or of the whole reply."""
    is_cut = isinstance(next, End) and next.reason == "length"
    return "incomplete" if is_cut else "completed"
