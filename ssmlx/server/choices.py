"""One answer of a request: its responses become text, reasoning and tool calls.

mlx-lm's parsers find reasoning and tool calls in the text.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..generation.segments import GenerationResponse
from ..json_files import parse_json
from ..prompt_cache import PromptCache
from ..settings import GenerateConfig
from .logprobs import TokenEntries
from .request_prompts import Prompt
from .requests import AnswerRequest, ChoiceEnd, Part, ReasoningPart, TextPart, ToolCallPart
from .schemas import tools_for_parser


class Choice:
    """One answer to one of a request's prompts, which turns responses into parts."""

    def __init__(
        self,
        ask: AnswerRequest,
        number: int,
        prompt: Prompt,
        config: GenerateConfig,
        tokenizer: TokenizerWrapper,
        token_entries: TokenEntries,
        prompt_cache: PromptCache,
    ) -> None:
        """Begin a choice; nothing is decoded yet.

        Args:
            ask: the request.
            number: of this choice among all of the request; those of one prompt follow each other.
            prompt: what is answered.
            config: the request's settings. The choice's seed is theirs plus its number among those
                of its prompt.
            tokenizer: of the model.
            token_entries: makes the entries of log probabilities, by the same tokenizer.
            prompt_cache: of the client.
        """
        own = number % ask.choices
        self.ask = ask
        self.number = number
        self.prompt = prompt
        self.config = replace(config, seed=((config.seed or 0) + own) % 2**63)
        self.prompt_cache = prompt_cache
        self.is_first = own == 0  # of its prompt
        self._token_entries = token_entries
        self._parser = AnswerParser(tokenizer, ask, prompt.tokens)

    def response_parts_or_empty_text(self, response: GenerationResponse) -> list[Part]:
        """Return the parts that one response adds; at least one, which may be an empty text.

        The first one has the response's token count and log probabilities, unless it is a tool
        call. That of an end token is reported in text completions alone.

        Args:
            response: the next one of the answer.
        """
        # A text completion reports its end token, too, as OpenAI's and vLLM's do.
        reports_end = not self.ask.is_chat
        logprobs = self._token_entries.of_segment(response, with_end_token=reports_end)
        piece = TextPart(response.text, len(response.tokens), logprobs)
        return self._with_number(self._parser.split_into_parts(piece))

    def held_back_parts_and_end(self, last: GenerationResponse) -> list[Part]:
        """Return the parts that were still held back, and last the `ChoiceEnd`.

        Its reason is "length" for a full context too; the parser makes "tool_calls" of "stop" where
        a tool was called.

        Args:
            last: the answer's last response, which was read already.
        """
        reason: Any = "stop" if last.finish_reason == "stop" else "length"
        num_predicted = len(self.config.prompt_lookup.reference)
        return self._with_number(
            self._parser.split_into_parts(ChoiceEnd(reason, last, num_predicted))
        )

    def with_scoring_counted_as_prefill(self, last: GenerationResponse) -> GenerationResponse:
        """Return `last` with the time that scoring its prompt took added to its `prefill_seconds`.

        Only for the first choice of a scored prompt; its `cached_tokens` become 0, as the score
        processed the whole prompt for it. Else `last` is returned as it is.
        """
        if self.prompt.logprobs is None or not self.is_first:
            return last
        seconds = last.prefill_seconds + self.prompt.seconds
        return replace(last, cached_tokens=0, prefill_seconds=seconds)

    def _with_number(self, parts: Sequence[Part]) -> list[Part]:
        return [replace(part, choice=self.number) for part in parts]


class AnswerParser:
    """Splits a choice's text into text, reasoning and tool calls, by mlx-lm's parsers.

    Text is passed on at once, but for an end that may begin a marker; white space after a marker is
    dropped. A call is held back until it is whole. A call that cannot be parsed becomes text, and
    so does any call if the request has no tools.
    """

    def __init__(
        self, tokenizer: TokenizerWrapper, ask: AnswerRequest, prompt_tokens: Sequence[int] = ()
    ) -> None:
        """Begin a text: of a new turn in the state that the tokenizer names for these, if it names
        one; else inside of reasoning where the prompt's end opens it.

        A text completion, or an answer that follows a grammar other than a forced call's, is not
        split.

        Args:
            tokenizer: of the model; knows its markers and its parser of calls.
            ask: the request.
            prompt_tokens: ids of the prompt.
        """
        self._tokenizer = tokenizer
        self._tools = ask.tools
        self._most_calls = None if ask.parallel_calls else 1
        self._call = ""
        self._is_behind_marker = False
        self._has_called = False
        self._reasoning_tokens = 0
        self._name = "normal"
        machine = TextStateMachine()
        if (ask.is_chat and ask.grammar is None) or ask.forced_tools:
            # A template may open reasoning at the prompt's end.
            machine = make_text_state_machine(tokenizer)
            prompt_end = tokenizer.decode([*prompt_tokens[-16:]])
            opens = tokenizer.has_thinking and prompt_end.rstrip().endswith(tokenizer.think_start)
            begun = "reasoning" if opens else "normal"
            is_new = not ask.continues and not ask.forced_tools
            self._name = (is_new and tokenizer.response_initial_state) or begun
        self._state = machine.make_state(self._name)

    def split_into_parts(self, part: TextPart | ChoiceEnd) -> list[Part]:
        """Return the parts of the next piece of text, or of the end of the answer.

        Of a piece there is at least one part. The first one has the piece's token count and log
        probabilities, unless it is a call. At the end, text that was held back comes first, and the
        end last; its `reason` is "tool_calls" if the answer stopped by itself and has called a
        tool, and its `reasoning_tokens` are those of all pieces whose first part was reasoning.
        """
        if isinstance(part, TextPart):
            self._state, segments = TextStateMachine.split(self._state, part.text)
            first, *more = self._parts_of_segments(segments) or [TextPart("")]
            if isinstance(first, TextPart):  # these are of the whole part
                first = replace(first, tokens=part.tokens, logprobs=part.logprobs)
            if isinstance(first, ReasoningPart):
                self._reasoning_tokens += first.tokens
            return [first, *more]
        self._state, text, _ = TextStateMachine.flush(self._state)
        found = self._parts_of_segments([(self._name, text)])
        if self._name == "tool":
            # Where the text was cut, only a call without an end marker can be whole.
            is_cut = part.reason == "length" and bool(self._tokenizer.tool_call_end)
            found += self._parse_collected_calls_or_text(is_cut=is_cut)
        is_call = self._has_called and part.reason == "stop"
        reason = "tool_calls" if is_call else part.reason
        end = replace(part, reason=reason, reasoning_tokens=self._reasoning_tokens)
        return [*found, end]

    def _parts_of_segments(self, segments: Sequence[tuple[str, str]]) -> list[Part]:
        """Return the parts of (state, text) segments of mlx-lm's state machine; none for empty
        texts.

        Text of a call is collected, and parsed when the call's segments end. White space of text
        behind a marker is left out.
        """
        found: list[Part] = []
        for name, text in segments:
            if name != self._name:
                found += self._parse_collected_calls_or_text() if self._name == "tool" else []
                self._name = name
                self._is_behind_marker = True
            if name == "tool":
                self._call += text
            elif name == "reasoning":
                found += [ReasoningPart(text)] if text else []
            elif rest := text.lstrip() if self._is_behind_marker else text:
                self._is_behind_marker = False
                found.append(TextPart(rest))
        return found

    def _parse_collected_calls_or_text(self, *, is_cut: bool = False) -> list[Part]:
        """Return the calls in the text that was collected between markers, and forget that text.

        Args:
            is_cut: whether the answer was cut inside of it, so that it cannot be a whole call.

        Returns:
            The calls. Where the text cannot be parsed, is cut, or the request has no tools: the
            text as one part, without its markers; nothing where it is white space. Nothing, too,
            for every call behind the first where the request allows only one.
        """
        text = self._call
        self._call = ""
        try:
            if is_cut or self._tools is None:
                raise ValueError("it is no call")
            found = self._tokenizer.tool_parser(text, tools_for_parser(self._tools))
            found = found if isinstance(found, list) else [found]
            calls = [*map(_checked_call_with_id, found)][: self._most_calls]
        except Exception:  # whatever a parser makes of a model's words
            return [TextPart(text)] if text.strip() else []
        if self._has_called and self._most_calls:
            return []
        self._has_called = True
        return [*calls]


def _checked_call_with_id(parsed: Mapping[str, Any]) -> ToolCallPart:
    """Make a part of what mlx-lm's parser returned, with an id if it has none.

    Args:
        parsed: "name", "arguments" (an object or its JSON text; none count as an empty object), and
            perhaps "id".

    Raises:
        Exception: of any type, where that is no call with a name and an object of arguments.
    """
    name = parsed["name"]
    arguments = parsed.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parse_json(arguments)
    if not isinstance(arguments, dict) or not isinstance(name, str):
        raise ValueError("a call has a name, and an object of arguments")
    arguments_text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    id = str(parsed.get("id") or f"call_{secrets.token_hex(12)}")
    return ToolCallPart(id, name, arguments_text)
