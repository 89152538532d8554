"""Answers that follow a JSON schema: tokens that would leave it are not sampled (llguidance)."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLTokenizer, hf
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import InputError, first_line

# Some indentation, but no endless one, in which small models get lost.
_STYLE: Any = {"whitespace_pattern": r"[ \n]{1,24}"}


def processor(
    tokenizer: TokenizerWrapper, schema: Mapping[str, Any]
) -> Callable[[Sequence[int], mx.array], mx.array]:
    """What holds an answer to a JSON schema, {} for any object.

    It takes the tokens of the answer so far, and logits [1, V] of the next, and returns those, -inf
    where a token would leave the schema. Behind a whole JSON text it leaves end tokens alone.

    Raises:
        InputError: it is no JSON schema, or one that cannot be followed.
    """
    try:
        form = LLMatcher.grammar_from_json_schema(dict(schema or {"type": "object"}), None, _STYLE)
        matcher = LLMatcher(_tokens_of(tokenizer), form, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(
            f"the JSON schema cannot be followed ({first_line(error)[:200]})",
            expected="one that llguidance knows",
            do="simplify it",
        ) from error
    num_known = 0

    def constrained(tokens: Sequence[int], logits: mx.array) -> mx.array:
        nonlocal num_known
        matcher.rollback(max(0, num_known - len(tokens)))
        matcher.consume_tokens([*tokens[num_known:]])
        num_known = len(tokens)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little", count=logits.shape[-1])
        return mx.where(mx.array(allowed.astype(bool)), logits, -mx.inf)

    return constrained


@lru_cache(maxsize=1)
def _tokens_of(tokenizer: TokenizerWrapper) -> LLTokenizer:
    """What llguidance knows of a tokenizer's tokens; takes a second."""
    return hf.from_tokenizer(tokenizer._tokenizer, eos_token=sorted(tokenizer.eos_token_ids))
