"""The Metal kernels: what MLX compiles, and what one call of them is.

Their functions are in `attention.metal`; here are the three entry points. MLX writes the
signatures, from the names that a body mentions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from ..shapes import indices
from .division import BLOCK_ROWS, LANES, TILE_KEYS, Division, ceil_div

FUNCTIONS = Path(__file__).with_name("attention.metal")
# MLX gives smaller arrays to a kernel in another address space, which would be another source.
_MIN_WORDS = 8

_WALK = """
    threadgroup T copied[TILE * tile_pitch<T, D>()];
    const Place place = place_of(thread_index_in_simdgroup);
    const int num_rows = q_shape[2], num_heads = q_shape[1], group = num_heads / k_shape[1];
    const int kv_head = int(threadgroup_position_in_grid.y);
    const int simdgroup = int(threadgroup_position_in_grid.x * simdgroups_per_threadgroup
        + simdgroup_index_in_threadgroup);
    Rows<D> rows[BLOCKS];
    UNROLL for (int b = 0; b < BLOCKS; b++) {
      const int index = (simdgroup * BLOCKS + b) * FRAGMENT + place.row;
      load_row<T, D>(
          rows[b], q, q_strides, scale, index, num_rows, kv_head * group, group, place);
    }
    const Side<T> keys = {k + kv_head * k_strides[1], k_strides[2]};
    const Side<T> values = {v + kv_head * v_strides[1], v_strides[2]};
    const Mask mask = {bits, bits_shape[1], k_shape[2]};
    const int num_tiles = (mask.num_keys + TILE - 1) / TILE;
    const int split = int(threadgroup_position_in_grid.z);
    const int num_splits = int(threadgroups_per_grid.z);
    const int first = num_tiles * split / num_splits;
    const int last = num_tiles * (split + 1) / num_splits;
    const Copy<T> copy = {
        copied, int(thread_index_in_threadgroup), int(threads_per_threadgroup.x)};
    attend<T, D, BLOCKS>(rows, keys, values, mask, first, last, copy, place);
"""

_STORE = """
    UNROLL for (int b = 0; b < BLOCKS; b++) {
      if (rows[b].row >= 0) {
        const int index = rows[b].row * num_heads + rows[b].head;
        const float factor = rows[b].total > 0.0f ? 1.0f / rows[b].total : 0.0f;
        store_row<T, D>(rows[b], out + index * D, factor, place);
      }
    }
"""

_STORE_SPLIT = """
    UNROLL for (int b = 0; b < BLOCKS; b++) {
      if (rows[b].row >= 0) {
        const int index = (split * num_rows + rows[b].row) * num_heads + rows[b].head;
        store_row<float, D>(rows[b], partial + index * D, 1.0f, place);
        if (place.column == 0) {
          largest[index] = rows[b].largest;
          total[index] = rows[b].total;
        }
      }
    }
"""

_MERGE = """
    const int index = int(thread_position_in_grid.y);
    const int num_splits = partial_shape[0], num_outputs = partial_shape[1] * partial_shape[2];
    float highest = UNSEEN;
    for (int s = 0; s < num_splits; s++) {
      highest = metal::max(highest, largest[s * num_outputs + index]);
    }
    float sum = 0;
    for (int s = 0; s < num_splits; s++) {
      const int at = s * num_outputs + index;
      sum += total[at] * metal::fast::exp2(largest[at] - highest);
    }
    const float factor = sum > 0.0f ? 1.0f / sum : 0.0f;
    for (int d = int(thread_position_in_grid.x); d < D; d += 32) {
      float output = 0;
      for (int s = 0; s < num_splits; s++) {
        const int at = s * num_outputs + index;
        output += partial[at * D + d] * metal::fast::exp2(largest[at] - highest);
      }
      out[index * D + d] = static_cast<T>(output * factor);
    }
"""


@dataclass(frozen=True)
class Kernel:
    """A Metal kernel, as `mx.fast.metal_kernel` takes it."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str

    @lru_cache(maxsize=8)  # noqa: B019 (there are three kernels, for good)
    def build(self) -> Callable[..., list[mx.array]]:
        """Build a callable, whose arguments are the fields of `Call`. Inputs are read in place:
        they need not be contiguous."""
        built = mx.fast.metal_kernel(
            name=self.name,
            input_names=self.inputs,
            output_names=self.outputs,
            source=self.source,
            header=FUNCTIONS.read_text(encoding="utf-8"),
            ensure_row_contiguous=False,
        )
        return cast("Callable[..., list[mx.array]]", built)


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of one call, as MLX's callable takes them."""

    inputs: list[mx.array]
    template: list[tuple[str, Any]]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    output_shapes: list[tuple[int, ...]]
    output_dtypes: list[mx.Dtype]


Run = Callable[[Kernel, Call], list[mx.array]]

_INPUTS = ("q", "k", "v", "bits", "scale")
ATTEND = Kernel("ssmlx_attend", _INPUTS, ("out",), _WALK + _STORE)
ATTEND_SPLIT = Kernel(
    "ssmlx_attend_split", _INPUTS, ("partial", "largest", "total"), _WALK + _STORE_SPLIT
)
MERGE = Kernel("ssmlx_merge", ("partial", "largest", "total"), ("out",), _MERGE)


def run_on_metal(kernel: Kernel, call: Call) -> list[mx.array]:
    """Run a kernel, lazily, on the GPU."""
    return kernel.build()(**vars(call))


def pack_bits(
    visible: mx.array,  # [R, C]; keys after the first C are committed tokens, which every row sees
) -> mx.array:  # [R, W] uint32
    """Pack a mask into words: bit j of word w is set if a row sees key 32 * w + j; bits after the
    first C are set. W is C / 32 rounded up, or more, so that R * W is at least 8."""
    rows, columns = visible.shape
    words = max(ceil_div(columns, TILE_KEYS), ceil_div(_MIN_WORDS, rows))
    padded = mx.pad(
        visible, [(0, 0), (0, words * TILE_KEYS - columns)], constant_values=mx.array(True)
    )
    bits = padded.reshape(rows, words, TILE_KEYS).astype(mx.uint32)
    return (bits << indices(TILE_KEYS).astype(mx.uint32)).sum(axis=-1)


def attend(
    queries: mx.array,  # [1, H, R, Dh] of any strides
    # [1, Hkv, C + L, Dh], a slice of a cache: elements of a key side by side, the other strides and
    # the offset multiples of 4
    keys: mx.array,
    values: mx.array,  # like `keys`
    bits: mx.array,  # [R, W] uint32 of `pack_bits`
    scale: float,  # of the scores, before the softmax
    division: Division,
    run: Run | None = None,
) -> mx.array:  # [1, H, R, Dh]
    """Attend, lazily. If the division splits the keys, a second kernel merges the parts."""
    run = run or run_on_metal
    dtype, (_, num_heads, num_rows, head_size) = queries.dtype, queries.shape
    template = [("T", dtype), ("D", head_size)]
    width = LANES * division.simdgroups
    walk: dict[str, Any] = {
        "inputs": [queries, keys, values, bits, mx.array(scale, mx.float32)],
        "template": [*template, ("BLOCKS", division.blocks)],
        "grid": (width * division.row_groups, keys.shape[1], division.splits),
        "threadgroup": (width, 1, 1),
    }
    whole: dict[str, Any] = {
        "output_shapes": [(1, num_rows, num_heads, head_size)],
        "output_dtypes": [dtype],
    }
    if division.splits == 1:
        (out,) = run(ATTEND, Call(**walk, **whole))
        return out.transpose(0, 2, 1, 3)
    stats = (division.splits, num_rows, num_heads)
    shapes = [(*stats, head_size), stats, stats]
    parts = run(ATTEND_SPLIT, Call(**walk, output_shapes=shapes, output_dtypes=3 * [mx.float32]))
    grid = (LANES, num_rows * num_heads, 1)
    threadgroup = (LANES, BLOCK_ROWS, 1)
    (out,) = run(
        MERGE, Call(inputs=parts, template=template, grid=grid, threadgroup=threadgroup, **whole)
    )
    return out.transpose(0, 2, 1, 3)
