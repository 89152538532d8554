"""Answers of several messages, each with a header that names its recipient: OpenAI's Harmony, and
Muse Spark's.

A message is `<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>`; the prompt has the first
`<|start|>assistant` already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import regex  # type: ignore[import-untyped]

from .arguments import OfferedTools
from .call_form import Call, CallForm
from .cursor import Cursor, NotACallError

_CHANNEL = regex.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = regex.compile(r"\bto=([^\s<]+)")


class Header(NamedTuple):
    """What a message is: a text, a thought, or a call of `tool`."""

    kind: Literal["text", "thought", "call"]
    tool: str = ""


@dataclass(frozen=True)
class Channels:
    """The marks of messages."""

    begins: Sequence[str]  # marks that begin or continue a header
    message: str  # ends a header
    ends: Sequence[str]  # marks that end a message
    end_tokens: Sequence[str]  # those that end an answer
    thinks_to: Sequence[str]  # recipients and channels of thoughts
    thought_header: str  # at an answer's start
    text_header: str  # at an answer's start
    call_header: str = ""  # up to the function's name; empty if headers do not name functions
    message_opens: str = "<|start|>assistant"  # before every header but the answer's first

    @property
    def calls_in_header(self) -> bool:
        return bool(self.call_header)

    @property
    def signs(self) -> tuple[str, ...]:
        """Tokens that together identify such a model."""
        return self.begins[-1], self.message

    @cached_property
    def header_pattern(self) -> Any:
        """A pattern that matches what may be the beginning of a header, and perhaps more."""
        marks = "|".join(map(regex.escape, (*self.begins, self.message)))
        return regex.compile(rf"\s*(?:to=[^\s<]*\s*)?(?:(?:{marks}).*)?", regex.DOTALL)

    def read_header(self, text: str, tools: OfferedTools) -> Header:
        """What a header says of its message. One to a tool that is not offered is a thought: it is
        not for the user."""
        channel = _CHANNEL.search(text)
        recipient = _RECIPIENT.search(text)
        to = recipient[1] if recipient else ""
        name = to.removeprefix("functions.")
        if self.calls_in_header and name and (name != to or name in tools.names):
            return Header("call", name)
        is_thought = (channel[1] if channel else "") in self.thinks_to or to in self.thinks_to
        is_thought = is_thought or (bool(to) and self.calls_in_header)
        return Header("thought" if is_thought else "text")

    def without_header(self, text: str) -> str:
        """A text without the header that it begins with, which no mark ended."""
        marks = "|".join(map(regex.escape, (*self.begins, *self.ends)))
        return str(regex.sub(rf"(?:{marks})\s*(?:\w+\b)?(?:\s*to=\S+)?\s*", "", text))

    def call_form(self, tool: str) -> CallForm:
        """The form of a message that calls a tool: the JSON of its arguments."""
        marks = (*self.ends, *self.begins)

        def read(cursor: Cursor, tools: OfferedTools) -> list[Call]:
            cursor.skip_space()
            is_empty = cursor.is_at_end or cursor.text.startswith(marks, cursor.at)
            arguments = {} if is_empty else cursor.json()
            cursor.skip_space()
            if not isinstance(arguments, dict):
                raise NotACallError()
            if not cursor.is_over and not cursor.text.startswith(marks, cursor.at):
                raise cursor.fail()
            return [Call(tool, arguments)]

        return CallForm(opens=(), ends=marks, read=read)


HARMONY = Channels(
    begins=("<|start|>", "<|constrain|>", "<|channel|>"),
    message="<|message|>",
    ends=("<|end|>", "<|call|>", "<|return|>"),
    end_tokens=("<|call|>", "<|return|>"),
    thinks_to=("analysis",),
    thought_header="<|channel|>analysis<|message|>",
    text_header="<|channel|>final<|message|>",
    call_header="<|channel|>commentary to=functions.",
)
MUSE = Channels(
    begins=("<|start|>",),
    message="<|message|>",
    ends=("<|eom|>", "<|eot|>"),
    end_tokens=("<|eot|>",),
    thinks_to=("self",),
    thought_header=" to=self<|message|>",
    text_header=" to=user<|message|>",
)
