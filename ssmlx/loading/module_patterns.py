"""Untrusted regular expressions, by which PEFT names modules, matched in bounded time.

Python's matcher backtracks and may take for ever: 60 optional letters are enough. Here all ways are
followed at once (Thompson's construction): the set of places where a part of the expression may
begin gives the set of places where it may end. A set is an int: bit n is the place before character
n.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from re import _constants as op  # type: ignore[attr-defined]  # Python parses the expressions
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from ..errors import InputError, quoted

MAX_LENGTH = 1000  # characters of an expression, and of a module's path
MAX_STEPS = 1_000_000  # of all expressions of one setting, on all modules: some seconds


def _is_word(one: str) -> bool:
    return one.isalnum() or one == "_"


_CLASSES: dict[Any, Callable[[str], bool]] = {
    op.CATEGORY_DIGIT: str.isdecimal,
    op.CATEGORY_NOT_DIGIT: lambda one: not one.isdecimal(),
    op.CATEGORY_SPACE: str.isspace,
    op.CATEGORY_NOT_SPACE: lambda one: not one.isspace(),
    op.CATEGORY_WORD: _is_word,
    op.CATEGORY_NOT_WORD: lambda one: not _is_word(one),
}


class _RefusedError(Exception):
    """An expression has a part that is not supported, or takes too many steps."""


class ModulePatterns:
    """Values by regular expressions of module paths: PEFT's `rank_pattern` and `alpha_pattern`."""

    def __init__(
        self,
        source: str,  # the file and the setting, for messages
        values: Mapping[str, Any],  # by expression
    ) -> None:
        self._source = source
        self._steps_left = MAX_STEPS
        self._parsed = {text: self._parse(text) for text in values}
        self._values = values

    def find(self, module: str, default: Any) -> Any:
        """The value of the first expression that matches the path, or what follows one of its
        dots."""
        for text, parsed in self._parsed.items():
            if len(module) > MAX_LENGTH:
                raise self._refusal(text, f"a module's path has {len(module)} characters")
            matching = _Matching(module, self._steps_left)
            try:
                is_match = matching.ends(parsed, matching.starts) >> len(module) & 1
            except _RefusedError as refused:
                raise self._refusal(text, str(refused)) from refused
            finally:
                self._steps_left = matching.steps_left
            if is_match:
                return self._values[text]
        return default

    def _parse(self, text: str) -> Any:
        if len(text) > MAX_LENGTH:
            raise self._refusal(text, f"it has {len(text)} characters")
        try:
            parsed = _parser.parse(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise self._refusal(text, str(error)) from error
        if parsed.state.flags != re.UNICODE:
            raise self._refusal(text, "it has flags")
        return parsed

    def _refusal(self, text: str, why: str) -> InputError:
        return InputError(
            f"{self._source} {quoted(text)} ({why})",
            expected=f"a plain regular expression of at most {MAX_LENGTH} characters",
            do="name the modules in full",
        )


class _Matching:
    def __init__(self, text: str, steps: int) -> None:
        self.steps_left = steps
        self._text = text
        self._before: dict[str, int] = {}  # by character, the positions right before it
        for place, one in enumerate(text):
            self._before[one] = self._before.get(one, 0) | 1 << place
        self.starts = 1 | self._before.get(".", 0) << 1

    def ends(self, parts: Iterable[tuple[Any, Any]], starts: int) -> int:
        """Where a sequence of parts may end that begins at one of `starts`."""
        for kind, value in parts:
            if not starts:
                break
            self.steps_left -= 1
            if self.steps_left < 0:
                raise _RefusedError("it takes too many steps")
            starts = self._part_ends(kind, value, starts)
        return starts

    def _part_ends(self, kind: Any, value: Any, starts: int) -> int:
        if kind is op.BRANCH:
            found = 0
            for parts in value[1]:
                found |= self.ends(parts, starts)
            return found
        if kind is op.SUBPATTERN and not (value[1] or value[2]):  # flags of its own
            return self.ends(value[3], starts)
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):  # they differ in what is tried first
            least, most, parts = value
            return self._repeat_ends(least, most, parts, starts)
        if kind is op.AT:
            return starts & self._anchors(value)
        if kind is op.LITERAL:
            return (starts & self._before.get(chr(value), 0)) << 1
        fits = _character_test(kind, value)
        return sum(starts & places for one, places in self._before.items() if fits(one)) << 1

    def _repeat_ends(self, least: int, most: Any, parts: Any, starts: int) -> int:
        found = starts if least == 0 else 0
        times = 0
        while starts and times < most:
            before = starts
            times += 1
            starts = self.ends(parts, starts)
            if times >= least:
                if not starts & ~found:
                    break
                found |= starts
            elif starts == before:  # and so for ever
                return starts
        return found

    def _anchors(self, value: Any) -> int:
        """The positions where an anchor matches."""
        text = self._text
        if value in (op.AT_BEGINNING, op.AT_BEGINNING_STRING):
            return 1
        if value in (op.AT_END, op.AT_END_STRING):
            return 1 << len(text)
        if value in (op.AT_BOUNDARY, op.AT_NON_BOUNDARY):
            inside = [False, *map(_is_word, text), False]
            is_asked = value is op.AT_BOUNDARY
            edges = enumerate(pairwise(inside))
            return sum(1 << n for n, (a, b) in edges if (a != b) == is_asked)
        raise _RefusedError(f"it has {str(value).lower()}")


def _character_test(kind: Any, value: Any) -> Callable[[str], bool]:
    """The test of a part that matches one character."""
    if kind is op.ANY:
        return lambda one: one != "\n"
    if kind is op.LITERAL:
        return lambda one: ord(one) == value
    if kind is op.NOT_LITERAL:
        return lambda one: ord(one) != value
    if kind is op.RANGE:
        return lambda one: bool(value[0] <= ord(one) <= value[1])
    if kind is op.CATEGORY and value in _CLASSES:
        return _CLASSES[value]
    if kind is op.IN:
        is_negated = value[0][0] is op.NEGATE
        tests = [_character_test(*item) for item in value[is_negated:]]
        return lambda one: any(test(one) for test in tests) != is_negated
    raise _RefusedError(f"it has {str(kind).lower()}")
