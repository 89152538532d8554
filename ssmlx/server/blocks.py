"""What Anthropic's messages and OpenAI's responses share: turns of typed parts, answers in runs."""

from collections.abc import AsyncIterator, Callable
from copy import deepcopy
from typing import Any, Protocol

from ..errors import quoted, require
from ..settings import GenerateConfig
from .asks import Api, Ask, Body, End, Event, Ids, Part, Reasoning, Text, ToolCall, typed

SHARED = ("model", "stream", "temperature", "top_p", "top_k", "max_tokens", "tool_choice")
"""Fields of requests that mean what they do in a chat's."""
Run = Text | Reasoning | ToolCall


class Turns(list[dict[str, Any]]):
    """A chat's turns. What one role says at once is one turn, as templates want it."""

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[Any, str] = {}  # of tools, by the ids of their calls

    def say(self, role: Any, content: Any) -> None:
        ok = role in ("user", "assistant", "system", "developer")
        require(ok, f"the role {quoted(role)}", expected="user or assistant", do="correct it")
        turn, said = self._turn("system" if role == "developer" else role), text_of(content)
        turn["content"] = "\n\n".join(one for one in (turn["content"], said) if one)

    def think(self, content: Any) -> None:
        if thought := text_of(content):
            self._turn("assistant")["reasoning_content"] = thought

    def call(self, id: Any, name: Any, arguments: Any) -> None:
        """`arguments` are an object, or its JSON."""
        ok = isinstance(id, str) and isinstance(name, str) and isinstance(arguments, str | dict)
        expected = "an id, a name and arguments"
        require(ok, f"a call of {quoted(name)}", expected=expected, do="correct it")
        self._names[id] = name
        function = {"name": name, "arguments": arguments}
        calls = self._turn("assistant").setdefault("tool_calls", [])
        calls.append({"id": id, "type": "function", "function": function})

    def result(self, id: Any, content: Any) -> None:
        known = isinstance(id, str) and id in self._names
        found = f"a result of the call {quoted(id)}"
        require(known, found, expected="a call before it", do="send that, too")
        more = {"tool_call_id": id, "name": self._names[id]}
        self.append({"role": "tool", "content": text_of(content), **more})

    def _turn(self, role: str) -> dict[str, Any]:
        if not self or self[-1]["role"] != role:
            self.append({"role": role, "content": ""})
        return self[-1]


def parts_of(content: Any) -> list[dict[str, Any]]:
    """Objects; a text stands for one of type text."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    ok = isinstance(parts, list) and all(isinstance(one, dict) for one in parts)
    require(ok, f"content is {quoted(content)}", expected="a text, or parts", do="correct it")
    return parts


def text_of(content: Any) -> str:
    """What a text says, or parts that are texts."""
    texts = {"text", "input_text", "output_text", "reasoning_text"}
    for part in parts_of(content):
        ok = part.get("type") in [*texts] and isinstance(part.get("text"), str)
        require(ok, f"content has {quoted(part)}", expected="text", do="leave out anything else")
    return "".join(part["text"] for part in parts_of(content))


def tools_of(body: Body, parameters: str) -> list[dict[str, Any]]:
    """Tools as templates take them, whose schemas are in `parameters`."""
    found = []
    for tool in typed(body, "tools", list, []):
        ok = isinstance(tool, dict) and isinstance(tool.get("name"), str) and parameters in tool
        expected = f"a name and {parameters}, for the client to run it"
        require(ok, f"the tool {quoted(tool)}", expected=expected, do="correct or drop it")
        function = {"name": tool["name"], "description": tool.get("description") or ""}
        function["parameters"] = tool[parameters] or {"type": "object", "properties": {}}
        found.append({"type": "function", "function": function})
    return found


class Teller(Protocol):
    """Tells an answer in runs: text, or reasoning, as long as it comes, and each call by itself.

    An API's own keeps them in `runs` as its replies have them: `opened` adds one, `added` adds a
    part to the last, `closed` completes it, before an `End` if that is `next`.
    """

    ask: Ask
    ids: Ids
    runs: list[dict[str, Any]]
    _open: type[Part] | None = None

    def begun(self) -> list[Event]: ...
    def opened(self, part: Run) -> list[Event]: ...
    def added(self, part: Run) -> list[Event]: ...
    def closed(self, next: Part) -> list[Event]: ...
    def ended(self, end: End) -> list[Event]: ...
    def reply(self, end: End) -> dict[str, Any]: ...

    def __init__(self, ask: Ask, ids: Ids) -> None:
        self.ask, self.ids, self.runs = ask, ids, []

    def told(self, part: Part) -> list[Event]:
        if isinstance(part, Text | Reasoning) and not part.text:
            return []
        events: list[Event] = []
        if type(part) is not self._open or isinstance(part, ToolCall):
            events += self.closed(part) if self._open else []
            self._open = type(part)
            events += self.ended(part) if isinstance(part, End) else self.opened(part)
        return events if isinstance(part, End) else [*events, *self.added(part)]


def event(name: str, **data: Any) -> Event:
    """An event, of what its data are now, whatever becomes of them."""
    return name, {"type": name, **deepcopy(data)}


def told_by(
    teller: Callable[[Ask, Ids], Teller],
    read: Callable[[Body, GenerateConfig], Ask],
    error: Callable[[int, str], dict[str, Any]],
) -> Api:
    """An API whose answers such a teller tells."""

    def whole(ask: Ask, parts: list[Part], ids: Ids) -> dict[str, Any]:
        own = teller(ask, ids)
        for part in parts:
            own.told(part)
        return own.reply(next(part for part in parts if isinstance(part, End)))

    async def events(ask: Ask, parts: AsyncIterator[Part], ids: Ids) -> AsyncIterator[Event]:
        own = teller(ask, ids)
        for told in own.begun():
            yield told
        async for part in parts:
            for told in own.told(part):
                yield told

    return Api(read, whole, events, error, "error")
