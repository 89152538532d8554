"""What the schemas of a tool's arguments say, for grammars of calls and for mlx-lm's parsers.

The parsers look for the `type` of an argument: they follow no reference to a definition, and know
no type of listed values that has none beside them, or of one that may be null as well.
"""

from collections.abc import Mapping, Sequence
from typing import Any

_CHOICES = ("anyOf", "oneOf")
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number"}
# What is larger stays as it is, so that a request takes no longer to read than it is long.
_MOST_KEYWORDS = 40  # of a schema
_MOST_CHOICES = 200
_MOST_STEPS = 8  # from reference to reference


def parsed_tools(tools: Sequence[Any] | None) -> list[Any] | None:
    """Tools as the parsers have to read them; whatever is no schema stays as it is."""
    return None if tools is None else [*map(_parsed_tool, tools)]


def _parsed_tool(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        return tool
    schema = plain_parameters(function.get("parameters"))
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return tool
    own = {name: _typed(one) for name, one in properties.items()}
    return {**tool, "function": {**function, "parameters": {**schema, "properties": own}}}


def _typed(schema: Any) -> Any:
    """A schema with the one type that it has beside null; that of a text is left to the parsers."""
    lists = [schema[name] for name in _CHOICES if isinstance(schema, Mapping) and name in schema]
    every = lists[0] if lists and isinstance(lists[0], list) else []
    kinds = [one.get("type") for one in every if isinstance(one, Mapping)]
    others = [kind for kind in kinds if kind != "null"]
    is_one = len(others) == 1 and isinstance(others[0], str) and others[0] != "string"
    return {**schema, "type": others[0]} if is_one else schema


def plain_parameters(schema: Any) -> Any:
    """A tool's parameters, whose own schemas and choices of them stand where they are referred to.

    What is deeper inside still refers to the definitions.
    """
    if not isinstance(schema, Mapping):
        return schema
    known: dict[Any, Any] = {}
    for where, every in definitions(schema).items():
        names = every if isinstance(every, Mapping) else {}
        known |= {f"#/{where}/{name}": _with_type(one) for name, one in names.items()}
    found = {**definitions(schema), **_followed(schema, known)}
    properties = found.get("properties")
    if isinstance(properties, Mapping):
        found["properties"] = {name: _plain(one, known) for name, one in properties.items()}
    return found


def definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What a schema defines for others to refer to."""
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


def _plain(schema: Any, known: Mapping[str, Any]) -> Any:
    """An argument's schema, and those that it is any of, in the place of references."""
    schema = _followed(schema, known)
    if not isinstance(schema, Mapping):
        return schema
    lists = {name: schema[name] for name in _CHOICES if isinstance(schema.get(name), list)}
    return {**schema, **{name: [_followed(one, known) for one in lists[name]] for name in lists}}


def _followed(schema: Any, known: Mapping[str, Any]) -> Any:
    """What a schema refers to, in its place; with a type."""
    schema = _with_type(schema)
    for _ in range(_MOST_STEPS):
        place = schema.get("$ref") if isinstance(schema, Mapping) else None
        target = known.get(place) if isinstance(place, str) else None
        if not isinstance(target, Mapping) or len(target) + len(schema) > _MOST_KEYWORDS:
            break
        schema = {**target, **{name: one for name, one in schema.items() if name != "$ref"}}
    return schema


def _with_type(schema: Any) -> Any:
    """A schema with the type of the values that it lists, if it has none and they have one."""
    if not isinstance(schema, Mapping) or "type" in schema:
        return schema
    kinds = {_TYPES.get(type(value)) for value in values(schema) or ()}
    (kind,) = kinds if len(kinds) == 1 else (None,)
    return {**schema, "type": kind} if kind else schema


def values(schema: Any) -> list[Any] | None:
    """What a schema lists as its values; None where it lists none."""
    if not isinstance(schema, Mapping):
        return None
    found = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return found if isinstance(found, list) else None


def choices(schema: Any) -> list[Any]:
    """The schemas that a schema is any of; itself alone where it is one."""
    if not isinstance(schema, Mapping) or len(schema) > _MOST_KEYWORDS:
        return [schema]
    for name in _CHOICES:
        if isinstance(every := schema.get(name), list) and len(every) <= _MOST_CHOICES:
            beside = {key: value for key, value in schema.items() if key != name}
            return [{**beside, **one} if isinstance(one, Mapping) else one for one in every]
    kinds = schema.get("type")
    return [{**schema, "type": kind} for kind in kinds] if isinstance(kinds, list) else [schema]
