"""Cross-entropy under the frozen LM head, a few rows of logits at a time (eq. 5).

Logits are by far the largest arrays of a step. So loss and gradient are computed together, one
chunk of rows after the other, and no logits are kept for the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

_CHUNK_LOGITS = 1 << 24
_BLOCK = 256

LogitsOf = Callable[[mx.array], mx.array]
"""Hidden states [R, D] to logits [R, V]: final norm and LM head, packed or not."""


def linear_cross_entropy(
    logits_of: LogitsOf, hidden: mx.array, targets: mx.array, scales: mx.array, vocab_size: int
) -> tuple[mx.array, mx.array]:
    """The scaled sum of cross-entropies, and each row's own.

    Args:
        logits_of: what is frozen.
        hidden: [R, D], what the gradient reaches.
        targets: [R] token ids.
        scales: [R] float32, the weight of each row in the sum.
        vocab_size: V, by which rows are cut into chunks.

    Returns:
        The sum, and [R] losses in nats that no gradient passes through.
    """

    def loss_of(rows: mx.array, wanted: mx.array, weights: mx.array) -> tuple[mx.array, mx.array]:
        logits = logits_of(rows).astype(mx.float32)
        chosen = mx.take_along_axis(logits, wanted[:, None], axis=-1)[:, 0]
        losses = log_normaliser(logits) - chosen
        return (losses * weights).sum(), losses

    def chunk_by_chunk(hidden: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        losses: list[mx.array] = []
        gradients: list[mx.array] = []
        for rows in _chunks(len(hidden), vocab_size):
            part = hidden[rows]
            if losses:  # the last chunk's logits are done with first, however MLX orders its work
                part = mx.depends([part], [losses[-1], gradients[-1]])[0]
            (_, own), gradient = mx.value_and_grad(loss_of)(part, targets[rows], scales[rows])
            losses.append(own)
            gradients.append(gradient)
        every = mx.concatenate(losses)
        return (every * scales).sum(), every, mx.concatenate(gradients)

    def pull_back(
        hidden: mx.array, upstream: tuple[mx.array, ...], found: tuple[mx.array, ...]
    ) -> mx.array:
        return (found[2] * upstream[0]).astype(hidden.dtype)

    summed: Any = mx.custom_function(chunk_by_chunk)
    summed.vjp(pull_back)
    total, losses, _ = summed(hidden)
    return total, mx.stop_gradient(losses)


def log_normaliser(logits: mx.array) -> mx.array:
    """[R] logsumexp of float32 logits [R, V], a block of tokens at a time.

    MLX's CPU backend adds one number after the other. Over a whole vocabulary the small ones are
    lost: losses come out some 1e-4 too low, and gradients of likely tokens are off by percents.
    """
    rows, vocab_size = logits.shape
    whole = vocab_size // _BLOCK * _BLOCK
    sums = []
    if whole:
        sums.append(mx.logsumexp(logits[:, :whole].reshape(rows, -1, _BLOCK), axis=-1))
    if whole < vocab_size:
        sums.append(mx.logsumexp(logits[:, whole:], axis=-1, keepdims=True))
    return mx.logsumexp(mx.concatenate(sums, axis=1), axis=-1)


def _chunks(num_rows: int, vocab_size: int) -> Iterator[slice]:
    size = max(1, _CHUNK_LOGITS // vocab_size)
    for first in range(0, num_rows, size):
        yield slice(first, first + size)
