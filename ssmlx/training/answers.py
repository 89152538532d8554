"""What a model asks and answers by itself, many texts at once, by mlx-lm's `BatchGenerator`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import apply_min_p
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..bars import bar
from ..loading.files import PartFile
from .questions import is_good_prompt, normalise_prompt, user_prefix

PREFILL_AT_ONCE = 8
_MIN_P = 0.02
_TRIES = 6  # a wanted question, and after so many rounds a found one: else a model gives up
_ROUNDS = 10


@dataclass(frozen=True)
class NumberedPrompt:
    """A prompt for `BatchResponder`, with its number and how its answer is sampled."""

    number: int  # its noise depends on this and the seed alone
    prompt: Sequence[int]
    temp: float = 0.0  # greedy


@dataclass(frozen=True)
class BatchResponder:
    """Answers many prompts at once with mlx-lm's `BatchGenerator`; with sampling where a prompt
    says so.
    """

    model: nn.Module  # mlx-lm's
    tokenizer: TokenizerWrapper
    batch_size: int  # texts that are decoded together
    seed: int = 0
    wait: Callable[[], None] = field(default=lambda: None)  # called between tokens

    def iterate_answers(
        self, texts: Sequence[NumberedPrompt], max_tokens: int
    ) -> Iterator[tuple[int, list[int]]]:
        """Decode answers together, and yield each as it ends.

        Args:
            texts: the prompts.
            max_tokens: longest answer.

        Yields:
            The prompt's number, and the tokens of its answer, the end token included where the
            model gave one.
        """
        if not texts:
            return
        generator: Any = BatchGenerator(
            self.model,
            max_tokens=max_tokens,
            stop_tokens=[[end] for end in self.tokenizer.eos_token_ids],
            completion_batch_size=self.batch_size,
            prefill_batch_size=min(self.batch_size, PREFILL_AT_ONCE),
        )
        samplers = [self._make_sampler(text) if text.temp else None for text in texts]
        ids = generator.insert([[*text.prompt] for text in texts], samplers=samplers)
        by_id = dict(zip(ids, texts, strict=True))
        try:
            while responses := generator.next_generated():
                self.wait()
                for one in (one for one in responses if one.finish_reason is not None):
                    text = by_id[one.uid]
                    yield text.number, list(one.all_tokens[len(text.prompt) :])
        finally:
            generator.close()

    def _make_sampler(self, text: NumberedPrompt) -> Callable[[mx.array], mx.array]:
        """Return a function that draws a token [B] from log probabilities [B, V], by the prompt's
        own noise.
        """
        key = mx.random.key(self.seed * 1_000_003 + text.number)

        def draw(logprobs: mx.array) -> mx.array:
            nonlocal key
            key, now = mx.random.split(key)
            return mx.random.categorical(apply_min_p(logprobs, _MIN_P) / text.temp, key=now)

        return draw

    def answer_with_progress(
        self, texts: Sequence[NumberedPrompt], max_tokens: int, part: PartFile
    ) -> list[list[int]]:
        """Answer every prompt, going on from what a stopped run has kept.

        Args:
            texts: the prompts.
            max_tokens: longest answer.
            part: finished answers are read from it, and appended to it as [number, tokens].

        Returns:
            The answers' tokens, in the order of `texts`.
        """
        known = dict(part.done)
        left = [text for text in texts if text.number not in known]
        made = self.iterate_answers(left, max_tokens)
        for number, tokens in bar(made, "answers", initial=len(known), total=len(texts)):
            part.append([number, tokens])
            known[number] = tokens
        return [known[text.number] for text in texts]

    def make_up_questions(self, wanted: int, max_tokens: int, part: PartFile) -> list[str]:
        """Let the model write users' questions, by continuing its chat template's user turn.

        Args:
            wanted: different good questions to stop at.
            max_tokens: longest question.
            part: all that the model writes is appended to it as [number, text], and read from it
                first.

        Returns:
            At most `wanted` questions, in the order of their numbers. Fewer where good ones are
            rare: it stops after a number of tries in proportion to `wanted`.
        """
        prefix = user_prefix(self.tokenizer) if wanted else []
        known = dict(part.done)
        found: dict[str, str] = {}
        size = 2 * self.batch_size  # of a round
        for first in count(0, size):
            rare = first >= _ROUNDS * size and first > _TRIES * len(found)
            if len(found) >= wanted or rare or first >= _TRIES * max(wanted, self.batch_size):
                break
            numbers = range(first, first + size)
            texts = [
                NumberedPrompt(number, prefix, 1.0) for number in numbers if number not in known
            ]
            label = f"questions, {len(found)} of {wanted}"
            asked = self.iterate_answers(texts, max_tokens)
            for number, tokens in bar(asked, label, total=len(texts)):
                ended = tokens[-1] in self.tokenizer.eos_token_ids
                known[number] = self.tokenizer.decode(tokens[:-1]).strip() if ended else ""
                part.append([number, known[number]])
            for text in (known[number] for number in numbers):
                if is_good_prompt(text):
                    found.setdefault(normalise_prompt(text), text)
        return list(found.values())[:wanted]
