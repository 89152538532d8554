"""Reasoning and tool calls in what a model writes, by mlx-lm's markers and parsers."""

import json
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..prompts import Tools
from ..settings import parse_json
from .asks import End, Part, Reasoning, Text, ToolCall

_OPENING = 16  # the last tokens of a prompt, among which a template opens reasoning


class Parser:
    """Tells a choice's text as text, reasoning and tool calls.

    Text goes on as it comes, but for an end that may begin a marker, and for space behind markers.
    A call is held until it is whole. One that cannot be parsed is text, as is any without tools.
    """

    def __init__(
        self, tokenizer: TokenizerWrapper, tools: Tools | None, prompt: Sequence[int] = ()
    ) -> None:
        self._tokenizer, self._tools = tokenizer, tools
        self._name = _first_state(tokenizer, prompt)
        self._state = make_text_state_machine(tokenizer).make_state(self._name)
        self._call, self._is_behind_marker, self._num_calls = "", False, 0

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
        is_call = self._num_calls and part.reason == "stop"
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
            calls = [_tool_call(one, n) for n, one in enumerate(found, self._num_calls)]
        except Exception:  # whatever a parser makes of a model's words
            return [Text(text)] if text.strip() else []
        self._num_calls += len(calls)
        return [*calls]


def _first_state(tokenizer: TokenizerWrapper, prompt: Sequence[int]) -> str:
    """Where an answer begins: in reasoning, if that is how the prompt ends."""
    if tokenizer.response_initial_state:
        return tokenizer.response_initial_state
    end = tokenizer.decode([*prompt[-_OPENING:]]).rstrip() if tokenizer.has_thinking else ""
    return "reasoning" if end and end.endswith(tokenizer.think_start) else "normal"


def _tool_call(parsed: Mapping[str, Any], index: int) -> ToolCall:
    """Raises an error of some kind where what was parsed is no call."""
    name, arguments = parsed["name"], parsed.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parse_json(arguments)
    if not isinstance(arguments, dict) or not isinstance(name, str):
        raise ValueError("a call has a name, and an object of arguments")
    told = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return ToolCall(str(parsed.get("id") or f"call_{secrets.token_hex(12)}"), name, told, index)


async def parsed(parts: AsyncGenerator[Text | End], parser: Parser) -> AsyncGenerator[Part]:
    """A choice's parts, with reasoning and calls told apart."""
    async for part in parts:
        for one in parser.read(part):
            yield replace(one, choice=part.choice)
