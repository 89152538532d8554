"""Ends a thought before a form, so that the form still fits into the answer."""

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

    def limited(tokens: Sequence[int], logits: mx.array) -> mx.array:
        """Return the logits [V] of the token after `tokens`, the whole answer so far, masked."""
        masked = mask(tokens, logits)
        place = len(tokens) - max_thought_tokens
        if not 0 <= place < len(ending) or [*tokens[max_thought_tokens:]] != ending[:place]:
            return masked
        is_over = end_mark in tokenizer.decode([*tokens[:max_thought_tokens]])
        is_next = mx.arange(masked.shape[-1]) == ending[place]
        forced = mx.where(is_next, masked, -mx.inf)
        # The mask forbids the mark where the answer has no thought.
        return masked if is_over or forced.max().item() == -mx.inf else forced

    return limited
