"""Operations that move numbers and change none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .registry import operation

Flags = np.ndarray | None


def _ints(values: np.ndarray) -> list[int]:
    return [int(value) for value in np.atleast_1d(values)]


@operation(rounds=False)
def reshape(x: np.ndarray, shape: np.ndarray) -> np.ndarray:
    """x in another shape; -1 is what is left, 0 the size of x, counted from the last axis."""
    sizes = _ints(shape)
    for back in range(1, len(sizes) + 1):
        if sizes[-back] == 0:
            sizes[-back] = x.shape[-back] if back <= x.ndim else 1
    return x.reshape(sizes)


@operation(rounds=False)
def transpose(x: np.ndarray, perm: np.ndarray) -> np.ndarray:
    """Axis i of the result is axis perm[i] of x."""
    return x.transpose(_ints(perm))


@operation(rounds=False)
def expand_dims(x: np.ndarray, axes: np.ndarray) -> np.ndarray:
    """x with axes of size 1, which stand at `axes` of the result."""
    return np.expand_dims(x, tuple(_ints(axes)))


@operation(rounds=False)
def squeeze(x: np.ndarray, axes: np.ndarray | None = None) -> np.ndarray:
    """x without the axes of size 1 at `axes`, or without all such."""
    return np.squeeze(x, None if axes is None else tuple(_ints(axes)))


@operation(rounds=False, lists=["values"])
def concat(values: Sequence[np.ndarray], axis: int, interleave: bool = False) -> np.ndarray:
    """Arrays one behind the other along `axis`; element by element in turn where `interleave`."""
    if not interleave:
        return np.concatenate(values, axis=int(axis))
    at = int(axis) % values[0].ndim
    sizes = list(values[0].shape)
    sizes[at] *= len(values)
    return np.stack(values, axis=at + 1).reshape(sizes)


@operation(rounds=False, lists=["values"])
def stack(values: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """Arrays of one shape along a new axis."""
    return np.stack(values, axis=int(axis))


@operation(rounds=False)
def split(
    x: np.ndarray,
    axis: int,
    num_splits: int | None = None,
    split_sizes: np.ndarray | None = None,
) -> tuple[np.ndarray, ...]:
    """x cut along `axis` into equal parts, or into parts of `split_sizes`."""
    if split_sizes is not None:
        return tuple(np.split(x, np.cumsum(_ints(split_sizes))[:-1], axis=int(axis)))
    assert num_splits is not None
    return tuple(np.split(x, int(num_splits), axis=int(axis)))


@operation(rounds=False)
def tile(x: np.ndarray, reps: np.ndarray) -> np.ndarray:
    """x repeated as a whole, reps[i] times along axis i."""
    return np.tile(x, _ints(reps))


@operation(rounds=False)
def reverse(x: np.ndarray, axes: np.ndarray | None = None) -> np.ndarray:
    """x turned round along `axes`, or all."""
    return np.flip(x, None if axes is None else tuple(_ints(axes)))


@operation(rounds=False)
def pad(
    x: np.ndarray, pad: np.ndarray, mode: str = "constant", constant_val: np.ndarray | float = 0
) -> np.ndarray:
    """x with pad[2i] elements before and pad[2i + 1] behind, on the last axes in their order."""
    sizes = _ints(pad)
    pairs = [(0, 0)] * (x.ndim - len(sizes) // 2)
    pairs += zip(sizes[::2], sizes[1::2], strict=True)
    if mode == "constant":
        return np.pad(x, pairs, constant_values=np.asarray(constant_val, x.dtype))
    if mode == "reflect":
        return np.pad(x, pairs, mode="reflect")
    if mode == "replicate":
        return np.pad(x, pairs, mode="edge")
    raise ValueError(f"has no mode {mode}")


@operation(rounds=False)
def band_part(x: np.ndarray, lower: int = -1, upper: int = -1) -> np.ndarray:
    """x [*, m, n], zero but for `lower` diagonals below the main one and `upper` above it.

    A negative number keeps all on its side.
    """
    below = np.arange(x.shape[-2])[:, None] - np.arange(x.shape[-1])
    kept = (int(lower) < 0) | (below <= int(lower))
    kept = kept & ((int(upper) < 0) | (-below <= int(upper)))
    return np.where(kept, x, np.zeros((), x.dtype))


@operation(rounds=False)
def fill(shape: np.ndarray, value: np.ndarray | float = 0.0) -> np.ndarray:
    """`value` everywhere."""
    return np.full(_ints(shape), value)


@operation(rounds=False)
def fill_like(ref_tensor: np.ndarray, value: np.ndarray | float = 0.0) -> np.ndarray:
    """`value` everywhere, in the shape of `ref_tensor`."""
    return np.full(ref_tensor.shape, value)


@operation("shape", rounds=False)
def shape_of(x: np.ndarray) -> np.ndarray:
    """The sizes of x."""
    return np.array(x.shape, np.int32)


@operation(rounds=False)
def range_1d(start: np.ndarray, end: np.ndarray, step: np.ndarray) -> np.ndarray:
    """start, start + step and so on, before end."""
    return np.arange(start.item(), end.item(), step.item()).astype(start.dtype)


@operation(rounds=False)
def slice_by_size(x: np.ndarray, begin: np.ndarray, size: np.ndarray) -> np.ndarray:
    """size[i] elements from begin[i] on; to the end where size[i] is -1."""
    cuts = []
    for start, count, whole in zip(_ints(begin), _ints(size), x.shape, strict=True):
        first = start + whole if start < 0 else start
        cuts.append(slice(first, whole if count == -1 else first + count))
    return x[tuple(cuts)]


@operation(rounds=False)
def slice_by_index(
    x: np.ndarray,
    begin: np.ndarray,
    end: np.ndarray,
    stride: np.ndarray | None = None,
    begin_mask: Flags = None,
    end_mask: Flags = None,
    squeeze_mask: Flags = None,
) -> np.ndarray:
    """x[begin:end:stride] on every axis.

    A set begin_mask or end_mask means from the first element, or to the last; a set squeeze_mask
    the element at `begin` alone, without its axis.
    """
    return x[_cuts(x, begin, end, stride, begin_mask, end_mask, squeeze_mask)]


@operation(rounds=False)
def slice_update(
    x: np.ndarray,
    update: np.ndarray,
    begin: np.ndarray,
    end: np.ndarray,
    stride: np.ndarray | None = None,
    begin_mask: Flags = None,
    end_mask: Flags = None,
    squeeze_mask: Flags = None,
) -> np.ndarray:
    """x, but `update` in the part that `slice_by_index` would give.

    Raises:
        ValueError: that part has not the shape of `update`: it would be cut off or spread out.
    """
    cuts = _cuts(x, begin, end, stride, begin_mask, end_mask, squeeze_mask)
    changed = x.copy()
    if changed[cuts].shape != update.shape:
        raise ValueError(f"puts {list(update.shape)} into {list(changed[cuts].shape)}")
    changed[cuts] = update
    return changed


def _cuts(
    x: np.ndarray,
    begin: np.ndarray,
    end: np.ndarray,
    stride: np.ndarray | None,
    begin_mask: Flags,
    end_mask: Flags,
    squeeze_mask: Flags,
) -> tuple[slice | int, ...]:
    starts, ends = _ints(begin), _ints(end)
    steps = [1] * x.ndim if stride is None else _ints(stride)
    unset = [False] * x.ndim
    masks = [unset if mask is None else mask for mask in (begin_mask, end_mask, squeeze_mask)]
    cuts: list[slice | int] = []
    for axis, (from_first, to_last, alone) in enumerate(zip(*masks, strict=True)):
        first, last = None if from_first else starts[axis], None if to_last else ends[axis]
        cuts.append((first or 0) if alone else slice(first, last, steps[axis]))
    return tuple(cuts)
