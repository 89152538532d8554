"""JSON of settings classes, and files of JSON and text."""

from __future__ import annotations

import hashlib
import json
from collections import abc
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import InputError, require

_Settings = TypeVar("_Settings")


def to_json(value: Any) -> Any:
    """JSON values of a settings object, of its fields and of theirs.

    A field stands under its name, or under what its metadata has as "json". Tuples become lists,
    mappings dicts; other values, such as numbers and None, stay as they are.
    """
    if is_dataclass(value):
        named = {one.metadata.get("json", one.name): one.name for one in fields(value)}
        return {name: to_json(getattr(value, own)) for name, own in named.items()}
    if isinstance(value, Mapping):
        return {name: to_json(one) for name, one in value.items()}
    return [to_json(one) for one in value] if isinstance(value, list | tuple) else value


def from_json(kind: Any, value: Any) -> Any:
    """Build a value of the type `kind` from what `to_json` made of it.

    Args:
        kind: a settings class, or an annotation of one of its fields: of a union, the first member
            and None; of a tuple, one type for all; or a mapping.
        value: JSON values. Fields that are missing have their defaults; unknown ones are left out.
            Numbers and texts are converted by int, float or str.

    Raises:
        TypeError, ValueError, AttributeError: it is broken. Settings classes that check themselves
            raise InputError, a ValueError.
    """
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        named = {one.metadata.get("json", one.name): one.name for one in fields(kind)}
        given = {own: value[name] for name, own in named.items() if name in value}
        built = {own: from_json(hints[own], one) for own, one in given.items()}
        return kind(**built)  # type: ignore[operator]
    origin = get_origin(kind)
    inner = get_args(kind)
    if origin in (Union, UnionType):
        return None if value is None else from_json(inner[0], value)
    if origin is tuple:
        return tuple(from_json(inner[0], one) for one in value)
    if origin in (dict, abc.Mapping):
        return {name: from_json(inner[1], one) for name, one in value.items()}
    return kind(value) if kind in (int, float, str) else value


def build_settings_ignoring_unknown(
    kind: type[_Settings],
    values: Mapping[str, Any],
    source: Path,
    *,
    do: str = "copy or convert it again",
) -> _Settings:
    """Make a settings class of the JSON values under its fields' names.

    Values of unknown names are passed over. A null is as if it were missing. Lists become tuples.

    Args:
        kind: a dataclass, which checks its values itself.
        values: a JSON object.
        source: the file that it was read from, for messages.
        do: what a message says is to be done.

    Raises:
        InputError: a field without a default has no value, or what `kind` raises.
    """
    own: Any = kind
    given = {
        one.name: tuple(value) if isinstance(value, list) else value
        for one in fields(own)
        if (value := values.get(one.name)) is not None
    }
    needed = [one.name for one in fields(own) if one.default is MISSING is one.default_factory]
    missing = ", ".join(name for name in needed if name not in given)
    require(not missing, f"{source} lacks {missing}", expected=", ".join(needed), do=do)
    return kind(**given)


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text, as text or bytes.

    Raises:
        ValueError: it is no JSON, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_text(path: Path, *, expected: str, do: str) -> str:
    r"""Read the UTF-8 text of a file or a pipe, without a byte-order mark; line ends become "\n".

    Args:
        path: the file.
        expected: what a message says was expected.
        do: what a message says is to be done.

    Raises:
        InputError: it cannot be read or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"{path} is not UTF-8 text"
        raise InputError(found, expected=expected, do="save it as UTF-8") from error
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist", expected=expected, do=do) from error
    except OSError as error:
        found = f"{path} cannot be read ({error.strerror})"
        raise InputError(found, expected=expected, do=do) from error


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Read the JSON object in a file.

    Args:
        path: the file, of UTF-8.
        what: a message's words for what it should hold.

    Raises:
        InputError: the file cannot be read, or holds no JSON, or another value than an object.
    """
    text = read_text(path, expected=what, do="check the path, or convert again")
    try:
        values: dict[str, Any] = parse_json(text)
    except ValueError as error:
        raise InputError(
            f"{path} is not valid JSON ({error})", expected=what, do="copy or convert it again"
        ) from error
    require(
        isinstance(values, dict),
        f"{path} holds a {type(values).__name__}",
        expected=f"{what}, a JSON object",
        do="copy or convert it again",
    )
    return values


def json_digest(values: Any) -> str:
    """Return 16 hexadecimal digits of JSON values' SHA-256, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
