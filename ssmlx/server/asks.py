"""What a request asks for, whatever API it came by, and the parts that an answer is told in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..api import GenerationResponse
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
    prediction: str = ""  # a text that the answer may repeat much of; drafted from
    stream: bool = False  # whether the answer is told part by part
    body: Body = field(default_factory=dict)  # the request, for what a reply repeats of it
    is_chat: bool = True
    others: Sequence[str | list[int]] = ()  # further prompts, each answered as the first one
    echoes: bool = False  # whether an answer begins with its prompt
    writes: bool = True  # whether anything is generated

    @property
    def num_answers(self) -> int:
        """Choices of all prompts together."""
        return self.choices * (1 + len(self.others))


@dataclass(frozen=True)
class Text:
    """What one target call brought of an answer's text."""

    text: str
    tokens: int = 0
    logprobs: list[dict[str, Any]] | None = None  # of its tokens, as chats tell them
    choice: int = 0  # what it is a part of


class Reasoning(Text):
    """What one target call brought of what a model thinks before it answers."""


@dataclass(frozen=True)
class ToolCall:
    """A call, whole; its text is its arguments, an object's JSON."""

    id: str
    name: str
    text: str
    choice: int = 0


@dataclass(frozen=True)
class End:
    """A choice is over."""

    reason: Literal["stop", "length", "tool_calls"]
    last: GenerationResponse  # its last segment
    predicted: int = 0  # tokens that the request foretold
    choice: int = 0

    @property
    def timings(self) -> dict[str, Any]:
        """What the choice took, by llama.cpp's names where it has them."""
        last = self.last
        return {
            "cache_n": last.cached_tokens,
            "prompt_n": last.prompt_tokens - last.cached_tokens,
            "prompt_ms": round(1000 * last.prefill_seconds, 3),
            "predicted_n": last.generation_tokens,
            "predicted_ms": round(1000 * last.decode_seconds, 3),
            "predicted_per_second": round(last.generation_tps, 3),
            "draft_n": last.drafted_tokens,
            "draft_n_accepted": last.generation_tokens - last.target_calls,
            "target_calls": last.target_calls,
        }


@dataclass(frozen=True)
class Waiting:
    """An answer was begun, or nothing was heard of it for a while."""

    done: int = 0  # tokens of the prompts that were processed
    total: int = 0


Part = Text | ToolCall | End
Heard = Part | Waiting
Event = tuple[str | None, Mapping[str, Any] | str]
"""The name of a server-sent event, if it has one, and its data: an object, or a text as it is."""


def check(ok: bool, found: str, expected: str) -> None:
    require(ok, found, expected=expected, do="correct or drop it")


def number(body: Body, name: str, least: float, most: float) -> Any:
    """A number of a request's body, a whole one if `least` is; None where it is absent or null."""
    value = body.get(name)
    allowed = Allowed(least=least, most=most)
    ok = value is None or allowed.holds(value, whole=isinstance(least, int))
    check(ok, f"{name} is {quoted(value)}", allowed.text())
    return value


def typed(body: Body, name: str, kind: type, default: Any = None) -> Any:
    """A value of one JSON type of a request's body; `default` where it is absent or null."""
    value = body.get(name)
    ok = value is None or isinstance(value, kind)
    check(ok, f"{name} is {quoted(value)}", f"a {kind.__name__}")
    return default if value is None else value


def parts_of(content: Any, name: str = "content") -> list[Any]:
    """Objects; a text stands for one of type text."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    ok = isinstance(parts, list) and all(isinstance(one, dict) for one in parts)
    check(ok, f"{name} is {quoted(content)}", "a text, or a list of objects")
    return parts


def text_of(content: Any) -> str:
    """What a text says, or parts that are texts."""
    parts = parts_of(content)
    kinds = ["text", "input_text", "output_text", "reasoning_text"]
    for part in parts:
        ok = part.get("type") in kinds and isinstance(part.get("text"), str)
        check(ok, f"content has {quoted(part)}", "text")
    return "".join(part["text"] for part in parts)
