"""Reads an answer as it comes: what of it is text, what a thought, and which calls it has."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import regex  # type: ignore[import-untyped]
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .arguments import OfferedTools, json_text
from .call_form import Call, CallForm
from .cursor import Cursor, NotACallError, UnfinishedError
from .families import LLAMA, AnswerFormat, find_format

_PROMPT_END = 32  # tokens, in which the header of an answer stands
_MOST_TRIES = 64  # to read one call, each time that a mark ends it


class Text(NamedTuple):
    """A piece of an answer's text, or of a thought."""

    text: str
    is_thought: bool = False


Piece = Text | Call
Begins = Literal["message", "thought", "text"]
"""What an answer begins with: a message, with its header, of a format with channels; a thought that
the prompt opened; or text."""


def begins_after(prompt: Sequence[int], tokenizer: TokenizerWrapper, prefill: str = "") -> Begins:
    """Return what an answer to a prompt's tokens begins with, see `answer_begins`."""
    end = tokenizer.decode([*prompt[-_PROMPT_END:]])
    return answer_begins(find_format(tokenizer), end, prefill)


def answer_begins(format: AnswerFormat, prompt_end: str, prefill: str = "") -> Begins:
    """Return what an answer begins with, as its prompt has it.

    Args:
        format: the model's.
        prompt_end: the last characters of the prompt.
        prefill: the text of the answer that the prompt has already.
    """
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


class AnswerReader:
    """Splits an answer into texts, thoughts and calls, whatever the pieces that it comes in.

    Text is passed on at once, but for an end that may begin a mark. Marks are left out, and so is
    white space after one of them before text. A call is held back until it is whole; what cannot be
    read as one is text, or part of the thought that it stands in.
    """

    def __init__(
        self,
        format: AnswerFormat,
        tools: Sequence[Any] | None = None,
        begins: Begins = "text",
        *,
        reads_calls: bool = True,
        reads_text: bool = True,
    ) -> None:
        """Begin an answer.

        Args:
            format: the model's.
            tools: those that are offered; without any, no call is one.
            begins: what the answer begins with.
            reads_calls: whether marks of calls are looked for; else they are text.
            reads_text: whether marks are looked for in text; else it goes on to the end, and only
                a thought that the answer begins with, or channels, are told from it.
        """
        self._format = format
        self._tools = OfferedTools(tools)
        self._reads_text = reads_text
        self._forms = [*format.calls] if reads_calls and reads_text else []
        self._channels = format.channels
        self._text = ""  # that was not read yet
        self._state: str = "header" if begins == "message" else begins
        self._origin = "text"  # the state in which a call began
        self._call: CallForm | None = None
        self._is_opened = True  # whether a mark opened the call
        self._searched = 0  # characters of a call in which its end was looked for
        self._tries = 0
        self._header = ""
        self._is_behind_mark = False
        self._owes_end = False  # whether a mark that ends calls may come alone
        self._left_thought = False  # whether a call ended a thought that no mark ended
        self._is_over = False
        self._may_stand_alone = bool(tools) and format.stands_alone and bool(self._forms)

    @property
    def is_thinking(self) -> bool:
        """Whether what comes next goes on with a thought."""
        return self._state == "thought"

    def read(self, text: str) -> list[Piece]:
        """Return what the next piece of the answer's text adds."""
        self._text += text
        found: list[Piece] = []
        while self._step(found):
            pass
        return found

    def end(self, *, is_cut: bool) -> list[Piece]:
        """Return what is left at the end of the answer.

        Args:
            is_cut: whether the answer was cut, so that what is open is not whole.
        """
        self._is_over = True
        found = self.read("")
        while self._state == "call" or self._text:
            if self._state == "call":
                # Without marks that end them, calls are as whole as their text.
                if not self._read_call(found, is_whole=not is_cut or not self._form.ends):
                    self._take_back_call(found)
            elif self._state == "header":
                self._end_header(found)
            else:
                self._read_lone_calls(found, is_cut=is_cut)
            found += self.read("")
        return found

    @property
    def _form(self) -> CallForm:
        assert self._call is not None
        return self._call

    def _step(self, found: list[Piece]) -> bool:
        """Read on up to the next mark; returns whether there is one."""
        if self._state == "call":
            return self._step_in_call(found)
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
        """Return the marks that may stand in what is read now."""
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
            own += [*form.opens, *(form.begins if self._tools.names else ())]
        return tuple(own)

    def _pass_mark(self, mark: str, found: list[Piece]) -> None:
        """Change the state as a mark says that was just read."""
        thought = self._format.thought or ("", "")
        channels = self._channels
        if channels and mark in (*channels.ends, *channels.begins):
            self._begin_header("" if mark in channels.ends else mark)
        elif mark == thought[1]:
            self._enter_text()
        elif mark == thought[0]:
            self._state = "thought"
        else:
            for form in self._forms:
                if mark in (*form.opens, *form.begins):
                    self._begin_call(form, is_opened=mark in form.opens, mark=mark)
                    return
            self._is_behind_mark = self._state == "text"
            self._owes_end = self._owes_end and mark in self._format.text_marks

    def _enter_text(self) -> None:
        self._state = "text"
        self._left_thought = False
        self._is_behind_mark = True

    def _begin_header(self, text: str) -> None:
        self._state = "header"
        self._header = text

    def _begin_call(self, form: CallForm, *, is_opened: bool, mark: str = "") -> None:
        """Begin to collect a call; a mark that is part of the call is collected, too."""
        self._origin = self._state
        self._state = "call"
        self._call = form
        self._is_opened = is_opened
        self._searched = 0
        self._tries = 0
        if not is_opened:
            self._text = mark + self._text

    def _step_in_call(self, found: list[Piece]) -> bool:
        """Try to read the call where a mark that may end it has come; returns whether it is over,
        either way."""
        form = self._form
        searched = self._searched
        self._searched = len(self._text)
        start = max(0, searched - max(map(len, form.ends), default=0))
        ends = _any_of(tuple(form.ends)).finditer(self._text, start) if form.ends else ()
        if not any(one.end() > searched for one in ends):
            return False
        self._tries += 1
        is_read = self._read_call(found, is_whole=False)
        if is_read is None and self._tries < _MOST_TRIES:
            return False
        if not is_read:
            self._take_back_call(found)
        return True

    def _read_call(self, found: list[Piece], *, is_whole: bool) -> bool | None:
        """Read the calls that were collected; returns whether there are any, None where there may
        be, once more text has come.
        """
        cursor = Cursor(self._text, is_whole=is_whole, is_opened=self._is_opened)
        try:
            if not self._tools.names:
                raise NotACallError()
            calls = self._form.read(cursor, self._tools)
            for one in calls:
                json_text(one.arguments)
            if not self._is_opened and any(one.name not in self._tools.names for one in calls):
                raise NotACallError()
        except UnfinishedError:
            return None
        except NotACallError:
            return False
        found += calls
        self._text = cursor.rest
        self._may_stand_alone = False
        self._owes_end = not self._is_opened
        self._left_thought = self._origin == "thought"
        if self._channels and self._form not in self._forms:
            self._begin_header("")
            return True
        self._state = "text"
        self._is_behind_mark = True
        return True

    def _take_back_call(self, found: list[Piece]) -> None:
        """Go on as before the mark that opened a call which is none: what was collected is read
        again, and a mark that ends calls is left out once."""
        form = self._form
        self._state = self._origin
        self._is_behind_mark = True
        self._owes_end = form in self._forms
        if not self._is_opened:
            mark = next(one for one in form.begins if self._text.startswith(one))
            self._is_behind_mark = self._owes_end = False
            self._say(mark, found)
            self._text = self._text[len(mark) :]

    def _read_lone_calls(self, found: list[Piece], *, is_cut: bool) -> None:
        """Read the rest of the answer as calls without marks, where it is that, and whole."""
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
        """Read a header up to its end, or to where it turns out to be none; returns whether either
        has come."""
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
        if kind == "call" and self._reads_text:
            self._state = "text"
            self._begin_call(channels.call_form(tool), is_opened=True)
        else:
            self._state = "thought" if kind == "thought" else "text"
        return True

    def _end_header(self, found: list[Piece]) -> None:
        """Make text of a header that was never ended, unless it has marks; those are left out."""
        channels = self._channels
        assert channels is not None
        has_marks = self._header or any(one in self._text for one in channels.begins)
        self._state = "text"
        if has_marks:
            self._text = ""

    def _say(self, text: str, found: list[Piece]) -> None:
        """Add text, or a piece of a thought, as the state says; white space after a mark is left
        out of text."""
        if self._state == "thought":
            found += [Text(text, is_thought=True)] if text else []
            return
        text = text.lstrip() if self._is_behind_mark else text
        if text:
            self._is_behind_mark = False
            self._may_stand_alone = False
            found.append(Text(text))


@lru_cache
def _any_of(marks: tuple[str, ...]) -> Any:
    """Return the pattern of any of several marks, of longer ones first."""
    return regex.compile("|".join(map(regex.escape, sorted(marks, key=len, reverse=True))))


@lru_cache
def _lone_calls_pattern(names: tuple[str, ...]) -> Any:
    """Return the pattern of a text that may be calls without any mark, of tools of these names."""
    keys = "name|type|function|tool_name|id|parameters|arguments"
    tools = "|".join(map(regex.escape, names)) or r"(?!)"
    in_json = rf'\[?\s*\{{\s*"(?:{keys})"\s*:.*'
    in_python = rf"\[\s*(?:{tools})(?:\.call)?\s*\(.*"
    return regex.compile(rf"\s*(?:{in_json}|{in_python})", regex.DOTALL)
