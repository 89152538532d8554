"""Calls whose arguments are one JSON object."""

# ruff: noqa: RUF001  (the bars of DeepSeek's marks are wide)
from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import regex  # type: ignore[import-untyped]

from .arguments import OfferedTools
from .call_form import Call, CallForm, CallWriter, read_until_end
from .cursor import Cursor, NotACallError, UnfinishedError
from .rules import GrammarRules, Schema, object_schema

_NAMES = ("name", "tool_name", "function", "tool")
_ARGUMENTS = ("arguments", "parameters", "args")


def calls_in_json(
    value: Any,
    *,
    needs_arguments: bool = False,  # unless an object has a name and nothing else
) -> list[Call]:
    """The calls of a JSON value: an object with a name and arguments, or a list of such."""
    listed = value if isinstance(value, list) else [value]
    return [_call_in_object(one, needs_arguments=needs_arguments) for one in listed]


def _call_in_object(value: Any, *, needs_arguments: bool) -> Call:
    """The call that an object is, which may be nested under "function" or "tool"; arguments may be
    the text of their JSON."""
    if not isinstance(value, dict):
        raise NotACallError()
    for key in ("function", "tool"):
        if isinstance(value.get(key), dict):
            value = {**value, **value[key]}
    name: str = next((value[one] for one in _NAMES if isinstance(value.get(one), str)), "")
    arguments = next((value[one] for one in _ARGUMENTS if one in value), None)
    if isinstance(arguments, str):
        arguments = Cursor(arguments).json() if arguments.strip() else {}
    says_more = needs_arguments and not {*value} <= {*_NAMES, *_ARGUMENTS, "type", "id"}
    arguments = {} if arguments is None and not says_more else arguments
    if not name or not isinstance(arguments, dict):
        raise NotACallError()
    id = value.get("id")
    return Call(name, arguments, id if isinstance(id, str) else None)


def read_json_calls(
    cursor: Cursor,
    tools: OfferedTools,
    end: str,
    *,
    needs_arguments: bool = False,  # see `calls_in_json`
) -> list[Call]:
    """Go past one or more calls in JSON, and past the mark that ends them."""
    # The mark may be missing before other text, and brackets may be closed once too often.
    found: list[Call] = []
    while True:
        before = cursor.at
        try:
            found += calls_in_json(cursor.json(), needs_arguments=needs_arguments)
        except UnfinishedError:
            if not found or not cursor.is_cut:
                raise
            cursor.at = before
            return found
        cursor.skip_space(";,]}")
        if cursor.has(end) or cursor.is_over:
            return found
        if cursor.is_at_end or cursor.text[cursor.at] not in "[{":
            if end.startswith(cursor.rest):
                cursor.take_or_end(end)
            return found


def write_json_call(name_key: str = "name", arguments_key: str = "arguments") -> CallWriter:
    """The writer of calls as JSON objects with these two keys."""

    def write(rules: GrammarRules, name: str, schema: Schema) -> str:
        head = rules.literal(f'{{"{name_key}": {json.dumps(name)}, "{arguments_key}": ')
        return f"{head} {rules.json_value(object_schema(schema))} {rules.literal('}')}"

    return write


def write_arguments(rules: GrammarRules, name: str, schema: Schema) -> str:
    """The grammar of a tool's name and the JSON of its arguments, as Harmony has them."""
    head = rules.literal(f"{name} <|constrain|>json<|message|>")
    return f"{head} {rules.json_value(object_schema(schema))}"


def make_json_form(
    open: str,
    end: str,
    **more: Any,  # attributes of the form that differ
) -> CallForm:
    """The form of a list of calls in JSON between two marks, the first of which is its sign."""
    own: dict[str, Any] = {
        "opens": (open,),
        "ends": (end,),
        "read": partial(read_json_calls, end=end),
        "signs": (open,),
        "call": write_json_call(),
        "before": "[",
        "between": ", ",
        "after": "]",
        "end": end,
    }
    return CallForm(**{**own, **more})


def _read_section(
    cursor: Cursor,
    tools: OfferedTools,
    begin: str,
    end: str,
    section_end: str,
    read_one: Any,  # reads a call between its marks
) -> list[Call]:
    """Go past calls that each have marks of their own, and past the end of their section."""

    def read_call() -> Call:
        cursor.take(begin)
        found: Call = read_one(cursor)
        cursor.take_or_end(end)
        return found

    return read_until_end(cursor, section_end, read_call)


_KIMI_ID = regex.compile(
    r"\s*(?:functions\.)?(?P<name>[^\s<]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>"
)


def _read_kimi_call(cursor: Cursor) -> Call:
    start = cursor.at
    name = cursor.match(_KIMI_ID)["name"]
    id = cursor.text[start : cursor.at].partition("<|")[0].strip()
    return Call(name, _json_object(cursor), id)


def _json_object(cursor: Cursor) -> dict[str, Any]:
    value = cursor.json()
    if not isinstance(value, dict):
        raise NotACallError()
    return value


def read_fenced_object(cursor: Cursor) -> dict[str, Any]:
    """Go past a JSON object, which may be in a Markdown fence, and return it."""
    is_fenced = cursor.has_fence()
    found = _json_object(cursor)
    if is_fenced:
        cursor.take_or_end("```")
    return found


def _write_kimi_call(rules: GrammarRules, name: str, schema: Schema) -> str:
    # Any number is allowed: the model counts the calls of a chat.
    head = rules.literal(f"<|tool_call_begin|>functions.{name}:")
    middle = rules.literal("<|tool_call_argument_begin|>")
    arguments = rules.json_value(object_schema(schema))
    return f"{head} /[0-9]{{1,4}}/ {middle} {arguments} {rules.literal('<|tool_call_end|>')}"


KIMI = CallForm(
    opens=("<|tool_calls_section_begin|>",),
    ends=("<|tool_calls_section_end|>", "<|tool_call_end|>"),
    begins=("<|tool_call_begin|>",),
    read=lambda cursor, tools: _read_section(
        cursor, tools, "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>",
        _read_kimi_call,
    ),
    signs=("<|tool_calls_section_begin|>",),
    call=_write_kimi_call,
    between="",
    end="<|tool_calls_section_end|>",
)  # fmt: skip

_DEEPSEEK_MARKS = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")


def _read_deepseek_call(cursor: Cursor) -> Call:
    """Read a name and JSON; before V3.1 after "function", and in a fence."""
    name = cursor.text_until("<｜tool▁sep｜>").strip()
    cursor.skip_space()
    if name == "function" and not cursor.text.startswith("{", cursor.at):
        name = cursor.text_until("\n").strip()
    return Call(name, read_fenced_object(cursor))


def _write_deepseek_call(before: str, middle: str, after: str) -> CallWriter:
    def write(rules: GrammarRules, name: str, schema: Schema) -> str:
        head = rules.literal(f"<｜tool▁call▁begin｜>{before}{name}{middle}")
        arguments = rules.json_value(object_schema(schema))
        return f"{head} {arguments} {rules.literal(f'{after}<｜tool▁call▁end｜>')}"

    return write


def _deepseek(
    call: CallWriter, *, between: str, signs: Sequence[str | tuple[str, ...]]
) -> CallForm:
    read = partial(
        _read_section,
        begin=_DEEPSEEK_MARKS[0],
        end=_DEEPSEEK_MARKS[1],
        section_end=_DEEPSEEK_MARKS[2],
        read_one=_read_deepseek_call,
    )
    return CallForm(
        opens=("<｜tool▁calls▁begin｜>",),
        ends=_DEEPSEEK_MARKS[1:],
        begins=_DEEPSEEK_MARKS[:1],
        read=read,
        signs=signs,
        call=call,
        between=between,
        end="<｜tool▁calls▁end｜>",
    )


DEEPSEEK_V3 = _deepseek(
    _write_deepseek_call("function<｜tool▁sep｜>", "\n```json\n", "\n```"),
    between="\n",
    signs=(("<｜tool▁calls▁begin｜>", "```json"),),
)
DEEPSEEK_V31 = _deepseek(
    _write_deepseek_call("", "<｜tool▁sep｜>", ""), between="", signs=("<｜tool▁calls▁begin｜>",)
)

_MISTRAL_HEAD = regex.compile(
    r"\s*(?P<name>[^\s\[\]{}<>\"']+)\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?(?:\[ARGS\])?\s*(?={)"
)


def _read_mistral_calls(cursor: Cursor, tools: OfferedTools) -> list[Call]:
    """Read a JSON list, or a name and JSON, with or without an id."""
    found: list[Call] = []
    while True:
        cursor.skip_space(",")
        if found and cursor.is_over:
            return found
        before = cursor.at
        try:
            cursor.has("[TOOL_CALLS]")
            cursor.skip_space()
            if cursor.text.startswith(("[", "{"), cursor.at):
                found += calls_in_json(cursor.json())
            else:
                head = cursor.match(_MISTRAL_HEAD)
                found.append(Call(head["name"], _json_object(cursor), head["id"]))
        except NotACallError:
            if not found:
                raise
            cursor.at = before
            return found


def _write_mistral_call(rules: GrammarRules, name: str, schema: Schema) -> str:
    return f"{rules.literal(f'{name}[ARGS]')} {rules.json_value(object_schema(schema))}"


MISTRAL = CallForm(
    opens=("[TOOL_CALLS]",),
    ends=(),
    read=_read_mistral_calls,
    signs=(("[TOOL_CALLS]", "[ARGS]"),),
    call=_write_mistral_call,
    between="[TOOL_CALLS]",
)
# Of older models, whose tokenizer has no `[ARGS]`, such as 7B v0.3 and Nemo.
MISTRAL_V3 = replace(
    MISTRAL,
    signs=("[TOOL_CALLS]",),
    call=write_json_call(),
    before="[",
    between=", ",
    after="]",
)


def _read_apertus_calls(cursor: Cursor, tools: OfferedTools) -> list[Call]:
    """Read [{name: arguments}, ...] and the mark that ends them."""
    value = cursor.json()
    if not isinstance(value, list) or not value:
        raise NotACallError()
    found = []
    for one in value:
        name, arguments = next(iter(one.items())) if isinstance(one, dict) and one else ("", None)
        if not isinstance(arguments, dict):
            raise NotACallError()
        found.append(Call(name, arguments))
    cursor.take_or_end("<|tools_suffix|>")
    return found


def _write_apertus_call(rules: GrammarRules, name: str, schema: Schema) -> str:
    head = rules.literal(f"{{{json.dumps(name)}: ")
    return f"{head} {rules.json_value(object_schema(schema))} {rules.literal('}')}"


APERTUS = CallForm(
    opens=("<|tools_prefix|>",),
    ends=("<|tools_suffix|>",),
    read=_read_apertus_calls,
    signs=("<|tools_prefix|>",),
    call=_write_apertus_call,
    before="[",
    between=", ",
    after="]",
    end="<|tools_suffix|>",
)
