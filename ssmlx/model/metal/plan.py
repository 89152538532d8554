"""The sizes of an attention, the chip, how the fused kernel divides its work, and when it is taken.

Everything but `this_chip` is a function of sizes and chip. MLX's own kernels, which the choice is
against, are those of `scaled_dot_product_attention.cpp` in 0.32:

    vector        for up to 8 rows: a threadgroup for each row of each head
    vector-split  the same, split over keys; the rows of a key/value head share a threadgroup
    full          for more rows: a threadgroup for 32 rows of a head, not split
    composed      matrix products and a softmax, where MLX has no kernel
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

LANES = 32
TILE_KEYS = 32
BLOCK_ROWS = 8
MAX_HEAD_SIZE = 128
DTYPES = (mx.float32, mx.float16, mx.bfloat16)

# A thread has at most 128 registers, a core some 208 KiB of them (philipturner/metal-benchmarks):
# 8 simdgroups fit, whatever the compiler needs. A block of 8 rows takes D / 4 registers of a lane
# for the query and as many for the output, so two blocks a simdgroup are for the smaller heads.
# 64 rows of 16-bit keys are 64 operations a byte. M chips have some 26 to 38 for each byte (their
# published peak over bandwidth), so reading keys once more for the next 64 rows costs no time.
MAX_SIMDGROUPS = 8
MAX_HEAD_SIZE_OF_TWO_BLOCKS = 80

_MIN_KEYS_OF_A_SPLIT = 128
_MAX_SPLITS = 32

MLXPath = Literal["vector", "vector-split", "full", "composed"]
AttentionPath = Literal["fused", MLXPath]

# Two guesses, to be replaced by measurements: below so many keys a step's attention is launches
# more than reading, and fewer rows leave a simdgroup's matrix of 8 half empty.
_MIN_KEYS = 512
_MIN_QUERIES = 5
_FULL_ROWS, _FULL_ROWS_NEURAL = 32, 64
_VECTOR_ROWS, _VECTOR_QUERIES = 8, 32
_VECTOR_SIZES = (64, 96, 128, 256)
_FULL_SIZES = (64, 72, 80, 96, 128)
_NEURAL_SIZES = (64, 96, 128, 256)


@dataclass(frozen=True)
class AttentionShape:
    """The sizes of one attention of a step."""

    rows: int
    heads: int  # of queries; a multiple of `kv_heads`
    kv_heads: int
    keys: int  # R + L and whatever else the rows may see
    head_size: int
    dtype: mx.Dtype

    def __post_init__(self) -> None:
        sizes = (self.rows, self.heads, self.kv_heads, self.keys, self.head_size)
        if min(sizes) < 1 or self.heads % self.kv_heads:
            raise ValueError(f"no attention has the sizes {self}")

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int], dtype: mx.Dtype) -> AttentionShape:
        """The sizes of queries [1, H, R, Dh] over keys [1, Hkv, C + L, Dh]."""
        _, heads, rows, head_size = queries
        _, kv_heads, num_keys, _ = keys
        return cls(rows, heads, kv_heads, num_keys, head_size, dtype)

    @property
    def group(self) -> int:
        """Query heads of one key/value head."""
        return self.heads // self.kv_heads

    @property
    def queries(self) -> int:
        """Query rows of one key/value head."""
        return self.rows * self.group


@dataclass(frozen=True, kw_only=True)
class Chip:
    """An Apple GPU as Metal names it, such as `applegpu_g13s`."""

    generation: int  # 13 for M1, to 17 for M5
    size: str  # "p" phone, "g" base and Pro, "s" Max, "d" Ultra

    @classmethod
    def of(cls, architecture: str) -> Chip:
        """Read Metal's name; an unknown one counts as a first base chip."""
        found = re.fullmatch(r"applegpu_g(\d+)([a-z])", architecture)
        generation, size = found.groups() if found else ("13", "g")
        return cls(generation=int(generation), size=size)

    @property
    def is_large(self) -> bool:
        """Max and Ultra, for which MLX splits sooner."""
        return self.size in ("s", "d")

    @property
    def wanted_threadgroups(self) -> int:
        """Threadgroups that keep it busy: about twice the cores of the largest of its class."""
        return {"p": 16, "s": 80, "d": 160}.get(self.size, 40)

    @property
    def has_neural_accelerators(self) -> bool:
        """Whether MLX's full kernel may use them (it asks for macOS 26.2 too)."""
        return self.generation >= (18 if self.size == "p" else 17)


def this_chip() -> Chip:
    """The chip that Metal runs on here."""
    return Chip.of(str(mx.device_info(mx.gpu).get("architecture", "")))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the fused kernel divides one attention.

    A threadgroup holds `simdgroups` * `blocks` * 8 query rows of one key/value head, and walks
    along one of `splits` parts of the keys.
    """

    blocks: int  # blocks of 8 rows that a simdgroup holds
    simdgroups: int  # of a threadgroup
    row_groups: int  # threadgroups that the query rows of a key/value head need
    splits: int  # parts of the keys; more than one needs a second kernel, which merges them


def make_plan(shape: AttentionShape, chip: Chip) -> Plan:
    """Divide rows evenly, and keys as far as the GPU has room for more threadgroups."""
    two = shape.head_size <= MAX_HEAD_SIZE_OF_TWO_BLOCKS
    blocks = 2 if two and shape.queries > MAX_SIMDGROUPS * BLOCK_ROWS else 1
    needed = ceil_div(shape.queries, BLOCK_ROWS * blocks)
    row_groups = ceil_div(needed, MAX_SIMDGROUPS)
    simdgroups = ceil_div(needed, row_groups)
    # A split's output is written and read once more: its keys must be worth it.
    least = max(_MIN_KEYS_OF_A_SPLIT, 2 * simdgroups * blocks * BLOCK_ROWS)
    wanted = ceil_div(chip.wanted_threadgroups, shape.kv_heads * row_groups)
    splits = max(1, min(wanted, shape.keys // least, _MAX_SPLITS))
    return Plan(blocks=blocks, simdgroups=simdgroups, row_groups=row_groups, splits=splits)


def is_supported(shape: AttentionShape) -> bool:
    """Whether the fused kernel can do it: head sizes are multiples of 8 up to 128."""
    size = shape.head_size
    return size % BLOCK_ROWS == 0 and size <= MAX_HEAD_SIZE and shape.dtype in DTYPES


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
    theirs_read = key_reads(shape, theirs, chip)
    reads_more = theirs_read > make_plan(shape, chip).row_groups
    starves = theirs == "full" and shape.kv_heads * theirs_read < chip.wanted_threadgroups // 2
    return "fused" if reads_more or starves else theirs


def key_reads(shape: AttentionShape, path: MLXPath, chip: Chip) -> int:
    """How often MLX reads a key/value head's keys, each threadgroup's reading counted once."""
    if path == "vector":
        return shape.queries
    if path == "vector-split":
        return 1
    rows = _FULL_ROWS_NEURAL if _uses_neural_accelerators(shape, chip) else _FULL_ROWS
    return shape.group * ceil_div(shape.rows, rows)


def _uses_neural_accelerators(shape: AttentionShape, chip: Chip) -> bool:
    half = shape.dtype != mx.float32
    return chip.has_neural_accelerators and half and shape.head_size in _NEURAL_SIZES


def ceil_div(number: int, by: int) -> int:
    """`number` / `by`, rounded up."""
    return -(-number // by)
