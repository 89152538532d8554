"""What a request asks for, whatever API it came by, and the parts that an answer is told in."""

import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ..errors import quoted, require
from ..prompts import Message, Tools
from ..settings import Allowed, GenerateConfig

Body = Mapping[str, Any]
"""A request's JSON object."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a request asks for, checked as far as that goes without a model."""

    model: str = ""  # as the request named it; "" for the server's own
    question: str | list[int] | list[Message]  # a prompt as it stands, or the turns of a chat
    config: GenerateConfig  # the server's settings with the request's own
    tools: Tools | None = None
    template_args: Mapping[str, Any] | None = None  # for the chat template
    choices: int = 1  # answers that are wanted
    # a JSON schema that the answer has to follow, {} for any JSON object
    schema: Mapping[str, Any] | None = None
    prediction: str | None = None  # a text that the answer may repeat much of; drafted from
    stream: bool = False  # whether the answer is told part by part
    body: Body = field(default_factory=dict)  # the request, for what a reply repeats of it
    is_chat: bool = True
    id: str = field(default_factory=lambda: secrets.token_hex(12))  # of the reply
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True)
class Text:
    """What one target call brought of an answer's text."""

    text: str
    tokens: int = 0
    logprobs: list[dict[str, Any]] | None = None  # of its tokens, as chats tell them
    choice: int = 0


class Reasoning(Text):
    """What one target call brought of what a model thinks before it answers."""


@dataclass(frozen=True)
class ToolCall:
    """A call, whole; its text is its arguments, an object's JSON."""

    id: str
    name: str
    text: str
    index: int = 0  # among the calls of its choice
    choice: int = 0


@dataclass(frozen=True)
class End:
    """A choice is over."""

    reason: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    # tokens of a prediction, accepted and not, where one was given
    predicted: tuple[int, int] | None = None
    stop: str | None = None  # the stop string that ended it, if one did
    timings: Mapping[str, Any] = field(default_factory=dict)
    choice: int = 0


Part = Text | ToolCall | End
Event = tuple[str | None, Mapping[str, Any] | str]
"""The name of a server-sent event, if it has one, and its data: an object, or a text as it is."""


class Teller(Protocol):
    """Tells an answer as an API does."""

    reply: dict[str, Any]  # in one piece, once all events are told

    def events(self, parts: AsyncIterator[Part]) -> AsyncIterator[Event]:
        """One a part at least. Their data change once the next one is asked for."""
        ...


@dataclass(frozen=True)
class Api:
    """How an API asks and is answered."""

    read: Callable[[Body, GenerateConfig], Ask]  # of a request, and the server's own settings
    teller: Callable[[Ask], Teller]
    error: Callable[[int, str], Body]  # of an HTTP status and a line about it
    error_name: str | None = None  # of the event that ends a reply which fails on its way


def check(ok: bool, found: str, expected: str) -> None:
    require(ok, found, expected=expected, do="correct or drop it")


def number(body: Body, name: str, least: float, most: float) -> Any:
    """A number of a request's body, a whole one if `least` is; None where it is absent or null."""
    value, whole = body.get(name), isinstance(least, int)
    ok = value is None or Allowed(least=least, most=most).holds(value, whole=whole)
    kind = "a whole number" if whole else "a number"
    check(ok, f"{name} is {quoted(value)}", f"{kind} from {least} to {most}")
    return value


_NAMES = {str: "a text", bool: "true or false", dict: "an object", list: "a list"}


def typed(body: Body, name: str, kind: type, default: Any = None) -> Any:
    """A value of one JSON type of a request's body; `default` where it is absent or null."""
    value = body.get(name)
    ok = value is None or isinstance(value, kind)
    check(ok, f"{name} is {quoted(value)}", _NAMES[kind])
    return default if value is None else value


def turns_of(body: Body) -> list[Message]:
    """The messages of a request's body: objects with a role each, one at least."""
    turns = typed(body, "messages", list, [])
    ok = all(isinstance(turn, dict) and isinstance(turn.get("role"), str) for turn in turns)
    expected = "a list of objects with a role each, one at least"
    check(bool(turns) and ok, f"messages is {quoted(turns)}", expected)
    return turns
