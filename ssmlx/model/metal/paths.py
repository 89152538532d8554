"""Which kernels a step's attention takes on Metal, and what they read.

    fused         this package's kernel
    vector        MLX's kernel for up to 8 rows: a threadgroup for each row of each head
    vector-split  the same, split over keys; the rows of a key/value head share a threadgroup
    full          MLX's kernel for more rows: a threadgroup for 32 rows of a head, not split
    composed      matrix products and a softmax, where MLX has no kernel

MLX's rules are those of `scaled_dot_product_attention.cpp` in 0.32. Everything is a function of
sizes and chip, with a table of cases in the tests.
"""

from __future__ import annotations

from typing import Literal

import mlx.core as mx

from .plan import TILE_KEYS, AttentionShape, Chip, ceil_div, is_supported, make_plan

AttentionPath = Literal["fused", "vector", "vector-split", "full", "composed"]
MLXPath = Literal["vector", "vector-split", "full", "composed"]

# Two guesses, to be replaced by measurements: below so many keys a step's attention is launches
# more than reading, and fewer rows leave a simdgroup's matrix of 8 half empty.
_MIN_KEYS = 512
_MIN_QUERIES = 5
_FULL_ROWS, _FULL_ROWS_NEURAL = 32, 64
_VECTOR_ROWS, _VECTOR_QUERIES = 8, 32
_VECTOR_SIZES = (64, 96, 128, 256)
_FULL_SIZES = (64, 72, 80, 96, 128)
_NEURAL_SIZES = (64, 96, 128, 256)


def mlx_path(shape: AttentionShape, chip: Chip) -> MLXPath:
    """What `mx.fast.scaled_dot_product_attention` runs on Metal, given a bool mask."""
    if shape.rows > _VECTOR_ROWS:
        return "full" if shape.head_size in _FULL_SIZES else "composed"
    fits = shape.queries <= _VECTOR_QUERIES and shape.rows <= shape.keys
    if not fits or shape.head_size not in _VECTOR_SIZES:
        return "composed"
    long_here = chip.is_large and shape.keys >= 1024
    return "vector-split" if long_here or (shape.group > 1 and shape.keys >= 4096) else "vector"


def choose_path(shape: AttentionShape, chip: Chip) -> AttentionPath:
    """Take the fused kernel where MLX's own falls back, reads keys several times, or starves a GPU.

    A rule from reading MLX's source, not from a measurement: `python -m perf.attention` tells on
    a Mac whether it holds there.
    """
    theirs = mlx_path(shape, chip)
    if not is_supported(shape) or shape.queries < _MIN_QUERIES:
        return theirs
    if theirs == "composed":
        return "fused"
    if shape.keys < _MIN_KEYS or (theirs == "full" and _uses_neural_accelerators(shape, chip)):
        return theirs
    reads_more = key_reads(shape, theirs, chip) > key_reads(shape, "fused", chip)
    starves = theirs == "full" and threadgroups(shape, theirs, chip) < chip.wanted_threadgroups // 2
    return "fused" if reads_more or starves else theirs


def key_reads(shape: AttentionShape, path: AttentionPath, chip: Chip) -> int:
    """How often the keys of a key/value head are read, each threadgroup's reading counted once."""
    if path == "fused":
        return make_plan(shape, chip).row_groups
    if path == "vector":
        return shape.queries
    return 1 if path == "vector-split" else shape.group * _full_row_groups(shape, chip)


def threadgroups(shape: AttentionShape, path: AttentionPath, chip: Chip) -> int:
    """Threadgroups that one attention gives the GPU; MLX's matrix products are not counted."""
    splits = 1
    if path == "fused":
        splits = make_plan(shape, chip).splits
    elif path == "vector-split":
        splits = _vector_splits(shape, chip)
    return shape.kv_heads * key_reads(shape, path, chip) * splits


def bytes_read(shape: AttentionShape, path: AttentionPath, chip: Chip) -> int:
    """Bytes that one attention asks the memory system for, each threadgroup's reading counted once.

    Keys and values as often as threadgroups read them, the mask, and what one kernel writes for
    the next. Caches serve some of the repeats: it is an upper bound of the traffic, to compare
    paths by, and says nothing of arithmetic.

    Args:
        shape: of one layer; a step's attention is the sum over its layers.
        path: as `choose_path` or `mlx_path` name it.
        chip: decides how keys are split.
    """
    outputs, scores = shape.rows * shape.heads, shape.rows * shape.heads * shape.keys
    keys = shape.kv_heads * key_reads(shape, path, chip) * shape.key_bytes
    if path == "fused":
        words = 4 * ceil_div(shape.rows, TILE_KEYS)
        splits = make_plan(shape, chip).splits
        partial = 4 * (shape.head_size + 2) * splits if splits > 1 else 0
        return keys + outputs * (words + 2 * partial)
    if path == "composed":
        # The first product's scores are written, then masked, softened and read by the second.
        return keys + scores * (1 + 3 * 2 * shape.dtype.size)
    splits = _vector_splits(shape, chip) if path == "vector-split" else 0
    return keys + scores + outputs * 2 * splits * (shape.head_size * shape.dtype.size + 8)


def _full_row_groups(shape: AttentionShape, chip: Chip) -> int:
    neural = _uses_neural_accelerators(shape, chip)
    return ceil_div(shape.rows, _FULL_ROWS_NEURAL if neural else _FULL_ROWS)


def _vector_splits(shape: AttentionShape, chip: Chip) -> int:
    """MLX's own choice, as `sdpa_vector_2pass` makes it."""
    keys, queries = shape.keys, shape.queries
    if chip.size == "s":
        limits = ((8192, 128), (32768, 256), (65536, 512))
        if keys <= 1024 or queries <= 4:
            return 64
        return next((splits for limit, splits in limits if keys <= limit), 1024)
    if chip.size == "d":
        if queries >= 6 and keys >= 16384:
            return 512 if keys < 65536 else 1024
        return 256 if queries <= 2 and keys > 8192 else 128
    return 64 if queries >= 4 else 32


def _uses_neural_accelerators(shape: AttentionShape, chip: Chip) -> bool:
    half = shape.dtype != mx.float32
    return chip.has_neural_accelerators and half and shape.head_size in _NEURAL_SIZES
