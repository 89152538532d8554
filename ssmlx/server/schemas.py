"""JSON schemas as they are asked for, made ready for llguidance and for mlx-lm's parsers of calls.

The parsers look for the `type` of an argument: they follow no reference to a definition, and know
no type of listed values that has none beside them, or of one that may be null as well.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_CHOICES = ("anyOf", "oneOf")
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number"}
# What is larger stays as it is, so that a request takes no longer to read than it is long.
_MOST_KEYWORDS = 40  # of a schema
_MOST_CHOICES = 200
_MOST_STEPS = 8  # from reference to reference


# Where schemas hold others: by name, in a list, and one alone.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "contains", "not", "if", "then", "else")


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema whose objects have no properties but those that it names, unless it says otherwise.

    So OpenAI's, vLLM's and llama.cpp's servers have it, where JSON Schema would allow any. One that
    joins what several schemas say of the same object stays as it is.
    """
    return schema if _joins(schema) else _closed(schema)


def _inner(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas that a schema holds."""
    for name in _NAMED:
        yield from schema[name].values() if isinstance(schema.get(name), Mapping) else ()
    for name in _LISTED:
        yield from schema[name] if isinstance(schema.get(name), list) else ()
    yield from (schema[name] for name in _SINGLE if name in schema)


def _joins(schema: Any) -> bool:
    """Whether it, or one that it holds, says of the same object what another one says, too."""
    if not isinstance(schema, Mapping):
        return False
    every = schema.get("allOf")
    joins_all = isinstance(every, list) and len(every) > 1
    own = "properties" in schema or "$ref" in schema
    others = own and any(name in schema for name in (*_CHOICES, "allOf"))
    is_split = any(name in schema for name in ("if", "dependentSchemas", "unevaluatedProperties"))
    return joins_all or others or is_split or any(map(_joins, _inner(schema)))


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    for name in _NAMED:
        if isinstance(every := schema.get(name), Mapping):
            found[name] = {key: _closed(one) for key, one in every.items()}
    for name in _LISTED:
        if isinstance(every := schema.get(name), list):
            found[name] = [*map(_closed, every)]
    found |= {name: _closed(schema[name]) for name in _SINGLE if name in schema}
    names_some = "properties" in schema or "patternProperties" in schema
    return {"additionalProperties": False, **found} if names_some else found


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
