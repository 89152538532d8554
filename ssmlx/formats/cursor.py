"""A position in a text that is read from left to right, and values written in it.

JSON, Python's literals and those of Gemma's calls differ only in quoting, so one reader handles all
of them. What cannot be read raises `NotACallError`, or `UnfinishedError` if more text may help.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import regex  # type: ignore[import-untyped]

Pattern = Any  # a compiled pattern of `regex`, which knows whether a text may go on to match
_Item = TypeVar("_Item")
_DECODER = json.JSONDecoder(strict=False)  # a raw line end in a text is the text's
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None, "True": True}
_WORDS |= {"False": False, "None": None}
_NUMBER = regex.compile(r"-?(?:0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_FENCE = regex.compile(r"```\w*\s*")
_PART_OF_WORD = regex.compile(r"[\w.+-]*\s*")
_KEY = regex.compile(r"[^\s:,={}\[\]\"'<]+")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "/": "/", "0": "\0"}
_ESCAPED |= {"\n": "", "a": "\a", "v": "\v", "\\": "\\", "'": "'", '"': '"'}
_CODE_DIGITS = {"x": 2, "u": 4, "U": 8}
_MOST_LEVELS = 100  # of values in values
PYTHON_QUOTES = ('"""', "'''", '"', "'")


class NotACallError(Exception):
    """A text that cannot be read as a call."""


class UnfinishedError(NotACallError):
    """A text that may become a call once more text comes."""


class Cursor:
    """A position in a text, from which values are read."""

    def __init__(
        self,
        text: str,
        at: int = 0,  # in characters
        *,
        is_whole: bool = True,  # the text is complete: marks that end a call may then be missing
        is_cut: bool = False,  # the text was cut: nothing more comes, and its last call is lost
        is_opened: bool = True,  # a mark opened the calls that are read, so another one ends them
    ) -> None:
        self.text = text
        self.at = at
        self.is_whole = is_whole
        self.is_cut = is_cut
        self.is_opened = is_opened

    @property
    def rest(self) -> str:
        return self.text[self.at :]

    @property
    def is_at_end(self) -> bool:
        return self.at >= len(self.text)

    @property
    def is_over(self) -> bool:
        """Whether this is the end of a text after which nothing comes."""
        return self.is_at_end and (self.is_whole or self.is_cut)

    def fail(self) -> NotACallError:
        """The error for unexpected text, or for the end of the text."""
        return UnfinishedError() if self.is_at_end else NotACallError()

    def skip_space(self, more: str = "") -> None:
        """Go past white space, and past the characters of `more`."""
        while not self.is_at_end and (self.text[self.at].isspace() or self.text[self.at] in more):
            self.at += 1

    def has(self, mark: str) -> bool:
        """Go past `mark` if it is next; returns whether it is."""
        if not mark or not self.text.startswith(mark, self.at):
            return False
        self.at += len(mark)
        return True

    def has_fence(self) -> bool:
        """Go past white space, and past what opens a Markdown fence; returns whether one does."""
        self.skip_space()
        return self.text.startswith("`", self.at) and bool(self.match(_FENCE))

    def take(self, mark: str) -> None:
        if not self.has(mark):
            raise UnfinishedError() if mark.startswith(self.rest) else NotACallError()

    def take_or_end(self, mark: str) -> None:
        """Go past white space and `mark`, which may be missing or cut at the end of a text."""
        self.skip_space()
        if not mark:
            return
        try:
            self.take(mark)
        except UnfinishedError:
            if not (self.is_whole or self.is_cut):
                raise
            self.at = len(self.text)

    def match(self, pattern: Pattern) -> Any:
        """Go past what the pattern matches here, and return the match."""
        found = pattern.match(self.text, self.at, partial=True)
        if found is None:
            raise NotACallError()
        if found.partial:
            raise UnfinishedError()
        self.at = found.end()
        return found

    def text_until(self, mark: str) -> str:
        """Go past the next `mark`, and return the text before it."""
        end = self.text.find(mark, self.at)
        if end < 0:
            raise UnfinishedError()
        found = self.text[self.at : end]
        self.at = end + len(mark)
        return found

    def json(self) -> Any:
        """Go past white space and a JSON value, and return that."""
        self.skip_space()
        try:
            value, self.at = _DECODER.raw_decode(self.text, self.at)
        except json.JSONDecodeError as error:
            # At the end, in a text, in an escape, or in a word or number that may go on.
            may_go_on = (
                error.msg.startswith("Unterminated")
                or "\\" in self.text[-6:]
                or _PART_OF_WORD.fullmatch(self.text, error.pos)
            )
            raise UnfinishedError() if may_go_on else NotACallError() from error
        except (ValueError, RecursionError) as error:  # a number of too many digits
            raise NotACallError() from error
        return value

    def value(
        self,
        quotes: Sequence[str],  # that texts may be in, longer ones first
        *,
        allows_bare: bool = False,  # whether a text may have no quotes, up to a comma or a bracket
        level: int = 0,
    ) -> Any:
        """Go past white space and a value, in JSON's or Python's words, and return it."""
        self.skip_space()
        if level > _MOST_LEVELS:
            raise NotACallError()
        for quote in quotes:
            if self.has(quote):
                return self._quoted_text(quote)
        inner: Any = {"quotes": quotes, "allows_bare": allows_bare, "level": level + 1}
        if self.has("{"):
            return dict(self.items("}", lambda: (self._key(quotes), self.value(**inner))))
        for opening, closing in (("[", "]"), ("(", ")")):
            if self.has(opening):
                return self.items(closing, lambda: self.value(**inner))
        return self._word(allows_bare)

    def items(
        self,
        closing: str,
        read: Callable[[], _Item],  # goes past one item, and returns it
    ) -> list[_Item]:
        """Go past items, which commas separate, and the bracket that closes them; return them."""
        found = []
        self.skip_space()
        while not self.has(closing):
            found.append(read())
            self.skip_space()
            if not self.has(","):
                self.take(closing)
                break
            self.skip_space()
        return found

    def _key(self, quotes: Sequence[str]) -> str:
        """Read the name of an item of an object, quoted or not, and the colon after it."""
        for quote in quotes:
            if self.has(quote):
                name = self._quoted_text(quote)
                break
        else:
            name = self.match(_KEY)[0]
        self.skip_space()
        self.take(":")
        return str(name)

    def _word(self, allows_bare: bool) -> Any:
        """Read a number, a known word, or a bare text, up to a comma, a bracket or the end."""
        start = self.at
        ends = ",]}" if allows_bare else ",]})"
        while not self.is_at_end and self.text[self.at] not in ends:
            self.at += 1
        word = self.text[start : self.at]
        if self.is_at_end and not self.is_whole:
            raise UnfinishedError()
        return _word_value(word, allows_bare)

    def _quoted_text(self, quote: str) -> str:
        """Read a text and the quote that ends it."""
        if "'" not in quote and quote.strip('"'):  # a mark of Gemma's: no escapes
            return self.text_until(quote)
        found: list[str] = []
        while not self.has(quote):
            if self.is_at_end:
                raise UnfinishedError()
            letter = self.text[self.at]
            self.at += 1
            found.append(self._escaped_character() if letter == "\\" else letter)
        # Two halves of a surrogate pair, each escaped by itself.
        return "".join(found).encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _escaped_character(self) -> str:
        """Read what follows a backslash; an unknown escape stays as it is."""
        if self.is_at_end:
            raise UnfinishedError()
        letter = self.text[self.at]
        self.at += 1
        digits = self.text[self.at : self.at + _CODE_DIGITS.get(letter, 0)]
        if not digits:
            return _ESCAPED.get(letter, "\\" + letter)
        try:
            code = chr(int(digits, 16))
        except (ValueError, OverflowError):
            return "\\" + letter
        self.at += len(digits)
        return code


def _word_value(word: str, allows_bare: bool) -> Any:
    """The value of a word without quotes."""
    short = word.strip()
    if short in _WORDS:
        return _WORDS[short]
    if found := _NUMBER.fullmatch(short):
        try:
            return float(short) if found[1] or found[2] else int(short)
        except ValueError as error:  # too many digits
            raise NotACallError() from error
    if not allows_bare:
        raise NotACallError()
    return word
