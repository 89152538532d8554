"""The sizes of an attention, the chip, and how the fused kernel divides its work.

Everything but `this_chip` is a function of sizes and chip.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    def of(
        cls,
        queries: Sequence[int],  # (1, H, R, Dh)
        keys: Sequence[int],  # (1, Hkv, C + L, Dh)
        dtype: mx.Dtype,
    ) -> AttentionShape:
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

    size: str  # "p" phone, "g" base and Pro, "s" Max, "d" Ultra

    @classmethod
    def of(
        cls,
        architecture: str,  # as Metal says it; an unknown one counts as a base chip
    ) -> Chip:
        found = re.fullmatch(r"applegpu_g\d+([a-z])", architecture)
        return cls(size=found[1] if found else "g")

    @property
    def wanted_threadgroups(self) -> int:
        """Threadgroups that keep it busy: about twice the cores of the largest of its class."""
        return {"p": 16, "s": 80, "d": 160}.get(self.size, 40)


def this_chip() -> Chip:
    return Chip.of(str(mx.device_info(mx.gpu).get("architecture", "")))


@dataclass(frozen=True, kw_only=True)
class Division:
    """A threadgroup holds `simdgroups` * `blocks` * 8 query rows of one key/value head, and walks
    along one of `splits` parts of the keys."""

    blocks: int  # blocks of 8 rows that a simdgroup holds
    simdgroups: int  # of a threadgroup
    row_groups: int  # threadgroups that the query rows of a key/value head need
    splits: int  # parts of the keys; more than one needs a second kernel, which merges them


def divide_attention(shape: AttentionShape, chip: Chip) -> Division:
    two = shape.head_size <= MAX_HEAD_SIZE_OF_TWO_BLOCKS
    blocks = 2 if two and shape.queries > MAX_SIMDGROUPS * BLOCK_ROWS else 1
    needed = ceil_div(shape.queries, BLOCK_ROWS * blocks)
    row_groups = ceil_div(needed, MAX_SIMDGROUPS)
    simdgroups = ceil_div(needed, row_groups)
    # A split's output is written and read once more: its keys must be worth it.
    least = max(_MIN_KEYS_OF_A_SPLIT, 2 * simdgroups * blocks * BLOCK_ROWS)
    wanted = ceil_div(chip.wanted_threadgroups, shape.kv_heads * row_groups)
    splits = max(1, min(wanted, shape.keys // least, _MAX_SPLITS))
    return Division(blocks=blocks, simdgroups=simdgroups, row_groups=row_groups, splits=splits)


def is_supported(shape: AttentionShape) -> bool:
    size = shape.head_size
    return size % BLOCK_ROWS == 0 and size <= MAX_HEAD_SIZE and shape.dtype in DTYPES


@dataclass(frozen=True)
class Bucket:
    """The shapes that one trial speaks for: rows and keys up to the same power of 2, and the same
    kernels."""

    largest: AttentionShape
    blocks: int
    is_split: bool

    @classmethod
    def of(cls, shape: AttentionShape, division: Division) -> Bucket:
        rows, keys = (1 << (size - 1).bit_length() for size in (shape.rows, shape.keys))
        return cls(replace(shape, rows=rows, keys=keys), division.blocks, division.splits > 1)


def ceil_div(number: int, by: int) -> int:
    return -(-number // by)
