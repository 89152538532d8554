"""What Anthropic's messages and OpenAI's responses share: they are lists of typed blocks.

Both are read by their translation into a chat completion.
"""

import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from ..errors import quoted
from ..settings import GenerateConfig
from ..turns import (
    BETWEEN_TEXTS,
    ROLES,
    is_content_part,
    is_text_part,
    kind_in_words,
    parse_arguments,
    part_text,
    read_content,
    thought_text,
)
from .completions import read_turns
from .fields import Body, check_field, check_value, list_parts, read_typed, with_fields
from .refusals import RequestError
from .requests import (
    AnswerRequest,
    ChoiceEnd,
    Event,
    NamespacedName,
    Part,
    StreamItem,
    TextPart,
    ToolCallPart,
)

# What a stream of parts is cut into groups by: parts of the same type in a row.
GroupMark = Literal["answer begins", "group begins", "part", "group ends", "answer ends"]


# Blocks that are calls: the fields of the id and of the arguments; the tool, if it has no name.
_CALLS = {
    # Anthropic's
    "tool_use": ("id", "input", ""),
    "mcp_tool_use": ("id", "input", ""),
    # OpenAI's
    "function_call": ("call_id", "arguments", ""),
    "custom_tool_call": ("call_id", "input", ""),
    "local_shell_call": ("call_id", "action", "local_shell"),
    "shell_call": ("call_id", "action", "shell"),
    "apply_patch_call": ("call_id", "operation", "apply_patch"),
    "mcp_call": ("id", "arguments", ""),
}
# Blocks that are results: the fields of the call's id and of what came of it.
_RESULTS = {
    "tool_result": ("tool_use_id", "content"),
    "mcp_tool_result": ("tool_use_id", "content"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call_output": ("call_id", "output"),
    "local_shell_call_output": ("call_id", "output"),
    "shell_call_output": ("call_id", "output"),
    "apply_patch_call_output": ("call_id", "output"),
    "mcp_call": ("id", "output"),
}

_THOUGHTS = ("thinking", "reasoning")


class Turns:
    """The turns of a chat, built from typed blocks; blocks of one role in a row become one turn."""

    def __init__(self) -> None:
        self._turns: list[dict[str, Any]] = []  # their texts are lists until `joined`
        self.left_out: list[str] = []  # paths and types of blocks that no turn includes
        self.tools: list[tuple[str, Any]] = []  # tools that blocks offer, with their paths
        self._names: dict[Any, str] = {}  # of tools, by the ids of their calls

    def add_block(self, role: Any, block: Body, place: str) -> None:
        """Add a block or item by its type; one without a type is a message of its own role."""
        kind = block.get("type")
        check_value(kind is None or isinstance(kind, str), f"{place}.type", kind, "a string")
        if kind in (None, "message"):
            self.add_text(block.get("role"), block.get("content"), f"{place}.content")
        elif kind in _THOUGHTS and (thought := thought_text(block)):
            self._turn_of("assistant")["reasoning_content"].append(thought)
        elif kind in _CALLS or kind in _RESULTS:
            if kind in _CALLS:
                self._add_tool_call(block, place)
            if kind in _RESULTS:
                self._add_tool_result(block, place)
        elif kind in ("additional_tools", "tool_search_output"):
            listed = list_parts(block.get("tools") or [], f"{place}.tools")
            self.tools += [(f"{place}.tools[{n}]", tool) for n, tool in enumerate(listed)]
        elif text := _document_text(block):
            self.add_text(role, text, place)
        elif is_content_part(kind):
            self.add_text(role, part_text(block, place), place)
        # encrypted blocks, references, what another server's tools did, and unknown types
        elif kind != "reasoning" or block.get("encrypted_content"):
            self.left_out.append(f"{place} ({kind})")

    def add_text(self, role: Any, content: Any, place: str) -> None:
        """Add text, after a blank line, to the last turn if that is `role`'s, else to a new one."""
        where = f"{place.removesuffix('.content')}.role"
        ok = isinstance(role, str) and role in ROLES
        check_value(ok, where, role, f"one of {', '.join(ROLES)}")
        text, thought = read_content({"role": role, "content": content}, place)
        turn = self._turn_of("system" if role == "developer" else role)
        turn["content"].append(text)
        turn["reasoning_content"].append(thought)

    def _add_tool_call(self, block: Body, place: str) -> None:
        id_field, arguments_field, tool = _CALLS[block["type"]]
        id = block.get(id_field) or block.get("id")
        name = tool or block.get("name")
        ok = isinstance(id, str) and isinstance(name, str)
        expected = f"{id_field} and name, both strings"
        check_field(ok, f"{place} is a call of {quoted(name)}", expected, place)
        given = block.get(arguments_field)
        if block["type"] == "custom_tool_call":
            arguments = {"input": given}
        else:
            arguments = parse_arguments(given, f"{place}.{arguments_field}")
        self._names[id] = offered_name(block.get("namespace"), str(name))
        function = {"name": self._names[id], "arguments": arguments}
        calls = self._turn_of("assistant").setdefault("tool_calls", [])
        calls.append({"id": id, "type": "function", "function": function})

    def _add_tool_result(self, block: Body, place: str) -> None:
        """Add a turn with a tool's result and, as chat templates need it, the tool's name."""
        id_field, result_field = _RESULTS[block["type"]]
        id = block.get(id_field) or block.get("id")
        ok = isinstance(id, str) and id in self._names
        found = f"{place} is a result of the call {quoted(id)}"
        check_field(ok, found, "that call before it", place)
        text = self._result_text(block.get(result_field), f"{place}.{result_field}")
        turn = self._begin_turn("tool")
        turn |= {"content": [text], "tool_call_id": id, "name": self._names[id]}

    def _result_text(self, result: Any, place: str) -> str:
        """Return what a tool's result says: its text, those of its parts, or its JSON."""
        if result is None or isinstance(result, str):
            return result or ""
        if not isinstance(result, list):
            return json.dumps(result, ensure_ascii=False)
        texts = []
        for number, part in enumerate(result):
            kind = part.get("type") if isinstance(part, Mapping) else None
            text = _document_text(part) if isinstance(part, Mapping) else None
            if isinstance(part, str) or is_text_part(part):
                texts.append(part_text(part, f"{place}[{number}]"))
            elif text or not isinstance(kind, str):
                texts.append(text or json.dumps(part, ensure_ascii=False))
            else:
                self.left_out.append(f"{place}[{number}] ({kind})")
                texts.append(f"({kind_in_words(kind)}, which was left out)")  # for the model
        return "".join(texts)

    def _turn_of(self, role: str) -> dict[str, Any]:
        """Return the last turn if it is `role`'s, else a new, empty one."""
        is_last = bool(self._turns) and self._turns[-1]["role"] == role
        return self._turns[-1] if is_last else self._begin_turn(role)

    def _begin_turn(self, role: str) -> dict[str, Any]:
        self._turns.append({"role": role, "content": [], "reasoning_content": []})
        return self._turns[-1]

    def joined(self) -> list[dict[str, Any]]:
        """Return the turns, the texts of each as one, with a blank line between them."""
        found = []
        for turn in self._turns:
            own = {**turn, "content": BETWEEN_TEXTS.join(filter(None, turn["content"]))}
            thought = BETWEEN_TEXTS.join(filter(None, own.pop("reasoning_content")))
            found.append({**own, "reasoning_content": thought} if thought else own)
        return found


def _document_text(block: Body) -> str:
    """Return the text of Anthropic's documents and results of a search, or ""."""
    if block.get("type") not in ("document", "search_result"):
        return ""
    source = block.get("source")
    title = [block.get("title")]
    if block["type"] == "search_result":
        title.append(source)
        found = block.get("content")
    else:
        inner: Body = source if isinstance(source, Mapping) else {}
        found = inner.get("data") if inner.get("type") == "text" else inner.get("content")
    if isinstance(found, list):
        found = "".join(part["text"] for part in found if is_text_part(part))
    if not isinstance(found, str) or not found:
        return ""
    return "\n".join([*(one for one in title if isinstance(one, str)), found])


def offered_name(namespace: Any, name: str) -> str:
    """Return the name under which a function of a namespace of tools is offered to a model."""
    if not isinstance(namespace, str) or namespace in ("", "functions"):  # as of no namespace
        return name
    return f"{namespace.removesuffix('__')}__{name}"


class OfferedTools(NamedTuple):
    """The functions that a request offers, in OpenAI's chat form, which chat templates take."""

    tools: list[dict[str, Any]]
    namespaced: dict[str, NamespacedName]  # what the client calls those of a namespace
    left_out: list[str]  # paths and types of tools that are not functions


def read_offered_tools(
    listed: Iterable[tuple[str, Any]],  # tools with their paths in the request
    schema_field: str,  # of a tool that has the JSON schema of its arguments
) -> OfferedTools:
    """Read the functions among tools; those of namespaces are offered under longer names."""
    tools: dict[str, dict[str, Any]] = {}
    namespaced = {}
    left_out = []
    for place, namespace, tool in _without_namespaces(listed):
        check_value(isinstance(tool, Mapping), place, tool, "an object")
        kind = tool.get("type", "function")
        # A hosted server would run it, or its calls have no JSON.
        if kind != "function" and schema_field not in tool:
            left_out.append(f"{place} ({kind})")
            continue
        own = tool.get("name")
        check_value(isinstance(own, str) and bool(own), f"{place}.name", own, "a name")
        name = offered_name(namespace, own)
        if name != own:
            namespaced[name] = NamespacedName(namespace, own)
        function = {"name": name, "description": tool.get("description") or ""}
        function["parameters"] = tool.get(schema_field) or {"type": "object", "properties": {}}
        tools[name] = {"type": "function", "function": function}  # of two of a name the later one
    return OfferedTools([*tools.values()], namespaced, left_out)


def _without_namespaces(listed: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, name of its namespace or None, tool) of tools, those in namespaces too."""
    for place, tool in listed:
        if isinstance(tool, Mapping) and tool.get("type") == "namespace":
            inner = list_parts(tool.get("tools"), f"{place}.tools")
            for number, one in enumerate(inner):
                yield f"{place}.tools[{number}]", tool.get("name"), one
        else:
            yield place, None, tool


def listed_tools(body: Body) -> list[tuple[str, Any]]:
    """Return the `tools` of a request, each with its path."""
    listed = read_typed(body, "tools", list, [])
    return [(f"tools[{number}]", tool) for number, tool in enumerate(listed)]


class Named(NamedTuple):
    """A value, and the name or path that it has in a request."""

    name: str
    value: Any


def only_value(*named: Named) -> Named:
    """Return the value of a setting that an API has several names for, by the name that is used."""
    given = [one for one in named if one.value]
    first = given[0] if given else Named(named[0].name, None)
    for name, value in given:
        expected = f"{first.name} or {name}, or the same for both"
        check_value(value == first.value, name, value, expected)
    return first


def read_as_chat(
    body: Body,
    translated: Mapping[str, Named],  # what a chat completion has in place of the body's own fields
    config: GenerateConfig,
) -> AnswerRequest:
    try:
        own = {name: one.value for name, one in translated.items()}
        return read_turns(with_fields(body, own), config)
    except RequestError as error:
        raise error.renamed({name: one.name for name, one in translated.items()}) from error


async def mark_groups(
    parts: AsyncIterator[StreamItem],
) -> AsyncIterator[tuple[GroupMark, Any]]:
    """Yield (mark, item), by which parts are written in groups; each call is a group of its own."""
    run: type | None = None
    async for part in parts:
        if run is None:
            run = type(None)
            yield "answer begins", part  # of any kind
        if not isinstance(part, Part) or (isinstance(part, TextPart) and not part.text):
            continue
        if type(part) is not run or isinstance(part, ToolCallPart):
            if run is not type(None):
                yield "group ends", part  # the one after the group
            run = type(part)
            yield "answer ends" if isinstance(part, ChoiceEnd) else "group begins", part
        if not isinstance(part, ChoiceEnd):
            yield "part", part


def typed_event(name: str, **data: Any) -> Event:
    """Return an event whose data has its name as `type` too."""
    return name, {"type": name, **data}
