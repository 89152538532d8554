"""Which attention path a step takes on which chip, and how the fused kernel divides its work."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest

from ssmlx.model.metal.kernels import LANES
from ssmlx.model.metal.paths import bytes_read, choose_path, key_reads, mlx_path, threadgroups
from ssmlx.model.metal.plan import AttentionShape, Chip, make_plan, this_chip
from ssmlx.model.metal.switch import is_available

M1, M1_MAX, M2_ULTRA, M5 = (Chip.of(f"applegpu_g{name}") for name in ("13g", "13s", "14d", "17s"))
HALF, FULL = mx.float16, mx.float32


def shape(
    rows: int, heads: int, kv_heads: int, keys: int, head_size: int = 64, dtype: mx.Dtype = HALF
) -> AttentionShape:
    """Sizes by position, as the tables below give them."""
    return AttentionShape(
        rows=rows, heads=heads, kv_heads=kv_heads, keys=keys, head_size=head_size, dtype=dtype
    )


SMOL = {"heads": 9, "kv_heads": 3}
# (sizes, chip, MLX's path, the path that is taken), and why
TABLE = {
    "few rows, long context: read once a row": (shape(8, 9, 3, 2000), M1, "vector", "fused"),
    "few rows, short context: launches only": (shape(8, 9, 3, 300), M1, "vector", "vector"),
    "one row: nothing to share": (shape(1, 9, 3, 2000), M1, "vector", "vector"),
    "few rows, MLX splits": (shape(8, 9, 3, 4096), M1, "vector-split", "vector-split"),
    "a Max splits sooner": (shape(8, 9, 3, 1024), M1_MAX, "vector-split", "vector-split"),
    "without shared heads never on a base chip": (shape(8, 9, 9, 8192), M1, "vector", "fused"),
    "rows x heads above 32: MLX falls back": (shape(8, 28, 4, 100, 128), M1, "composed", "fused"),
    "few rows of 80: MLX falls back": (shape(6, 32, 32, 100, 80), M1, "composed", "fused"),
    "a tree, shared heads": (shape(16, 9, 3, 1000), M1, "full", "fused"),
    "a tree, short context": (shape(16, 9, 3, 200), M1, "full", "full"),
    "a tree, no shared heads, enough of them": (shape(16, 32, 32, 2000), M1, "full", "full"),
    "a tree, too few heads for an Ultra": (shape(16, 32, 32, 2000), M2_ULTRA, "full", "fused"),
    "many rows, no shared heads": (shape(100, 32, 32, 2000), M1, "full", "fused"),
    "neural accelerators": (shape(16, 32, 8, 2000, 128), M5, "full", "full"),
    "neural accelerators have no float32": (shape(16, 32, 8, 2000, 128, FULL), M5, "full", "fused"),
    "heads of 256: neither": (shape(16, 16, 8, 2000, 256), M1, "composed", "composed"),
    "heads of 192: neither": (shape(4, 16, 8, 2000, 192), M1, "composed", "composed"),
    "heads of 20: neither": (shape(16, 16, 8, 2000, 20), M1, "composed", "composed"),
    "heads of 8: MLX falls back": (shape(16, 4, 2, 40, 8), M1, "composed", "fused"),
}


@pytest.mark.parametrize(("sizes", "chip", "theirs", "taken"), TABLE.values(), ids=TABLE.keys())
def test_path_by_sizes_and_chip(sizes: AttentionShape, chip: Chip, theirs: str, taken: str) -> None:
    assert mlx_path(sizes, chip) == theirs
    assert choose_path(sizes, chip) == taken


@pytest.mark.skipif(not is_available(), reason="asks MLX's own Metal code")
@pytest.mark.parametrize("sizes", [case[0] for case in TABLE.values()], ids=TABLE.keys())
def test_mlx_has_a_kernel_where_we_think_so(sizes: AttentionShape) -> None:
    queries = mx.zeros((1, sizes.heads, sizes.rows, sizes.head_size), sizes.dtype)
    keys = mx.zeros((1, sizes.kv_heads, sizes.keys, sizes.head_size), sizes.dtype)
    mask = mx.ones((sizes.rows, sizes.keys), mx.bool_)
    try:
        mx.eval(
            mx.fast.scaled_dot_product_attention(
                queries, keys, keys, scale=1.0, mask=mask, force_fused=True
            )
        )
        has_kernel = True
    except ValueError:
        has_kernel = False
    # Of 192 and 256 MLX has kernels, which it finds slower than products.
    assert has_kernel == (mlx_path(sizes, this_chip()) != "composed" or sizes.head_size > 128)


@pytest.mark.parametrize("chip", [M1, M1_MAX, M2_ULTRA, M5], ids=str)
def test_plan_covers_every_row_within_a_threadgroups_limits(chip: Chip) -> None:
    rng = random.Random(0)
    for _ in range(300):
        kv_heads = rng.randint(1, 8)
        sizes = shape(
            rng.randint(1, 200),
            kv_heads * rng.randint(1, 8),
            kv_heads,
            rng.randint(200, 20000),
            rng.choice([8, 64, 80, 96, 128]),
        )
        plan = make_plan(sizes, chip)
        held = 8 * plan.blocks * plan.simdgroups
        assert held * (plan.row_groups - 1) < sizes.queries <= held * plan.row_groups
        assert LANES * plan.simdgroups <= 256
        assert plan.blocks == 1 or sizes.head_size <= 80
        assert 1 <= plan.splits <= sizes.keys // 128 + 1
        registers = plan.blocks * sizes.head_size // 2 + 8 * plan.blocks
        assert registers < 100  # query, output and scores, of 128 that a thread has


def test_keys_are_read_once_up_to_128_rows() -> None:
    assert key_reads(shape(42, 9, 3, 4000), "fused", M1) == 1
    assert key_reads(shape(43, 9, 3, 4000), "fused", M1) == 2
    assert key_reads(shape(16, 32, 8, 4000, 128), "fused", M1) == 1


def test_longer_contexts_and_larger_chips_split_more() -> None:
    splits = [make_plan(shape(16, 9, 3, keys), M1).splits for keys in (100, 500, 1000, 4000, 40000)]
    assert splits == sorted(splits) == [1, 3, 7, 14, 14]
    chips = [make_plan(shape(16, 9, 3, 8000), chip).splits for chip in (M1, M1_MAX, M2_ULTRA)]
    assert chips == [14, 27, 32]


def test_bytes_read_by_hand() -> None:
    """16 rows of 9 heads on 3 key/value heads, 1,000 keys of 64 in 16 bits, on an M1."""
    sizes, keys = shape(16, 9, 3, 1000), 2 * 3 * 1000 * 64 * 2
    assert bytes_read(sizes, "full", M1) == 3 * keys + 16 * 9 * 1000
    partial = 7 * 16 * 9 * (64 + 2) * 4
    assert make_plan(sizes, M1).splits == 7
    assert bytes_read(sizes, "fused", M1) == keys + 16 * 9 * 4 + 2 * partial
    few = shape(8, 9, 3, 1000)
    assert bytes_read(few, "vector", M1) == 8 * 3 * keys + 8 * 9 * 1000
    assert bytes_read(few, "vector-split", M1) == keys + 8 * 9 * (1000 + 2 * 64 * (64 * 2 + 8))
    assert bytes_read(few, "composed", M1) == 3 * keys + 8 * 9 * 1000 * 13


@pytest.mark.parametrize("keys", [500, 2000, 8000])
def test_fused_reads_least_of_all_where_it_is_taken(keys: int) -> None:
    for rows, heads, kv_heads in ((8, 9, 3), (16, 9, 3), (32, 32, 8), (100, 9, 3)):
        sizes = shape(rows, heads, kv_heads, keys)
        if choose_path(sizes, M1) == "fused":
            assert bytes_read(sizes, "fused", M1) < bytes_read(sizes, mlx_path(sizes, M1), M1)


def test_threadgroups_that_a_gpu_gets() -> None:
    sizes = shape(16, 9, 3, 4000)
    assert threadgroups(sizes, "full", M1) == 9
    assert threadgroups(sizes, "fused", M1) == 3 * 14
    assert threadgroups(shape(8, 9, 3, 4000), "vector", M1) == 72
    assert threadgroups(shape(8, 9, 3, 5000), "vector-split", M1) == 3 * 64


def test_chips_by_metals_names() -> None:
    assert (M1.generation, M1.size, M1.is_large) == (13, "g", False)
    assert M1_MAX.is_large and M2_ULTRA.is_large
    assert M5.has_neural_accelerators and not M2_ULTRA.has_neural_accelerators
    assert not Chip.of("applegpu_g17p").has_neural_accelerators
    assert Chip.of("something else") == M1


@pytest.mark.parametrize("sizes", [(0, 9, 3, 10), (4, 9, 2, 10), (4, 9, 3, 0)])
def test_sizes_that_are_no_attention(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="no attention"):
        shape(*sizes)
