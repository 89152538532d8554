"""The rules of a grammar for llguidance, collected one by one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import quoted, require
from .schemas import definitions, listed_values, with_closed_objects

_MAX_CHARS = 256 * 2**10  # of a grammar; larger ones are refused when compiled
_MAX_RULES = 20_000
# JSON is in one line, as templates write it: small models may otherwise repeat white space
# endlessly.
STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}

Schema = Mapping[str, Any]


class GrammarRules:
    """The rules of a Lark grammar for llguidance; each is called `rule_N`."""

    def __init__(
        self,
        tokenizer: TokenizerWrapper,  # of the model, whose special tokens are written as ids
    ) -> None:
        self._rules: list[str] = []
        self._chars = 0
        added: Mapping[int, Any] = getattr(tokenizer._tokenizer, "added_tokens_decoder", {})
        special = [one.content for one in added.values() if one.special]
        self._ids = {one.content: id for id, one in added.items()}
        names = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
        self._special = re.compile(f"({names})" if names else r"(?!)()")

    def literal(self, text: str) -> str:
        """The expression of a text; special tokens in it become token ids."""
        parts = [one for one in self._special.split(text) if one]
        is_id = self._special.fullmatch
        return " ".join(f"<[{self._ids[one]}]>" if is_id(one) else json.dumps(one) for one in parts)

    def json_value(self, schema: Any) -> str:
        """Add a rule for one line of JSON by a schema, with closed objects; return its name."""
        # Anything that is not a schema allows any JSON.
        own = with_closed_objects(schema) if isinstance(schema, Mapping) else {}
        return self.add(f"%json {json.dumps({**own, 'x-guidance': STYLE})}")

    def text_up_to(
        self,
        mark: str,  # cannot be part of the text
        schema: Any,  # its listed texts and lengths are kept
        *,
        in_lines: bool = False,  # a line end that is not part of the text may come before the mark
    ) -> str:
        """The expression of a text without quotes, and of the mark that ends it."""
        if listed := listed_values(schema):
            texts = (self.literal(one) or '""' for one in listed if isinstance(one, str))
            end = '"\\n"?' if in_lines else ""
            return f"{self.add(' | '.join(texts))} {end} {self.literal(mark)}"
        least, most = (schema.get(name) for name in ("minLength", "maxLength"))
        is_sized = isinstance(least, int) or isinstance(most, int)
        size = f"{{{least or 0},{'' if most is None else most}}}" if is_sized else "*"
        first, *more = [one for one in self._special.split(mark) if one]
        end = re.escape(first).replace("/", r"\/")
        if not self._special.fullmatch(first):
            line = r"\n?" if in_lines else ""
            lexeme = self.add(rf"/(?s:.{size}){line}{end}/", "[lazy]")
            return f"{lexeme} {self.literal(''.join(more))}".strip()
        without_mark = rf"/(?s:.{size})/ & ~/(?s:.*){end}(?s:.*)/"
        return f"{self.add(without_mark, is_terminal=True)} {self.literal(mark)}"

    def add(
        self,
        body: str,
        options: str = "",  # of the rule, in brackets
        *,
        is_terminal: bool = False,  # its name is `RULE_N`, as a lexeme's is
    ) -> str:
        """Add a rule, even if one has the same body, and return its name."""
        name = f"{'RULE' if is_terminal else 'rule'}_{len(self._rules) + 1}"
        self._rules.append(f"{name}{options}: {body}")
        self._chars += len(self._rules[-1])
        require(
            self._chars <= _MAX_CHARS and len(self._rules) <= _MAX_RULES,
            "tools are too large",
            expected=f"schemas whose grammar has at most {_MAX_RULES:,} rules",
            do="simplify them or offer fewer tools",
        )
        return name

    def source(self, start: str) -> str:
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules])


def object_schema(schema: Schema) -> dict[str, Any]:
    """The schema of a tool's arguments as an object, closed if it names properties, unless it says
    otherwise."""
    only = {"additionalProperties": False} if "properties" in schema else {}
    return {"type": "object", **only, **schema}


class Parameter(NamedTuple):
    name: str
    schema: Any  # with the tool's definitions in it, if it refers to any
    is_required: bool


def ordered_parameters(
    schema: Schema,  # of the arguments, an object's
) -> list[Parameter]:
    """A tool's parameters with their schemas, required ones first, otherwise in their order. Their
    `$defs` are merged in; InputError for a schema that is not an object's."""
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    require(
        isinstance(properties, Mapping) and isinstance(required, list),
        f"tools has {quoted(schema)}",
        expected="parameters that are a JSON schema of an object",
        do="correct them",
    )
    known = definitions(schema)
    found = []
    for name, one in properties.items():
        refers = isinstance(one, Mapping) and '"$ref"' in json.dumps(one)
        own = {**known, **one} if refers else one
        found.append(Parameter(name, own, name in required))
    return sorted(found, key=lambda one: not one.is_required)


def join_arguments(
    rules: GrammarRules,
    items: Sequence[tuple[str, bool]],  # expression, and whether it is required; these come first
    comma: str,
) -> str:
    """The expression of arguments in their order; those not required may be left out."""
    needed = [one for one, is_required in items if is_required]
    others = [one for one, is_required in items if not is_required]
    more = [f"({comma} {one})?" for one in others]
    if needed:
        return " ".join([f" {comma} ".join(needed), *more])
    starts = [" ".join([one, *more[place + 1 :]]) for place, one in enumerate(others)]
    return rules.add(" | ".join(['""', *starts]))
