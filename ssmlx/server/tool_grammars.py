"""Grammars of forced tool calls, in the form that the model was trained to write.

mlx-lm has a parser for each form; the grammars here generate what these parsers read.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import quoted
from .grammars import STYLE
from .requests import RequestError, check_field
from .schemas import (
    alternatives,
    definitions,
    listed_values,
    resolved_parameters,
    with_closed_objects,
)

MAX_CALLS = 8  # in one answer, where several are allowed
_MAX_CHARS = 4_000_000  # of a grammar

Schema = Mapping[str, Any]
_LETTER = "[^<]"


class GrammarRules:
    """The rules of a Lark grammar for llguidance, collected one by one; each is called `rule_N`."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        """Begin without rules.

        Args:
            tokenizer: of the model, whose special tokens are written as ids.
        """
        self._rules: list[str] = []
        self._chars = 0
        special = [one.content for one in _added_tokens(tokenizer).values() if one.special]
        self._ids = {one.content: id for id, one in _added_tokens(tokenizer).items()}
        names = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
        self._special = re.compile(f"({names})" if names else r"(?!)()")

    def literal(self, text: str) -> str:
        """Return the grammar's expression for a text; special tokens in it become token ids. Empty
        for an empty text.
        """
        parts = [one for one in self._special.split(text) if one]
        is_id = self._special.fullmatch
        return " ".join(f"<[{self._ids[one]}]>" if is_id(one) else json.dumps(one) for one in parts)

    def json_value(self, schema: Any) -> str:
        """Add a rule for JSON in one line that follows a schema, with closed objects; return its
        name.

        What is no schema allows any JSON.
        """
        own = with_closed_objects(schema) if isinstance(schema, Mapping) else {}
        return self.add_rule(f"%json {json.dumps({**own, 'x-guidance': STYLE})}")

    def add_rule(self, body: str) -> str:
        """Add a rule, also where there is one of the same body, and return its new name.

        Args:
            body: the rule's expression.

        Raises:
            RequestError: all rules together get larger than `_MAX_CHARS` characters.
        """
        self._rules.append(body)
        self._chars += len(body)
        expected = f"schemas that make a grammar of {_MAX_CHARS:,} characters at most"
        check_field(self._chars <= _MAX_CHARS, "tools are too large", expected, "tools")
        return f"rule_{len(self._rules)}"

    def source(self, start: str) -> str:
        """Return the text of the whole grammar, which begins with the expression `start`."""
        rules = [f"rule_{number}: {body}" for number, body in enumerate(self._rules, 1)]
        return "\n".join(["%llguidance {}", f"start: {start}", *rules])


def _added_tokens(tokenizer: TokenizerWrapper) -> Mapping[int, Any]:
    """The tokens that were added to a tokenizer's vocabulary, by id."""
    found: Mapping[int, Any] = getattr(tokenizer._tokenizer, "added_tokens_decoder", {})
    return found


def _object_schema(schema: Schema) -> dict[str, Any]:
    """Return the schema of a tool's arguments as an object; one that names properties has no
    others, unless it allows them.
    """
    only = {"additionalProperties": False} if "properties" in schema else {}
    return {"type": "object", **only, **schema}


class _Parameter(NamedTuple):
    """A parameter of a tool."""

    name: str
    schema: Any  # with the tool's definitions in it, where it refers to any
    is_required: bool


def _parameters_required_first(schema: Schema) -> list[_Parameter]:
    """Return a tool's parameters, required ones first, else in their order.

    Args:
        schema: of the arguments, an object's.

    Raises:
        RequestError: the parameters are no JSON schema of an object.
    """
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    ok = isinstance(properties, Mapping) and isinstance(required, list)
    check_field(ok, f"tools has {quoted(schema)}", "parameters that are a JSON schema", "tools")
    known = definitions(schema)
    found = []
    for name, one in properties.items():
        refers = isinstance(one, Mapping) and '"$ref"' in json.dumps(one)
        own = {**known, **one} if refers else one
        found.append(_Parameter(name, own, name in required))
    return sorted(found, key=lambda one: not one.is_required)


def _unquoted_text_or_none(rules: GrammarRules, schema: Any, letter: str) -> str | None:
    """Return the expression of a text without quotes; None where the schema is not that of a text.

    Listed values become a rule, whose name is returned; else the schema's lengths are kept.

    Args:
        rules: where a rule is added.
        schema: of the argument.
        letter: regular expression of a character that the text may have.
    """
    if not isinstance(schema, Mapping) or schema.get("type") != "string":
        return None
    if listed := listed_values(schema):
        return rules.add_rule(" | ".join(rules.literal(str(one)) or '""' for one in listed))
    most = schema.get("maxLength", "")
    return f"/{letter}{{{schema.get('minLength', 0)},{most}}}/"


def _json_call(rules: GrammarRules, name: str, schema: Schema) -> str:
    """Return the expression of a call as JSON: {"name": ..., "arguments": ...}.

    Args:
        rules: where rules are added.
        name: of the tool.
        schema: of its arguments.
    """
    head = rules.literal(f'{{"name": {json.dumps(name)}, "arguments": ')
    return f"{head} {rules.json_value(_object_schema(schema))} {rules.literal('}')}"


def _make_tagged_call_writer(
    head: str,
    before_value: str,
    after_value: str,
    foot: str,
    *,
    after_json: str = "",
    parser_tells_text_from_json: bool = False,
) -> "_CallWriter":
    """Make the writer of calls whose arguments stand between tags, one after the other.

    Texts stand as they are, other values as JSON. A text has no `<` in it, by which its end is
    found.

    Args:
        head: before the arguments; `{}` stands for the tool's name.
        before_value: before an argument's value; `{}` stands for its name.
        after_value: behind a value.
        foot: behind the arguments.
        after_json: behind a value that is JSON; the parser cuts it off a text.
        parser_tells_text_from_json: whether the parser tells a text from other values where both
            are allowed. If not, such a text is written as JSON.

    Returns:
        A function that returns the expression of a call.
    """

    def call(rules: GrammarRules, name: str, schema: Schema) -> str:
        """Return the expression of a call of the tool `name`; rules that it needs are added to
        `rules`.
        """
        parts = [rules.literal(head.format(name))]
        for argument, own, is_required in _parameters_required_first(schema):
            found = []
            for choice in alternatives(own) if parser_tells_text_from_json else [own]:
                text = _unquoted_text_or_none(rules, choice, _LETTER)
                found.append(text or f"{rules.json_value(choice)} {rules.literal(after_json)}")
            value = rules.add_rule(" | ".join(found))
            before = rules.literal(before_value.format(argument))
            one = f"{before} {value} {rules.literal(after_value)}"
            parts.append(rules.add_rule(one) + ("" if is_required else "?"))
        return " ".join([*parts, rules.literal(foot)]) if foot else " ".join(parts)

    return call


def _make_bracketed_call_writer(
    head: str,
    before_value: str,
    quote: str,
    foot: str,
    *,
    quoted_letter: str = _LETTER,
    separator: str = ",",
) -> "_CallWriter":
    """Make the writer of calls whose arguments stand in brackets, with separators.

    Args:
        head: before the arguments; `{}` stands for the tool's name.
        before_value: before an argument's value; `{}` stands for its name.
        quote: around a text; where it is empty, texts are JSON.
        foot: behind the arguments.
        quoted_letter: regular expression of a character of a quoted text.
        separator: between arguments.

    Returns:
        A function that returns the expression of a call.
    """

    def call(rules: GrammarRules, name: str, schema: Schema) -> str:
        """Return the expression of a call of the tool `name`; rules that it needs are added to
        `rules`.
        """
        items = []
        for argument, own, is_required in _parameters_required_first(schema):
            found = []
            mark = rules.literal(quote)
            for choice in alternatives(own) if quote else [own]:
                text = _unquoted_text_or_none(rules, choice, quoted_letter) if quote else None
                found.append(f"{mark} {text} {mark}" if text else rules.json_value(choice))
            value = rules.add_rule(" | ".join(found))
            item = rules.add_rule(f"{rules.literal(before_value.format(argument))} {value}")
            items.append((item, is_required))
        comma = rules.literal(separator)
        inner = _join_arguments(rules, items, comma)
        return f"{rules.literal(head.format(name))} {inner} {rules.literal(foot)}".replace(
            "  ", " "
        )

    return call


def _join_arguments(rules: GrammarRules, items: Sequence[tuple[str, bool]], comma: str) -> str:
    """Return an expression of arguments in their order with a separator; those not required may be
    left out.

    Args:
        rules: where a rule is added if no argument is required.
        items: (expression, whether it is required) of each; required ones come first.
        comma: the separator's expression.
    """
    needed = [one for one, is_required in items if is_required]
    others = [one for one, is_required in items if not is_required]
    more = [f"({comma} {one})?" for one in others]
    if needed:
        return " ".join([f" {comma} ".join(needed), *more])
    starts = [" ".join([one, *more[place + 1 :]]) for place, one in enumerate(others)]
    return rules.add_rule(" | ".join(['""', *starts]))


def _kimi_call(rules: GrammarRules, name: str, schema: Schema) -> str:
    """Return the expression of a call in the form of Kimi K2, of any number from 0 to 9.

    Args:
        rules: where rules are added.
        name: of the tool.
        schema: of its arguments.
    """
    head = rules.literal(f"<|tool_call_begin|>functions.{name}:")
    middle = rules.literal("<|tool_call_argument_begin|>")
    arguments = rules.json_value(_object_schema(schema))
    return f"{head} /[0-9]/ {middle} {arguments} {rules.literal('<|tool_call_end|>')}"


def _mistral_call(rules: GrammarRules, name: str, schema: Schema) -> str:
    return f"{rules.literal(f'{name}[ARGS]')} {rules.json_value(_object_schema(schema))}"


def _longcat_call_or_json(rules: GrammarRules, name: str, schema: Schema) -> str:
    """Return the expression of a call in LongCat's form, or as JSON if no argument is required.

    mlx-lm's parser reads a call without arguments as JSON alone.

    Args:
        rules: where rules are added.
        name: of the tool.
        schema: of its arguments.
    """
    if not any(one.is_required for one in _parameters_required_first(schema)):
        return _json_call(rules, name, schema)
    before = "<longcat_arg_key>{}</longcat_arg_key>\n<longcat_arg_value>"
    return _make_tagged_call_writer("{}\n", before, "</longcat_arg_value>\n", "")(
        rules, name, schema
    )


_CallWriter = Callable[[GrammarRules, str, Schema], str]


@dataclass(frozen=True)
class _CallFormat:
    """How calls are written between the start and end markers of one of mlx-lm's parsers.

    `call` returns the expression of one call, and adds rules that it needs.
    """

    call: _CallWriter
    before: str = ""  # behind the start marker
    after: str = ""  # before the end marker
    between: str | None = None  # two calls between one pair of markers; None: each has its own


_CALL_FORMATS = {
    "json_tools": _CallFormat(_json_call, "\n", "\n"),
    "mistral": _CallFormat(_mistral_call, between=""),
    "kimi_k2": _CallFormat(_kimi_call, between=""),
    "pythonic": _CallFormat(
        _make_bracketed_call_writer("{}(", "{}=", "", ")", separator=", "), "[", "]", between=", "
    ),
    "gemma4": _CallFormat(_make_bracketed_call_writer("call:{}{{", "{}:", '<|"|>', "}")),
    "function_gemma": _CallFormat(
        _make_bracketed_call_writer("call:{}{{", "{}:", "<escape>", "}", quoted_letter="[^<}]")
    ),
    "qwen3_coder": _CallFormat(
        _make_tagged_call_writer(
            "<function={}>\n",
            "<parameter={}>\n",
            "</parameter>\n",
            "</function>",
            after_json="\n",
            parser_tells_text_from_json=True,
        ),
        "\n",
        "\n",
    ),
    "glm47": _CallFormat(
        _make_tagged_call_writer("{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", "")
    ),
    "longcat": _CallFormat(_longcat_call_or_json),
    "minimax_m2": _CallFormat(
        _make_tagged_call_writer(
            '<invoke name="{}">\n',
            '<parameter name="{}">',
            "</parameter>\n",
            "</invoke>",
            parser_tells_text_from_json=True,
        ),
        "\n",
        "\n",
        between="\n",
    ),
    "minicpm5": _CallFormat(
        _make_tagged_call_writer(
            '"{}">', '<param name="{}">', "</param>", "", parser_tells_text_from_json=True
        )
    ),
    "muse_spark": _CallFormat(
        _make_tagged_call_writer(
            '<atem:invoke name="{}">\n',
            '<atem:parameter name="{}">',
            "</atem:parameter>\n",
            "</atem:invoke>",
        ),
        "\n",
        "\n",
        between="\n",
    ),
}
_CALL_FORMATS["laguna"] = _CALL_FORMATS["glm47"]
"""The forms of mlx-lm's parsers, by the names of their modules."""


def tool_call_grammar(
    tokenizer: TokenizerWrapper, tools: Sequence[Any], names: Sequence[str], max_calls: int
) -> str:
    """Return the grammar of one or more tool calls, in the model's own form, with its markers.

    Nothing else may stand before, between or behind the calls but what the form has there.

    Args:
        tokenizer: of the model; its parser decides the form.
        tools: those that the request offers.
        names: of the tools that may be called, one or more of them.
        max_calls: calls at most; one at least is made.

    Raises:
        RequestError: the form of this model's calls is unknown, or a schema is too large or broken.
    """
    parser: Any = tokenizer.tool_parser
    form = _CALL_FORMATS.get(getattr(parser, "__module__", "").rpartition(".")[2])
    if form is None:
        raise RequestError(
            "tool_choice",
            "tool_choice asks for a call",
            "auto or none: the form in which this model calls tools is not known",
        )
    functions = [one.get("function", one) for one in tools]
    rules = GrammarRules(tokenizer)
    try:
        calls = [
            rules.add_rule(
                form.call(rules, one["name"], resolved_parameters(one.get("parameters") or {}))
            )
            for one in functions
            if one["name"] in names
        ]
    except RecursionError as error:
        raise RequestError(
            "tools", "tools are nested too deeply", "schemas of fewer levels", "simplify them"
        ) from error
    one = rules.add_rule(" | ".join(calls))
    start = rules.literal(tokenizer.tool_call_start + form.before)
    end = rules.literal(form.after + tokenizer.tool_call_end)
    if form.between is None:
        whole = rules.add_rule(" ".join(filter(None, [start, one, end])))
        more = rules.add_rule(f'"\\n"? {whole}')
        return rules.source(f"{whole} {more}{{0,{max_calls - 1}}}" if max_calls > 1 else whole)
    more = rules.add_rule(f"{rules.literal(form.between)} {one}".strip())
    inner = f"{one} {more}{{0,{max_calls - 1}}}" if max_calls > 1 else one
    return rules.source(" ".join(filter(None, [start, inner, end])))
