"""Weights that are stored compressed, and spread out once before the program runs."""

from __future__ import annotations

from math import prod

import numpy as np

from .registry import operation


@operation()
def constexpr_blockwise_shift_scale(
    data: np.ndarray, scale: np.ndarray, offset: np.ndarray | None = None
) -> np.ndarray:
    """scale * (data - offset), with one scale and offset for each block of data.

    All have one rank; a block is as long on each axis as data's size over the scale's.
    """
    # Scales stay small: data is cut into blocks instead, [a, b] to [a / i, i, b / j, j].
    blocks = _in_blocks(data.astype(scale.dtype), scale.shape)
    if offset is not None:
        blocks = blocks - _per_block(offset.astype(scale.dtype))
    return (blocks * _per_block(scale)).reshape(data.shape)


@operation(rounds=False)
def constexpr_lut_to_dense(
    indices: np.ndarray, lut: np.ndarray, vector_axis: np.ndarray | None = None
) -> np.ndarray:
    """Numbers out of look-up tables, by indices of one to eight bits.

    lut is [*, entries, vector], its first axes one for each of `indices`, with one table for each
    block. Where vectors are longer than 1, every index becomes so many numbers along
    `vector_axis`.
    """
    *groups, entries, vector = lut.shape
    blocks = _in_blocks(indices, tuple(groups))
    table = _per_block(np.arange(prod(groups)).reshape(groups))
    chosen = lut.reshape(-1, vector)[table * entries + blocks]
    chosen = chosen.reshape(*indices.shape, vector)
    if vector == 1:
        return chosen[..., 0]
    if vector_axis is None:
        raise ValueError(f"has vectors of {vector} and no axis for them")
    at = int(vector_axis) % indices.ndim
    sizes = list(indices.shape)
    sizes[at] *= vector
    return np.moveaxis(chosen, -1, at + 1).reshape(sizes)


@operation()
def constexpr_cast(source_val: np.ndarray, output_dtype: str) -> np.ndarray:
    """A float16 constant as float32."""
    if output_dtype != "fp32":
        raise ValueError(f"casts to fp32 alone, not {output_dtype}")
    return source_val


def _in_blocks(data: np.ndarray, counts: tuple[int, ...]) -> np.ndarray:
    """[a, b] with (m, n) blocks to [m, a / m, n, b / n]."""
    if len(counts) != data.ndim or any(
        size % count for size, count in zip(data.shape, counts, strict=False)
    ):
        raise ValueError(f"has {list(counts)} blocks in {list(data.shape)} numbers")
    split = [(count, size // count) for size, count in zip(data.shape, counts, strict=True)]
    return data.reshape([part for pair in split for part in pair])


def _per_block(numbers: np.ndarray) -> np.ndarray:
    """[m, n] to [m, 1, n, 1]."""
    return numbers.reshape([part for size in numbers.shape for part in (size, 1)])
