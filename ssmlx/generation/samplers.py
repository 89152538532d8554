"""A caller's own sampler and logits processors, of mlx-lm's kind.

They are called token by token, so an answer that follows them is decoded plainly.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

import mlx.core as mx

from ..decoding.batch import Mask
from ..decoding.step import Steps
from ..errors import quoted, require
from ..model.shapes import indices, to_int
from ..model.streams import StreamFusedModel
from ..model.text_cache import TextCache
from ..settings import GenerateConfig, SamplingConfig
from .batching import Batches
from .plan import Decode, Plan, require_context

Sampler = Callable[[mx.array], mx.array]
"""Maps the log probabilities [1, V] of the next token to the token [1]."""
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
"""Maps all tokens [T] so far, the prompt's too, and logits [1, V] to the logits to decide by."""
_log = logging.getLogger("ssmlx")


@cache
def _log_once(line: str) -> None:
    _log.info(line)


def with_plain_decoding(config: GenerateConfig, sampler: Sampler | None) -> GenerateConfig:
    """The settings of an answer that follows a caller's functions."""
    _log_once("sampler= and logits_processors= decode plainly: nothing is drafted")
    if sampler is None:
        return replace(config, decoding="plain")
    default = SamplingConfig()
    for one in fields(SamplingConfig):
        value = getattr(config, one.name)
        require(
            value == getattr(default, one.name),
            f"{one.name}={quoted(value)} beside sampler=",
            expected="one of them, as the sampler alone chooses tokens",
            do=f"omit {one.name}=",
        )
    return replace(config, decoding="plain", temp=0.0)


def decode_with(sampler: Sampler | None, processors: Sequence[LogitsProcessor]) -> Decode:
    """A loop that follows a caller's functions."""
    seed = to_int(mx.random.randint(0, 2**31 - 1))  # from the state of the calling thread

    def decode(
        plan: Plan,
        model: StreamFusedModel,
        prompt: list[int],
        cache: TextCache,
        *,
        context: Sequence[int] = (),
        **more: Any,
    ) -> Steps:
        require_context(context, cache)
        mask = _as_mask(sampler, processors, [*context, *prompt], seed)
        return Batches().decode(plan, model, prompt, cache, context=context, mask=mask, **more)

    return decode


def _as_mask(
    sampler: Sampler | None,
    processors: Sequence[LogitsProcessor],
    text: Sequence[int],  # the tokens before the answer
    seed: int,  # of MLX's random state on the MLX thread, where they are called
) -> Mask:
    """The logits that processors give; with a sampler, those that only its token has."""
    before = mx.array([*text], mx.int32)
    mx.eval(before)

    def mask(tokens: Sequence[int], logits: mx.array) -> mx.array:
        if not tokens:
            mx.random.seed(seed)
        if processors:
            known = mx.concatenate([before, mx.array([*tokens], before.dtype)])
            for process in processors:
                logits = process(known, logits)
        if sampler is None:
            return logits
        chosen = sampler(logits - mx.logsumexp(logits, keepdims=True))
        found = f"sampler= returned {chosen.size} tokens"
        require(chosen.size == 1, found, expected="one token", do="correct the sampler")
        return mx.where(indices(logits.shape[-1]) == chosen.reshape(1, 1), 0.0, -mx.inf)

    return mask
