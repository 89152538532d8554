"""Generates a model's own questions and answers, many at once, with mlx-lm's `BatchGenerator`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import apply_min_p
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..bars import bar
from .part_file import PartFile
from .questions import is_good_prompt, normalise_prompt, user_turn_prefix

PREFILL_AT_ONCE = 8
_MIN_P = 0.02
_TRIES = 6  # per wanted question, and after `_ROUNDS` per good one; then the model gives up
_ROUNDS = 10


@dataclass(frozen=True)
class NumberedPrompt:
    """A prompt's token ids, and the temperature of its answer."""

    number: int  # its noise depends on this and the seed alone
    prompt: Sequence[int]
    temp: float = 0.0  # greedy


class NumberedAnswer(NamedTuple):
    """The token ids of an answer, and its prompt's number."""

    number: int
    tokens: list[int]  # with the end token if the model gave one


@dataclass(frozen=True)
class BatchResponder:
    """Answers many prompts at once with mlx-lm's `BatchGenerator`; sampled if `temp` is above 0."""

    model: nn.Module  # mlx-lm's
    tokenizer: TokenizerWrapper
    batch_size: int  # texts that are decoded together
    seed: int = 0
    wait: Callable[[], None] = field(default=lambda: None)  # called between tokens

    def stream_answers(
        self, requests: Sequence[NumberedPrompt], max_tokens: int
    ) -> Iterator[NumberedAnswer]:
        """Decode at most `batch_size` at once; yield answers as they end; call `wait` per token."""
        if not requests:
            return
        generator: Any = BatchGenerator(
            self.model,
            max_tokens=max_tokens,
            stop_tokens=[[end] for end in self.tokenizer.eos_token_ids],
            completion_batch_size=self.batch_size,
            prefill_batch_size=min(self.batch_size, PREFILL_AT_ONCE),
        )
        samplers = [
            self._make_seeded_sampler(request) if request.temp else None for request in requests
        ]
        ids = generator.insert([[*request.prompt] for request in requests], samplers=samplers)
        by_id = dict(zip(ids, requests, strict=True))
        try:
            while responses := generator.next_generated():
                self.wait()
                for one in (one for one in responses if one.finish_reason is not None):
                    request = by_id[one.uid]
                    tokens = list(one.all_tokens[len(request.prompt) :])
                    yield NumberedAnswer(request.number, tokens)
        finally:
            generator.close()

    def _make_seeded_sampler(self, request: NumberedPrompt) -> Callable[[mx.array], mx.array]:
        """A sampler that draws [B] from log probabilities [B, V], after min-p."""
        # Noise depends on the seed, the request's number and the number of earlier draws.
        key = mx.random.key(self.seed * 1_000_003 + request.number)

        def draw(logprobs: mx.array) -> mx.array:
            nonlocal key
            key, now = mx.random.split(key)
            return mx.random.categorical(apply_min_p(logprobs, _MIN_P) / request.temp, key=now)

        return draw

    def answer_missing(
        self,
        requests: Sequence[NumberedPrompt],  # each with a different number
        max_tokens: int,
        part: PartFile,  # stores answers as [number, tokens]
    ) -> list[list[int]]:
        """Decode what `part` lacks; return all answers in the order of `requests`."""
        known = dict(part.done)
        left = [request for request in requests if request.number not in known]
        made = self.stream_answers(left, max_tokens)
        for number, tokens in bar(made, "answers", initial=len(known), total=len(requests)):
            part.append([number, tokens])
            known[number] = tokens
        return [known[request.number] for request in requests]

    def make_up_questions(
        self,
        wanted: int,
        max_tokens: int,  # a text that has not ended by then is dropped
        part: PartFile,  # stores questions as [number, text]
    ) -> list[str]:
        """Make up users' questions, by continuing the chat template's user turn at temperature 1.

        Returns fewer than `wanted` if good ones are rare: it stops after six times `wanted` or
        `batch_size` tries, whichever is more, or once ten rounds had less than one good in six.
        """
        prefix = user_turn_prefix(self.tokenizer) if wanted else []
        known = dict(part.done)
        found: dict[str, str] = {}
        size = 2 * self.batch_size  # of a round
        for first in count(0, size):
            rare = first >= _ROUNDS * size and first > _TRIES * len(found)
            if len(found) >= wanted or rare or first >= _TRIES * max(wanted, self.batch_size):
                break
            numbers = range(first, first + size)
            requests = [
                NumberedPrompt(number, prefix, 1.0) for number in numbers if number not in known
            ]
            label = f"questions, {len(found)} of {wanted}"
            asked = self.stream_answers(requests, max_tokens)
            for number, tokens in bar(asked, label, total=len(requests)):
                ended = tokens[-1] in self.tokenizer.eos_token_ids
                known[number] = self.tokenizer.decode(tokens[:-1]).strip() if ended else ""
                part.append([number, known[number]])
            for text in (known[number] for number in numbers):
                if is_good_prompt(text):
                    found.setdefault(normalise_prompt(text), text)
        return list(found.values())[:wanted]
