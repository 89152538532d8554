"""Calls whose arguments are in brackets: Python's, and Gemma's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import regex  # type: ignore[import-untyped]

from .arguments import OfferedTools, allowed_types, argument_value, referenced
from .call_form import Call, CallForm, read_until_end
from .cursor import PYTHON_QUOTES, Cursor, NotACallError, UnfinishedError
from .json_calls import read_json_calls
from .rules import GrammarRules, Schema, join_arguments, ordered_parameters
from .schemas import alternatives

JSON_BEGINS = regex.compile(r"\s*\[?\s*\{")
_PYTHON_CALL = regex.compile(r"\s*(?P<name>[\w.-]+)\s*\(")
_PYTHON_NAME = regex.compile(r"\s*(?P<name>[^\s=(),'\"\[\]{}]+)\s*=(?!=)")


def read_python_calls(
    cursor: Cursor,
    tools: OfferedTools,
    end: str = "",  # the mark, which may be missing at the end of the text
) -> list[Call]:
    """Go past [name(argument=value, ...), ...] and the mark that ends it, and return the calls."""
    # They may also be on lines of their own without brackets, in a fence, or in JSON.
    cursor.skip_space()
    if cursor.is_at_end:
        raise UnfinishedError()
    if JSON_BEGINS.match(cursor.text, cursor.at):
        return read_json_calls(cursor, tools, end)
    is_fenced = cursor.has_fence()
    mark = "```" if is_fenced else end
    if cursor.has("["):
        found = cursor.items("]", lambda: _read_python_call(cursor, tools))
        cursor.take_or_end(mark)
    else:
        found = read_until_end(cursor, mark, lambda: _read_python_call(cursor, tools))
    if is_fenced:
        cursor.take_or_end(end)
    if not found:
        raise NotACallError()
    return found


def _read_python_call(cursor: Cursor, tools: OfferedTools) -> Call:
    """Read name(argument=value, ...); Llama's models also write name.call(...)."""
    name = str(cursor.match(_PYTHON_CALL)["name"])
    name = name if name in tools.names else name.removesuffix(".call")

    def read_argument() -> tuple[str, Any]:
        return cursor.match(_PYTHON_NAME)["name"], cursor.value(PYTHON_QUOTES)

    return Call(name, dict(cursor.items(")", read_argument)))


def _write_python_call(rules: GrammarRules, name: str, schema: Schema) -> str:
    """The grammar of a call in Python's form, with values in JSON."""
    items = []
    for one in ordered_parameters(schema):
        head = rules.literal(f"{one.name}=")
        items.append((rules.add(f"{head} {rules.json_value(one.schema)}"), one.is_required))
    inner = join_arguments(rules, items, rules.literal(", "))
    return " ".join(filter(None, [rules.literal(f"{name}("), inner, rules.literal(")")]))


def _make_python_form(open: str, end: str, *signs: str, **more: Any) -> CallForm:
    return CallForm(
        opens=(open,),
        ends=(end,),
        read=partial(read_python_calls, end=end),
        signs=(open, *signs),
        call=_write_python_call,
        end=end,
        **{"before": "[", "between": ", ", "after": "]", **more},
    )


LFM = _make_python_form("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_list_start|>")
OLMO = _make_python_form(
    "<function_calls>",
    "</function_calls>",
    before="\n",
    between="\n",
    after="\n",
)

_GEMMA_CALL = regex.compile(r"\s*call:(?P<name>[^\s{}]+?)\s*\{")
_GEMMA_NAME = regex.compile(r"\s*(?P<name>[^\s:,{}\[\]]+?)\s*:")


def _read_gemma_calls(cursor: Cursor, tools: OfferedTools, quote: str, end: str) -> list[Call]:
    """Read call:name{argument:value,...} and the mark that ends it."""
    return read_until_end(cursor, end, lambda: _read_gemma_call(cursor, tools, quote))


def _read_gemma_call(cursor: Cursor, tools: OfferedTools, quote: str) -> Call:
    name = cursor.match(_GEMMA_CALL)["name"]

    def read_argument() -> tuple[str, Any]:
        argument = cursor.match(_GEMMA_NAME)["name"].removeprefix(quote).removesuffix(quote)
        cursor.skip_space()
        start = cursor.at
        value = cursor.value((quote, '"'), allows_bare=True)
        written = cursor.text[start : cursor.at]
        if not isinstance(value, dict | list) and written[:1] not in (quote[:1], '"'):
            # A bare word is a text if only a text is allowed.
            schema = tools.schema(name, argument)
            is_text = allowed_types(schema) == {"string"}
            value = argument_value(written, schema) if is_text else value
        return argument, value

    return Call(name, dict(cursor.items("}", read_argument)))


def _make_gemma_form(open: str, end: str, quote: str) -> CallForm:
    """The form of calls of one of Gemma's families, in which texts are in `quote`."""

    def write(rules: GrammarRules, name: str, schema: Schema) -> str:
        items = []
        for argument, own, is_required in ordered_parameters(schema):
            ways = []
            for one in alternatives(own):
                if isinstance(one, Mapping) and allowed_types(one) == {"string"}:
                    ways.append(
                        f"{rules.literal(quote)} {rules.text_up_to(quote, referenced(one))}"
                    )
                else:
                    ways.append(rules.json_value(one))
            value = rules.add(" | ".join(ways))
            items.append((rules.add(f"{rules.literal(f'{argument}:')} {value}"), is_required))
        inner = join_arguments(rules, items, rules.literal(","))
        parts = [rules.literal(f"call:{name}{{"), inner, rules.literal("}")]
        return " ".join(filter(None, parts))

    return CallForm(
        opens=(open,),
        ends=(end,),
        read=partial(_read_gemma_calls, quote=quote, end=end),
        signs=(open,),
        call=write,
        end=end,
    )


GEMMA = _make_gemma_form("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _make_gemma_form("<start_function_call>", "<end_function_call>", "<escape>")
