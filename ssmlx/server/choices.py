"""One answer of a request: from segments to text, reasoning and tool calls.

Reasoning and tool calls are told by mlx-lm's parsers.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..api import GenerationResponse
from ..json_files import parse_json
from ..settings import GenerateConfig
from .asks import Ask, End, Part, Reasoning, Text, ToolCall
from .logprobs import logprobs_of
from .prompts import Prompt
from .schemas import parsed_tools


class Choice:
    """One answer to one of a request's prompts, from segments to parts."""

    def __init__(
        self,
        ask: Ask,
        number: int,
        prompt: Prompt,
        config: GenerateConfig,
        tokenizer: TokenizerWrapper,
        user: int,
    ) -> None:
        """`number` is its place among all of the request, those of one prompt together."""
        own = number % ask.choices
        self.ask = ask
        self.number = number
        self.prompt = prompt
        self.config = replace(config, seed=((config.seed or 0) + own) % 2**63)
        self.user = user
        self.is_first = own == 0  # of its prompt
        self._tokenizer = tokenizer
        self._parser = Parser(tokenizer, ask, prompt.tokens)

    def read(self, said: GenerationResponse) -> list[Part]:
        """What a segment says."""
        # A text completion tells its end token, too, as OpenAI's and vLLM's do.
        told = logprobs_of(self._tokenizer, said, with_end=not self.ask.is_chat)
        return self._own(self._parser.read(Text(said.text, len(said.tokens), told)))

    def end(self, last: GenerationResponse) -> list[Part]:
        """What is left behind the last segment."""
        reason: Any = "stop" if last.finish_reason == "stop" else "length"
        foretold = len(self.config.prompt_lookup.reference)
        return self._own(self._parser.read(End(reason, last, foretold)))

    def whole(self, last: GenerationResponse) -> GenerationResponse:
        """The last segment, with what was done for it before."""
        if self.prompt.logprobs is None or not self.is_first:
            return last
        seconds = last.prefill_seconds + self.prompt.seconds
        return replace(last, cached_tokens=0, prefill_seconds=seconds)

    def _own(self, parts: Sequence[Part]) -> list[Part]:
        return [replace(part, choice=self.number) for part in parts]


class Parser:
    """Tells a choice's text as text, reasoning and tool calls.

    Text goes on as it comes, but for an end that may begin a marker, and for space behind markers.
    A call is held until it is whole. One that cannot be parsed is text, as is any without tools.
    """

    def __init__(self, tokenizer: TokenizerWrapper, ask: Ask, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._tools = ask.tools
        self._most_calls = None if ask.parallel_calls else 1
        self._call = ""
        self._is_behind_marker = False
        self._has_called = False
        self._name = "normal"
        machine = TextStateMachine()
        if (ask.is_chat and ask.grammar is None) or ask.forced_tools:
            # A template may open reasoning at the prompt's end.
            machine = make_text_state_machine(tokenizer)
            end = tokenizer.decode([*prompt[-16:]])
            opens = tokenizer.has_thinking and end.rstrip().endswith(tokenizer.think_start)
            begun = "reasoning" if opens else "normal"
            is_new = not ask.continues and not ask.forced_tools
            self._name = (is_new and tokenizer.response_initial_state) or begun
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
                self._name = name
                self._is_behind_marker = True
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
        text = self._call
        self._call = ""
        try:
            if is_cut or self._tools is None:
                raise ValueError("it is no call")
            found = self._tokenizer.tool_parser(text, parsed_tools(self._tools))
            found = found if isinstance(found, list) else [found]
            calls = [*map(_tool_call, found)][: self._most_calls]
        except Exception:  # whatever a parser makes of a model's words
            return [Text(text)] if text.strip() else []
        if self._has_called and self._most_calls:
            return []
        self._has_called = True
        return [*calls]


def _tool_call(parsed: Mapping[str, Any]) -> ToolCall:
    """Raises an error of some kind where what was parsed is no call."""
    name = parsed["name"]
    arguments = parsed.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parse_json(arguments)
    if not isinstance(arguments, dict) or not isinstance(name, str):
        raise ValueError("a call has a name, and an object of arguments")
    told = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return ToolCall(str(parsed.get("id") or f"call_{secrets.token_hex(12)}"), name, told)
