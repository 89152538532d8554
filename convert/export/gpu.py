"""The profile `gpu`: transformers' own layers, rows before channels, cache writes by scatter.

Hidden states are [1, R, D]. A layer's cache is two tensors [1, Hkv, S, Dh].
"""

import math
from typing import Any

import torch
from torch.nn import functional

from ..reference.model import StreamFusedReference, rotate_values
from .parts import Profile, Rows
from .settings import GraphSizes


def grouped_attention(
    module: Any,
    query: torch.Tensor,  # [1, H, R, Dh]
    key: torch.Tensor,  # [1, Hkv, keys, Dh]
    value: torch.Tensor,  # [1, Hkv, keys, Dh]
    attention_mask: torch.Tensor,  # [1, 1, H / Hkv * R, keys], additive, repeated for those heads
    scaling: float | None = None,  # of the scores; None for 1 over the root of Dh
    **_: Any,
) -> tuple[torch.Tensor, None]:  # [1, R, H, Dh]
    """Attention with a KV head's query heads as rows of one head, so that keys are not copied.

    It has the form that transformers' `AttentionInterface` takes.
    """
    _, heads, rows, width = query.shape
    kv_heads = key.shape[1]
    if scaling is not None and math.isclose(scaling, module.head_dim**-0.5):
        scaling = None  # otherwise the converter splits attention into several operations
    folded = query.reshape(1, kv_heads, heads // kv_heads * rows, width)
    mixed = functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=attention_mask, scale=scaling
    )
    return mixed.reshape(1, heads, rows, width).transpose(1, 2), None


class _SlotKeys:
    """The part of transformers' `Cache` that attention calls, for one layer and one call.

    Nodes' keys and values go to their slots of the layer's cache, in place; those of streams follow
    the slots and are not kept.
    """

    def __init__(
        self,
        keys: torch.Tensor,  # [1, Hkv, S, Dh] of the layer's cache
        values: torch.Tensor,  # [1, Hkv, S, Dh]
        rows: Rows,  # without slots they are streams
        rotation_step: float,  # radians (eq. 7); 0 for none
    ) -> None:
        self._keys = keys
        self._values = values
        self._rows = rows
        self._rotation_step = rotation_step

    def update(
        self,
        keys: torch.Tensor,  # [1, Hkv, R, Dh]
        values: torch.Tensor,  # [1, Hkv, R, Dh]
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values; return what rows see: nodes S keys, streams S + R."""
        if self._rows.slots is None:
            if self._rotation_step:
                values = rotate_values(values, values.shape[2], self._rotation_step)
            return torch.cat([self._keys, keys], dim=2), torch.cat([self._values, values], dim=2)
        index = self._rows.slots.long()[None, None, :, None].expand_as(keys)
        self._keys.scatter_(2, index, keys)
        self._values.scatter_(2, index, values)
        return self._keys, self._values


class GpuProfile(Profile):
    """Runs any decoder that the reference supports, in transformers' own layout and modules."""

    axis = 1

    def __init__(self, model: StreamFusedReference, sizes: GraphSizes) -> None:
        """Make the base's attention modules compute `grouped_attention` from now on."""
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        super().__init__(model, sizes)
        AttentionInterface.register("ssmlx_export", grouped_attention)
        AttentionMaskInterface.register("ssmlx_export", sdpa_mask)
        model.base.set_attn_implementation("ssmlx_export")

    def cache_shape(self) -> tuple[int, ...]:
        """The shape [1, Hkv, S, Dh]."""
        width = self.decoder.layers[0].self_attn.head_dim
        heads = self.base.config.num_attention_heads // self.groups
        return 1, heads, self.sizes.num_slots, width

    def run(self, hidden: torch.Tensor, first: int, last: int, rows: Rows) -> torch.Tensor:
        """Run layers on hidden states [1, R, D]."""
        rotary = {}
        if self.rotary is not None:
            tables = tuple(table[rows.positions][None].to(hidden.dtype) for table in self.rotary)
            rotary = {"position_embeddings": tables}
        mask = rows.mask.repeat(1, 1, self.groups, 1)
        for layer in range(first, last):
            keys, values = rows.caches[2 * layer : 2 * layer + 2]
            slots = _SlotKeys(keys, values, rows, self.config.rotation_step)
            hidden = self.decoder.layers[layer](
                hidden,
                attention_mask=mask,
                position_ids=rows.positions[None],
                cache=slots,
                use_cache=True,
                **rotary,
            )
        return hidden
