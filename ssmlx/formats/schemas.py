"""JSON schemas of requests, prepared for llguidance; other values stay as they are."""

from collections.abc import Iterator, Mapping
from typing import Any

_CHOICES = ("anyOf", "oneOf")
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number"}
# Larger schemas stay as they are, so that reading takes time in proportion to a request's length.
_MOST_KEYWORDS = 40  # of a schema
_MOST_CHOICES = 200
_MOST_STEPS = 8  # from reference to reference


# Where schemas hold others: by name, in a list, and one alone.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "contains", "not", "if", "then", "else")


def with_closed_objects(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A copy of a schema in which objects that name properties may have no others."""
    # OpenAI's, vLLM's and llama.cpp's servers read schemas so, while JSON Schema allows any others.
    # If one object is described by several schemas, none of them may be closed.
    return schema if _describes_object_by_several(schema) else _close_objects(schema)


def _subschemas(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas directly inside a schema."""
    for name in _NAMED:
        yield from schema[name].values() if isinstance(schema.get(name), Mapping) else ()
    for name in _LISTED:
        yield from schema[name] if isinstance(schema.get(name), list) else ()
    yield from (schema[name] for name in _SINGLE if name in schema)


def _describes_object_by_several(schema: Any) -> bool:
    """Whether a schema, or one inside it, describes one object by several schemas."""
    if not isinstance(schema, Mapping):
        return False
    every = schema.get("allOf")
    joins_all = isinstance(every, list) and len(every) > 1
    own = "properties" in schema or "$ref" in schema
    others = own and any(name in schema for name in (*_CHOICES, "allOf"))
    is_split = any(name in schema for name in ("if", "dependentSchemas", "unevaluatedProperties"))
    return (
        joins_all
        or others
        or is_split
        or any(map(_describes_object_by_several, _subschemas(schema)))
    )


def _close_objects(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    for name in _NAMED:
        if isinstance(every := schema.get(name), Mapping):
            found[name] = {key: _close_objects(one) for key, one in every.items()}
    for name in _LISTED:
        if isinstance(every := schema.get(name), list):
            found[name] = [*map(_close_objects, every)]
    found |= {name: _close_objects(schema[name]) for name in _SINGLE if name in schema}
    names_some = "properties" in schema or "patternProperties" in schema
    # The schema's own additionalProperties goes first.
    return {"additionalProperties": False, **found} if names_some else found


def resolved_parameters(schema: Any) -> Any:
    """A copy of a tool's parameters whose arguments have types, if they can be inferred, and no
    references.
    It reaches the arguments and their alternatives. Schemas further inside keep their references,
    as do those that are unknown or too large, so the definitions are kept too.
    """
    if not isinstance(schema, Mapping):
        return schema
    definition_by_reference: dict[Any, Any] = {}
    for where, every in definitions(schema).items():
        names = every if isinstance(every, Mapping) else {}
        definition_by_reference |= {
            f"#/{where}/{name}": _with_listed_type(one) for name, one in names.items()
        }
    found = {
        **definitions(schema),
        **_resolve(schema, definition_by_reference),
    }
    properties = found.get("properties")
    if isinstance(properties, Mapping):
        found["properties"] = {
            name: _resolve_argument(one, definition_by_reference)
            for name, one in properties.items()
        }
    return found


def definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`$defs` and `definitions`, if the schema has them."""
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


def _resolve_argument(
    schema: Any,
    definition_by_reference: Mapping[str, Any],  # by references such as "#/$defs/name"
) -> Any:
    schema = _resolve(schema, definition_by_reference)
    if not isinstance(schema, Mapping):
        return schema
    lists = {name: schema[name] for name in _CHOICES if isinstance(schema.get(name), list)}
    return {
        **schema,
        **{name: [_resolve(one, definition_by_reference) for one in lists[name]] for name in lists},
    }


def _resolve(
    schema: Any,
    definition_by_reference: Mapping[str, Any],  # by references such as "#/$defs/name"
) -> Any:
    """A schema with the definition that it refers to; its own keywords take precedence."""
    schema = _with_listed_type(schema)
    for _ in range(_MOST_STEPS):
        place = schema.get("$ref") if isinstance(schema, Mapping) else None
        target = definition_by_reference.get(place) if isinstance(place, str) else None
        if not isinstance(target, Mapping) or len(target) + len(schema) > _MOST_KEYWORDS:
            break
        schema = {**target, **{name: one for name, one in schema.items() if name != "$ref"}}
    return schema


def _with_listed_type(schema: Any) -> Any:
    """A schema with a type: without one, that which all of its listed values have."""
    if not isinstance(schema, Mapping) or "type" in schema:
        return schema
    kinds = {_TYPES.get(type(value)) for value in listed_values(schema) or ()}
    (kind,) = kinds if len(kinds) == 1 else (None,)
    return {**schema, "type": kind} if kind else schema


def listed_values(schema: Any) -> list[Any] | None:
    """The values of `enum` or `const`."""
    if not isinstance(schema, Mapping):
        return None
    found = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return found if isinstance(found, list) else None


def alternatives(schema: Any) -> list[Any]:
    """The schemas of `anyOf` or `oneOf`, or of each of several types; else the schema alone."""
    if not isinstance(schema, Mapping) or len(schema) > _MOST_KEYWORDS:
        return [schema]
    for name in _CHOICES:
        if isinstance(every := schema.get(name), list) and len(every) <= _MOST_CHOICES:
            # What is beside `anyOf` is part of each.
            beside = {key: value for key, value in schema.items() if key != name}
            return [{**beside, **one} if isinstance(one, Mapping) else one for one in every]
    kinds = schema.get("type")
    return [{**schema, "type": kind} for kind in kinds] if isinstance(kinds, list) else [schema]
