"""Calls whose arguments are between tags: texts are unquoted.

Only what the form itself adds around a text is removed.
"""

# ruff: noqa: RUF001  (the bars of DeepSeek's marks are wide)
from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import regex  # type: ignore[import-untyped]

from .arguments import OfferedTools, allowed_types, argument_value, inner_schema, referenced
from .call_form import Call, CallForm, CallWriter, read_until_end
from .cursor import Cursor, NotACallError, UnfinishedError
from .json_calls import (
    calls_in_json,
    make_json_form,
    read_fenced_object,
    read_json_calls,
    write_json_call,
)
from .rules import GrammarRules, Schema, ordered_parameters
from .schemas import alternatives

_CDATA = regex.compile(r"\s*<!\[CDATA\[(.*?)\]\]>\s*", regex.DOTALL)
_MOST_LEVELS = 100  # of tags in tags
_ANY_BUT_TEXT = {"type": ["number", "boolean", "null", "array", "object"]}
_PLAIN_TYPES = {"number", "boolean"}


@dataclass(frozen=True, kw_only=True)
class Tags:
    """The tags of such calls, in which `{}` is a name, `{type}` a value's type."""

    head: str  # before the arguments
    argument: str  # before an argument's value
    value_end: str  # after a value; `{}` is the argument's name
    foot: str = ""  # after the arguments; may be empty
    end: str = ""  # the mark that ends all calls; empty if each call is separate
    gap: str = "\n"  # what separates these parts
    # what replaces `{any}` in a call that is written; when a call is read, it is anything
    any: str = ""
    has_lines: bool = False  # whether a value has lines of its own
    # what `{type}` is for a text, and for other values; None for the value's JSON type
    types: tuple[str, str | None] = ("", "")
    # around the JSON of all arguments, if that may take their place
    json_marks: tuple[str, str] = ("", "")
    has_cdata: bool = False  # whether texts may be in <![CDATA[...]]>
    nested: str = ""  # what is before each tag, if lists and objects are written by tags as well
    # whether a call without arguments counts only if its tool is offered
    needs_arguments: bool = False

    @cached_property
    def _head_pattern(self) -> Any:
        return regex.compile(_pattern(self.head, r"\s"))

    @cached_property
    def _argument_pattern(self) -> Any:
        return regex.compile(_pattern(self.argument, r"\n"))

    @cached_property
    def _cut_pattern(self) -> Any:
        """A pattern of where a value may end if its own end is missing: at another argument, call
        or end."""
        line = r"\n\s*" if self.has_lines else r"\s*"
        argument = rf"(?P<argument>{line}{_pattern(self.argument, chr(92) + 'n')})"
        end = regex.escape(self.end) if self.end else r"(?!)"
        foot = regex.escape(self.foot) if self.foot else r"(?!)"
        head = _pattern(self.head, r"\s", named=False)
        call = rf"(?P<call>\s*{foot}\s*(?:{end}|{head}))"
        return regex.compile(rf"{argument}|{call}|(?P<text>\s*(?:{foot}\s*(?:{end})?|{end})\s*$)")

    def read(self, cursor: Cursor, tools: OfferedTools) -> list[Call]:
        return read_until_end(cursor, self.end, lambda: self._read_call(cursor, tools))

    def _read_call(self, cursor: Cursor, tools: OfferedTools) -> Call:
        name = html.unescape(cursor.match(self._head_pattern)["name"].strip())
        cursor.skip_space()
        if cursor.text.startswith("{", cursor.at):
            (call,) = calls_in_json({"name": name, "arguments": cursor.json()})
            cursor.take_or_end(self.foot)
            return call
        return self.read_arguments(cursor, name, tools)

    def read_arguments(self, cursor: Cursor, name: str, tools: OfferedTools) -> Call:
        """Go past the arguments of a call of the tool `name`, and return it."""
        found: dict[str, Any] = {}
        if cursor.has(self.json_marks[0]):
            found = calls_in_json({"name": name, "arguments": cursor.json()})[0].arguments
            cursor.take(self.json_marks[1])
        while not self._is_past_arguments(cursor):
            tag = cursor.match(self._argument_pattern)
            key = html.unescape(tag["name"].strip())
            value_end = self.value_end.format(tag["name"])
            text = self._value_text(cursor, value_end, name, found, tools)
            found[key] = self._value(text, tag.groupdict().get("type"), tools.schema(name, key))
        if self.needs_arguments and not found and name not in tools.names:
            raise NotACallError()
        return Call(name, found)

    def _is_past_arguments(self, cursor: Cursor) -> bool:
        """Go past white space, and past the foot if it is here; returns whether the arguments are
        over."""
        cursor.skip_space()
        if cursor.has(self.foot) or (cursor.is_at_end and cursor.is_whole):
            return True
        return bool(self.end) and cursor.text.startswith(self.end, cursor.at)

    def _value_text(
        self,
        cursor: Cursor,
        value_end: str,
        name: str,
        given: dict[str, Any],  # arguments that were read already
        tools: OfferedTools,
    ) -> str:
        """Go past a value and the mark that ends it, and return its text.

        If the mark is missing, the value ends before the next argument of the tool that was not
        given yet, before the call's end, or with a whole text.
        """
        end = cursor.text.find(value_end, cursor.at)
        limit = len(cursor.text) if end < 0 else end
        for cut in self._cut_pattern.finditer(cursor.text, cursor.at, limit):
            key = html.unescape(cut["name"].strip()) if cut["argument"] else ""
            is_next = tools.has_argument(name, key) and key not in given
            is_last = cut["text"] is not None and cursor.is_whole and end < 0
            if is_next or is_last or cut["call"]:
                # A line end before the form's tags is removed with the value's own.
                line = 1 if self.has_lines and cut[0].startswith("\n") else 0
                text = cursor.text[cursor.at : cut.start() + line]
                cursor.at = cut.start() + line
                return text
        if end >= 0:
            return cursor.text_until(value_end)
        if not cursor.is_whole:
            raise UnfinishedError()
        text = cursor.rest
        cursor.at = len(cursor.text)
        return text

    def _value(
        self,
        text: str,
        type: str | None,  # that the tag names, if it does
        schema: Any,
    ) -> Any:
        if self.has_lines:
            text = text.removeprefix("\n").removesuffix("\n")
        if self.has_cdata and (inner := _CDATA.fullmatch(text)):
            text = inner[1]
        if type and type == self.types[0]:
            return text
        if self.nested and text.lstrip().startswith(f"{self.nested}<"):
            return _nested_value(Cursor(text), self.nested, schema)
        if type and "string" in allowed_types(schema) != {"string"}:
            schema = _ANY_BUT_TEXT
        return argument_value(text, schema)

    def write(self, rules: GrammarRules, name: str, schema: Schema) -> str:
        parts = [rules.literal(self.head.replace("{any}", self.any).format(name) + self.gap)]
        for parameter in ordered_parameters(schema):
            ways = self._write_argument(rules, parameter.name, parameter.schema)
            one = f"{rules.add(' | '.join(ways))} {rules.literal(self.gap)}"
            parts.append(rules.add(one) + ("" if parameter.is_required else "?"))
        return " ".join([*parts, rules.literal(self.foot)]) if self.foot else " ".join(parts)

    def _write_argument(self, rules: GrammarRules, name: str, schema: Any) -> list[str]:
        """The expressions of an argument with its tags, one for each way to write it."""
        line = "\n" if self.has_lines else ""
        value_end = self.value_end.format(name)

        def before(type: str | None) -> str:
            tag = self.argument.replace("{type}", str(type)).format(name)
            return rules.literal(tag + line)

        ways = []
        every = [one if isinstance(one, Mapping) else {} for one in alternatives(schema)]
        types = [*map(allowed_types, every)]
        has_text = any("string" in one for one in types)
        for one, allowed in zip(every, types, strict=True):
            if "string" in allowed:
                text = rules.text_up_to(value_end, referenced(one), in_lines=self.has_lines)
                ways.append(f"{before(self.types[0])} {text}")
            # Without a type in the tag, a number is a text if that is allowed.
            elif self.types[0] or not (has_text and allowed <= _PLAIN_TYPES):
                kind = min(allowed) if self.types[1] is None else self.types[1]
                after = rules.literal(line + value_end)
                ways.append(f"{before(kind)} {rules.json_value(one)} {after}")
        return ways


def _nested_value(cursor: Cursor, prefix: str, schema: Any) -> Any:
    """The value of the tags that a text is: <item> of a list, or others of an object."""
    tag = regex.compile(rf"\s*{regex.escape(prefix)}<(?P<name>[^<>/\s]+)>")
    end = f"{prefix}</"

    def value(inner: Any, level: int = 0) -> Any:
        if level > _MOST_LEVELS:
            raise NotACallError()
        if not tag.match(cursor.text, cursor.at):
            last = cursor.text.find(end, cursor.at)
            if last < 0:
                raise NotACallError()
            text = cursor.text[cursor.at : last]
            cursor.at = last
            return argument_value(text, inner or _ANY_BUT_TEXT)
        found: list[tuple[str, Any]] = []
        while child := tag.match(cursor.text, cursor.at):
            cursor.at = child.end()
            name = child["name"]
            found.append((name, value(inner_schema(inner, name), level + 1)))
            cursor.take(f"{end}{name}>")
        cursor.skip_space()
        is_list = all(name == "item" for name, _ in found)
        return [one for _, one in found] if is_list else dict(found)

    found = value(schema)
    if not cursor.is_at_end:
        raise NotACallError()
    return found


def _pattern(
    tag: str,  # as those of `Tags`
    not_in_name: str,  # characters that a name cannot contain
    *,
    named: bool = True,  # the name is a group of the expression
) -> str:
    """The regular expression of a tag, in which quotes may be others, or missing."""
    name = rf"[^\"'<>{{}}{not_in_name}]+?"
    own = {"{}": f"(?P<name>{name})" if named else name, '"': r"[\"']?"}
    own["{any}"] = r"(?:\s[^<>\n]*)?"
    own["{type}"] = r"(?P<type>[^\"'<>\n]*)" if named else r"[^<>\n]*"
    parts = regex.split(r"(\{\}|\{type\}|\{any\}|\"|\s+)", tag)
    found = "".join(own.get(one, r"\s*" if one.isspace() else regex.escape(one)) for one in parts)
    return found + r"(?=\s*(?:[<{]|$))" if tag.endswith("{}") else found


GLM = Tags(
    head="{}",
    argument="<arg_key>{}</arg_key>\n<arg_value>",
    value_end="</arg_value>",
    end="</tool_call>",
    needs_arguments=True,
)
QWEN = Tags(
    head="<function={}>",
    argument="<parameter={}>",
    value_end="</parameter>",
    foot="</function>",
    end="</tool_call>",
    has_lines=True,
)
_CALL_MARKS = ("<tool_call>", "</tool_call>")


def _read_tool_call(cursor: Cursor, tools: OfferedTools) -> list[Call]:
    """Read calls after `<tool_call>`, which opens JSON, Qwen's tags and GLM's."""
    cursor.skip_space()
    if cursor.is_at_end:
        raise UnfinishedError()
    if cursor.text[cursor.at] in "[{":
        return read_json_calls(cursor, tools, _CALL_MARKS[1])
    is_qwen = cursor.text.startswith("<", cursor.at)
    return (QWEN if is_qwen else GLM).read(cursor, tools)


def _make_tool_call_form(call: CallWriter, **more: Any) -> CallForm:
    """The form between `<tool_call>` and `</tool_call>`; reads all of the forms that these open."""
    return CallForm(
        opens=_CALL_MARKS[:1],
        ends=(_CALL_MARKS[1], "</function>"),
        begins=("<function=",),
        read=_read_tool_call,
        call=call,
        end=_CALL_MARKS[1],
        **more,
    )


HERMES = _make_tool_call_form(write_json_call(), before="\n", after="\n", signs=("<tool_call>",))
QWEN_CODER = _make_tool_call_form(
    QWEN.write, before="\n", after="\n", signs=(("<tool_call>", "<function="),)
)
GLM_4 = _make_tool_call_form(GLM.write, signs=(("<tool_call>", "<arg_key>"),))


_HUNYUAN_NAME = regex.compile(r"\s*(?P<name>[^\s<>{}\"'`]+)\s*(?:<tool_sep>)?\s*")


def _read_hunyuan_calls(cursor: Cursor, tools: OfferedTools) -> list[Call]:
    """Read a JSON list; or names in <tool_call>, each with JSON in a fence or with GLM's tags."""
    cursor.skip_space()
    if cursor.text.startswith(("[", "{"), cursor.at):
        return read_json_calls(cursor, tools, "</tool_calls>")

    def read_call() -> Call:
        cursor.take(_CALL_MARKS[0])
        name = cursor.match(_HUNYUAN_NAME)["name"]
        if cursor.text.startswith("`", cursor.at):
            call = Call(name, read_fenced_object(cursor))
        else:
            call = GLM.read_arguments(cursor, name, tools)
        cursor.take_or_end(_CALL_MARKS[1])
        return call

    return read_until_end(cursor, "</tool_calls>", read_call)


HUNYUAN = make_json_form("<tool_calls>", "</tool_calls>", read=_read_hunyuan_calls)


def _make_form(open: str, tags: Tags, *signs: str) -> CallForm:
    """The form of calls between tags that a mark opens, which is also a sign of it."""
    return CallForm(
        opens=(open,),
        ends=(tags.end, tags.foot) if tags.foot else (tags.end,),
        read=tags.read,
        signs=(open, *signs),
        call=tags.write,
        between=tags.gap if tags.foot else None,
        before=tags.gap if tags.foot else "",
        after=tags.gap if tags.foot else "",
        end=tags.end,
    )


LONGCAT = _make_form(
    "<longcat_tool_call>",
    Tags(
        head="{}",
        argument="<longcat_arg_key>{}</longcat_arg_key>\n<longcat_arg_value>",
        value_end="</longcat_arg_value>",
        end="</longcat_tool_call>",
        needs_arguments=True,
    ),
)
MINIMAX = _make_form(
    "<minimax:tool_call>",
    Tags(
        head='<invoke name="{}">',
        argument='<parameter name="{}">',
        value_end="</parameter>",
        foot="</invoke>",
        end="</minimax:tool_call>",
    ),
)
_M3 = "]<]minimax[>["
MINIMAX_M3 = _make_form(
    f"{_M3}<tool_call>",
    Tags(
        head=f'{_M3}<invoke name="{{}}">',
        argument=f"{_M3}<{{}}>",
        value_end=f"{_M3}</{{}}>",
        foot=f"{_M3}</invoke>",
        end=f"{_M3}</tool_call>",
        nested=_M3,
    ),
    _M3,
)
MUSE_SPARK = _make_form(
    "<atem:function_calls>",
    Tags(
        head='<atem:invoke name="{}">',
        argument='<atem:parameter name="{}">',
        value_end="</atem:parameter>",
        foot="</atem:invoke>",
        end="</atem:function_calls>",
    ),
)
SEED = _make_form(
    "<seed:tool_call>",
    Tags(
        head="<function={}>",
        argument="<parameter={}>",
        value_end="</parameter>",
        foot="</function>",
        end="</seed:tool_call>",
    ),
)


def _deepseek_tags(section: str) -> Tags:
    """The tags of DeepSeek from V3.2 on, which say of each argument whether it is a text."""
    return Tags(
        head='<｜DSML｜invoke name="{}">',
        argument='<｜DSML｜parameter name="{}" string="{type}">',
        value_end="</｜DSML｜parameter>",
        foot="</｜DSML｜invoke>",
        end=f"</｜DSML｜{section}>",
        types=("true", "false"),
    )


DEEPSEEK_V32 = _make_form("<｜DSML｜function_calls>", _deepseek_tags("function_calls"), "｜DSML｜")
DEEPSEEK_V4 = _make_form("<｜DSML｜tool_calls>", _deepseek_tags("tool_calls"))
KIMI_K3 = _make_form(
    "<|open|>tools<|sep|>",
    Tags(
        head='<|open|>call tool="{}"{any}<|sep|>',
        any=' index="1"',
        argument='<|open|>argument key="{}" type="{type}"<|sep|>',
        value_end="<|close|>argument<|sep|>",
        foot="<|close|>call<|sep|>",
        end="<|close|>tools<|sep|>",
        gap="",
        types=("string", None),
        json_marks=('<|open|>json type="object"<|sep|>', "<|close|>json<|sep|>"),
    ),
)
STEP_3 = _make_form(
    "<｜tool_calls_begin｜>",
    Tags(
        head='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{}">',
        argument='<steptml:parameter name="{}">',
        value_end="</steptml:parameter>",
        foot="</steptml:invoke><｜tool_call_end｜>",
        end="<｜tool_calls_end｜>",
        gap="",
    ),
)
_MINICPM = Tags(
    head='<function name="{}">',
    argument='<param name="{}">',
    value_end="</param>",
    foot="</function>",
    gap="",
    has_cdata=True,
)
MINICPM = CallForm(
    opens=(),
    begins=("<function name=",),
    ends=("</function>",),
    read=_MINICPM.read,
    signs=(('<function name="', '<param name="'),),
    call=_MINICPM.write,
)
