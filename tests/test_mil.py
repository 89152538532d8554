"""The MIL interpreter of the export's tests: its operations against coremltools and PyTorch."""

from __future__ import annotations

import logging
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ct = pytest.importorskip("coremltools", exc_type=ImportError)
from coremltools.converters.mil.mil import Builder, Function
from mil.operations import OPERATIONS, run
from torch.nn import functional

pytestmark = pytest.mark.slow
logging.getLogger("coremltools").setLevel(logging.ERROR)
RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def ints(*values) -> np.ndarray:
    return np.array(values, np.int32)


X, Y, POSITIVE = floats(2, 3, 4), floats(3, 4), np.abs(floats(2, 3)) + 0.1
COUNTS = RNG.integers(-4, 5, (2, 3), np.int32)
CUTS = {"begin": ints(1, -3, 0), "end": ints(2, 3, -1)}
FLAGS = {"begin_mask": [False, True, False], "end_mask": [False, True, False]}
FOLDED = [
    *(("abs", {"x": x}) for x in (X, COUNTS)),
    *((name, {"x": X, "y": Y}) for name in ("add", "minimum", "mul", "real_div", "sub")),
    *((name, {"x": COUNTS, "y": COUNTS.T.reshape(2, 3)}) for name in ("add", "equal", "less")),
    *((name, {"x": X, "y": Y}) for name in ("greater", "greater_equal")),
    *(("cast", {"x": 3 * X, "dtype": dtype}) for dtype in ("int32", "fp16")),
    ("clip", {"x": X, "alpha": -0.5, "beta": 0.75}),
    ("concat", {"values": (X, -X), "axis": 1, "interleave": False}),
    ("exp", {"x": X}),
    ("expand_dims", {"x": Y, "axes": ints(0, 3)}),
    ("gather", {"x": X, "indices": ints([2, 0], [1, 1]), "axis": 1}),
    ("gather_along_axis", {"x": X, "indices": RNG.integers(0, 3, (2, 2, 4), np.int32), "axis": 1}),
    ("gelu", {"x": X, "mode": "EXACT"}),
    ("gelu", {"x": X, "mode": "TANH_APPROXIMATION"}),
    *((name, {"x": POSITIVE, "epsilon": 1e-3}) for name in ("inverse", "log", "rsqrt")),
    ("layer_norm", {"x": X, "axes": ints(-1), "gamma": Y[0], "beta": Y[1], "epsilon": 1e-3}),
    ("linear", {"x": X, "weight": floats(5, 4), "bias": floats(5)}),
    ("logical_not", {"x": X > 0}),
    ("logical_or", {"x": X > 0, "y": X < 0.5}),
    ("matmul", {"x": X, "y": floats(2, 4, 5)}),
    ("matmul", {"x": X, "y": floats(5, 4), "transpose_y": True}),
    ("pow", {"x": POSITIVE, "y": np.float32(2)}),
    *(
        (f"reduce_{name}", {"x": X, "axes": ints(0, 2), "keep_dims": keep})
        for name in ("max", "mean", "sum")
        for keep in (True, False)
    ),
    ("reduce_argmax", {"x": X, "axis": 1, "keep_dims": False}),
    ("relu", {"x": X}),
    ("reshape", {"x": X, "shape": ints(4, -1)}),
    ("scatter_along_axis", {"data": X, "indices": ints([[2, 0]], [[1, 1]]).reshape(2, 2, 1)
                            .repeat(4, 2), "updates": floats(2, 2, 4), "axis": 1,
                            "mode": "update"}),
    ("select", {"cond": X > 0, "a": X, "b": -X}),
    ("slice_by_index", {"x": X, **CUTS, "squeeze_mask": [True, False, False]}),
    ("slice_by_index", {"x": X, **CUTS, **FLAGS, "stride": ints(1, 2, 2)}),
    ("softmax", {"x": X, "axis": 1}),
    ("split", {"x": X, "axis": 2, "num_splits": 2}),
    ("split", {"x": X, "axis": 1, "split_sizes": ints(1, 2)}),
    ("stack", {"values": (Y, -Y), "axis": 1}),
    ("tile", {"x": Y, "reps": ints(2, 1)}),
    ("topk", {"x": X, "k": 2, "axis": -1}),
    ("transpose", {"x": X, "perm": ints(2, 0, 1)}),
]  # fmt: skip


def as_tuple(found):
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def check(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        mine, theirs = np.asarray(mine), np.asarray(theirs)
        assert mine.shape == theirs.shape and mine.dtype.kind == theirs.dtype.kind
        np.testing.assert_allclose(mine, theirs, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("name", "inputs"), FOLDED, ids=[name for name, _ in FOLDED])
def test_an_operation_gives_what_coremltools_folds(name, inputs):
    with Function({}, opset_version=ct.target.iOS18), np.errstate(all="ignore"):
        (*made,) = as_tuple(getattr(Builder, name)(**inputs))
    assert all(var.val is not None for var in made)
    check(run(name, inputs), [var.val for var in made])


def torch_attention(query, key, value, attn_mask):
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask)


IN_TORCH = [
    ("silu", functional.silu, (X,)),
    ("conv", functional.conv2d, (floats(1, 3, 2, 4), floats(5, 3, 1, 1), floats(5))),
    ("scaled_dot_product_attention", torch_attention,
     (floats(1, 2, 5, 4), floats(1, 2, 7, 4), floats(1, 2, 7, 4), floats(1, 1, 5, 7))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "function", "arrays"), IN_TORCH, ids=["silu", "conv", "attention"]
)
def test_an_operation_gives_what_pytorch_gives(name, function, arrays):
    found = OPERATIONS[name](*arrays)
    check([found], [function(*map(torch.from_numpy, arrays))])


def test_every_operation_is_compared():
    compared = {name for name, *_ in (*FOLDED, *IN_TORCH)}
    packed = {"constexpr_blockwise_shift_scale", "constexpr_lut_to_dense"}
    assert compared | packed == set(OPERATIONS)


@pytest.mark.parametrize("shape", [(8, 1), (2, 3), (8, 6), (1, 1)])
def test_blocks_have_a_scale_each(shape):
    data = RNG.integers(-8, 8, (8, 6)).astype(np.int8)
    scale = np.abs(floats(*shape)) + 0.1
    with Function({}, opset_version=ct.target.iOS18):
        made = Builder.constexpr_blockwise_shift_scale(data=data, scale=scale)
    expected = made.op.materialized_val_inference()
    check(run("constexpr_blockwise_shift_scale", {"data": data, "scale": scale}), [expected])


def test_tables_belong_to_their_group():
    indices = np.array([2, 3, 3, 0, 1, 0, 3, 0, 2, 1, 0, 3], np.uint8).reshape(6, 2)
    table = np.array([1, 5, 9, 13, 2, 10, 18, 26], np.float32).reshape(2, 1, 4, 1)
    (dense,) = run("constexpr_lut_to_dense", {"indices": indices, "lut": table})
    assert dense.tolist() == [[9, 13], [13, 1], [5, 1], [26, 2], [18, 10], [2, 26]]


@pytest.mark.parametrize(
    ("name", "inputs", "found"),
    [
        ("cast", {"x": ints(-1), "dtype": "uint16"}, "casts -1"),
        ("cast", {"x": np.float32([np.nan]), "dtype": "int32"}, "casts nan"),
        ("topk", {"x": X, "k": 5}, "the 5 largest of 4"),
        ("gather", {"x": X, "indices": ints(-1), "axis": 0}, "indices -1"),
        ("gather_along_axis", {"x": X, "indices": ints([[2]]), "axis": 0}, "into 2 elements"),
        ("conv", {"x": X, "weight": floats(5, 3, 2, 2)}, "kernels of one element"),
        ("constexpr_blockwise_shift_scale", {"data": X, "scale": floats(1, 2, 1)}, "blocks"),
    ],
)
def test_what_an_operation_cannot_do_is_an_error(name, inputs, found):
    with np.errstate(all="ignore"), pytest.raises(ValueError, match=found):
        run(name, inputs)
    with pytest.raises(NotImplementedError, match="fold of x"):
        run("fold", {"x": X})
