"""Ends a thought before a form, so that the form still fits into the answer."""

import math
from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoding.batch import Mask


def with_thought_ended(
    mask: Mask, tokenizer: TokenizerWrapper, end_mark: str, max_thought_tokens: int
) -> Mask:
    """Return a mask that ends a thought after so many tokens of an answer, unless it is over.

    Args:
        mask: of the whole answer, which allows any thought up to the mark.
        tokenizer: of the model.
        end_mark: the text that ends the thought.
        max_thought_tokens: tokens of the answer before the mark has to come.
    """
    ending = list(tokenizer.encode(end_mark, add_special_tokens=False))

    over_at = math.inf  # tokens with which the thought is over, once that is known

    def limited(tokens: Sequence[int], logits: mx.array) -> mx.array:
        """Return the logits [V] of the token after `tokens`, the whole answer so far, masked."""
        nonlocal over_at
        masked = mask(tokens, logits)
        if len(tokens) < max_thought_tokens or len(tokens) >= over_at:
            return masked
        if end_mark in tokenizer.decode([*tokens]):
            over_at = len(tokens)
            return masked
        over_at = math.inf
        begun = next(n for n in range(len(ending) - 1, -1, -1) if _ends_with(tokens, ending[:n]))
        is_next = mx.arange(masked.shape[-1]) == ending[begun]
        forced = mx.where(is_next, masked, -mx.inf)
        # The mask forbids the mark within a character, and where the answer has no thought.
        return masked if forced.max().item() == -mx.inf else forced

    return limited


def _ends_with(tokens: Sequence[int], end: Sequence[int]) -> bool:
    return [*tokens[len(tokens) - len(end) :]] == [*end]
