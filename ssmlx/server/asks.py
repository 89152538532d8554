"""What a request asks for, whatever API it came by, and the parts that an answer is told in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.exceptions import HTTPException

from ..api import GenerationResponse
from ..drafters.lookup import EXPECTED
from ..errors import InputError, quoted
from ..prompts import Message, Tools
from ..settings import Allowed, GenerateConfig

Body = Mapping[str, Any]
"""A request's JSON object."""
_KINDS = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
"""What JSON calls the types that `typed` checks."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a request asks for, checked as far as that goes without a model."""

    model: str = ""  # as the request named it; "" for the server's own
    question: str | list[int] | list[Message]  # a prompt as it stands, or the turns of a chat
    config: GenerateConfig  # the server's settings with the request's own
    tools: Tools | None = None
    template_args: Mapping[str, Any] | None = None  # for the chat template
    choices: int = 1  # answers that are wanted
    grammar: str | None = None  # of llguidance, which the answer has to follow
    forced_tools: Sequence[str] = ()  # names of tools; the answer has to call one of them
    parallel_calls: bool = True  # whether it may call several
    continues: bool = False  # whether it goes on from the last turn, the assistant's
    opens_turn: bool = True  # whether the template begins an assistant's turn for it
    ignores_end: bool = False  # whether end tokens are never chosen
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
    def right(self) -> int:
        """Tokens of what the request foretold that were drafted and accepted."""
        drafts = self.last.drafts.get(EXPECTED)
        return min(drafts.accepted, self.predicted) if drafts else 0

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
            "tokens_per_call": round(last.generation_tokens / max(1, last.target_calls), 3),
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


class RequestError(InputError):
    """A field of a request that cannot be followed, by the name that its API has for it.

    Args:
        param: the field; None where several, or the whole request, are meant.
        found: what was found, which begins with the field's name where there is one.
        expected, do: as those of `InputError`.
        details: what Anthropic's clients read of an error beside its words.
    """

    def __init__(
        self,
        param: str | None,
        found: str,
        expected: str,
        do: str = "correct or drop it",
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(found, expected=expected, do=do)
        self.param = param
        self.details = details

    def renamed(self, names: Mapping[str, str]) -> "RequestError":
        """The same by the name that another API has for the field, if it has one."""
        param = names.get(self.param or "", self.param)
        found = self.found
        if param and self.param and found.startswith(self.param):
            found = param + found.removeprefix(self.param)
        return RequestError(param, found, self.expected, self.do, self.details)


class Refusal(HTTPException):
    """A status with the fields of an error object that OpenAI's and Anthropic's clients read."""

    def __init__(
        self,
        status_code: int,
        detail: str,
        headers: Mapping[str, str] | None = None,
        *,
        param: str | None = None,
        code: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(status_code, detail, headers)
        self.param = param
        self.code = code
        self.details = details


def check(ok: bool, found: str, expected: str, param: str | None = None) -> None:
    """Raise a `RequestError` of a field, `param`, unless `ok`."""
    if not ok:
        raise RequestError(param, found, expected)


def checked(name: str, value: Any, allowed: Allowed, *, whole: bool) -> Any:
    """A field's number, which is within its bounds or absent."""
    ok = value is None or allowed.holds(value, whole=whole)
    kind = "a whole number, " if whole else ""
    check(ok, f"{name} is {quoted(value)}", kind + allowed.text(), name)
    return value


def number(body: Body, name: str, least: float, most: float) -> Any:
    """A number of a request's body, a whole one if `least` is; None where it is absent or null."""
    whole = isinstance(least, int)
    return checked(name, body.get(name), Allowed(least=least, most=most), whole=whole)


def typed(body: Body, name: str, kind: type, default: Any = None) -> Any:
    """A value of one JSON type of a request's body; `default` where it is absent or null."""
    value = body.get(name)
    ok = value is None or isinstance(value, kind)
    check(ok, f"{name} is {quoted(value)}", _KINDS[kind], name)
    return default if value is None else value


def parts_of(content: Any, name: str = "content") -> list[Any]:
    """Objects; a text stands for one of type text."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    ok = isinstance(parts, list) and all(isinstance(one, dict) for one in parts)
    check(ok, f"{name} is {quoted(content)}", "a text, or a list of objects", name)
    return parts


def text_of(content: Any) -> str:
    """What a text says, or parts that are texts."""
    parts = parts_of(content)
    kinds = ["text", "input_text", "output_text", "reasoning_text"]
    for part in parts:
        ok = part.get("type") in kinds and isinstance(part.get("text"), str)
        check(ok, f"content has {quoted(part)}", "text", "content")
    return "".join(part["text"] for part in parts)
