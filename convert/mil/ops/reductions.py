"""Operations that reduce or normalise along axes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .registry import operation

# None for all axes.
Axes = np.ndarray | tuple[int, ...] | None
_REDUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "reduce_max": np.max,
    "reduce_min": np.min,
    "reduce_mean": np.mean,
    "reduce_sum": np.sum,
}


def _register(name: str, function: Callable[..., np.ndarray]) -> None:
    def call(x: np.ndarray, axes: Axes = None, keep_dims: bool = False) -> np.ndarray:
        reduced = function(x, axis=_axes(axes), keepdims=bool(keep_dims))
        # numpy sums int32 as int64.
        return np.asarray(reduced).astype(x.dtype, copy=False)

    operation(name)(call)


for _name, _function in _REDUCTIONS.items():
    _register(_name, _function)


def _axes(axes: Axes) -> tuple[int, ...] | None:
    return None if axes is None else tuple(int(axis) for axis in np.atleast_1d(axes))


@operation()
def reduce_sum_square(x: np.ndarray, axes: Axes = None, keep_dims: bool = False) -> np.ndarray:
    """The sum of squares over axes."""
    return np.sum(np.square(x), axis=_axes(axes), keepdims=bool(keep_dims), dtype=x.dtype)


@operation()
def reduce_log_sum_exp(x: np.ndarray, axes: Axes = None, keep_dims: bool = False) -> np.ndarray:
    """log(sum(e^x)) over axes, without overflow."""
    over = _axes(axes)
    top = np.max(x, axis=over, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    total = np.log(np.sum(np.exp(x - top), axis=over, keepdims=True)) + top
    return total if keep_dims else np.squeeze(total, axis=over)


@operation("reduce_argmax", rounds=False)
def reduce_argmax(
    x: np.ndarray, axis: int = -1, keep_dims: bool = False, output_dtype: str = "int32"
) -> np.ndarray:
    """Where the largest number along `axis` stands; the first of equal ones."""
    return np.argmax(x, axis=int(axis), keepdims=bool(keep_dims)).astype(output_dtype)


@operation("reduce_argmin", rounds=False)
def reduce_argmin(
    x: np.ndarray, axis: int = -1, keep_dims: bool = False, output_dtype: str = "int32"
) -> np.ndarray:
    """Where the smallest number along `axis` stands; the first of equal ones."""
    return np.argmin(x, axis=int(axis), keepdims=bool(keep_dims)).astype(output_dtype)


@operation()
def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    """e^x over its sum along `axis`; NaN where all are minus infinity."""
    powers = np.exp(x - np.max(x, axis=int(axis), keepdims=True))
    return powers / np.sum(powers, axis=int(axis), keepdims=True)


@operation()
def layer_norm(
    x: np.ndarray,
    axes: Axes = None,
    gamma: np.ndarray | None = None,
    beta: np.ndarray | None = None,
    epsilon: np.ndarray | float = 1e-5,
) -> np.ndarray:
    """gamma (x - mean) / sqrt(variance + epsilon) + beta, over axes.

    `gamma` and `beta` have the sizes of x on those axes, in their order.
    """
    over = tuple(range(x.ndim)) if axes is None else tuple(a % x.ndim for a in _axes(axes) or ())
    sizes = [size if axis in over else 1 for axis, size in enumerate(x.shape)]
    centred = x - np.mean(x, axis=over, keepdims=True)
    variance = np.mean(np.square(centred), axis=over, keepdims=True)
    normed = centred / np.sqrt(variance + np.asarray(epsilon, x.dtype))
    if gamma is not None:
        normed = normed * gamma.reshape(sizes)
    return normed if beta is None else normed + beta.reshape(sizes)


@operation()
def cumsum(
    x: np.ndarray, axis: int = 0, exclusive: bool = False, reverse: bool = False
) -> np.ndarray:
    """Running sums along `axis`, from its end where `reverse`; without the element itself where
    `exclusive`."""
    turned = np.flip(x, int(axis)) if reverse else x
    sums = np.cumsum(turned, axis=int(axis), dtype=x.dtype)
    sums = sums - turned if exclusive else sums
    return np.flip(sums, int(axis)) if reverse else sums


@operation("topk", rounds=False)
def topk(
    x: np.ndarray,
    k: int = 1,
    axis: int = -1,
    ascending: bool = False,
    sort: bool = True,
    return_indices: bool = True,
    output_indices_dtype: str = "int32",
) -> tuple[np.ndarray, ...]:
    """The k largest numbers along `axis`, largest first, and where they stand.

    The smallest, smallest first, where `ascending`; all where k is -1. Equal numbers stand in
    their order in x, which a device does not promise; unsorted results come sorted.
    """
    count = x.shape[int(axis)] if int(k) == -1 else int(k)
    if not 0 < count <= x.shape[int(axis)]:
        raise ValueError(f"takes {count} of {x.shape[int(axis)]} numbers")
    rows = np.moveaxis(x, int(axis), -1)
    order = np.moveaxis(_first(rows if ascending else -rows, count), -1, int(axis))
    values = np.take_along_axis(x, order, int(axis))
    return (values, order.astype(output_indices_dtype)) if return_indices else (values,)


def _first(rows: np.ndarray, count: int) -> np.ndarray:
    """[..., count] places of the smallest numbers of [..., n] rows, in order."""
    if count == 1:
        return np.argmin(rows, axis=-1)[..., None]
    # A whole vocabulary is not sorted for a few tokens: only what reaches the count-th number is.
    limit = np.partition(rows, count - 1, axis=-1)[..., count - 1 : count]
    order = np.empty((*rows.shape[:-1], count), np.int64)
    for at in np.ndindex(rows.shape[:-1]):
        reached = np.flatnonzero(rows[at] <= limit[at])
        order[at] = reached[np.argsort(rows[at][reached], kind="stable")[:count]]
    return order
