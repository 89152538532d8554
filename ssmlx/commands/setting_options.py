"""Options that are made of the fields of settings classes, and read back into them."""

from __future__ import annotations

import argparse
from collections import abc
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import Field, fields
from typing import Any

from ..errors import quoted, require
from ..pairs import Key
from ..settings import allowed_values, flag_of, key_of, setting_types
from .parser import unescape_newlines


def option_fields(settings: Any) -> dict[str, Field[Any]]:
    """The fields that have an option of their own, by the option's name in parsed arguments."""
    return {
        flag_of(one)[2:].replace("-", "_"): one
        for one in fields(settings)
        if one.metadata.get("help") and not key_of(one)
    }


def add_setting_options(
    group: argparse._ActionsContainer,
    settings: Any,  # the class
    names: Iterable[str] | None = None,  # of its fields; None for all that have an option
    *,
    defaults: Mapping[str, Any] | None = None,  # instead of the fields' own
    # what help says of the default of fields whose option is None unless it is given
    shown: Mapping[str, str] | None = None,
) -> None:
    """Add an option for each of some fields of a settings class; `given_settings` reads them."""
    known = {one.name: one for one in option_fields(settings).values()}
    for name in known if names is None else names:
        one = known[name]
        default = (defaults or {}).get(name, one.default)
        words = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
        if default in (None, ()):
            words = ""
        if shown and name in shown:
            default, words = None, shown[name]
        keywords = _argparse_keywords(one, settings)
        text = one.metadata["help"] + "; repeatable" * (keywords.get("action") == "append")
        text += f" (default: {words})" if words else ""
        group.add_argument(flag_of(one), default=default, help=text, **keywords)


def defaults_in_words(settings: Any) -> dict[str, str]:
    """What help says of each field's default, for options that are None unless given; empty if it
    has nothing to say, as for None, False and 0."""
    known = option_fields(settings).values()
    return {one.name: str(one.default) if one.default else "" for one in known}


def given_settings(args: argparse.Namespace, settings: Any) -> dict[str, Any]:
    """The values of fields whose options are given on the command line (not None)."""
    values = {one.name: getattr(args, name, None) for name, one in option_fields(settings).items()}
    found = {name: value for name, value in values.items() if value is not None}
    kinds = setting_types(settings)
    for name, value in found.items():
        if kinds[name].container is abc.Mapping:
            found[name] = dict(value)
    return found


_SWITCH = {"on": True, "off": False}


def settable_fields(settings: Any) -> dict[str, Field[Any]]:
    """The fields that one may change between answers, by name: those in a group of options, or with
    a name in requests."""
    return {
        one.name: one
        for one in fields(settings)
        if one.metadata.get("group") or one.metadata.get("wire")
    }


def values_in_words(settings: Any, one: Field[Any]) -> str:
    """The values that a text may give a field, such as "0 to 1"."""
    kind = setting_types(settings)[one.name]
    if kind.item is bool:
        return " or ".join(_SWITCH)
    if kind.container is abc.Mapping:
        return f"{one.metadata['metavar']}, with blanks between several"
    allowed = allowed_values(settings, one)
    return "a text, in which \\n is a new line" if allowed is None else allowed.in_words()


def parse_setting(settings: Any, one: Field[Any], text: str) -> Any:
    """The value of a field that a text gives; InputError for one that it may not have."""
    kind = setting_types(settings)[one.name]
    allowed = allowed_values(settings, one)
    value: Any = None
    with suppress(KeyError, ValueError, argparse.ArgumentTypeError):
        if kind.item is bool:
            value = _SWITCH[text]
        elif kind.container is abc.Mapping:
            value = dict(map(_parse_token_bias, text.split()))
        elif kind.container is abc.Sequence:
            value = (unescape_newlines(text),)
        else:
            value = Key.of_field(settings, one).parse(text)
    require(
        value is not None and (allowed is None or allowed.holds(value)),
        f"{one.name} {quoted(text)}",
        expected=values_in_words(settings, one),
        do="correct it",
    )
    return value


def _argparse_keywords(one: Field[Any], settings: Any) -> dict[str, Any]:
    """The arguments of `add_argument` that say what a field's option takes."""
    kind = setting_types(settings)[one.name]
    metavar = one.metadata["metavar"]
    if kind.item is bool:
        return {"action": "store_true"}
    if kind.container is abc.Mapping:
        return {"action": "append", "type": _parse_token_bias, "metavar": metavar}
    if kind.container is abc.Sequence:
        return {"action": "append", "type": unescape_newlines, "metavar": metavar}
    allowed = allowed_values(settings, one)
    number = kind.item if kind.item in (int, float) else str
    how: dict[str, Any] = {"type": number, "metavar": metavar or ("N" if number is int else "X")}
    # "threshold=P" is a value of --prune, and not among its choices.
    takes_keys = any(key_of(other) and flag_of(other) == flag_of(one) for other in fields(settings))
    if allowed is not None and allowed.choices and not takes_keys:
        how = {"choices": allowed.choices, **({"metavar": metavar} if metavar else {})}
    if kind.container is tuple:
        how["nargs"] = "+"
    return how


def _parse_token_bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    with suppress(ValueError):
        return int(token), float(bias)
    raise argparse.ArgumentTypeError(f"{quoted(text)} is not ID=X, a token's id and a number")
