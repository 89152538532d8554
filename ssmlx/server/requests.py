"""A request of any API, and the parts of its answer."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from llguidance import LLMatcher

from ..drafters.lookup import EXPECTED
from ..formats.reader import Begins
from ..generation.segments import GenerationResponse
from ..prompts import Tools
from ..settings import GenerateConfig
from ..turns import Message
from .fields import Body, content_text, read_typed
from .grammars import read_grammar


def shared_field(read: Callable[[Body], Any], default: Any) -> Any:
    """Make a field of `AnswerRequest` that every API has; `read` gives None for the default."""
    return field(default=default, metadata={"read": read})


def typed(name: str, kind: type) -> Callable[[Body], Any]:
    return lambda body: read_typed(body, name, kind)


def _read_prediction(body: Body) -> str:
    content = read_typed(body, "prediction", dict, {}).get("content")
    return content_text(content or "", "prediction.content")


class NamespacedName(NamedTuple):
    """What a client calls a function: its name, among those of a namespace of tools."""

    namespace: str
    name: str


@dataclass(frozen=True, kw_only=True)
class AnswerRequest:
    """A request of any API, its fields checked as far as they can be without a model."""

    model: str = shared_field(typed("model", str), "")  # "" for the server's own
    question: str | list[int] | list[Message]  # a prompt, or the turns of a chat
    # the server's settings with the request's; max_tokens is never above the server's
    config: GenerateConfig
    tools: Tools | None = None
    template_args: Mapping[str, Any] | None = None  # for the chat template
    choices: int = 1  # answers that are wanted
    # of llguidance, which the answer follows
    grammar: str | None = shared_field(read_grammar, None)
    forced_tools: Sequence[str] = ()  # names of tools, one of which the answer has to call
    parallel_calls: bool = True  # whether it may call several
    continues: bool = False  # whether it continues the last turn, the assistant's
    opens_turn: bool = True  # whether the template begins an assistant's turn for it
    begins: Begins = "text"  # what the answer begins with, once its prompt is known
    matcher: LLMatcher | None = None  # of its form at the beginning, once that is compiled
    # whether no end token is ever chosen
    ignores_end: bool = shared_field(typed("ignore_eos", bool), False)
    # expected text: the settings' `prompt_lookup.reference`, as tokens
    prediction: str = shared_field(_read_prediction, "")
    # whether the answer is sent part by part
    stream: bool = shared_field(typed("stream", bool), False)
    reports_usage: bool = False  # whether a stream ends with its usage
    echoed: Mapping[str, Any] = field(default_factory=dict)  # fields that a reply repeats
    num_bytes: int = 0  # of the body
    deadline: float = math.inf  # when it has to be answered, by the clock of the event loop
    is_chat: bool = True
    others: Sequence[str | list[int]] = ()  # further prompts, each answered as the first one
    echoes: bool = False  # whether an answer begins with its prompt
    writes: bool = True  # whether anything is generated
    # tools and blocks that are left out, by their paths in the request: "tools[1] (web_search)"
    left_out: Sequence[str] = ()
    # of tools that are offered under another name, by that: what the client calls them
    namespaced: Mapping[str, NamespacedName] = field(default_factory=dict)

    @property
    def num_answers(self) -> int:
        return self.choices * (1 + len(self.others))


def read_shared_fields(body: Body) -> dict[str, Any]:
    """Return the arguments of `AnswerRequest` that every API has, each read by its own reader."""
    readers = {one.name: one.metadata["read"] for one in fields(AnswerRequest) if one.metadata}
    found = {name: read(body) for name, read in readers.items()}
    return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class TextPart:
    """A piece of an answer's text, from one target call, or of an echoed prompt; may be empty."""

    text: str
    tokens: int = 0
    logprobs: list[dict[str, Any]] | None = None  # of its tokens, as chats have them
    choice: int = 0  # the index of the choice


class ReasoningPart(TextPart):
    """A piece of what a model thinks before it answers, from one target call."""


@dataclass(frozen=True)
class ToolCallPart:
    """A whole call of a tool."""

    id: str
    name: str
    text: str  # its arguments, as the JSON text of an object
    choice: int = 0  # the index of the choice


@dataclass(frozen=True)
class ChoiceEnd:
    """The last part of a choice."""

    reason: Literal["stop", "length", "tool_calls"]
    last: GenerationResponse  # its last segment
    num_predicted: int = 0  # tokens of the request's `prediction`
    reasoning_tokens: int = 0  # how many of the choice's tokens are reasoning
    choice: int = 0

    @property
    def accepted_prediction(self) -> int:
        """How many tokens of the request's `prediction` were drafted and accepted."""
        drafts = self.last.drafts.get(EXPECTED)
        return min(drafts.accepted, self.num_predicted) if drafts else 0

    @property
    def timings(self) -> dict[str, Any]:
        """Tokens, milliseconds and target calls of the choice, as llama.cpp's server names them."""
        last = self.last
        return {
            "cache_n": last.cached_tokens,
            "prompt_n": last.prompt_tokens - last.cached_tokens,
            "prompt_ms": round(1000 * last.prefill_seconds, 3),
            "predicted_n": last.generation_tokens,
            "predicted_ms": round(1000 * last.decode_seconds, 3),
            "predicted_per_second": round(last.generation_tps, 3),
            "draft_n": last.drafted_tokens,
            # also those of the last call that come after the answer's end, as in llama.cpp
            "draft_n_accepted": sum(one.accepted for one in last.drafts.values()),
            "target_calls": last.target_calls,
            "tokens_per_call": round(last.generation_tokens / max(1, last.target_calls), 3),
        }


@dataclass(frozen=True)
class Begun:
    """Stream item: the request's first answer has begun."""


@dataclass(frozen=True)
class Waiting:
    """Stream item: no part has come for a while."""

    done: int = 0  # tokens of the prompts that were processed
    total: int = 0


Part = TextPart | ToolCallPart | ChoiceEnd
StreamItem = Part | Begun | Waiting
# The name of a server-sent event, if it has one, and its data: an object, or a text as it is.
Event = tuple[str | None, Mapping[str, Any] | str]
