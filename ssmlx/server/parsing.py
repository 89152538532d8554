"""What models write: reasoning and tool calls, told by mlx-lm's parsers; JSON, held to a schema."""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLTokenizer, hf
from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import InputError, first_line
from ..settings import parse_json
from .asks import Ask, End, Part, Reasoning, Text, ToolCall

# Some indentation, but no endless one, in which small models get lost.
_STYLE: Any = {"whitespace_pattern": r"[ \n]{1,24}"}


class Parser:
    """Tells a choice's text as text, reasoning and tool calls.

    Text goes on as it comes, but for an end that may begin a marker, and for space behind markers.
    A call is held until it is whole. One that cannot be parsed is text, as is any without tools.
    """

    def __init__(self, tokenizer: TokenizerWrapper, ask: Ask, prompt: Sequence[int] = ()) -> None:
        self._tokenizer, self._tools = tokenizer, ask.tools
        self._call, self._is_behind_marker, self._has_called = "", False, False
        self._name, machine = "normal", TextStateMachine()
        if ask.is_chat and ask.schema is None:
            machine, end = make_text_state_machine(tokenizer), tokenizer.decode([*prompt[-16:]])
            opens = tokenizer.has_thinking and end.rstrip().endswith(tokenizer.think_start)
            self._name = tokenizer.response_initial_state or ("reasoning" if opens else "normal")
        self._state = machine.make_state(self._name)

    def read(self, part: Text | End) -> list[Part]:
        """What another part of the text says, or its end."""
        if isinstance(part, Text):
            self._state, segments = TextStateMachine.split(self._state, part.text)
            first, *more = self._told(segments) or [Text("")]
            if isinstance(first, Text):  # tells of the whole part
                first = replace(first, tokens=part.tokens, logprobs=part.logprobs)
            return [first, *more]
        self._state, text, _ = TextStateMachine.flush(self._state)
        found = self._told([(self._name, text)])
        if self._name == "tool":
            # Where the text was cut, only a call without an end marker can be whole.
            is_cut = part.reason == "length" and bool(self._tokenizer.tool_call_end)
            found += self._calls(is_cut=is_cut)
        is_call = self._has_called and part.reason == "stop"
        return [*found, replace(part, reason="tool_calls") if is_call else part]

    def _told(self, segments: Sequence[tuple[str, str]]) -> list[Part]:
        found: list[Part] = []
        for name, text in segments:
            if name != self._name:
                found += self._calls() if self._name == "tool" else []
                self._name, self._is_behind_marker = name, True
            if name == "tool":
                self._call += text
            elif name == "reasoning":
                found += [Reasoning(text)] if text else []
            elif said := text.lstrip() if self._is_behind_marker else text:
                self._is_behind_marker = False
                found.append(Text(said))
        return found

    def _calls(self, *, is_cut: bool = False) -> list[Part]:
        """The calls in the text between markers, or that text."""
        text, self._call = self._call, ""
        try:
            if is_cut or self._tools is None:
                raise ValueError("it is no call")
            found = self._tokenizer.tool_parser(text, self._tools)
            found = found if isinstance(found, list) else [found]
            calls = [*map(_tool_call, found)]
        except Exception:  # whatever a parser makes of a model's words
            return [Text(text)] if text.strip() else []
        self._has_called = True
        return [*calls]


def _tool_call(parsed: Mapping[str, Any]) -> ToolCall:
    """Raises an error of some kind where what was parsed is no call."""
    name, arguments = parsed["name"], parsed.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parse_json(arguments)
    if not isinstance(arguments, dict) or not isinstance(name, str):
        raise ValueError("a call has a name, and an object of arguments")
    told = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return ToolCall(str(parsed.get("id") or f"call_{secrets.token_hex(12)}"), name, told)


def processor(
    tokenizer: TokenizerWrapper, schema: Mapping[str, Any]
) -> Callable[[Sequence[int], mx.array], mx.array]:
    """What holds an answer to a JSON schema, {} for any object.

    It takes the tokens of the answer so far, and logits [1, V] of the next, and returns those, -inf
    where a token would leave the schema. Behind a whole JSON text it leaves end tokens alone.

    Raises:
        InputError: it is no JSON schema, or one that cannot be followed.
    """
    try:
        form = LLMatcher.grammar_from_json_schema(dict(schema or {"type": "object"}), None, _STYLE)
        matcher = LLMatcher(_tokens_of(tokenizer), form, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
    except (ValueError, TypeError, RecursionError) as error:
        found = f"the JSON schema cannot be followed ({first_line(error)[:200]})"
        raise InputError(found, expected="one that llguidance knows", do="simplify it") from error
    num_known = 0

    def constrained(tokens: Sequence[int], logits: mx.array) -> mx.array:
        nonlocal num_known
        matcher.rollback(max(0, num_known - len(tokens)))
        matcher.consume_tokens([*tokens[num_known:]])
        num_known = len(tokens)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little", count=logits.shape[-1])
        return mx.where(mx.array(allowed.astype(bool)), logits, -mx.inf)

    return constrained


@lru_cache(maxsize=1)
def _tokens_of(tokenizer: TokenizerWrapper) -> LLTokenizer:
    """What llguidance knows of a tokenizer's tokens; takes a second."""
    return hf.from_tokenizer(tokenizer._tokenizer, eos_token=sorted(tokenizer.eos_token_ids))
