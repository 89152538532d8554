"""Ends a thought before a form, so that the form still fits into the answer."""

import math
from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .grammars import GrammarMask


class ThoughtLimit:
    """A mask that ends a thought after so many tokens of an answer, unless it is over."""

    def __init__(
        self,
        mask: GrammarMask,  # of the whole answer, which allows any thought up to the mark
        tokenizer: TokenizerWrapper,
        end_mark: str,  # the text that ends the thought
        max_thought_tokens: int,  # of the answer, before the mark has to come
    ) -> None:
        self._mask = mask
        self._tokenizer = tokenizer
        self._end_mark = end_mark
        self._ending = list(tokenizer.encode(end_mark, add_special_tokens=False))
        self._max_thought_tokens = max_thought_tokens
        self._over_at = math.inf  # tokens with which the thought is over, once that is known

    @property
    def error(self) -> str:
        return self._mask.error

    def __call__(
        self,
        tokens: Sequence[int],  # the whole answer so far
        logits: mx.array,  # [1, V] of the token after them
    ) -> mx.array:
        masked = self._mask(tokens, logits)
        if len(tokens) < self._max_thought_tokens or len(tokens) >= self._over_at:
            return masked
        if self._end_mark in self._tokenizer.decode([*tokens]):
            self._over_at = len(tokens)
            return masked
        self._over_at = math.inf
        ending = self._ending
        begun = next(n for n in range(len(ending) - 1, -1, -1) if _ends_with(tokens, ending[:n]))
        is_next = mx.arange(masked.shape[-1]) == ending[begun]
        forced = mx.where(is_next, masked, -mx.inf)
        # The mask forbids the mark within a character, and where the answer has no thought.
        return masked if forced.max().item() == -mx.inf else forced


def _ends_with(tokens: Sequence[int], end: Sequence[int]) -> bool:
    return [*tokens[len(tokens) - len(end) :]] == [*end]
