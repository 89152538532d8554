"""The condition on a drafted token: corrections of the streams' last hidden states.

Streams guess side by side, and none knows what another has guessed. The condition adds to the
final-normed state n of a stream, before the LM head, what follows from the token a before it:

n + Q (sigmoid(W_g n) * W_e e(a)), e(a) the target's embedding of a, of RMS 1

One for all streams, without biases; Q starts at zero, which changes nothing. It is DFlash 2's
selector, a gated table of token pairs, on the target's own embeddings and head instead of tables
over the vocabulary, which small data cannot fill. Hydra's heads (arXiv 2402.05109) and the MLP
speculator (arXiv 2404.19124) see the token before in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from .shapes import expect_shape

EPSILON = 1e-12  # beside the mean square of an embedding: for one of zeros

RESCORED = 16  # only the likeliest candidates of a stream are scored again when decoding


def scale_to_unit_rms(
    embeddings: mx.array,  # [..., D]
) -> mx.array:
    return mx.fast.rms_norm(embeddings, None, EPSILON)


@dataclass(frozen=True, eq=False)
class Condition:
    """The weights of the condition, of rank r; one for all streams."""

    embed: mx.array  # [r, D] W_e
    gate: mx.array  # [r, D] W_g
    out: mx.array  # [D, r] Q

    def __post_init__(self) -> None:
        rank, size = self.embed.shape
        expect_shape("the condition's gate", self.gate, rank, size)
        expect_shape("the condition's output", self.out, size, rank)

    def __call__(
        self,
        normed: mx.array,  # [..., D] streams' last hidden states, after the final norm
        previous_embeddings: mx.array,  # [..., D] of the tokens before, of any length; broadcast
    ) -> mx.array:  # [..., D] to add to `normed`
        return self.mix(normed, previous_embeddings) @ self.out.T

    def mix(self, normed: mx.array, previous_embeddings: mx.array) -> mx.array:  # [..., r]
        """The correction before Q: sigmoid(W_g n) * W_e e(a)."""
        return mx.sigmoid(normed @ self.gate.T) * (
            scale_to_unit_rms(previous_embeddings) @ self.embed.T
        )
