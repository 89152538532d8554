"""How likely the tokens of a prompt are, one behind the other."""

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
    """How likely a model finds the tokens of a prompt.

    Attributes:
        logprobs: of every token but the first one, which has nothing before it.
    """

    logprobs: tuple[TokenLogprobs, ...]


def score_in_pieces(
    model: StreamFusedModel, tokens: Sequence[int], cache: TextCache, top: int
) -> Iterator[tuple[TokenLogprobs, ...]]:
    """Yield log probabilities of each token of a prompt but the first, `PIECE` tokens at a time.

    An empty tuple comes before each piece, for others to take their turn, and then the piece's
    entries, in order. Nothing comes for a prompt of one token. On the thread that runs MLX.

    Args:
        model: the target.
        tokens: a prompt; all but the last join the cache.
        cache: an empty one.
        top: how many of the likeliest tokens are wanted in each place.
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
