"""Who sees whom, as bits: the mask that layers are handed while the fused kernel is on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Protocol

import mlx.core as mx

from ...errors import InputError
from ..masks import MaskBuffer, SeenCache
from .plan import TILE_KEYS
from .switch import in_use, is_on

# MLX gives smaller arrays to a kernel in another address space, which would be another source.
_MIN_WORDS = 8


def pack_bits(visible: mx.array) -> mx.array:
    """[R, W] uint32 words: bit j of word w is set where a row sees column 32 * w + j.

    Columns beyond C are committed tokens, which every row sees.

    Args:
        visible: [R, C] bool.
    """
    rows, columns = visible.shape
    words = max(-(-columns // TILE_KEYS), -(-_MIN_WORDS // rows))
    padded = mx.pad(
        visible, [(0, 0), (0, words * TILE_KEYS - columns)], constant_values=mx.array(True)
    )
    bits = padded.reshape(rows, words, TILE_KEYS).astype(mx.uint32)
    return (bits * _bit_values()).sum(axis=-1)


@lru_cache(maxsize=1)
def _bit_values() -> mx.array:
    """[32] uint32, what each bit of a word is worth."""
    return mx.array([1 << bit for bit in range(TILE_KEYS)], mx.uint32)


class TreeMask:
    """A step's mask in both forms; each is made when the first layer asks for it.

    Args:
        visible: [R, C] bool, which row sees which of the first C keys; all see the others.
        dense: gives the bool mask [R, C + L], for layers that MLX's kernels serve.
    """

    def __init__(self, visible: mx.array, dense: Callable[[], mx.array]) -> None:
        self.visible, self._dense = visible, dense

    @cached_property
    def bits(self) -> mx.array:
        """[R, W] uint32; see `pack_bits`."""
        return pack_bits(self.visible)

    @cached_property
    def dense(self) -> mx.array:
        """[R, C + L] bool."""
        return self._dense()


class MaskTaker(Protocol):
    """What a mask must know of a model; see `backbone.Backbone`."""

    @property
    def takes_tree_masks(self) -> bool: ...


class StepMasks:
    """The masks of one stage of a model: `MaskBuffer`, or bits while the fused kernel is on.

    The dense mask of a step is then made only if some layer wants it.

    Args:
        model: asked, while the kernel is on, whether its layers take such masks.
    """

    def __init__(self, model: MaskTaker) -> None:
        self._buffer, self._model = MaskBuffer(), model

    @property
    def nbytes(self) -> int:
        """Bytes of all masks that are kept."""
        return self._buffer.nbytes

    def forget(self) -> None:
        """See `MaskBuffer.forget`."""
        self._buffer.forget()

    def mask(self, visible: mx.array, cache: SeenCache, key: object) -> mx.array | TreeMask:
        """The mask of a step, as `backbone.run` takes it; the arguments are `MaskBuffer.mask`'s.

        Raises:
            InputError: "fused" was chosen for a model whose layers take no tree masks.
        """
        if not is_on() or not self._takes():
            return self._buffer.mask(visible, cache, key)
        paths = cache.path_columns.visible(visible.shape[0])
        columns = mx.concatenate([visible, *paths], axis=1)
        return TreeMask(columns, lambda: self._buffer.mask(visible, cache, key))

    def _takes(self) -> bool:
        takes = self._model.takes_tree_masks
        if not takes and in_use() == "fused":
            raise InputError(
                "--attention fused, for a model with an attention of its own",
                expected="layers that call mlx-lm's scaled_dot_product_attention",
                do="use --attention auto",
            )
        return takes
