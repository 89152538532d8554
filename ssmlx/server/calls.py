"""Tool calls that a model has to make: the grammar of a call in the model's own form.

mlx-lm has a parser for each form; here is what each of them reads, written forwards.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import quoted
from .asks import RequestError, check
from .grammars import STYLE
from .schemas import choices, closed, definitions, plain_parameters, values

MAX_CALLS = 8  # in one answer, where several are allowed
_MAX_CHARS = 4_000_000  # of a grammar

Schema = Mapping[str, Any]
_LETTER = "[^<]"


class Rules:
    """A Lark grammar as it is written, rule by rule."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._rules: list[str] = []
        self._chars = 0
        special = [one.content for one in _added(tokenizer).values() if one.special]
        self._ids = {one.content: id for id, one in _added(tokenizer).items()}
        names = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
        self._special = re.compile(f"({names})" if names else r"(?!)()")

    def text(self, text: str) -> str:
        """A text as it stands: special tokens by their ids, all else by its characters."""
        parts = [one for one in self._special.split(text) if one]
        is_id = self._special.fullmatch
        return " ".join(f"<[{self._ids[one]}]>" if is_id(one) else json.dumps(one) for one in parts)

    def json(self, schema: Any) -> str:
        """JSON that follows a schema."""
        own = closed(schema) if isinstance(schema, Mapping) else {}
        return self.rule(f"%json {json.dumps({**own, 'x-guidance': STYLE})}")

    def rule(self, body: str) -> str:
        """The name of a new rule."""
        self._rules.append(body)
        self._chars += len(body)
        expected = f"schemas that make a grammar of {_MAX_CHARS:,} characters at most"
        check(self._chars <= _MAX_CHARS, "tools are too large", expected, "tools")
        return f"rule_{len(self._rules)}"

    def grammar(self, start: str) -> str:
        rules = [f"rule_{number}: {body}" for number, body in enumerate(self._rules, 1)]
        return "\n".join(["%llguidance {}", f"start: {start}", *rules])


def _added(tokenizer: TokenizerWrapper) -> Mapping[int, Any]:
    found: Mapping[int, Any] = getattr(tokenizer._tokenizer, "added_tokens_decoder", {})
    return found


def _object(schema: Schema) -> dict[str, Any]:
    """A tool's parameters: an object of what they name, and of nothing else unless they say so."""
    only = {"additionalProperties": False} if "properties" in schema else {}
    return {"type": "object", **only, **schema}


def _parameters(schema: Schema) -> list[tuple[str, Any, bool]]:
    """Names, schemas, and whether they are required; these come first.

    A schema knows what the tool's own defines, to which it may refer.
    """
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    ok = isinstance(properties, Mapping) and isinstance(required, list)
    check(ok, f"tools has {quoted(schema)}", "parameters that are a JSON schema", "tools")
    known = definitions(schema)
    found = []
    for name, one in properties.items():
        refers = isinstance(one, Mapping) and '"$ref"' in json.dumps(one)
        own = {**known, **one} if refers else one
        found.append((name, own, name in required))
    return sorted(found, key=lambda one: not one[2])


def _text(rules: Rules, schema: Any, letter: str) -> str | None:
    """The rule of a text as it stands, of such letters; None where it is no text."""
    if not isinstance(schema, Mapping) or schema.get("type") != "string":
        return None
    if listed := values(schema):
        return rules.rule(" | ".join(rules.text(str(one)) or '""' for one in listed))
    most = schema.get("maxLength", "")
    return f"/{letter}{{{schema.get('minLength', 0)},{most}}}/"


def _json_call(rules: Rules, name: str, schema: Schema) -> str:
    head = rules.text(f'{{"name": {json.dumps(name)}, "arguments": ')
    return f"{head} {rules.json(_object(schema))} {rules.text('}')}"


def _tagged(
    head: str, before: str, after: str, foot: str, *, line: str = "", splits: bool = False
) -> "_Write":
    """Arguments between tags, one behind the other; texts as they are, all else as JSON.

    `head` and `before` name the tool and the argument as `{}`. A text has no `<` in it, by which
    its end is found; a `line` end before `after` is a part of a text, which the parsers cut off.
    Where another kind may stand as well, a text is as it is if the parser `splits` them, else JSON.
    """

    def call(rules: Rules, name: str, schema: Schema) -> str:
        parts = [rules.text(head.format(name))]
        for argument, own, is_required in _parameters(schema):
            found = []
            for choice in choices(own) if splits else [own]:
                text = _text(rules, choice, _LETTER)
                found.append(text or f"{rules.json(choice)} {rules.text(line)}")
            value = rules.rule(" | ".join(found))
            one = f"{rules.text(before.format(argument))} {value} {rules.text(after)}"
            parts.append(rules.rule(one) + ("" if is_required else "?"))
        return " ".join([*parts, rules.text(foot)]) if foot else " ".join(parts)

    return call


def _listed(
    head: str, before: str, quote: str, foot: str, *, letter: str = _LETTER, separator: str = ","
) -> "_Write":
    """Arguments in brackets, with a separator between them; texts in quotes of the form's own, or
    as JSON where `quote` is empty."""

    def call(rules: Rules, name: str, schema: Schema) -> str:
        items = []
        for argument, own, is_required in _parameters(schema):
            found = []
            mark = rules.text(quote)
            for choice in choices(own) if quote else [own]:
                text = _text(rules, choice, letter) if quote else None
                found.append(f"{mark} {text} {mark}" if text else rules.json(choice))
            value = rules.rule(" | ".join(found))
            item = rules.rule(f"{rules.text(before.format(argument))} {value}")
            items.append((item, is_required))
        comma = rules.text(separator)
        inner = _chain(rules, items, comma)
        return f"{rules.text(head.format(name))} {inner} {rules.text(foot)}".replace("  ", " ")

    return call


def _chain(rules: Rules, items: Sequence[tuple[str, bool]], comma: str) -> str:
    """Items in their order, separated; those that are not required come last, or are left out."""
    needed = [one for one, is_required in items if is_required]
    others = [one for one, is_required in items if not is_required]
    more = [f"({comma} {one})?" for one in others]
    if needed:
        return " ".join([f" {comma} ".join(needed), *more])
    starts = [" ".join([one, *more[place + 1 :]]) for place, one in enumerate(others)]
    return rules.rule(" | ".join(['""', *starts]))


def _kimi_call(rules: Rules, name: str, schema: Schema) -> str:
    head = rules.text(f"<|tool_call_begin|>functions.{name}:")
    middle = rules.text("<|tool_call_argument_begin|>")
    arguments = rules.json(_object(schema))
    return f"{head} /[0-9]/ {middle} {arguments} {rules.text('<|tool_call_end|>')}"


def _mistral_call(rules: Rules, name: str, schema: Schema) -> str:
    return f"{rules.text(f'{name}[ARGS]')} {rules.json(_object(schema))}"


def _longcat_call(rules: Rules, name: str, schema: Schema) -> str:
    """Where there may be no argument, as JSON: mlx-lm reads a call without one in no other way."""
    if not any(is_required for _, _, is_required in _parameters(schema)):
        return _json_call(rules, name, schema)
    before = "<longcat_arg_key>{}</longcat_arg_key>\n<longcat_arg_value>"
    return _tagged("{}\n", before, "</longcat_arg_value>\n", "")(rules, name, schema)


_Write = Callable[[Rules, str, Schema], str]


@dataclass(frozen=True)
class _Form:
    """How calls are written between the markers of a parser."""

    call: _Write
    before: str = ""  # behind the start marker
    after: str = ""  # before the end marker
    between: str | None = None  # two calls between one pair of markers; None: each has its own


_FORMS = {
    "json_tools": _Form(_json_call, "\n", "\n"),
    "mistral": _Form(_mistral_call, between=""),
    "kimi_k2": _Form(_kimi_call, between=""),
    "pythonic": _Form(_listed("{}(", "{}=", "", ")", separator=", "), "[", "]", between=", "),
    "gemma4": _Form(_listed("call:{}{{", "{}:", '<|"|>', "}")),
    "function_gemma": _Form(_listed("call:{}{{", "{}:", "<escape>", "}", letter="[^<}]")),
    "qwen3_coder": _Form(
        _tagged(
            "<function={}>\n",
            "<parameter={}>\n",
            "</parameter>\n",
            "</function>",
            line="\n",
            splits=True,
        ),
        "\n",
        "\n",
    ),
    "glm47": _Form(_tagged("{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", "")),
    "longcat": _Form(_longcat_call),
    "minimax_m2": _Form(
        _tagged(
            '<invoke name="{}">\n',
            '<parameter name="{}">',
            "</parameter>\n",
            "</invoke>",
            splits=True,
        ),
        "\n",
        "\n",
        between="\n",
    ),
    "minicpm5": _Form(_tagged('"{}">', '<param name="{}">', "</param>", "", splits=True)),
    "muse_spark": _Form(
        _tagged(
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
_FORMS["laguna"] = _FORMS["glm47"]
"""The forms of mlx-lm's parsers, by the names of their modules."""


def call_grammar(
    tokenizer: TokenizerWrapper, tools: Sequence[Any], names: Sequence[str], most: int
) -> str:
    """The grammar of one to `most` calls of the tools of these names, and of nothing else.

    Raises:
        RequestError: nobody knows how this model writes calls.
    """
    parser: Any = tokenizer.tool_parser
    form = _FORMS.get(getattr(parser, "__module__", "").rpartition(".")[2])
    if form is None:
        found = "tool_choice asks for a call"
        expected = "auto or none: the form in which this model calls tools is not known"
        raise RequestError("tool_choice", found, expected)
    functions = [one.get("function", one) for one in tools]
    rules = Rules(tokenizer)
    try:
        calls = [
            rules.rule(form.call(rules, one["name"], plain_parameters(one.get("parameters") or {})))
            for one in functions
            if one["name"] in names
        ]
    except RecursionError as error:
        found = "tools are nested too deeply"
        raise RequestError("tools", found, "schemas of fewer levels", "simplify them") from error
    one = rules.rule(" | ".join(calls))
    start = rules.text(tokenizer.tool_call_start + form.before)
    end = rules.text(form.after + tokenizer.tool_call_end)
    if form.between is None:
        whole = rules.rule(" ".join(filter(None, [start, one, end])))
        more = rules.rule(f'"\\n"? {whole}')
        return rules.grammar(f"{whole} {more}{{0,{most - 1}}}" if most > 1 else whole)
    more = rules.rule(f"{rules.text(form.between)} {one}".strip())
    inner = f"{one} {more}{{0,{most - 1}}}" if most > 1 else one
    return rules.grammar(" ".join(filter(None, [start, inner, end])))
