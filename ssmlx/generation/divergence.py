"""The first difference of two answers to one prompt, and whether rounding may have decided it.

In float32 they never do. In 16 bits a row's logits depend on the rows beside it, so two tokens that
all but tie may come out in either order.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..decoding.loop import prefill
from ..decoding.ranking import Noise
from ..decoding.sampling import Sampling, last_tokens, row_positions
from ..model.shapes import to_float
from ..model.streams import StreamFusedModel
from ..model.tree import root_tree
from ..settings import GenerateConfig

ROUNDING = {mx.float32: 0.0, mx.float16: 8 * 2**-11, mx.bfloat16: 8 * 2**-8}
"""Largest gap of two logits for which rounding may have decided between them, as a share of the
larger: 8 units in the last place. In float32 every drafter must write the same."""


@dataclass(frozen=True)
class Divergence:
    """The first token by which an answer differs from plain decoding's."""

    place: int  # tokens before it, which both begin with
    plain: int  # token of plain decoding there
    other: int  # token of the other answer
    gap: float  # between what decides there: the target's logits of the two, with noise
    logit: float  # the larger of the two logits without noise, without its sign
    limit: float  # gap up to which rounding may have decided

    @property
    def is_near_tie(self) -> bool:
        return self.gap <= self.limit


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """The index of the first token that two answers do not share, if they differ."""
    if list(plain) == list(other):
        return None
    pairs = zip(plain, other, strict=False)
    shorter = min(len(plain), len(other))
    return next((place for place, (a, b) in enumerate(pairs) if a != b), shorter)


def compare_logits(
    place: int,  # tokens of the answers before it
    plain: int,
    other: int,
    logits: mx.array,  # [V] there, bias and penalties included
    noise: Noise,  # [1, V] what sampling adds to them
    dtype: mx.Dtype,  # of the activations, whose rounding it is
) -> Divergence:
    own = logits.astype(mx.float32)
    decides = own if noise is None else own + noise[0]
    gap = abs(to_float(decides[plain]) - to_float(decides[other]))
    larger = max(abs(to_float(own[plain])), abs(to_float(own[other])))
    return Divergence(place, plain, other, gap, larger, ROUNDING[dtype] * larger)


def find_divergence(
    model: StreamFusedModel,
    prompt: Sequence[int],
    plain: Sequence[int],  # tokens of plain decoding's answer
    other: Sequence[int],
    config: GenerateConfig,  # of both, a seed included if they were sampled
    ends: Collection[int],  # tokens that end an answer
) -> Divergence | None:
    """Find the first difference of an answer from plain decoding's. MLX thread."""
    place = first_difference(plain, other)
    if place is None:
        return None
    sampling = Sampling(config, model.backbone.vocab_size)
    text = [*prompt, *plain[:place]]
    cache = model.make_cache()
    prefill(model, text[:-1], cache)
    token = mx.array(text[-1:], mx.int32)
    first = cache.root_position
    output = model.backbone.append(token, cache)
    places = row_positions(root_tree(token), first, last_tokens(text[:-1], sampling.context_size))
    logits = sampling.apply_bias_and_penalties(output.logits, places)[0]

    def token_or_likeliest_end(answer: Sequence[int]) -> int:
        # An answer that is over counts as having the likeliest of its end tokens there.
        return (
            answer[place]
            if place < len(answer)
            else max(ends, key=lambda end: to_float(logits[end]))
        )

    noise = sampling.noise(first, 1)
    dtype = model.backbone.dtype
    return compare_logits(
        place, token_or_likeliest_end(plain), token_or_likeliest_end(other), logits, noise, dtype
    )
