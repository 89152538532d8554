"""The shape legend of the whole package, its check at stage boundaries, and reads by the host.

    L   committed tokens: their keys and values are in the cache
    N   nodes of the draft tree; node 0, the root, is the newest token, already decided and
        not yet in the cache
    M   nodes kept after pruning (M <= N)
    G   speculative streams (the paper's gamma)
    K   ranked candidates of each stream
    C   candidate nodes from which the best tree is chosen
    P   levels of a tree: its deepest node has depth P - 1
    R   rows of a forward pass: N in the lower layers, M * (1 + G) in the upper ones
    S   scratch rows that the cache keeps before the committed ones
    D   hidden size          V  vocabulary        Hkv  key/value heads      Dh  head size

Rows of the upper layers are nodes first, then streams node by node: stream j (1 to G) of
node i is row M + i * G + j - 1.
"""

from functools import lru_cache
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten


def to_int(array: mx.array) -> int:
    """Waits for the device."""
    return int(cast("int", array.item()))


def to_float(array: mx.array) -> float:
    """Waits for the device."""
    return float(cast("float", array.item()))


def to_list(array: mx.array) -> list[Any]:
    """Waits for the device."""
    return cast("list[Any]", array.tolist())


def expect_shape(
    name: str,  # of the array: the error begins with it
    array: mx.array,  # not computed
    *shape: int | None,  # None: any size
) -> None:
    found = array.shape
    if len(found) != len(shape) or any(
        want is not None and have != want for have, want in zip(found, shape, strict=True)
    ):
        raise ValueError(f"{name} has shape {found}, expected {shape}")


def evaluated(array: mx.array) -> mx.array:
    """Compute an array that is to be kept, for no other thread can compute it later."""
    mx.eval(array)
    return array


@lru_cache(maxsize=512)
def indices(first: int, last: int | None = None) -> mx.array:
    """int32 numbers from 0 up to `first`, or from `first` up to `last` if given; kept and
    shared."""
    return evaluated(mx.arange(first) if last is None else mx.arange(first, last))


def take(
    array: mx.array,  # [n]
    positions: mx.array,  # [m]
) -> mx.array:  # [m]
    """One MLX primitive; indexing with [] takes two."""
    return mx.take_along_axis(array, positions, axis=0)


def arrays_in(tree: Any) -> list[mx.array]:
    """The arrays in nested lists, tuples and dictionaries, such as a module's parameters."""
    pairs: Any = tree_flatten(tree)
    return [leaf for _, leaf in pairs if isinstance(leaf, mx.array)]
