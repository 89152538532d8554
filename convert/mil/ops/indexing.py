"""Operations that read or write at given places.

MIL leaves undefined what a place outside the array gives; here it is an error, as a program that
needs it is wrong.
"""

from __future__ import annotations

import numpy as np

from .registry import operation

# What `mode` does to a number; "update" is apart, it replaces it.
_MODES: dict[str, np.ufunc] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
}


def _check(indices: np.ndarray, size: int) -> None:
    if indices.size and (indices.min() < 0 or indices.max() >= size):
        raise ValueError(f"has indices {indices.min()} to {indices.max()} into {size} elements")


@operation(rounds=False)
def gather(
    x: np.ndarray,
    indices: np.ndarray,
    axis: int = 0,
    batch_dims: int = 0,
    validate_indices: bool = False,
) -> np.ndarray:
    """Slices of x along `axis`, chosen by `indices` of any shape.

    The first `batch_dims` axes of both go together: the choice differs from one to the next.
    """
    at, batch = int(axis) % x.ndim, int(batch_dims)
    _check(indices, x.shape[at])
    if not batch:
        return np.take(x, indices, axis=at)
    chosen = [
        np.take(x[place], indices[place], axis=at - batch) for place in np.ndindex(x.shape[:batch])
    ]
    return np.stack(chosen).reshape(*x.shape[:batch], *chosen[0].shape)


@operation(rounds=False)
def gather_along_axis(
    x: np.ndarray, indices: np.ndarray, axis: int = 0, validate_indices: bool = False
) -> np.ndarray:
    """Of every line of x along `axis`, the elements that the same line of `indices` names."""
    at = int(axis) % x.ndim
    _check(indices, x.shape[at])
    return np.take_along_axis(x, indices.astype(np.int64), axis=at)


@operation(rounds=False)
def gather_nd(
    x: np.ndarray, indices: np.ndarray, batch_dims: int = 0, validate_indices: bool = False
) -> np.ndarray:
    """The slices of x at `indices` [*, n], whose last axis holds n coordinates each."""
    batch = int(batch_dims)
    spread = (1,) * (indices.ndim - 1 - batch)
    lead = np.ogrid[tuple(slice(size) for size in x.shape[:batch])]
    places = [axis.reshape(*axis.shape, *spread) for axis in lead]
    places += _coordinates(indices, x.shape[batch:])
    return x[tuple(places)]


@operation()
def scatter(
    data: np.ndarray,
    indices: np.ndarray,
    updates: np.ndarray,
    axis: int = 0,
    mode: str = "add",
    validate_indices: bool = False,
) -> np.ndarray:
    """data, its slices at `indices` [n] along `axis` changed by those of `updates`.

    `mode` says how: the new number replaces the old one (update), or is added, and so on.
    """
    at = int(axis) % data.ndim
    _check(indices, data.shape[at])
    return _changed(data, (*(slice(None),) * at, indices), updates, mode)


@operation()
def scatter_along_axis(
    data: np.ndarray,
    indices: np.ndarray,
    updates: np.ndarray,
    axis: int = 0,
    mode: str = "add",
    validate_indices: bool = False,
) -> np.ndarray:
    """data, changed by `updates` at the places that `gather_along_axis` would read."""
    at = int(axis) % data.ndim
    _check(indices, data.shape[at])
    places: list[np.ndarray] = list(np.ogrid[tuple(slice(size) for size in indices.shape)])
    places[at] = indices
    return _changed(data, tuple(places), updates, mode)


@operation()
def scatter_nd(
    data: np.ndarray,
    indices: np.ndarray,
    updates: np.ndarray,
    mode: str = "add",
    validate_indices: bool = False,
) -> np.ndarray:
    """data, changed by `updates` at the places that `gather_nd` would read."""
    return _changed(data, _coordinates(indices, data.shape), updates, mode)


def _coordinates(indices: np.ndarray, sizes: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """[*, n] coordinates -> n arrays [*]."""
    places = tuple(np.moveaxis(indices, -1, 0))
    for place, size in zip(places, sizes, strict=False):
        _check(place, size)
    return places


def _changed(data: np.ndarray, places: tuple, updates: np.ndarray, mode: str) -> np.ndarray:
    changed = data.copy()
    if changed[places].shape != updates.shape:
        raise ValueError(f"puts {list(updates.shape)} into {list(changed[places].shape)}")
    if mode == "update":
        changed[places] = updates
    elif mode in _MODES:
        # A place that is named twice changes twice.
        _MODES[mode].at(changed, places, updates)
    else:
        raise ValueError(f"has no mode {mode}")
    return changed


@operation(rounds=False)
def one_hot(
    indices: np.ndarray,
    one_hot_vector_size: int,
    axis: int = -1,
    on_value: np.ndarray | int = 1,
    off_value: np.ndarray | int = 0,
) -> np.ndarray:
    """`on_value` where the new axis' place equals the index, else `off_value`."""
    at = int(axis) % (indices.ndim + 1)
    places = np.arange(int(one_hot_vector_size))
    places = places.reshape(-1, *(1,) * (indices.ndim - at))
    kind = np.asarray(on_value).dtype
    kind = np.dtype(np.int32) if kind == np.int64 else kind
    hot = np.expand_dims(indices, at) == places
    return np.where(hot, np.asarray(on_value, kind), np.asarray(off_value, kind))
