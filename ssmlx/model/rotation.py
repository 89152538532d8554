"""Streams told apart by their values in attention (eq. 7, appendix B)."""

from __future__ import annotations

import mlx.core as mx


class ValueRotation:
    """Turns the values of stream n by n times a step, as complex numbers.

    A head's feature i is the real and feature i + Dh / 2 the imaginary part of one number: the
    pairs of rotary embeddings' "rotate half". Every pair turns by the same angle.

    Args:
        num_streams: G, the streams to have angles for.
        step: epsilon, in radians.
    """

    def __init__(self, num_streams: int, step: float) -> None:
        angles = step * mx.arange(1, num_streams + 1)[:, None]
        self._cos, self._sin = mx.cos(angles), mx.sin(angles)

    def __call__(self, values: mx.array, num_nodes: int, num_streams: int) -> mx.array:
        """[1, Hkv, M * (1 + G), Dh] values of a step's rows, those of streams turned.

        Args:
            values: [1, Hkv, M * (1 + G), Dh]
            num_nodes: M, the rows in front, which stay as they are.
            num_streams: G, at most as many as there are angles for.
        """
        if num_streams == 0:
            return values
        turned = self.turn(values[:, :, num_nodes:], num_streams)
        return mx.concatenate([values[:, :, :num_nodes], turned], axis=2)

    def turn(self, values: mx.array, num_streams: int | None = None) -> mx.array:
        """[B, Hkv, M * G, Dh] values of stream rows alone, turned.

        Args:
            values: [B, Hkv, M * G, Dh]
            num_streams: G, at most as many as there are angles for; all of them unless given.
        """
        cos, sin = self._cos[:num_streams], self._sin[:num_streams]
        batch, num_heads, _, head_size = values.shape
        streams = values.reshape(batch, num_heads, -1, cos.shape[0], head_size)
        real, imaginary = mx.split(streams.astype(mx.float32), 2, axis=-1)
        turned = mx.concatenate(
            [real * cos - imaginary * sin, imaginary * cos + real * sin], axis=-1
        )
        return turned.astype(values.dtype).reshape(values.shape)
