"""Scores of a prompt: how likely each token is after those before it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..decoding.sampling import TokenLogprobs, own_and_top_logprobs, read_logprobs
from ..model.streams import StreamFusedModel
from ..model.text_cache import TextCache

PIECE = 128
"""Tokens whose logits are computed at once: with a vocabulary of 150,000, 77 MB in float32."""


@dataclass(frozen=True)
class ScoredPrompt:
    """Log probabilities of a prompt's tokens."""

    logprobs: tuple[TokenLogprobs, ...]  # of every token but the first, which has nothing before it


def score_in_pieces(
    model: StreamFusedModel,
    tokens: Sequence[int],
    cache: TextCache,  # an empty one, which all tokens but the last join
    top: int,  # how many of the likeliest tokens are wanted at each position
) -> Iterator[tuple[TokenLogprobs, ...]]:
    """Log probabilities of each token but the first, `PIECE` tokens at a time. MLX thread.

    An empty tuple comes before each piece, so that other answers can take their turn.
    """
    for first in range(0, len(tokens) - 1, PIECE):
        yield ()
        piece = list(tokens[first : first + PIECE + 1])
        logits = model.backbone.append(mx.array(piece[:-1]), cache).logits
        rows = own_and_top_logprobs(logits, mx.array(piece[1:]), top)
        mx.eval(rows, cache.state)
        found = read_logprobs(piece[1:], rows)
        mx.clear_cache()
        yield found
