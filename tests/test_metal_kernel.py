"""The fused attention kernel's meaning: MLX's own generated source, run on the CPU."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from metal import shim
from metal.cases import Case, error_of, error_on_metal, make_data, mlx_inputs, run_case
from metal.lint import complaints

from ssmlx.model.metal.kernels import FUNCTIONS, Call, Kernel, attend
from ssmlx.model.metal.mask import pack_bits
from ssmlx.model.metal.plan import DTYPES, Plan
from ssmlx.model.metal.switch import is_available

needs_compiler = pytest.mark.skipif(shim.COMPILER is None, reason=shim.NO_COMPILER)


@pytest.fixture(scope="session")
def programs(request: pytest.FixtureRequest) -> Path:
    """Where compiled kernels are kept, by the hash of their text."""
    return Path(request.config.cache.mkdir("metal"))


CASES = {
    "a tree": Case(),
    "one row": Case(rows=1, committed=40, heads=2),
    "no committed tokens": Case(rows=21, committed=0),
    "one key": Case(rows=1, committed=0, heads=1, kv_heads=1),
    "a whole number of tiles": Case(rows=32, committed=96),
    "one key into a tile": Case(rows=32, committed=97),
    "a tile and a key of rows": Case(rows=33, committed=31, heads=3, kv_heads=3),
    "columns without rows": Case(rows=4, extra=9, committed=50, heads=4),
    "a chain": Case(rows=40, density=1.0),
    "only itself": Case(rows=70, committed=0, density=0.0),
    "streams: most tiles unseen": Case(rows=200, committed=33, heads=3, kv_heads=1, density=0.02),
    "split keys": Case(rows=24, committed=300, splits=3),
    "more splits than a row sees": Case(rows=70, committed=5, density=0.0, splits=3),
    "as many splits as tiles": Case(rows=8, committed=120, splits=4),
    "several threadgroups of rows": Case(rows=30, heads=8, kv_heads=1, head_size=128),
    "two blocks a simdgroup": Case(rows=40, heads=4, kv_heads=2, head_size=64),
    "eight heads a key/value head": Case(rows=5, heads=8, kv_heads=1),
    "heads of 80": Case(head_size=80),
    "heads of 96": Case(head_size=96),
    "heads of 8": Case(head_size=8, rows=5),
    "half precision": Case(dtype=mx.float16),
    "half precision, split": Case(dtype=mx.float16, committed=300, splits=2),
    "half precision, two blocks of 80": Case(dtype=mx.float16, rows=30, head_size=80),
    "bfloat16": Case(dtype=mx.bfloat16, head_size=128),
    "bfloat16, split": Case(dtype=mx.bfloat16, head_size=128, committed=260, splits=2),
}


@needs_compiler
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernel_agrees_with_float64(case: Case, programs: Path) -> None:
    assert error_of(case, programs) < 1


@pytest.mark.skipif(not is_available(), reason="needs a Mac: an Apple GPU and Metal")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernel_agrees_with_float64_on_a_gpu(case: Case) -> None:
    assert error_on_metal(case) < 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_is_given_the_same_inputs(dtype: mx.Dtype) -> None:
    case = Case(dtype=dtype, extra=3)
    data = make_data(case)
    for ours, theirs in zip(mlx_inputs(case), (data.queries, data.keys, data.values), strict=True):
        np.testing.assert_array_equal(shim.to_numpy(ours), theirs)


@needs_compiler
@pytest.mark.parametrize("order", range(1, 6))
def test_kernel_does_not_depend_on_which_threads_run_first(order: int, programs: Path) -> None:
    case = Case(rows=24, committed=150, splits=2, density=0.1)
    first = run_case(case, programs)
    np.testing.assert_array_equal(run_case(replace(case, order=order), programs), first)


@needs_compiler
@pytest.mark.parametrize("seed", range(12))
def test_kernel_agrees_on_random_sizes(seed: int, programs: Path) -> None:
    rng = np.random.default_rng(seed)
    kv_heads = int(rng.integers(1, 4))
    case = Case(
        rows=int(rng.integers(1, 80)),
        extra=int(rng.integers(0, 20)),
        committed=int(rng.integers(0, 400)),
        heads=kv_heads * int(rng.integers(1, 5)),
        kv_heads=kv_heads,
        density=float(rng.random()),
        splits=int(rng.integers(1, 4)),
        order=seed,
        seed=seed,
    )
    assert error_of(case, programs) < 1


@needs_compiler
@pytest.mark.parametrize(
    "case",
    [
        Case(rows=33, committed=31, heads=3, kv_heads=3, order=1),
        Case(rows=24, extra=3, committed=100, splits=2, dtype=mx.float16, order=2),
    ],
    ids=["whole", "split"],
)
def test_kernel_stays_within_its_buffers(case: Case, programs: Path) -> None:
    assert error_of(case, programs, flags=shim.SANITISE) < 1


MUTATIONS = {
    "no barrier before the scores": (
        "copy_tile<T, D>(keys, mask.num_keys, tile, copy);\n"
        "    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);",
        "copy_tile<T, D>(keys, mask.num_keys, tile, copy);",
    ),
    "no barrier before the values are copied": (
        "metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);\n"
        "    copy_tile<T, D>(values",
        "copy_tile<T, D>(values",
    ),
    "no barrier after the values": (
        "metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);\n  }\n}",
        "}\n}",
    ),
    "a barrier that not all simdgroups reach": (
        "add_values<T, D, BLOCKS>(rows, copy.tile, place, weights);",
        "add_values<T, D, BLOCKS>(rows, copy.tile, place, weights);"
        "metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);",
    ),
    "a mask shifted by one key": ("const uint pair = seen >> (", "const uint pair = seen >> (1 + "),
    "a mask of the next tile": ("row * mask.words + tile]", "row * mask.words + tile + 1]"),
    "a mask of the wrong row": ("rows.row = exists ? index % num_rows", "rows.row = exists ? 0"),
    "committed tokens unseen": (": ~0u;", ": 0u;"),
    "keys beyond the last": ("left < TILE ? seen", "left < 0 ? seen"),
    "no rescaling of the output": ("rows.output[f] *= shrink;", ""),
    "no rescaling of the sum": ("rows.total * shrink +", "rows.total +"),
    "sums of half a row": ("return value + metal::simd_shuffle_xor(value, 8);", "return value;"),
    "lanes of another row": ("simd_shuffle_xor(value, 8)", "simd_shuffle_xor(value, 16)"),
    "a collective that one lane skips": (
        "largest = row_max(largest);",
        "if (place.column) { largest = row_max(largest); }",
    ),
    "keys not transposed": (
        "const int key = c * FRAGMENT + place.column, element = f * FRAGMENT + place.row;",
        "const int key = c * FRAGMENT + place.row, element = f * FRAGMENT + place.column;",
    ),
    "exp for exp2": ("scale * LOG2_E", "scale"),
    "the wrong query head": ("first_head + (exists ? index / num_rows", "first_head + (exists ? 0"),
    "the stride of dense keys": ("{k + kv_head * k_strides[1],", "{k + kv_head * D * k_shape[2],"),
    "the offset of values for keys": ("v + kv_head * v_strides[1]", "k + kv_head * k_strides[1]"),
    "too much threadgroup memory": ("copied[TILE *", "copied[4 * TILE *"),
    "a half-filled tile": ("i < TILE * CHUNKS", "i < TILE * CHUNKS - 1"),
}
SPLIT_MUTATIONS = {
    "a tile too many for the first split": ("num_tiles * (split + 1) / num_splits", "num_tiles"),
    "a split without its maximum": ("exp2(largest[at] - highest)", "exp2(0.0f)"),
    "sums of the first split alone": ("total[at] * metal::fast", "total[index] * metal::fast"),
}
# Some simdgroups see nothing of the second tile.
BROKEN = Case(rows=70, committed=50, heads=4, density=0.01)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "splits"),
    [*((name, 1) for name in MUTATIONS), *((name, 2) for name in SPLIT_MUTATIONS)],
)
def test_a_broken_kernel_is_caught(name: str, splits: int, programs: Path) -> None:
    old, new = {**MUTATIONS, **SPLIT_MUTATIONS}[name]
    changed = []

    def change(source: str) -> str:
        changed.append(old in source)
        return source.replace(old, new)

    def survives(order: int) -> bool:
        try:
            case = replace(BROKEN, order=order, splits=splits)
            return error_of(case, programs, change=change) < 1
        except shim.KernelFailedError:
            return False

    assert not all(survives(order) for order in (0, 1))
    assert any(changed), "the mutation does not apply any more"


@needs_compiler
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("mask.bits[row *", "mask.bits[1000 + row *", "heap-buffer-overflow"),
        ("if (key < num_keys) {", "if (true) {", "heap-buffer-overflow"),
        ("copy.tile + in_tile *", "copy.tile + 2 + in_tile *", "misaligned address"),
        ("copy.tile + in_tile *", "copy.tile + 64 + in_tile *", "use-after-poison"),
    ],
    ids=["mask", "keys", "alignment", "threadgroup memory"],
)
def test_an_access_out_of_bounds_is_caught(
    old: str, new: str, message: str, programs: Path
) -> None:
    case = Case(rows=8, committed=1200, heads=1, kv_heads=1, splits=1)
    with pytest.raises(shim.KernelFailedError, match=message):
        run_case(
            case, programs, flags=shim.SANITISE, change=lambda source: source.replace(old, new)
        )


class Recorder:
    """Takes the place of Metal: keeps the sources that MLX generates, and gives zeros."""

    def __init__(self) -> None:
        self.sources: list[str] = []

    def __call__(self, kernel: Kernel, call: Call) -> list[mx.array]:
        self.sources.append(shim.generated_source(kernel, call))
        pairs = zip(call.output_shapes, call.output_dtypes, strict=True)
        return [mx.zeros(shape, dtype) for shape, dtype in pairs]


def generated(dtype: mx.Dtype = mx.float16, blocks: int = 1) -> list[str]:
    """The sources of all three kernels."""
    record = Recorder()
    queries, keys = mx.zeros((1, 4, 9, 64), dtype), mx.zeros((1, 2, 40, 64), dtype)
    for splits in (1, 2):
        plan = Plan(blocks=blocks, simdgroups=3, row_groups=1, splits=splits)
        attend(queries, keys, keys, mx.zeros((9, 2), mx.uint32), 1.0, plan, record)
    return record.sources


def test_source_comes_from_mlx_with_the_strides_of_the_cache() -> None:
    whole, split, merge = generated()
    for source in (whole, split, merge):
        assert FUNCTIONS.read_text() in source
        assert "[[kernel]] void custom_kernel_ssmlx_" in source
    named = {b.name: (b.space, b.type) for b in shim.buffers_of(whole)}
    assert named["k"] == named["v"] == named["q"] == ("device", "float16_t")
    assert named["bits"] == ("device", "uint32_t")
    assert named["k_strides"] == ("constant", "int64_t")
    assert [b.name for b in shim.buffers_of(split)][-3:] == ["partial", "largest", "total"]
    assert [b.name for b in shim.buffers_of(merge)][-1] == "out"


def test_row_number_and_context_need_no_new_source() -> None:
    """MLX compiles a source once: nothing that changes from step to step may be in it."""
    record = Recorder()
    for rows, num_keys in ((1, 9), (2, 2), (7, 100), (24, 1000)):
        queries, keys = mx.zeros((1, 3, rows, 64)), mx.zeros((1, 1, num_keys, 64))
        bits = pack_bits(mx.ones((rows, rows), mx.bool_))
        plan = Plan(blocks=1, simdgroups=-(-3 * rows // 8), row_groups=1, splits=1)
        attend(queries, keys, keys, bits, 1.0, plan, record)
    assert len(set(record.sources)) == 1


@needs_compiler
@pytest.mark.parametrize("blocks", [1, 2])
def test_compiler_has_no_complaints(blocks: int, programs: Path) -> None:
    for source in generated(blocks=blocks):
        assert shim.build(source, programs).warnings == ""


needs_clang = pytest.mark.skipif(find_spec("clang") is None, reason="no package libclang")


@needs_clang
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_clang_has_no_complaints_with_address_spaces(dtype: mx.Dtype, tmp_path: Path) -> None:
    for source in generated(dtype, blocks=2):
        assert complaints(source, tmp_path) == []


@needs_clang
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("threadgroup T* target", "device T* target", "cannot initialize"),
        ("const device T* source = ", "device T* source = ", "cannot initialize"),
        ("const threadgroup T* at", "const T* at", "cannot initialize"),
        ("metal::fast::exp2(", "metal::fast::exp3(", "no member named 'exp3'"),
        ("float sum = 0;", "int sum = 0;", "implicit conversion"),
    ],
    ids=["space", "const", "no space", "unknown", "rounding"],
)
def test_lint_can_fail(old: str, new: str, message: str, tmp_path: Path) -> None:
    (source, *_) = generated()
    assert any(message in found for found in complaints(source.replace(old, new), tmp_path))
