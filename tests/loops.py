"""The decoding loop as tests run it, what they give it, and plain decoding without the loop."""

from collections.abc import Iterator, Sequence
from itertools import islice

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ssmlx.decoding.draft_shape import CallRecord, DraftShape
from ssmlx.decoding.drafter import Verified
from ssmlx.decoding.drafting import scratch_rows
from ssmlx.decoding.loop import plain_decode, speculative_decode
from ssmlx.decoding.sampling import (
    GREEDY,
    RowPositions,
    Sampling,
    TokenLogprobs,
    last_tokens,
    read_logprobs,
)
from ssmlx.decoding.step import AnswerPart, Steps, Take
from ssmlx.drafters.copies import NGRAM
from ssmlx.drafters.stream_drafter import StreamDrafter
from ssmlx.model.streams import StreamFusedModel
from ssmlx.model.tree import PAD_TOKEN, Tree


def speculative_steps(
    model: StreamFusedModel, prompt: list[int], drafters, cache=None, **settings
) -> Steps:
    """Decode with drafts, without end; `settings` are those of `speculative_decode`."""
    if cache is None:
        cache = model.make_cache(scratch_rows(drafters))
    return speculative_decode(model, prompt, cache, drafters=drafters, **settings)


def plain_steps(model: StreamFusedModel, prompt: list[int], cache=None, **settings) -> Steps:
    """Decode plainly, without end; `settings` are those of `plain_decode`."""
    return plain_decode(model, prompt, model.make_cache() if cache is None else cache, **settings)


def ended_after(*calls: int) -> Take:
    """Take all tokens, for an answer that ends with those of these calls, counted from 1."""
    taken: list[Sequence[int]] = []

    def take(tokens: Sequence[int]) -> AnswerPart:
        taken.append(tokens)
        ends = len(taken) in calls
        return AnswerPart(tuple(tokens), finish_reason="stop" if ends else None)

    return take


class Turns:
    """A controller that goes through `shapes`, and drafts nothing after them."""

    def __init__(self, shapes: Sequence[DraftShape | None]) -> None:
        self._shapes = list(shapes)
        self.calls: list[CallRecord] = []

    def next(self, *, is_read: bool = False) -> DraftShape | None:
        done = len(self.calls)
        return self._shapes[done] if done < len(self._shapes) else None

    def record(self, call: CallRecord) -> None:
        assert call.drafted == self.next()
        self.calls.append(call)

    @property
    def verified(self) -> list[DraftShape | None]:
        """The shape that each call verified."""
        return [call.shape for call in self.calls]


class Recorder(StreamDrafter):
    """Keeps its trees."""

    def start(self, tokens: Sequence[int]) -> None:
        super().start(tokens)
        self._trees: list[tuple[mx.array, Tree]] = []

    def propose(self, verified: Verified, shape: DraftShape) -> Tree:
        tree = super().propose(verified, shape)
        self._trees.append((verified.root_position, tree))
        return tree

    def drawn(self, count: int | None = None) -> list[tuple[int, list[int], list[list[int]]]]:
        """The first `count` trees: the root's position, tokens and paths."""
        return [
            (*position.tolist(), tree.tokens.tolist(), tree.paths.tolist())
            for position, tree in self._trees[:count]
        ]


def continuation(text: Sequence[int], count: int) -> list[int]:
    """What followed the text's last tokens before, by hand: the longest n-gram, its newest place;
    the text is repeated at its own end."""
    for n in range(min(NGRAM, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                period = len(text) - end
                return [text[end + k % period] for k in range(count)]
    return [PAD_TOKEN] * count


# --- The oracle: plain decoding by the model's own call, in mlx-lm's caches ---


def decide_plainly(
    model: StreamFusedModel, prompt: Sequence[int], sampling: Sampling = GREEDY
) -> Iterator[tuple[int, TokenLogprobs | None]]:
    """The tokens that follow a prompt, each with its log probabilities if these are asked for."""
    base = model.backbone.model
    cache = make_prompt_cache(base)
    text = list(prompt)
    only = mx.array([0])
    logits = base(mx.array([text]), cache=cache)[:, -1]
    while True:
        recent = last_tokens(text, sampling.context_size)[None]
        place = RowPositions(mx.array([len(text) - 1]), only, 1, recent)
        chosen = sampling.sample(logits, place)
        chosen = sampling.resolve_row(chosen, logits, place, only)
        token = chosen.tolist()
        logprobs = sampling.token_logprobs(logits, place, only, chosen)
        yield token[0], None if logprobs is None else read_logprobs(token, logprobs)[0]
        text += token
        logits = base(mx.array([token]), cache=cache)[:, -1]


def plain_tokens(
    model: StreamFusedModel, prompt: Sequence[int], count: int, sampling: Sampling = GREEDY
) -> list[int]:
    return [token for token, _ in islice(decide_plainly(model, prompt, sampling), count)]
