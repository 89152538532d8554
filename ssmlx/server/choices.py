"""One answer of a request: its responses become text, reasoning and tool calls."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..bars import Progress
from ..decoding.batch import Mask
from ..errors import first_line
from ..formats.arguments import json_text
from ..formats.families import find_format
from ..formats.history import call_id
from ..formats.reader import AnswerReader, Piece, Text
from ..generation.segments import GenerationResponse
from ..prompt_cache import PromptCache
from .grammars import unsupported_form_error
from .request_prompts import Prompt, PromptReader
from .requests import AnswerRequest, ChoiceEnd, Part, ReasoningPart, TextPart, ToolCallPart

# Tokens of an echoed prompt in a part, so that other requests do not wait long while it is written.
_AT_ONCE = 256


class Choice:
    """One answer to one of a request's prompts, which turns responses into parts."""

    def __init__(
        self,
        ask: AnswerRequest,
        number: int,  # among all of the request; those of one prompt follow each other
        prompt: Prompt,
        prompt_cache: PromptCache,  # of the client
        progress: Progress,
        reader: PromptReader,
    ) -> None:
        own = number % ask.choices  # its number among those of its prompt
        config = replace(ask.config, seed=((ask.config.seed or 0) + own) % 2**63)
        self.ask = replace(ask, config=config, begins=prompt.begins, matcher=prompt.matcher)
        self.number = number
        self.is_first = own == 0  # of its prompt
        self.prompt = prompt
        self.prompt_cache = prompt_cache
        self.progress = progress
        self.mask: Mask | None = None  # that its answer is held to a form by, once it is opened
        self._token_entries = reader.token_entries
        self._parser = AnswerParser(reader.engine.tokenizer, self.ask)

    def echoed_parts(self) -> Iterator[TextPart]:
        """Yield its prompt as parts if it is echoed, with log probabilities if it is scored."""
        text = self.prompt.text
        entries = self.prompt.logprobs
        if not self.ask.echoes:
            return
        if entries is None:
            yield TextPart(text, choice=self.number)
            return
        begin = 0
        for start in range(0, len(entries), _AT_ONCE):
            own = entries[start : start + _AT_ONCE]
            is_last = start + _AT_ONCE >= len(entries)
            end = len(text) if is_last else begin + sum(len(one["token"]) for one in own)
            yield TextPart(text[begin:end], 0, own, self.number)
            begin = end

    def response_parts(self, response: GenerationResponse) -> list[Part]:
        """Return the parts that one response adds, at least an empty text."""
        # A text completion reports its end token, too, as OpenAI's and vLLM's do.
        reports_end = not self.ask.is_chat
        logprobs = self._token_entries.of_segment(response, with_end_token=reports_end)
        piece = TextPart(response.text, len(response.tokens), logprobs)
        return self._with_number(self._parser.parse(piece))

    def end_parts(self, last: GenerationResponse) -> list[Part]:
        """Return the parts that were still held back, and last the `ChoiceEnd`."""
        # A full context is "length" too.
        reason: Any = "stop" if last.finish_reason == "stop" else "length"
        num_predicted = len(self.ask.config.prompt_lookup.reference)
        return self._with_number(self._parser.parse(ChoiceEnd(reason, last, num_predicted)))

    def check_form(self) -> None:
        """Raise RequestError if the form of the answer could not be followed to its end."""
        if error := getattr(self.mask, "error", ""):  # a mask of another kind has none
            raise unsupported_form_error(None, first_line(ValueError(error))[:200])

    def with_scoring_time(self, last: GenerationResponse) -> GenerationResponse:
        """Return `last` as the first choice of a scored prompt reports it."""
        if self.prompt.logprobs is None or not self.is_first:
            return last
        # Scoring processed the whole prompt for it.
        seconds = last.prefill_seconds + self.prompt.seconds
        return replace(last, cached_tokens=0, prefill_seconds=seconds)

    def _with_number(self, parts: Sequence[Part]) -> list[Part]:
        return [replace(part, choice=self.number) for part in parts]


class AnswerParser:
    """Splits a choice's text into text, reasoning and tool calls, as the model writes them."""

    def __init__(self, tokenizer: TokenizerWrapper, ask: AnswerRequest) -> None:
        format = find_format(tokenizer)
        self._most_calls = None if ask.parallel_calls else 1
        self._has_called = False
        self._reasoning_tokens = 0  # of all pieces whose first part was reasoning
        # An answer in a form is split from a thought before it, and not further; a forced call is.
        is_free = ask.grammar is None or bool(ask.forced_tools)
        self._reader: AnswerReader | None = None
        if ask.is_chat or ask.forced_tools:  # otherwise the text is not split
            self._reader = AnswerReader(format, ask.tools, ask.begins, reads_text=is_free)

    def parse(self, part: TextPart | ChoiceEnd) -> list[Part]:
        """Return the parts of the next piece, at least one, or what was held back and the end."""
        if self._reader is None:
            return [part]
        if isinstance(part, TextPart):
            pieces = self._parts(self._reader.read(part.text))
            empty = ReasoningPart("") if self._reader.is_thinking else TextPart("")
            first, *more = pieces or [empty]
            if isinstance(first, TextPart):  # these are of the whole piece
                first = replace(first, tokens=part.tokens, logprobs=part.logprobs)
            if isinstance(first, ReasoningPart):
                self._reasoning_tokens += first.tokens
            return [first, *more]
        found = self._parts(self._reader.end(is_cut=part.reason == "length"))
        is_call = self._has_called and part.reason == "stop"
        reason = "tool_calls" if is_call else part.reason
        end = replace(part, reason=reason, reasoning_tokens=self._reasoning_tokens)
        return [*found, end]

    def _parts(self, pieces: Sequence[Piece]) -> list[Part]:
        found: list[Part] = []
        for piece in pieces:
            if isinstance(piece, Text):
                found.append((ReasoningPart if piece.is_thought else TextPart)(piece.text))
            elif not (self._has_called and self._most_calls):
                self._has_called = True
                id = call_id(piece)
                found.append(ToolCallPart(id, piece.name, json_text(piece.arguments)))
        return found
