"""What a request asks for, whatever API it came by, and the parts that an answer is told in."""

import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

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


@dataclass(frozen=True)
class Logprob:
    """A token's text with its log probability, and those of the likeliest in its place."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Text:
    """What one target call brought of an answer's text."""

    text: str
    tokens: int = 0
    logprobs: tuple[Logprob, ...] | None = None
    choice: int = 0


@dataclass(frozen=True)
class Reasoning:
    """What one target call brought of what a model thinks before it answers."""

    text: str
    tokens: int = 0
    choice: int = 0


@dataclass(frozen=True)
class ToolCall:
    """A call, whole; `arguments` are JSON."""

    id: str
    name: str
    arguments: str
    choice: int = 0


@dataclass(frozen=True)
class Usage:
    """Tokens; those of a prediction None where none was given."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


@dataclass(frozen=True)
class End:
    """A choice is over; `stop` is the stop string that ended it, if one did."""

    reason: Literal["stop", "length", "tool_calls"]
    usage: Usage
    stop: str | None = None
    timings: Mapping[str, Any] = field(default_factory=dict)
    choice: int = 0


Part = Text | Reasoning | ToolCall | End


@dataclass(frozen=True)
class Ids:
    """What a reply is known by; each API puts a prefix of its own before `id`."""

    model: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))


Event = tuple[str | None, Mapping[str, Any] | str]
"""The name of a server-sent event, if it has one, and its data: an object, or a text as it is."""


@dataclass(frozen=True)
class Api:
    """How an API asks and is answered."""

    read: Callable[[Body, GenerateConfig], Ask]  # of a request, and the server's own settings
    whole: Callable[[Ask, list[Part], Ids], dict[str, Any]]  # the reply in one piece
    events: Callable[[Ask, AsyncIterator[Part], Ids], AsyncIterator[Event]]  # one a part at least
    error: Callable[[int, str], dict[str, Any]]  # of an HTTP status and a line about it
    error_name: str | None = None  # of the event that ends a reply which fails on its way


def number(body: Body, name: str, least: float, most: float, *, whole: bool = False) -> Any:
    """A number of a request's body; None where it is absent or null."""
    value, kind = body.get(name), "a whole number" if whole else "a number"
    ok = value is None or Allowed(least=least, most=most).holds(value, whole=whole)
    expected = f"{kind} from {least} to {most}"
    require(ok, f"{name} is {quoted(value)}", expected=expected, do="correct or drop it")
    return value


_NAMES = {str: "a text", bool: "true or false", dict: "an object", list: "a list"}


def typed(body: Body, name: str, kind: type, default: Any = None) -> Any:
    """A value of one JSON type of a request's body; `default` where it is absent or null."""
    value = body.get(name)
    ok = value is None or isinstance(value, kind)
    require(ok, f"{name} is {quoted(value)}", expected=_NAMES[kind], do="correct or drop it")
    return default if value is None else value


def turns_of(body: Body, name: str = "messages") -> list[Message]:
    """The turns of a request's body: objects with a role each, one at least."""
    turns = typed(body, name, list, [])
    ok = all(isinstance(turn, dict) and isinstance(turn.get("role"), str) for turn in turns)
    expected = "a list of objects with a role each, one at least"
    require(bool(turns) and ok, f"{name} is {quoted(turns)}", expected=expected, do="correct it")
    return turns
