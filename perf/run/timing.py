"""Times answers, in turns."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ssmlx.api import stream_generate
from ssmlx.decoding.step import DraftCounts
from ssmlx.generation.segments import GenerationResponse
from ssmlx.model.streams import StreamFusedModel
from ssmlx.settings import GenerateConfig


class TimedCall(NamedTuple):
    """One target call after the prompt's: what it verified, and how long it took."""

    rows: int  # number of verified rows; 1 for a bare root
    tokens: int  # number of tokens that it added
    context: int  # tokens committed before it
    seconds: float  # since the previous call's tokens arrived
    drafter: str | None = None  # the drafter of the verified tree, if several may draft


@dataclass(frozen=True)
class TimedAnswer:
    """An answer's tokens, calls and times."""

    tokens: list[int]  # ids, the end token included
    target_calls: int  # forward passes, the prompt's counted as one
    decode_seconds: float  # from the first token to the last
    prefill_seconds: float = 0.0  # until the first token
    draft_model_calls: int = 0  # forward passes of a draft model
    peak_bytes: int = 0  # most memory in use on top of what was there before; 0 if not measured
    calls: list[TimedCall] = field(default_factory=list)  # all but the prompt's

    @property
    def seconds(self) -> float:
        """Seconds from the prompt to the last token."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first, divided by their time."""
        return (len(self.tokens) - 1) / self.decode_seconds if self.decode_seconds else 0.0


def answer_with_ssmlx(
    model: StreamFusedModel,
    tokenizer: TokenizerWrapper,
    prompt: list[int],
    config: GenerateConfig,
    **how: Any,  # drafter and earlier answers, as arguments of `stream_generate`
) -> TimedAnswer:
    return timed_answer_from_responses(stream_generate(model, tokenizer, prompt, config, **how))


def timed_answer_from_responses(responses: Iterable[GenerationResponse]) -> TimedAnswer:
    """Build the answer; each response after the first becomes a call."""
    segments = list(responses)
    tokens = [token for one in segments for token in one.tokens]
    last = segments[-1]
    return TimedAnswer(
        tokens,
        last.target_calls,
        last.decode_seconds,
        last.prefill_seconds,
        last.draft_model_calls,
        calls=[_timed_call(before, one) for before, one in pairwise(segments)],
    )


def _timed_call(before: GenerationResponse, segment: GenerationResponse) -> TimedCall:
    """Make a call; its drafter is the one whose counts changed; without one, it has one row."""
    drafter = None
    rows = 1
    for name, counts in segment.drafts.items():
        known = before.drafts.get(name, DraftCounts())
        if counts != known:
            drafter = name
            rows = counts.nodes - known.nodes
    return TimedCall(
        rows,
        len(segment.tokens),
        before.prompt_tokens + before.generation_tokens - 1,
        segment.decode_seconds - before.decode_seconds,
        drafter,
    )


def rotate_turns(prompts: Iterable[Any], labels: Sequence[str]) -> Iterator[tuple[Any, str]]:
    """Yield every label for every prompt; the order of labels rotates from prompt to prompt."""
    for index, prompt in enumerate(prompts):
        turn = index % len(labels)
        for label in (*labels[turn:], *labels[:turn]):
            yield prompt, label
