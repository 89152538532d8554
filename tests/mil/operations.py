"""MIL's operations in numpy, by MIL's names and parameters: those that our exports use.

Floats come as float32. What an operation cannot do as MIL defines it is a ValueError.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray
NUMPY = {"fp16": "float16", "fp32": "float32"}
"""numpy's names of MIL's types, where they differ."""

OPERATIONS: dict[str, Callable[..., Any]] = {
    "abs": lambda x: np.abs(x),
    "add": lambda x, y: x + y,
    "clip": lambda x, alpha, beta: np.clip(x, alpha, beta),
    "concat": lambda values, axis, interleave: np.concatenate(values, int(axis)),
    "equal": lambda x, y: x == y,
    "exp": lambda x: np.exp(x),
    "expand_dims": lambda x, axes: np.expand_dims(x, tuple(axes)),
    "greater": lambda x, y: x > y,
    "greater_equal": lambda x, y: x >= y,
    "inverse": lambda x, epsilon: 1 / (x + epsilon),
    "less": lambda x, y: x < y,
    "log": lambda x, epsilon: np.log(x + epsilon),
    "logical_not": lambda x: ~x,
    "logical_or": lambda x, y: x | y,
    "minimum": lambda x, y: np.minimum(x, y),
    "mul": lambda x, y: x * y,
    "pow": lambda x, y: x**y,
    "real_div": lambda x, y: x / y,
    "relu": lambda x: np.maximum(x, 0),
    "reshape": lambda x, shape: x.reshape(tuple(shape)),
    "rsqrt": lambda x, epsilon: 1 / np.sqrt(x + epsilon),
    "select": lambda cond, a, b: np.where(cond, a, b),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "stack": lambda values, axis: np.stack(values, int(axis)),
    "sub": lambda x, y: x - y,
    "tile": lambda x, reps: np.tile(x, tuple(reps)),
    "transpose": lambda x, perm: x.transpose(tuple(perm)),
}
MOVES = {
    "concat", "expand_dims", "gather", "gather_along_axis", "reduce_argmax", "reduce_max",
    "reshape", "scatter_along_axis", "select", "slice_by_index", "split", "stack", "tile", "topk",
    "transpose",
}  # fmt: skip
"""Operations that only move numbers, which were rounded when they were made."""


def operation(call: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function under its own name."""
    OPERATIONS[call.__name__] = call
    return call


def run(name: str, inputs: dict[str, Any]) -> tuple[Any, ...]:
    """The results of an operation.

    Raises:
        NotImplementedError: it, or one of its parameters, is none that the interpreter knows.
    """
    call = OPERATIONS.get(name)
    if call is None or not set(inputs) <= set(inspect.signature(call).parameters):
        raise NotImplementedError(f"{name} of {', '.join(inputs)}")
    results = call(**inputs)
    return results if isinstance(results, tuple) else (results,)


@operation
def cast(x: Array, dtype: str) -> Array:
    """x as numbers of another type; towards zero from floats to integers."""
    found = x.astype(NUMPY.get(dtype, dtype))
    if found.dtype.kind in "iu" and x.size and not np.array_equal(found, np.trunc(x)):
        raise ValueError(f"casts {x.min()} to {x.max()} to {dtype}")
    return found


@operation
def gelu(x: Array, mode: str = "EXACT") -> Array:
    """x times the normal distribution's P(X <= x), or its approximation by a tanh."""
    if mode == "EXACT":
        return x * (1 + np.vectorize(math.erf, otypes=[x.dtype])(x / math.sqrt(2))) / 2
    if mode == "TANH_APPROXIMATION":
        return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    raise ValueError(f"mode {mode}")


# --- Products ---


@operation
def linear(x: Array, weight: Array, bias: Array | float = 0.0) -> Array:
    """[..., in] to [..., out], weight [out, in]."""
    return x @ weight.T + bias


@operation
def conv(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    strides: Sequence[int] = (1, 1),
    pad_type: str = "valid",
    pad: Sequence[int] = (0, 0, 0, 0),
    dilations: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Array:
    """[1, in, h, w] to [1, out, h, w], by kernels of one element."""
    if weight.shape[2:] != (1, 1) or groups != 1 or max(strides) > 1 or any(pad):
        raise ValueError("takes kernels of one element, one by one")
    found = np.einsum("oi,nihw->nohw", weight[:, :, 0, 0], x, optimize=True)
    return found if bias is None else found + bias[:, None, None]


@operation
def matmul(x: Array, y: Array, transpose_x: bool = False, transpose_y: bool = False) -> Array:
    """x y over the last two axes, either of them turned first."""
    x, y = (np.swapaxes(a, -1, -2) if t else a for a, t in ((x, transpose_x), (y, transpose_y)))
    return x @ y


@operation
def scaled_dot_product_attention(
    query: Array, key: Array, value: Array, attn_mask: Array | None = None
) -> Array:
    """softmax(q k^T / sqrt(width) + mask) v."""
    scores = query @ np.swapaxes(key, -1, -2) / np.float32(math.sqrt(query.shape[-1]))
    return softmax(scores if attn_mask is None else scores + attn_mask, -1) @ value


# --- Along axes ---


def _reduction(function: Callable[..., Array]) -> Callable[..., Array]:
    def call(x: Array, axes: Array | None = None, keep_dims: bool = False) -> Array:
        over = None if axes is None else tuple(int(axis) for axis in axes)
        return np.asarray(function(x, axis=over, keepdims=bool(keep_dims))).astype(x.dtype)

    return call


for _name in ("max", "mean", "sum"):
    OPERATIONS[f"reduce_{_name}"] = _reduction(getattr(np, _name))


@operation
def reduce_argmax(
    x: Array, axis: int = -1, keep_dims: bool = False, output_dtype: str = "int32"
) -> Array:
    """Where the largest number stands; the first of equal ones."""
    return np.argmax(x, int(axis), keepdims=bool(keep_dims)).astype(output_dtype)


@operation
def softmax(x: Array, axis: int) -> Array:
    """e^x over its sum along `axis`."""
    powers = np.exp(x - x.max(int(axis), keepdims=True))
    return powers / powers.sum(int(axis), keepdims=True)


@operation
def layer_norm(
    x: Array, axes: Sequence[int], gamma: Array, beta: Array, epsilon: float = 1e-5
) -> Array:
    """gamma (x - mean) / sqrt(variance + epsilon) + beta, over the last axes."""
    over = tuple(int(axis) for axis in axes)
    centred = x - x.mean(over, keepdims=True)
    return centred / np.sqrt(np.square(centred).mean(over, keepdims=True) + epsilon) * gamma + beta


@operation
def topk(
    x: Array,
    k: int,
    axis: int = -1,
    ascending: bool = False,
    sort: bool = True,
    return_indices: bool = True,
    output_indices_dtype: str = "int32",
) -> tuple[Array, Array]:
    """The k largest numbers, largest first, and where they stand; equal ones in their order."""
    if ascending or not return_indices or not 0 < k <= x.shape[int(axis)]:
        raise ValueError(f"takes the {k} largest of {x.shape[int(axis)]}, with their places")
    order = np.argsort(-x, axis=int(axis), kind="stable").take(range(int(k)), int(axis))
    return np.take_along_axis(x, order, int(axis)), order.astype(output_indices_dtype)


# --- By index ---


def _checked(indices: Array, size: int) -> Array:
    if indices.size and not 0 <= indices.min() <= indices.max() < size:
        raise ValueError(f"indices {indices.min()} to {indices.max()} into {size} elements")
    return indices.astype(np.int64)


@operation
def gather(
    x: Array, indices: Array, axis: int, batch_dims: int = 0, validate_indices: bool = False
) -> Array:
    """The parts of x at `indices` along `axis`."""
    if batch_dims:
        raise ValueError("takes no batches")
    return np.take(x, _checked(np.asarray(indices), x.shape[int(axis)]), int(axis))


@operation
def gather_along_axis(x: Array, indices: Array, axis: int, validate_indices: bool = False) -> Array:
    """Elements at `indices` along `axis`, of the place in question on the others."""
    return np.take_along_axis(x, _checked(indices, x.shape[int(axis)]), int(axis))


@operation
def scatter_along_axis(
    data: Array,
    indices: Array,
    updates: Array,
    axis: int,
    mode: str = "update",
    validate_indices: bool = False,
) -> Array:
    """data, but `updates` at `indices` along `axis`."""
    if mode != "update":
        raise ValueError(f"mode {mode}")
    changed = data.copy()
    np.put_along_axis(changed, _checked(indices, data.shape[int(axis)]), updates, int(axis))
    return changed


@operation
def split(
    x: Array, axis: int, num_splits: int | None = None, split_sizes: Array | None = None
) -> tuple[Array, ...]:
    """x cut into equal parts, or into parts of `split_sizes`."""
    cuts = int(num_splits or 0) if split_sizes is None else np.cumsum(split_sizes)[:-1]
    return tuple(np.split(x, cuts, int(axis)))


@operation
def slice_by_index(
    x: Array,
    begin: Array,
    end: Array,
    stride: Array | None = None,
    begin_mask: Array | None = None,
    end_mask: Array | None = None,
    squeeze_mask: Array | None = None,
) -> Array:
    """x[begin:end:stride] on every axis.

    A set begin_mask or end_mask means from the first element, or to the last; a set squeeze_mask
    the element at `begin` alone, without its axis.
    """
    unset = [False] * x.ndim
    open_, closed, alone = (unset if m is None else m for m in (begin_mask, end_mask, squeeze_mask))
    steps = [1] * x.ndim if stride is None else stride
    cuts: list[slice | int] = []
    for axis in range(x.ndim):
        first = None if open_[axis] else int(begin[axis])
        last = None if closed[axis] else int(end[axis])
        cuts.append(first or 0 if alone[axis] else slice(first, last, int(steps[axis])))
    return x[tuple(cuts)]


# --- Compressed weights ---


@operation
def constexpr_blockwise_shift_scale(data: Array, scale: Array, offset: Any = None) -> Array:
    """scale * data, each scale for a block of the elements."""
    if offset is not None:
        raise ValueError("takes symmetric weights")
    for axis, (size, parts) in enumerate(zip(data.shape, scale.shape, strict=True)):
        if size % parts:
            raise ValueError(f"{size} elements in {parts} blocks")
        scale = np.repeat(scale, size // parts, axis)
    return data.astype(np.float32) * scale


@operation
def constexpr_lut_to_dense(indices: Array, lut: Array, vector_axis: Any = None) -> Array:
    """The table's number for each index; lut [groups of each axis..., entries, 1]."""
    if vector_axis is not None or lut.shape[-1] != 1:
        raise ValueError("takes tables of numbers")
    *groups, entries, _ = lut.shape
    place = np.zeros(indices.shape, np.int64)  # the group of each element
    for axis, (size, parts) in enumerate(zip(indices.shape, groups, strict=True)):
        own = np.arange(size) // (size // parts)
        place = place * parts + own.reshape([-1 if a == axis else 1 for a in range(place.ndim)])
    return lut.reshape(-1, entries)[place, indices.astype(np.int64)]
