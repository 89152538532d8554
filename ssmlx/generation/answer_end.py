"""Where an answer ends: its end tokens, stop strings, `max_tokens`, and a context that is full."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoding.step import AnswerPart, FinishReason
from ..detokenizer import Detokenizer
from ..model.streams import StreamFusedModel


class AnswerText:
    """The text of an answer as its tokens come, up to where a stop string begins.

    What could be the beginning of a stop string is held back until it turns out not to be.

    Args:
        tokenizer: as `load` returns it.
        stop: the stop strings.
        behind: tokens that the answer's text goes on from; without any it is that of a beginning.

    Attributes:
        ended_by: the stop string that was found, None before.
    """

    def __init__(
        self, tokenizer: TokenizerWrapper, stop: Sequence[str] = (), behind: Sequence[int] = ()
    ) -> None:
        """Begin without tokens: no text, and no stop string found.

        The arguments are explained at the class.
        """
        self._detokenizer = Detokenizer(tokenizer, behind)
        self._stop = stop
        self._text = ""  # what was not given out yet
        self._end: int | None = None  # where a stop string begins in it
        self.ended_by: str | None = None

    def add(self, token: int) -> bool:
        """Append the next token; returns whether a stop string begins in the text that is not given
        out.

        Of several the one that begins first counts, and is kept in `ended_by`. Text that the
        tokenizer may still change counts as it would be now.
        """
        self._text += self._detokenizer.add(token)
        if self._stop:
            text = (self._text + self._detokenizer.held_back_text()).rstrip(
                "\N{REPLACEMENT CHARACTER}"
            )
            found = {stop: text.find(stop) for stop in self._stop}
            found = {stop: place for stop, place in found.items() if place >= 0}
            self.ended_by = min(found, key=found.__getitem__, default=None)
            self._end = None if self.ended_by is None else found[self.ended_by]
        return self._end is not None

    def take_segment(self, *, is_last: bool) -> str:
        """Take out and return the text that is certain since the last segment; with `is_last`, all
        of it.

        Text that may begin a stop string, or that the tokenizer may still change, is held back
        until it turns out not to, or to the last segment. The text ends where a stop string
        begins, which is never given out.
        """
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
        return next((size for size in sizes if self._is_begun_by(self._text[-size:])), 0)

    def _is_begun_by(self, end: str) -> bool:
        """Whether any stop string begins with `end`."""
        return any(stop.startswith(end) for stop in self._stop)


@dataclass
class StopChecker:
    """Takes the tokens of an answer's calls, and decides where it ends.

    An answer ends with an end token or a stop string, after `max_tokens`, or where the model's
    context is full.

    Attributes:
        text: gets every token of the answer.
        end_tokens: tokens that end it.
        max_tokens: tokens of the answer at most.
        context_room: tokens that still fit into the context; None where that has no limit.
        is_full: whether there is no room for another call, where calls need more than a token.
        generated: tokens of the answer so far.
    """

    text: AnswerText
    end_tokens: Set[int]
    max_tokens: int
    context_room: int | None = None
    is_full: Callable[[], bool] = lambda: False
    generated: int = 0

    def take(self, tokens: Sequence[int]) -> AnswerPart:
        """Append the tokens of a call to the answer, up to where it ends.

        To be called once for each call, in order.

        Returns:
            What of them belongs to the answer, an end token included, which has no text; and why
            the answer ends with them, if it does. Of reasons, "stop" goes before "length", that
            before "context".
        """
        count, reason = self._add_tokens_until_end(tokens)
        text = self.text.take_segment(is_last=reason is not None)
        return AnswerPart(tuple(tokens[:count]), text, reason, self.text.ended_by)

    def _add_tokens_until_end(self, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        """Add the next tokens to `generated` and to the text, up to the one that ends the answer.

        An end token is counted, but is not added to the text.

        Returns:
            How many these are, and why the answer ends with them; None where it does not.
        """
        for count, token in enumerate(tokens, 1):
            self.generated += 1
            if token in self.end_tokens or self.text.add(token):
                return count, "stop"
            if self.generated == self.max_tokens:
                return count, "length"
            if self.generated == self.context_room:
                return count, "context"
        return len(tokens), "context" if self.is_full() else None


def end_token_ids(model: StreamFusedModel, tokenizer: TokenizerWrapper) -> set[int]:
    """Ids of tokens that end an answer: the tokenizer's end tokens and the adapter's."""
    return set(tokenizer.eos_token_ids) | set(model.config.end_token_ids if model.config else ())
