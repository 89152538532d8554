"""Where an answer ends: its end tokens, stop strings, `max_tokens`, and a context that is full."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoding.step import AnswerPart, FinishReason
from ..detokenizer import Detokenizer
from ..model.streams import StreamFusedModel


class AnswerText:
    """The text of an answer as its tokens come, up to the beginning of a stop string."""

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        stop: Sequence[str] = (),
        before: Sequence[int] = (),  # tokens that the text continues, leading space and all
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, before)
        self._stop = stop
        self._text = ""  # that no segment has had yet
        self._end: int | None = None  # index in it at which a stop string begins
        # The stop string that was found.
        self.ended_by: str | None = None

    def add(self, token: int) -> bool:
        """Append the next token; whether a stop string begins in the text."""
        self._text += self._detokenizer.add(token)
        if self._stop:
            # Text that the tokenizer may still change counts as it would be now.
            text = (self._text + self._detokenizer.held_back_text()).rstrip(
                "\N{REPLACEMENT CHARACTER}"
            )
            found = {stop: text.find(stop) for stop in self._stop}
            found = {stop: index for stop, index in found.items() if index >= 0}
            # Of several, the one that begins first.
            self.ended_by = min(found, key=found.__getitem__, default=None)
            self._end = None if self.ended_by is None else found[self.ended_by]
        return self._end is not None

    def take_segment(self, *, is_last: bool) -> str:
        """The text that is certain now and was not before; not what may begin a stop string."""
        if is_last:
            self._text += self._detokenizer.held_back_text()
        size = len(self._text) - (0 if is_last else self._held_back())
        size = size if self._end is None else self._end
        given = self._text[:size]
        self._text = self._text[size:]
        return given

    def _held_back(self) -> int:
        """Characters at the end of the text that may begin a stop string."""
        longest = max(map(len, self._stop), default=0) - 1
        sizes = range(min(longest, len(self._text)), 0, -1)
        for size in sizes:
            if any(stop.startswith(self._text[-size:]) for stop in self._stop):
                return size
        return 0


@dataclass
class StopChecker:
    """Takes the tokens of an answer's calls, and decides with which it ends."""

    text: AnswerText  # gets every token of the answer
    end_tokens: Set[int]
    max_tokens: int  # of the answer
    context_room: int | None = None  # tokens that still fit into the context, if that has a limit
    # whether there is no room for another call, if calls need more than a token
    is_full: Callable[[], bool] = lambda: False
    generated: int = 0  # tokens of the answer so far

    def take(self, tokens: Sequence[int]) -> AnswerPart:
        """Append the tokens of a call, up to the answer's end; for each call, in order."""
        count, reason = self._add(tokens)
        text = self.text.take_segment(is_last=reason is not None)
        return AnswerPart(tuple(tokens[:count]), text, reason, self.text.ended_by)

    def _add(self, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        """Append tokens up to the answer's end: how many belong to it, and why it ends, if it
        does."""
        for count, token in enumerate(tokens, 1):
            self.generated += 1
            # An end token is counted, but has no text.
            if token in self.end_tokens or self.text.add(token):
                return count, "stop"
            if self.generated == self.max_tokens:
                return count, "length"
            if self.generated == self.context_room:
                return count, "context"
        return len(tokens), "context" if self.is_full() else None


def end_token_ids(model: StreamFusedModel, tokenizer: TokenizerWrapper) -> set[int]:
    """The tokenizer's end tokens and the adapter's."""
    return set(tokenizer.eos_token_ids) | set(model.config.end_token_ids if model.config else ())
