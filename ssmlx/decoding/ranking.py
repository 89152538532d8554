"""The likeliest tokens of rows of logits, for samplers and drafters."""

import math

import mlx.core as mx

from ..model.shapes import indices

Noise = mx.array | None
"""The known part of the decisions that are guessed, see `Sampling.noise`."""


def rank_candidates(
    logits: mx.array,  # [G, V], or [G, Vd] with a draft vocabulary
    count: int,
    # [Vd] the token of each column, if it is not the column's number
    vocab: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """[G, K] likeliest tokens, best first, and [G, K] float32 log probabilities."""
    columns, values = top_columns(logits, count)
    tokens = columns if vocab is None else vocab[columns]
    return tokens, values - mx.logsumexp(logits.astype(mx.float32), axis=-1, keepdims=True)


def with_noise(logits: mx.array, noise: Noise) -> mx.array:
    return logits if noise is None else logits.astype(mx.float32) + noise


def top_columns(
    values: mx.array,  # [R, V]
    count: int,
) -> tuple[mx.array, mx.array]:
    """[R, K] columns and [R, K] float32 values, largest first; ties by the lowest column."""
    # A sort of whole rows takes many passes on a GPU. The K largest are in the K blocks of
    # columns with the largest maxima, so about sqrt(V K) numbers are sorted, twice.
    rows, size = values.shape
    # Of a block: a power of two, of which most vocabularies' sizes are multiples.
    width = 1 << (math.isqrt(size // count).bit_length() - 1)
    columns = indices(size)[None]
    found = values
    if width > 1:
        whole = size // width * width
        maxima = values[:, :whole].reshape(rows, -1, width).max(axis=-1)
        # In the order of their columns, so that a stable sort leaves equal values in it.
        blocks = mx.sort(mx.argsort(-maxima, axis=-1)[:, :count], axis=-1).astype(mx.int32)
        columns = (blocks[:, :, None] * width + indices(width)).reshape(rows, -1)
        if whole < size:
            rest = mx.broadcast_to(indices(whole, size), (rows, size - whole))
            columns = mx.concatenate([columns, rest], axis=-1)
        found = mx.take_along_axis(values, columns, axis=-1)
    order = mx.argsort(-found, axis=-1)[:, :count]
    columns = mx.broadcast_to(columns, found.shape)
    best = mx.take_along_axis(found, order, axis=-1).astype(mx.float32)
    return mx.take_along_axis(columns, order, axis=-1), best
