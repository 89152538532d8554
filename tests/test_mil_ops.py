"""Each operation of the MIL interpreter against PyTorch, and against coremltools' own folding."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from mil_cases import CASES, COUNTS, FEW, Case, X, floats, ints

from convert.mil.arithmetic import Arithmetic
from convert.mil.ops import OPERATIONS
from convert.mil.values import DTYPES, TensorType

DECLARED = Arithmetic("declared")


def tensors(inputs: dict[str, Any]) -> dict[str, Any]:
    """The arrays that PyTorch's side of a case takes: values, not settings."""
    names = (
        "x",
        "y",
        "cond",
        "a",
        "b",
        "gamma",
        "beta",
        "weight",
        "bias",
        "values",
        "query",
        "key",
        "value",
        "attn_mask",
        "update",
        "indices",
        "data",
        "updates",
    )
    taken = {name: value for name, value in inputs.items() if name in names}
    return {
        name: [torch.from_numpy(part) for part in value]
        if isinstance(value, list)
        else torch.from_numpy(value)
        for name, value in taken.items()
        if isinstance(value, (np.ndarray, list))
    }


def check(given: Any, expected: Any) -> None:
    """That two results are of one shape and equal, to what float32 rounds."""
    given = given if isinstance(given, tuple) else (given,)
    expected = expected if isinstance(expected, (tuple, list)) else (expected,)
    for mine, theirs in zip(given, expected, strict=True):
        mine, theirs = np.asarray(mine), np.asarray(theirs)
        assert mine.shape == theirs.shape
        assert mine.dtype.kind == theirs.dtype.kind
        np.testing.assert_allclose(mine, theirs, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("one", CASES, ids=str)
def test_an_operation_gives_what_pytorch_gives(one):
    before = {n: v.copy() for n, v in one.inputs.items() if isinstance(v, np.ndarray)}
    given = OPERATIONS[one.name].call(**one.inputs)
    values = tensors(one.inputs)
    if set(values) == {"values"}:
        check(given, one.torch(values["values"]))
    else:
        check(given, one.torch(*values.values()))
    for name, value in before.items():
        np.testing.assert_array_equal(one.inputs[name], value)


def folded(one: Case) -> tuple[np.ndarray, ...]:
    """What coremltools makes of an operation on constants."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ct = pytest.importorskip("coremltools")
    from coremltools.converters.mil.mil import Builder, Function

    logging.getLogger("coremltools").setLevel(logging.ERROR)
    inputs = {n: tuple(v) if isinstance(v, list) else v for n, v in one.inputs.items()}
    with Function({}, opset_version=ct.target.iOS18), np.errstate(all="ignore"):
        made = getattr(Builder, one.name)(**inputs)
    return tuple(v.val for v in (made if isinstance(made, (tuple, list)) else (made,)))


@pytest.mark.parametrize("one", [one for one in CASES if one.inferred], ids=str)
def test_an_operation_gives_what_coremltools_folds(one):
    check(OPERATIONS[one.name].call(**one.inputs), folded(one))


def test_every_operation_is_compared():
    compared = {one.name for one in CASES}
    assert compared | {
        "constexpr_blockwise_shift_scale",
        "constexpr_lut_to_dense",
        "constexpr_cast",
    } == set(OPERATIONS)


def test_tables_hold_vectors_along_an_axis():
    indices = np.array([[[0, 0], [1, 0]], [[1, 1], [0, 0]]], np.uint8)
    table = np.array([[1, 2, 3], [4, 5, 6]], np.float32).reshape(1, 1, 1, 2, 3)
    call = OPERATIONS["constexpr_lut_to_dense"].call
    # The two examples of the operation's documentation.
    down = call(indices, table, vector_axis=np.int32(1))
    assert down[0].T.tolist() == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 1, 2, 3]]
    across = call(indices, table, vector_axis=np.int32(-1))
    assert across[0].tolist() == [[1, 2, 3, 1, 2, 3], [4, 5, 6, 1, 2, 3]]
    with pytest.raises(ValueError, match="vectors of 3"):
        call(indices, table)


def test_tables_belong_to_their_group():
    indices = np.array([2, 3, 3, 0, 1, 0, 3, 0, 2, 1, 0, 3], np.uint8).reshape(6, 2)
    table = np.array([1, 5, 9, 13, 2, 10, 18, 26], np.float32).reshape(2, 1, 4, 1)
    dense = OPERATIONS["constexpr_lut_to_dense"].call(indices, table)
    assert dense.tolist() == [[9, 13], [13, 1], [5, 1], [26, 2], [18, 10], [2, 26]]


@pytest.mark.parametrize(
    ("name", "inputs", "found"),
    [
        ("add", {"x": X, "y": COUNTS}, "one type"),
        ("real_div", {"x": COUNTS, "y": FEW}, "floor_div"),
        ("cast", {"x": ints(70000), "dtype": "uint16"}, "70000"),
        ("cast", {"x": np.float32([np.nan]), "dtype": "int32"}, "nan"),
        ("topk", {"x": X, "k": 5}, "takes 5 of 4"),
        ("gather", {"x": X, "indices": ints(-1)}, "indices -1"),
        ("gather_along_axis", {"x": X, "indices": ints([[2]]), "axis": 0}, "into 2 elements"),
        ("gather_nd", {"x": X, "indices": ints([0, 3])}, "into 3 elements"),
        ("scatter", {"data": X, "indices": ints(2), "updates": X[:1]}, "into 2 elements"),
        ("scatter", {"data": X, "indices": ints(1), "updates": X[:1], "mode": "xor"}, "mode xor"),
        ("scatter_nd", {"data": X, "indices": ints([1]), "updates": X[0, 0]}, "puts"),
        (
            "slice_update",
            {"x": X, "update": X[:1], "begin": ints(0, 0, 0), "end": ints(2, 3, 4)},
            "puts",
        ),
        ("conv", {"x": X, "weight": floats(5, 3, 2)}, "kernels of one element"),
        ("conv", {"x": X, "weight": floats(5, 3, 1), "strides": ints(2)}, "kernels of one element"),
        ("gelu", {"x": X, "mode": "ROUGH"}, "mode ROUGH"),
        ("pad", {"x": X, "pad": ints(1, 1), "mode": "wrap"}, "mode wrap"),
        ("constexpr_blockwise_shift_scale", {"data": X, "scale": floats(1, 2, 1)}, "blocks"),
        ("constexpr_cast", {"source_val": X, "output_dtype": "fp16"}, "fp32 alone"),
    ],
)
def test_what_an_operation_cannot_do_is_an_error(name, inputs, found):
    with pytest.raises(ValueError, match=found):
        OPERATIONS[name].call(**inputs)


@pytest.mark.parametrize("name", ["add", "mul", "real_div", "sub"])
def test_halves_are_rounded_once_as_numpy_rounds_them(name):
    x, y = floats(500).astype(np.float16), floats(500).astype(np.float16)
    kind = TensorType(DTYPES[10], (500,))
    wide = OPERATIONS[name].call(DECLARED.carry(x), DECLARED.carry(y))
    ufunc = {"add": np.add, "mul": np.multiply, "real_div": np.divide, "sub": np.subtract}[name]
    np.testing.assert_array_equal(DECLARED.settle(wide, kind), ufunc(x, y))
