"""What Anthropic's messages and OpenAI's responses share: they are lists of typed blocks.

Both are read by their translation into a chat completion. The server keeps no response: a request
brings its whole conversation.
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from ..errors import quoted
from ..settings import GenerateConfig
from . import requests
from .completions import read_chat
from .fields import OF_CHATS
from .requests import (
    AnswerRequest,
    Body,
    ChoiceEnd,
    Event,
    Part,
    RequestError,
    StreamItem,
    TextPart,
    ToolCallPart,
)

GroupMark = Literal["answer begins", "group begins", "part", "group ends", "answer ends"]
"""What a stream of parts is cut into groups by: parts of the same type in a row."""


class Turns(list[dict[str, Any]]):
    """The turns of a chat, a list of messages, built from typed blocks.

    Blocks of one role in a row become one turn; a tool's result is a turn of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[Any, str] = {}  # of tools, by the ids of their calls

    def add_block_by_type(self, role: Any, block: Body) -> None:
        """Add a block or item by its type, to the last turn or to a new one.

        Thinking becomes the turn's reasoning, but encrypted one is left out; a use of a tool
        becomes a call, and its result a turn. A message, and any unknown type, is read as text.

        Args:
            role: whose text it is, for types that do not say so.
            block: the block.

        Raises:
            RequestError: it is broken, or its type is unknown and it has no text.
        """
        match block.get("type", "message"):
            case "message":
                self.add_text(block.get("role"), block.get("content"))
            case "thinking":
                self.add_reasoning(block.get("thinking"))
            case "reasoning":
                self.add_reasoning(block.get("content"))
            case "redacted_thinking":
                pass
            case "tool_use":
                self.add_tool_call(block.get("id"), block.get("name"), block.get("input"))
            case "function_call":
                self.add_tool_call(block.get("call_id"), block.get("name"), block.get("arguments"))
            case "tool_result":
                self.add_tool_result(block.get("tool_use_id"), block.get("content"))
            case "function_call_output":
                self.add_tool_result(block.get("call_id"), block.get("output"))
            case _:
                self.add_text(role, [block])

    def add_text(self, role: Any, content: Any) -> None:
        """Add text to the last turn if that is `role`'s, behind a blank line, else to a new one.

        Args:
            role: "developer" counts as "system".
            content: a text, or a list of parts with text.

        Raises:
            RequestError: a part is no text.
        """
        turn = self._turn_of("system" if role == "developer" else role)
        text = requests.content_text(content)
        turn["content"] = "\n\n".join(one for one in (turn["content"], text) if one)

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
        text = requests.content_text(content or "")
        turn = {"role": "tool", "content": text, "tool_call_id": id, "name": self._names[id]}
        self.append(turn)

    def _turn_of(self, role: str) -> dict[str, Any]:
        """Return the last turn if it is `role`'s, else a new, empty one, which is added."""
        if not self or self[-1]["role"] != role:
            self.append({"role": role, "content": ""})
        return self[-1]


def read_tools_in_chat_form(body: Body, schema_field: str) -> list[dict[str, Any]]:
    """Return the `tools` of a request in the form that chat templates take, OpenAI's chat form.

    Args:
        body: the request; without tools the list is empty.
        schema_field: the field of a tool that has the JSON schema of its arguments; an empty one
            becomes that of any object.

    Raises:
        RequestError: a tool has no such field and is not of type "function", as the API's own
            server would run it; or one has no name.
    """
    tools = requests.text_or_list_as_parts(body.get("tools") or [], "tools")
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


def value_under_any_name(value_by_name: Mapping[str, Any]) -> Any:
    """Return the value of a setting that an API has several names for; None where it is not given.

    Args:
        value_by_name: the request's values; None or empty where it has none.

    Raises:
        RequestError: two of them differ; the later one is named.
    """
    given = {name: value for name, value in value_by_name.items() if value}
    first = next(iter(given), "")
    for name, value in given.items():
        expected = f"{first} or {name}, or the same for both"
        requests.check_field(value == given[first], f"{name} is {quoted(value)}", expected, name)
    return given.get(first)


def read_as_chat_completion(
    body: Body, translated: Body, config: GenerateConfig, own_name_by_chats: Mapping[str, str]
) -> AnswerRequest:
    """Read a request by its translation into a chat completion.

    Args:
        body: the request, which the result keeps; its fields of `OF_CHATS` are those of the chat
            completion.
        translated: further fields of the chat completion, or others in place of the request's.
        config: the server's settings.
        own_name_by_chats: this API's names of fields, by the chat's, for error messages.

    Raises:
        RequestError: a field cannot be followed; it is called by `own_name_by_chats`.
    """
    shared = {name: body.get(name) for name in OF_CHATS if name not in translated}
    try:
        ask = read_chat({**shared, **translated}, config)
    except RequestError as error:
        raise error.copy_with_renamed_field(own_name_by_chats) from error
    return replace(ask, body=body)


async def mark_groups_of_parts(
    parts: AsyncIterator[StreamItem],
) -> AsyncIterator[tuple[GroupMark, Any]]:
    """Yield parts, with marks between groups: parts of the same type in a row, such as text or
    reasoning. Each call is a group of its own.

    Empty texts, `Begun` and every `Waiting` are left out, but for the first item.

    Yields:
        (mark, item): "answer begins" once, with the first item; for each group "group begins", with
        its first part, "part" for each of its parts, the first included, and "group ends", with
        the item after the group; in the end "answer ends", with the `ChoiceEnd`.
    """
    run: type | None = None
    async for part in parts:
        if run is None:
            run = type(None)
            yield "answer begins", part
        if not isinstance(part, Part) or (isinstance(part, TextPart) and not part.text):
            continue
        if type(part) is not run or isinstance(part, ToolCallPart):
            if run is not type(None):
                yield "group ends", part
            run = type(part)
            yield "answer ends" if isinstance(part, ChoiceEnd) else "group begins", part
        if not isinstance(part, ChoiceEnd):
            yield "part", part


def typed_event(name: str, **data: Any) -> Event:
    """Return an event whose data has its name as `type` too."""
    return name, {"type": name, **data}
