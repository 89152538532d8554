"""JSON of settings classes, and files of JSON, JSON Lines and text."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, abc
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import InputError, quoted, require

_Settings = TypeVar("_Settings")
_JsonError = json.JSONDecodeError


def to_json(value: Any) -> Any:
    """A settings object as JSON values, with its fields and theirs."""
    if is_dataclass(value):
        # A field may have another name in JSON, by its metadata.
        named = {one.metadata.get("json", one.name): one.name for one in fields(value)}
        return {name: to_json(getattr(value, own)) for name, own in named.items()}
    if isinstance(value, Mapping):
        return {name: to_json(one) for name, one in value.items()}
    return [to_json(one) for one in value] if isinstance(value, list | tuple) else value


def from_json(
    kind: Any,  # a settings class, or an annotation of one of its fields
    value: Any,
) -> Any:
    """The value of that kind for one of JSON, as `to_json` makes it.

    Missing fields have their defaults, unknown ones are ignored. A value of another kind raises
    InputError, a missing field without a default TypeError.
    """
    if is_dataclass(kind):
        _require_kind(isinstance(value, Mapping), value, "an object")
        hints = get_type_hints(kind)
        named = {one.metadata.get("json", one.name): one.name for one in fields(kind)}
        given = {own: value[name] for name, own in named.items() if name in value}
        built = {}
        for own, one in given.items():
            try:
                built[own] = from_json(hints[own], one)
            except InputError as error:
                raise error.at(own) from error
        return kind(**built)  # type: ignore[operator]
    origin = get_origin(kind)
    inner = get_args(kind)
    if origin in (Union, UnionType):  # of one kind and None
        return None if value is None else from_json(inner[0], value)
    if origin is tuple:  # of one kind, any number of them
        _require_kind(isinstance(value, list), value, "a list")
        return tuple(from_json(inner[0], one) for one in value)
    if origin in (dict, abc.Mapping):  # by texts
        _require_kind(isinstance(value, Mapping), value, "an object")
        return {name: from_json(inner[1], one) for name, one in value.items()}
    if kind in _KINDS:
        allowed, expected = _KINDS[kind]
        _require_kind(type(value) in allowed, value, expected)
        return kind(value)
    return value


# The types that a value of JSON may have for a field of each type.
_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a text"),
}


def _require_kind(ok: bool, value: Any, expected: str) -> None:
    require(ok, f"it is {found_in_json(value)}", expected=expected, do="correct it")


def build_settings(
    kind: type[_Settings],  # a dataclass, which checks its values itself
    values: Mapping[str, Any],
    source: Path,  # for messages
    *,
    do: str = "copy or convert it again",
) -> _Settings:
    """A settings class from JSON values by its fields' names; null counts as missing."""
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


def parse_json(
    text: str | bytes,
    make_object: Callable[[list[tuple[str, Any]]], Any] | None = None,  # as `object_pairs_hook`
) -> Any:
    """The value of a JSON text, as `json.loads`; every error is a ValueError that says what is
    wrong."""
    try:
        return json.loads(text, object_pairs_hook=make_object)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except (InputError, _JsonError, UnicodeDecodeError):
        raise
    except ValueError as error:  # Python's own limit
        raise ValueError("it has a number of more than 4300 digits") from error


def found_in_json(value: Any) -> str:
    """A value as a message shows it: as JSON, cut to 80 characters."""
    try:
        return json.dumps(value, ensure_ascii=False, default=quoted)[:80]
    except Exception:  # keys of other types, a circle, lists too deep, objects that fail
        return quoted(value)


def read_json_rows(
    path: Path,
    option: str,  # that named the file
    expected: str,  # what a line should be, for messages
) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a JSON Lines file, each with where it is: "FILE, line N"."""
    text = read_text(path, expected=expected, do=f"check {option}")
    # JSON allows line separators inside texts that str.splitlines would cut at.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    require(bool(lines), f"{path} is empty", expected=expected, do=f"check {option}")
    rows = []
    for number, line in lines:
        where = f"{path}, line {number}"
        try:
            rows.append((where, _parse_row(line, expected)))
        except InputError as error:
            raise error.at(where) from error
    return rows


def _parse_row(line: str, expected: str) -> dict[str, Any]:
    def object_of_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        names = ", ".join(map(found_in_json, twice))
        found = f"it repeats the field{'s' * (len(twice) > 1)} {names}"
        require(not twice, found, expected="each field once", do="correct the line")
        return made

    # Files with a byte-order mark that were put together have one inside.
    try:
        values = parse_json(line.lstrip("\ufeff"), object_of_fields)
    except InputError:
        raise
    except ValueError as error:
        why = f"{error.msg} at column {error.colno}" if isinstance(error, _JsonError) else error
        raise InputError(
            f"it is not JSON ({why})", expected=expected, do="correct the line"
        ) from error
    found = f"it is {found_in_json(values)}"
    require(isinstance(values, dict), found, expected=expected, do="correct the line")
    row: dict[str, Any] = values
    return row


def read_text(path: Path, *, expected: str, do: str) -> str:
    """The UTF-8 text of a file or a pipe, without a byte-order mark; line ends are normalised."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        found = f"{path}, line {line}, is not UTF-8 text"
        raise InputError(found, expected=expected, do="save it as UTF-8") from error
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist", expected=expected, do=do) from error
    except OSError as error:
        found = f"{path} cannot be read ({error.strerror})"
        raise InputError(found, expected=expected, do=do) from error


def read_json(
    path: Path,
    what: str,  # it should hold, for messages
) -> dict[str, Any]:
    """The JSON object in a file."""
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
    """The digest of JSON values, 16 hexadecimal digits, whatever the order of keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
