"""The prompts that options give: a text, standard input, or a file with a prompt on each line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..errors import InputError, naming_file, naming_place, require
from ..json_files import found_in_json
from ..settings import (
    OTHER_NAMES,
    WIRE_NAMES,
    GenerateConfig,
    SamplingConfig,
    allowed_values,
    with_settings,
)
from .parser import add_options

_FIELDS = {one.name: one for one in fields(GenerateConfig)}
LINE_SETTINGS = (*(one.name for one in fields(SamplingConfig)), "max_tokens", "stop")
"""Settings that a line of --prompts may have."""


def add_prompt_options(group: argparse._ArgumentGroup) -> None:
    """Add --prompt and --prompts; `read_given_prompts` reads them."""
    add_options(
        group.add_mutually_exclusive_group(),
        ("--prompt", "TEXT", "the prompt to answer; - or none reads standard input", str),
        (
            "--prompts",
            "FILE.jsonl",
            "several prompts: a JSON object on each line, with `prompt` or `messages`",
            Path,
        ),
    )


@dataclass(frozen=True)
class GivenPrompt:
    row: Mapping[str, Any]  # "prompt" or "messages", and whatever else its line holds
    where: str = "the prompt"  # its file and line
    settings: Mapping[str, Any] = field(default_factory=dict)  # that its line has


def read_given_prompts(
    args: argparse.Namespace,
    followed: Collection[str] = LINE_SETTINGS,  # settings that a line may have
) -> list[GivenPrompt]:
    """The checked prompts of --prompt, --prompts or standard input."""
    from ..prompts import read_prompt_rows

    if args.prompts is None:
        is_piped = args.prompt is None and not sys.stdin.isatty()
        text = _read_stdin() if is_piped or args.prompt == "-" else args.prompt
        expected = "--prompt TEXT, --prompts FILE.jsonl, or a text on standard input"
        require(text is not None, "there is no prompt", expected=expected, do="give one of them")
        return [GivenPrompt({"prompt": text})]
    return [
        GivenPrompt(row, where, _read_settings(row, where, followed))
        for where, row in read_prompt_rows(args.prompts)
    ]


def _read_stdin() -> str:
    expected = "a prompt, as --prompt or --prompts has one"
    try:
        with naming_file("standard input"):
            text = sys.stdin.read().removesuffix("\n")  # of a shell's echo
    except UnicodeDecodeError as error:
        found = "standard input is not UTF-8 text"
        raise InputError(found, expected=expected, do="convert it") from error
    require(bool(text.strip()), "standard input is empty", expected=expected, do="give one")
    return text


def _read_settings(row: Mapping[str, Any], where: str, followed: Collection[str]) -> dict[str, Any]:
    """The settings of a line, checked; those that are null are left out."""
    found = {}
    for name, value in row.items():
        own = WIRE_NAMES.get(name, name)
        if value is None:
            continue
        if own in followed:
            found[name] = _checked_value(name, value, where)
        elif own in _FIELDS or own in OTHER_NAMES or own == "system":
            raise _refused_setting(name, where, followed)
    with naming_place(where):
        with_settings(None, found)
    return {WIRE_NAMES.get(name, name): value for name, value in found.items()}


def _checked_value(name: str, value: Any, where: str) -> Any:
    own = WIRE_NAMES.get(name, name)
    allowed = allowed_values(GenerateConfig, _FIELDS[own])
    has = f'{where}, has {found_in_json(value)} for "{name}"'
    do = "correct the line"
    if allowed is not None:
        require(allowed.holds(value), has, expected=allowed.in_words(), do=do)
    if own != "logit_bias":
        return value
    is_object = isinstance(value, Mapping) and all(token.isdecimal() for token in value)
    require(is_object, has, expected="an object of numbers by token id", do=do)
    return {int(token): bias for token, bias in value.items()}


def _refused_setting(name: str, where: str, followed: Collection[str]) -> InputError:
    do = "give it as an option, for all prompts"
    if OTHER_NAMES.get(name) in followed:
        do = f'write "{OTHER_NAMES[name]}"'
    elif name == "system":
        do = 'write "messages" with a turn of the role system'
    expected = f"settings of a line alone: {', '.join(followed)}"
    return InputError(f'{where}, has "{name}"', expected=expected, do=do)
