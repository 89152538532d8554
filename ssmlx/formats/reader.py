"""Splits an answer into text, thoughts and tool calls as it streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import regex  # type: ignore[import-untyped]
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .arguments import OfferedTools, json_text
from .call_form import Call, CallForm
from .cursor import Cursor, NotACallError, UnfinishedError
from .families import LLAMA, AnswerFormat, find_format

_PROMPT_END = 32  # tokens at the prompt's end that are searched for an answer's header
_TRIES = 16
# A call is read again at each mark that may end it, at most `_TRIES` times; then whenever its text
# has grown by this factor, so that reading takes time in proportion to its length.
_GROWTH = 1.06


class Text(NamedTuple):
    """A piece of an answer's text, or of a thought."""

    text: str
    is_thought: bool = False


Piece = Text | Call
# What an answer begins with: a message, with its header, of a format with channels; a thought that
# the prompt opened; or text.
Begins = Literal["message", "thought", "text"]


def begins_after(
    prompt: Sequence[int],  # tokens
    tokenizer: TokenizerWrapper,
    prefill: str = "",
) -> Begins:
    """See `answer_begins`."""
    end = tokenizer.decode([*prompt[-_PROMPT_END:]])
    return answer_begins(find_format(tokenizer), end, prefill)


def answer_begins(
    format: AnswerFormat,
    prompt_end: str,  # the last characters of the prompt
    prefill: str = "",  # the text of the answer that the prompt has already
) -> Begins:
    """What an answer begins with, as its prompt leaves it."""
    end = prompt_end.rstrip()
    if channels := format.channels:
        if not end.endswith(channels.message):
            return "text" if prefill else "message"
        start = end.rfind(channels.begins[0])
        header = channels.read_header(end[max(0, start) :], OfferedTools(None))
        return "thought" if header.kind == "thought" else "text"
    opening, closing = format.thought or ("", "")
    is_open = bool(opening) and (
        end.endswith(opening) or prefill.rfind(opening) > prefill.rfind(closing)
    )
    return "thought" if is_open else "text"


@dataclass
class _OpenCall:
    """A call, or several, whose text is collected."""

    form: CallForm
    mark: str  # that opened it, or that it begins with
    is_opened: bool  # the mark is before it, not part of it
    searched: int = 0  # characters already searched for its end
    has_end: bool = False  # a mark that may end it has come since it was last read
    tries: int = 0
    next_try: int = 0  # least number of characters at which it is read next

    def is_due(self, text: str) -> bool:
        ends = self.form.ends
        start = max(0, self.searched - max(map(len, ends), default=0))
        found = _any_of(tuple(ends)).finditer(text, start) if ends else ()
        self.has_end |= any(one.end() > self.searched for one in found)
        self.searched = len(text)
        if not self.has_end or len(text) < self.next_try:
            return False
        self.has_end = False
        self.tries += 1
        self.next_try = int(len(text) * _GROWTH) if self.tries >= _TRIES else 0
        return True


class AnswerReader:
    """Splits an answer into texts, thoughts and calls, however it is cut into pieces.

    Text is passed on at once, except an end that may begin a mark. Marks are left out, and so is
    white space between one of them and text. A call is held back until it is complete; what cannot
    be read as one is text, or part of the thought that it is in, with its marks.
    """

    def __init__(
        self,
        format: AnswerFormat,
        tools: Sequence[Any] | None = None,  # that are offered; without any, nothing is a call
        begins: Begins = "text",
        *,
        reads_calls: bool = True,  # if false, their marks are text
        reads_text: bool = True,  # if false, only channels, and a thought at the start, are marks
    ) -> None:
        self._format = format
        self._tools = OfferedTools(tools)
        self._reads_text = reads_text
        reads_calls = reads_calls and reads_text and bool(self._tools.names)
        self._forms = [*format.calls] if reads_calls else []
        self._channels = format.channels
        self._text = ""  # not read yet
        self._state: str = "header" if begins == "message" else begins
        self._call: _OpenCall | None = None  # while there is one, `_state` is that before it
        self._header = ""
        self._is_after_mark = False
        self._has_text = False  # since the last call; a text that names the marks opens no thought
        self._owes_end = False  # whether a mark that ends calls may come alone
        self._left_thought = False  # whether a call ended a thought that no mark ended
        self._is_over = False
        self._may_stand_alone = bool(tools) and format.stands_alone and bool(self._forms)

    @property
    def is_thinking(self) -> bool:
        """Whether what comes next continues a thought."""
        return self._state == "thought" and self._call is None

    def read(self, text: str) -> list[Piece]:
        """The parts that the next piece of the answer's text adds."""
        self._text += text
        found: list[Piece] = []
        while self._step(found):
            pass
        return found

    def end(
        self,
        *,
        is_cut: bool,  # the answer was cut, so what is open is not whole
    ) -> list[Piece]:
        """The parts that are left at the end of the answer."""
        self._is_over = True
        found = self.read("")
        while self._call or self._text:
            if self._call:
                # Without marks that end them, calls are as whole as their text.
                is_whole = not is_cut or not self._call.form.ends
                if not self._read_call(self._call, found, is_whole=is_whole, is_cut=is_cut):
                    self._take_back_call(self._call, found)
            elif self._state == "header":
                self._end_header(is_cut=is_cut)
            else:
                self._read_lone_calls(found, is_cut=is_cut)
            found += self.read("")
        return found

    def _step(self, found: list[Piece]) -> bool:
        """Read on up to the next mark; returns whether there is one."""
        if self._call:
            return self._step_in_call(self._call, found)
        if self._state == "header":
            return self._step_in_header(found)
        if self._state == "text" and self._may_stand_alone and self._text:
            if _lone_calls_pattern(self._tools.names).fullmatch(self._text, partial=True):
                return False
            self._may_stand_alone = False
        marks = self._marks()
        partial = not self._is_over
        match = _any_of(marks).search(self._text, partial=partial) if marks else None
        end = len(self._text) if match is None else match.start()
        self._say(self._text[:end], found)
        self._text = self._text[end:]
        if match is None or match.partial:
            return False
        mark = match[0]
        self._text = self._text[len(mark) :]
        self._pass_mark(mark, found)
        return True

    def _marks(self) -> tuple[str, ...]:
        """The marks that may come in the present state."""
        channels = self._channels
        own: list[str] = [*channels.ends, *channels.begins] if channels else []
        thought = self._format.thought
        if self._owes_end:
            own += [one.end for one in self._forms if one.end]
        if self._state == "thought":
            own += [thought[1]] if thought else []
        elif self._reads_text:
            own += [thought[0]] if thought else []
            own += [thought[1]] if thought and self._left_thought else []
            own += self._format.text_marks
        elif not channels:
            return ()
        for form in self._forms:
            own += [*form.opens, *form.begins]
        return tuple(own)

    def _pass_mark(self, mark: str, found: list[Piece]) -> None:
        """Change the state by the mark that was just read."""
        thought = self._format.thought or ("", "")
        channels = self._channels
        if channels and mark in (*channels.ends, *channels.begins):
            self._begin_header("" if mark in channels.ends else mark)
        elif mark == thought[1]:
            self._enter_text()
        elif mark == thought[0] and self._has_text:
            self._say(mark, found)
        elif mark == thought[0]:
            self._state = "thought"
        else:
            for form in self._forms:
                if mark in (*form.opens, *form.begins):
                    self._call = _OpenCall(form, mark, is_opened=mark in form.opens)
                    self._text = self._text if self._call.is_opened else mark + self._text
                    return
            self._is_after_mark = self._state == "text"
            self._owes_end = self._owes_end and mark in self._format.text_marks

    def _enter_text(self) -> None:
        self._state = "text"
        self._left_thought = False
        self._is_after_mark = True

    def _begin_header(self, text: str) -> None:
        self._state = "header"
        self._header = text

    def _step_in_call(self, call: _OpenCall, found: list[Piece]) -> bool:
        """Read the call if it is time; returns whether it is finished, as a call or as text."""
        if not call.is_due(self._text):
            return False
        is_read = self._read_call(call, found, is_whole=False)
        if is_read is None:
            return False
        if not is_read:
            self._take_back_call(call, found)
        return True

    def _read_call(
        self, call: _OpenCall, found: list[Piece], *, is_whole: bool, is_cut: bool = False
    ) -> bool | None:
        """Whether these are calls, which are then added; None if more text may complete them."""
        cursor = Cursor(self._text, is_whole=is_whole, is_cut=is_cut, is_opened=call.is_opened)
        try:
            calls = call.form.read(cursor, self._tools)
            for one in calls:
                json_text(one.arguments)
            if not call.is_opened and any(one.name not in self._tools.names for one in calls):
                raise NotACallError()
        except UnfinishedError:
            return None
        except NotACallError:
            return False
        found += calls
        self._text = cursor.rest
        self._may_stand_alone = False
        self._has_text = False
        self._call = None
        self._owes_end = not call.is_opened
        self._left_thought = self._state == "thought"
        if self._channels and call.form not in self._forms:
            self._begin_header("")
            return True
        self._state = "text"
        self._is_after_mark = True
        return True

    def _take_back_call(self, call: _OpenCall, found: list[Piece]) -> None:
        """Treat the mark of what turned out to be no call as text, and read on after it."""
        self._call = None
        if not call.is_opened:
            self._text = self._text[len(call.mark) :]
        self._say(call.mark, found)

    def _read_lone_calls(self, found: list[Piece], *, is_cut: bool) -> None:
        """Read the rest of the answer as calls without marks, if it is exactly that and whole."""
        self._may_stand_alone = False
        cursor = Cursor(self._text)
        try:
            calls = LLAMA.read(cursor, self._tools)
            for one in calls:
                json_text(one.arguments)
        except NotACallError:
            return
        are_offered = all(one.name in self._tools.names for one in calls)
        if are_offered and not is_cut and not cursor.rest.strip():
            found += calls
            self._text = ""

    def _step_in_header(self, found: list[Piece]) -> bool:
        """Read a header on; returns whether it has ended, or turned out not to be one."""
        channels = self._channels
        assert channels is not None
        if not self._header and not channels.header_pattern.fullmatch(self._text, partial=True):
            self._state = "text"
            return True
        marks = _any_of((channels.message, *(one for form in self._forms for one in form.opens)))
        match = marks.search(self._text, partial=True)
        if match is None or match.partial:
            return False
        header = self._header + self._text[: match.start()]
        self._text = self._text[match.end() :]
        self._header = ""
        if match[0] != channels.message:
            self._pass_mark(match[0], found)
            return True
        kind, tool = channels.read_header(header, self._tools)
        if kind == "call" and self._reads_text and self._tools.names:
            self._call = _OpenCall(channels.call_form(tool), "", is_opened=True)
        self._state = "thought" if kind == "thought" else "text"
        return True

    def _end_header(self, *, is_cut: bool) -> None:
        """Make text of a header that was never ended, without its marks and what they name."""
        assert self._channels is not None
        self._state = "text"
        self._text = "" if is_cut else self._channels.without_header(self._header + self._text)
        self._header = ""

    def _say(self, text: str, found: list[Piece]) -> None:
        """Add text, or a piece of a thought; white space after a mark is left out of text."""
        if self._state == "thought":
            found += [Text(text, is_thought=True)] if text else []
            return
        text = text.lstrip() if self._is_after_mark else text
        if text:
            self._is_after_mark = False
            self._may_stand_alone = False
            self._has_text = self._has_text or not text.isspace()
            found.append(Text(text))


@lru_cache
def _any_of(marks: tuple[str, ...]) -> Any:
    """A pattern of any of these texts, longer ones tried first."""
    return regex.compile("|".join(map(regex.escape, sorted(marks, key=len, reverse=True))))


@lru_cache
def _lone_calls_pattern(names: tuple[str, ...]) -> Any:
    """A pattern of a text that may be calls, without any mark, of tools of these names."""
    keys = "name|type|function|tool_name|id|parameters|arguments"
    tools = "|".join(map(regex.escape, names)) or r"(?!)"
    in_json = rf'\[?\s*\{{\s*"(?:{keys})"\s*:.*'
    in_python = rf"\[\s*(?:{tools})(?:\.call)?\s*\(.*"
    by_name = rf"(?:{tools})[ \t]*\n\s*\{{.*"
    return regex.compile(rf"\s*(?:{in_json}|{in_python}|{by_name})", regex.DOTALL)
