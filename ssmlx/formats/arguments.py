"""The value that a written argument stands for, by the schema of the tool that is called.

A value that may be a text is the text as the model wrote it: "10001", "true" and "None" too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

from .cursor import PYTHON_QUOTES, Cursor, NotACallError
from .schemas import definitions, listed_values

_TYPES = ("string", "number", "boolean", "null", "array", "object")
ANYTHING = frozenset(_TYPES)
_OTHER_NAMES = {"str": "string", "text": "string", "integer": "number", "int": "number"}
_OTHER_NAMES |= {"float": "number", "double": "number", "bool": "boolean", "list": "array"}
_OTHER_NAMES |= {"dict": "object", "none": "null"}
_TYPE_OF = {str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
_TYPE_OF |= {list: "array", dict: "object"}
_HINTS = {"properties": "object", "additionalProperties": "object", "items": "array"}
_MOST_LEVELS = 12  # of schemas in schemas that are looked at
_MOST_CHOICES = 200
_TRUTH = {"true": True, "false": False}


class OfferedTools:
    """The tools that a request offers, as a chat template gets them; anything else is ignored."""

    def __init__(self, tools: Sequence[Any] | None) -> None:
        functions = [one.get("function", one) for one in tools or () if isinstance(one, Mapping)]
        known = [one for one in functions if isinstance(one, Mapping)]
        self._parameters = {str(one.get("name")): one.get("parameters") for one in known}
        self.names = tuple(self._parameters)

    def schema(self, tool: str, argument: str) -> Any:
        """The schema of an argument, with the definitions that it may refer to."""
        parameters = self._parameters.get(tool)
        if not isinstance(parameters, Mapping):
            return None
        properties = parameters.get("properties")
        own = properties.get(argument) if isinstance(properties, Mapping) else None
        own = parameters.get("additionalProperties") if own is None else own
        return {**definitions(parameters), **own} if isinstance(own, Mapping) else None

    def has_argument(self, tool: str, argument: str) -> bool:
        parameters = self._parameters.get(tool)
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        return isinstance(properties, Mapping) and argument in properties


def inner_schema(schema: Any, name: str) -> Any:
    """The schema of an object's property, or of a list's items."""
    if not isinstance(schema, Mapping):
        return None
    known = referenced(schema)
    properties = known.get("properties")
    own = properties.get(name) if isinstance(properties, Mapping) else None
    own = known.get("items") if own is None else own
    return {**definitions(schema), **own} if isinstance(own, Mapping) else None


def argument_value(text: str, schema: Any) -> Any:
    """The value of an argument that is written without quotes.

    A schema that allows a text makes it a text, unless it is null, a list or an object, and the
    schema names that type as well. Without a schema, lists and objects are read as such.
    """
    listed = listed_values(schema)
    short = text.strip()
    if listed is not None:
        for one in (text, short, *_written_values(short)):
            if any(one == known and type(one) is type(known) for known in listed):
                return one
    allowed = allowed_types(schema)
    is_text_allowed = "string" in allowed
    for value in _written_values(short, in_python=not is_text_allowed):
        kind = _TYPE_OF[type(value)]
        is_plain = kind in ("number", "boolean") or (kind == "null" and allowed == ANYTHING)
        if kind in allowed and not (is_text_allowed and is_plain):
            return _as_integer(value, schema)
    if "boolean" in allowed and not is_text_allowed:
        return _TRUTH.get(short.lower(), text)
    return text


def _written_values(text: str, *, in_python: bool = False) -> list[Any]:
    """What a text says in JSON or in Python's words, as a list of at most one value."""
    for quotes in ((), PYTHON_QUOTES)[: 1 + in_python]:
        cursor = Cursor(text)
        try:
            value = cursor.value(quotes) if quotes else cursor.json()
        except NotACallError:
            continue
        if cursor.is_at_end and not isinstance(value, str):
            return [value]
    return []


def _as_integer(value: Any, schema: Any) -> Any:
    """A number as an integer if a schema asks for one: 3 for 3.0."""
    is_asked = isinstance(schema, Mapping) and schema.get("type") in ("integer", "int")
    return int(value) if is_asked and isinstance(value, float) and value.is_integer() else value


def allowed_types(schema: Any) -> frozenset[str]:
    """The JSON types that a schema allows, "number" for integers too.

    `ANYTHING` if it does not restrict them, refers to itself, or is not a schema.
    """
    return _allowed(schema, definitions(schema) if isinstance(schema, Mapping) else {}, {}, 0)


def _allowed(
    schema: Any,
    known: Mapping[str, Any],  # definitions that `schema` may refer to
    referenced: dict[
        str, frozenset[str]
    ],  # types that these allow, by reference, as far as they are resolved
    level: int,
) -> frozenset[str]:
    if not isinstance(schema, Mapping) or level > _MOST_LEVELS:
        return ANYTHING

    def union(schemas: Any) -> frozenset[str]:
        types = [_allowed(one, known, referenced, level + 1) for one in _listed(schemas)]
        return frozenset().union(*types) if types else ANYTHING

    place = str(schema.get("$ref"))
    if "$ref" in schema and place not in referenced:
        referenced[place] = ANYTHING  # as long as it is not known
        target = _definition(place, known)
        referenced[place] = _allowed(target, known, referenced, level + 1)
    found = [
        *_types_of_keywords(schema),
        *(union(schema[name]) for name in ("anyOf", "oneOf") if name in schema),
        *(_allowed(one, known, referenced, level + 1) for one in _listed(schema.get("allOf"))),
        referenced.get(place, ANYTHING),
    ]
    allowed = reduce(frozenset.__and__, found, ANYTHING) or ANYTHING
    return allowed | {"null"} if schema.get("nullable") is True else allowed


def _types_of_keywords(schema: Mapping[str, Any]) -> list[frozenset[str]]:
    """The types that `type`, listed values and keywords of one type allow, each alone."""
    found = []
    kinds = schema.get("type")
    names = [kinds] if isinstance(kinds, str) else _listed(kinds)
    known = {_OTHER_NAMES.get(str(one).lower(), str(one).lower()) for one in names}
    if known & ANYTHING:
        found.append(frozenset(known & ANYTHING))
    if listed := listed_values(schema):
        found.append(frozenset(_TYPE_OF.get(type(one), "string") for one in listed))
    if "type" not in schema and (hint := next((_HINTS[n] for n in _HINTS if n in schema), None)):
        found.append(frozenset([hint]))
    return found


def _listed(value: Any) -> list[Any]:
    """The listed values; empty if it is not a list, or too long."""
    return value if isinstance(value, list) and len(value) <= _MOST_CHOICES else []


def _definition(place: str, known: Mapping[str, Any]) -> Any:
    """The definition that a reference such as "#/$defs/name" names."""
    found: Any = known
    for name in place.removeprefix("#/").split("/"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def referenced(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema with the definitions that it refers to merged in; its own keywords go first."""
    found = schema
    places = set[str]()
    while "$ref" in found and str(found["$ref"]) not in places:  # they may refer to each other
        places.add(str(found["$ref"]))
        target = _definition(str(found["$ref"]), schema)
        if isinstance(target, Mapping):
            found = {**target, **{name: found[name] for name in found if name != "$ref"}}
    return found


def json_text(arguments: Any) -> str:
    try:
        if isinstance(arguments, dict):
            return json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        pass
    raise NotACallError()
