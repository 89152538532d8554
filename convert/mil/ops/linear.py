"""Products of matrices, and attention."""

from __future__ import annotations

import numpy as np

from .reductions import softmax
from .registry import operation


@operation()
def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """x [*, in] times the transpose of weight [out, in], plus bias [out]: [*, out]."""
    # One product of two matrices, however many axes x has.
    product = x.reshape(-1, x.shape[-1]) @ weight.T
    product = product.reshape(*x.shape[:-1], weight.shape[0])
    return product if bias is None else product + bias


@operation()
def matmul(
    x: np.ndarray, y: np.ndarray, transpose_x: bool = False, transpose_y: bool = False
) -> np.ndarray:
    """x [*, a, b] times y [*, b, c], their last two axes swapped before where it is asked."""
    left = x.swapaxes(-1, -2) if transpose_x and x.ndim > 1 else x
    right = y.swapaxes(-1, -2) if transpose_y and y.ndim > 1 else y
    return left @ right


@operation(lists=["values"])
def einsum(values: list[np.ndarray], equation: str) -> np.ndarray:
    """The product of two arrays of rank 3 or 4 in Einstein's notation."""
    return np.einsum(equation, *values, optimize=True)


@operation()
def conv(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    strides: np.ndarray | None = None,
    pad_type: str = "valid",
    pad: np.ndarray | None = None,
    dilations: np.ndarray | None = None,
    groups: int = 1,
) -> np.ndarray:
    """x [B, in, *] with a kernel of one element, weight [out, in, 1...], plus bias [out].

    The form that the Neural Engine prefers for a linear map: [B, out, *].

    Raises:
        ValueError: it is another kind of convolution.
    """
    steps = np.ones(1, int) if strides is None else strides
    padded = pad is not None and pad_type == "custom" and np.any(pad)
    if weight.shape[2:] != (1,) * (x.ndim - 2) or np.any(steps != 1) or padded or int(groups) != 1:
        raise ValueError(f"is read with kernels of one element alone, not {weight.shape}")
    product = weight.reshape(weight.shape[:2]) @ x.reshape(*x.shape[:2], -1)
    product = product.reshape(x.shape[0], weight.shape[0], *x.shape[2:])
    return product if bias is None else product + bias.reshape(-1, *(1,) * (x.ndim - 2))


@operation()
def scaled_dot_product_attention(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, attn_mask: np.ndarray | None = None
) -> np.ndarray:
    """softmax(query keyᵀ / sqrt(E) + mask) value.

    query [*, L, E], key [*, S, E], value [*, S, Ev]; the mask, broadcast to [*, L, S], is added,
    or tells by True which keys a row may see.
    """
    scores = query @ key.swapaxes(-1, -2) / np.asarray(query.shape[-1] ** 0.5, query.dtype)
    if attn_mask is not None and attn_mask.dtype == bool:
        scores = np.where(attn_mask, scores, np.asarray(-np.inf, scores.dtype))
    elif attn_mask is not None:
        scores = scores + attn_mask
    return softmax(scores) @ value
