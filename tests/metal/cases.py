"""Attentions of a step, laid out as the cache lays them out, and what they must give in float64."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ssmlx.model.metal.division import AttentionShape, Chip, Division, divide_attention
from ssmlx.model.metal.kernels import attend, pack_bits

from .shim import Shim, to_mlx, to_numpy

ROOM = 5
BASE_CHIP = Chip.of("applegpu_g13g")
# Scores reach some 20 here, whose rounding in float32 changes exp2 by a few 1e-6. The other types
# are rounded once, when the output is written.
TOLERANCES = {mx.float32: 1e-5, mx.float16: 1e-3, mx.bfloat16: 1e-2}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention.

    Attributes:
        rows, committed, heads, kv_heads, head_size, dtype: its sizes.
        extra: columns that are seen but have no row: C - R.
        splits: parts of the keys; None takes the division's.
        density: chance that a row sees another row of the step.
        order: which threads run first.
        seed: of everything random.
    """

    rows: int = 16
    committed: int = 100
    heads: int = 6
    kv_heads: int = 2
    head_size: int = 64
    dtype: mx.Dtype = mx.float32
    extra: int = 0
    splits: int | None = None
    density: float = 0.3
    order: int = 0
    seed: int = 0

    @property
    def keys(self) -> int:
        """C + L."""
        return self.rows + self.extra + self.committed

    @property
    def division(self) -> Division:
        """The division of a base chip, but for `splits`."""
        shape = AttentionShape(
            rows=self.rows,
            heads=self.heads,
            kv_heads=self.kv_heads,
            keys=self.keys,
            head_size=self.head_size,
            dtype=self.dtype,
        )
        division = divide_attention(shape, BASE_CHIP)
        return replace(division, splits=self.splits or division.splits)


@dataclass(frozen=True)
class Data:
    """The inputs of a case.

    Attributes:
        queries: [1, H, R, Dh] raw, a view with the rows outermost, as after the rotary embedding.
        keys, values: [1, Hkv, C + L, Dh] raw views of one buffer that is NaN everywhere else.
        visible: [R, C] bool; every row sees itself.
        scale: of the scores.
    """

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    visible: np.ndarray
    scale: float


def make_data(case: Case) -> Data:
    """Random inputs; the cache has spare rows before and behind those in use."""
    rng = np.random.default_rng(case.seed)
    size = (2, case.kv_heads, case.keys + 2 * ROOM, case.head_size)
    buffer = rng.normal(size=size).astype(np.float32)
    used = slice(ROOM, ROOM + case.keys)
    unused = np.full_like(buffer, np.nan)
    unused[:, :, used] = buffer[:, :, used]
    cache = _raw(unused, case.dtype)
    # Large scores too: softmax must not overflow.
    rows = 3 * rng.normal(size=(case.rows, case.heads, case.head_size)).astype(np.float32)
    queries = _raw(rows, case.dtype).transpose(1, 0, 2)[None]
    visible = rng.random((case.rows, case.rows + case.extra)) < case.density
    visible[np.arange(case.rows), np.arange(case.rows)] = True
    return Data(queries, cache[:1, :, used], cache[1:, :, used], visible, case.head_size**-0.5)


def _raw(array: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    return to_numpy(mx.array(array).astype(dtype))


def _float64(raw: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    dense = to_mlx(np.ascontiguousarray(raw), dtype)
    return np.array(dense.astype(mx.float32)).astype(np.float64)


def reference(case: Case, data: Data) -> np.ndarray:
    """[1, H, R, Dh] in float64, by a matrix mask."""
    queries, keys, values = (
        _float64(raw, case.dtype) for raw in (data.queries, data.keys, data.values)
    )
    group = case.heads // case.kv_heads
    keys = np.repeat(keys, group, axis=1)
    values = np.repeat(values, group, axis=1)
    mask = np.ones((case.rows, case.keys), bool)
    mask[:, : case.rows + case.extra] = data.visible
    scores = np.where(mask, data.scale * queries @ keys.swapaxes(2, 3), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ values


def mlx_inputs(case: Case) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values as MLX's arrays, views of the same buffers."""
    data = make_data(case)
    assert data.queries.base is not None and data.keys.base is not None
    rows, cache = (to_mlx(a.base, case.dtype) for a in (data.queries, data.keys))
    used = slice(ROOM, ROOM + case.keys)
    return rows.transpose(1, 0, 2)[None], cache[:1, :, used], cache[1:, :, used]


def error_on_metal(case: Case) -> float:
    """What `error_of` gives, of a real GPU."""
    data = make_data(case)
    bits = pack_bits(mx.array(data.visible))
    out = attend(*mlx_inputs(case), bits, data.scale, case.division)
    return _in_tolerances(np.array(out.astype(mx.float32)), reference(case, data), case)


def _in_tolerances(found: np.ndarray, expected: np.ndarray, case: Case) -> float:
    assert found.shape == expected.shape
    gap = np.abs(found - expected).max() / TOLERANCES[case.dtype]
    return float(gap) if np.isfinite(gap) else np.inf


def run_case(case: Case, folder: Path, **options: Any) -> np.ndarray:
    """[1, H, R, Dh] what the kernels give for a case, in float64."""
    data = make_data(case)
    dense = [
        to_mlx(np.ascontiguousarray(raw), case.dtype)
        for raw in (data.queries, data.keys, data.values)
    ]
    strided = {"q": data.queries, "k": data.keys, "v": data.values}
    shim = Shim(folder, order=case.order, strided=strided, **options)
    bits = pack_bits(mx.array(data.visible))
    out = attend(*dense, bits, data.scale, case.division, shim)
    return np.array(out.astype(mx.float32)).astype(np.float64)


def error_of(case: Case, folder: Path, **options: Any) -> float:
    """Largest error of a case, in units of its type's tolerance; infinite for NaN."""
    found = run_case(case, folder, **options)
    return _in_tolerances(found, reference(case, make_data(case)), case)
