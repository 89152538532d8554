"""The profile `ane`: channels before rows, 1 x 1 convolutions, one-hot cache writes.

Hidden states are [1, D, 1, R], the Neural Engine's own layout. A layer's cache is two tensors
[1, Hkv * Dh, 1, S]. The layers are written out here, on the modules and weights of transformers'
layers, because those have rows before channels.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ssmlx.errors import require

from ..reference.model import LowRank, StreamFusedReference
from .parts import Profile, Rows
from .settings import GraphSizes

_PARTS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm",
)  # fmt: skip


def convolve(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """A linear module on [1, in, 1, R]: [1, out, 1, R]."""
    return functional.conv2d(x, module.weight[:, :, None, None], module.bias)


def low_rank(pair: LowRank, x: torch.Tensor) -> torch.Tensor:
    """B A x on [1, in, 1, R]."""
    return convolve(pair.lora_B, convolve(pair.lora_A, x))


def rms_norm(norm: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
    """An RMSNorm module over axis `dim` of a tensor of four.

    What is squared is divided by the largest magnitude first: hidden states of this family reach
    tens of thousands, and their squares exceed float16, which is all that the Neural Engine has.
    """
    peak = x.abs().amax(dim=dim, keepdim=True).clamp(min=1e-3)
    mean = (x / peak).square().mean(dim=dim, keepdim=True)
    floor = (norm.variance_epsilon**0.5 / peak).square()
    shape = [1, 1, 1, 1]
    shape[dim] = -1
    return x * (torch.rsqrt(mean + floor) / peak) * norm.weight.view(shape)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [1, heads, Dh, R] by tables [1, 1, Dh, R]."""
    half = x.shape[2] // 2
    turned = torch.cat([-x[:, :, half:], x[:, :, :half]], dim=2)
    return x * cos + turned * sin


def turn_values(values: torch.Tensor, heads: int, num_streams: int, step: float) -> torch.Tensor:
    """Eq. 7 on the values of stream rows [1, Hkv * Dh, 1, M * G]."""
    angles = step * torch.arange(1, num_streams + 1, dtype=torch.float32)
    cos, sin = angles.cos().to(values.dtype), angles.sin().to(values.dtype)
    parted = values.reshape(heads, -1, values.shape[3] // num_streams, num_streams)
    real, imaginary = parted.chunk(2, dim=1)
    turned = torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin], dim=1)
    return turned.reshape(values.shape)


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """[1, H * Dh, 1, R] of attention, a KV head's query heads by broadcasting: of `query`
    [1, H, Dh, R], `keys` and `values` [1, Hkv * Dh, 1, keys], and additive `mask` [1, 1, R, keys].
    """
    _, heads, width, rows = query.shape
    kv = keys.shape[1] // width
    parted = (query * scale).reshape(kv, heads // kv, width, rows).transpose(2, 3)
    scores = parted @ keys.reshape(kv, 1, width, keys.shape[3]) + mask
    weights = scores.softmax(dim=-1)
    mixed = values.reshape(kv, 1, width, values.shape[3]) @ weights.transpose(2, 3)
    return mixed.reshape(1, heads * width, 1, rows)


class AneProfile(Profile):
    """A regular decoder in channels-first layout, on the reference's weights."""

    axis, piece = 3, 16384  # the Neural Engine takes no wider tensor
    linear_of = staticmethod(convolve)

    def __init__(self, model: StreamFusedReference, sizes: GraphSizes) -> None:
        _check_layers(model)
        super().__init__(model, sizes)
        self._heads = model.base.config.num_attention_heads
        self._kv_heads = self._heads // self.groups
        self._width = self.decoder.layers[0].self_attn.head_dim
        for what, size in (("--context", sizes.num_slots), ("KV width", self.cache_shape()[1])):
            require(
                size % 32 == 0,
                f"{what} {size} with --profile ane",
                expected="a multiple of 32, the only state sizes that it takes",
                do="choose another --context, or --profile gpu",
            )
        assert self.rotary is not None
        self._tables = tuple(table.t().contiguous() for table in self.rotary)

    def cache_shape(self) -> tuple[int, ...]:
        return 1, self._kv_heads * self._width, 1, self.sizes.num_slots

    def run(self, hidden: torch.Tensor, first: int, last: int, rows: Rows) -> torch.Tensor:
        cos, sin = (table[:, rows.positions][None, None].to(hidden.dtype) for table in self._tables)
        columns = torch.arange(self.sizes.num_slots, dtype=torch.int32)
        placed = (rows.slots[:, None] == columns).to(rows.mask.dtype)[None, None]
        kept = 1 - placed.sum(dim=2, keepdim=True)
        self.count.nodes = rows.slots.shape[0]
        for index in range(first, last):
            layer: Any = self.decoder.layers[index]
            normed = rms_norm(layer.input_layernorm, hidden, 1)
            query, keys, values = self._project(layer.self_attn, normed, cos, sin)
            keys, values = self._remember(index, keys, values, rows, (placed, kept))
            mixed = attend(query, keys, values, rows.mask, layer.self_attn.scaling)
            hidden = hidden + _apply(layer.self_attn.o_proj, mixed)
            normed, mlp = rms_norm(layer.post_attention_layernorm, hidden, 1), layer.mlp
            gate = mlp.act_fn(_apply(mlp.gate_proj, normed))
            hidden = hidden + _apply(mlp.down_proj, gate * _apply(mlp.up_proj, normed))
        return hidden

    def _project(
        self, attention: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [1, H, Dh, R], keys and values [1, Hkv * Dh, 1, R] of [1, D, 1, R]."""
        rows = x.shape[3]
        query = _apply(attention.q_proj, x).reshape(1, self._heads, self._width, rows)
        keys = _apply(attention.k_proj, x).reshape(1, self._kv_heads, self._width, rows)
        if hasattr(attention, "q_norm"):
            query = rms_norm(attention.q_norm, query, 2)
            keys = rms_norm(attention.k_norm, keys, 2)
        keys = rotate(keys, cos, sin).reshape(1, -1, 1, rows)
        return rotate(query, cos, sin), keys, _apply(attention.v_proj, x)

    def _remember(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: Rows,
        slots: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the nodes' keys and values; what the rows see: slots, then streams.

        `slots` are as ones and zeros: [1, 1, node rows, S] which row goes to which one, and
        [1, 1, 1, S] which ones stay as they are.
        """
        nodes, (placed, kept) = rows.slots.shape[0], slots
        key_cache, value_cache = rows.caches[2 * layer : 2 * layer + 2]
        for cache, new in ((key_cache, keys), (value_cache, values)):
            written = new[..., :nodes].transpose(1, 2) @ placed
            cache[:] = cache * kept + written.transpose(1, 2)
        if not rows.num_streams:
            return key_cache, value_cache
        behind, step = values[..., nodes:], self.config.rotation_step
        if step:
            behind = turn_values(behind, self._kv_heads, rows.num_streams, step)
        return (
            torch.cat([key_cache, keys[..., nodes:]], dim=3),
            torch.cat([value_cache, behind], dim=3),
        )

    def start_streams(self, nodes: torch.Tensor) -> torch.Tensor:
        model, started = self.reference, nodes
        if model.stream_init is not None:
            started = low_rank(model.stream_init, nodes)
        if self.config.stream_init == "residual":
            started = nodes + started
        _, width, _, count = nodes.shape
        spread = started[0, :, 0, :, None]
        if model.stream_embeddings is None:
            spread = spread.expand(width, count, self.sizes.num_streams)
        else:
            spread = spread + model.stream_embeddings.t()[:, None]
        return spread.reshape(1, width, 1, -1)

    def exit_states(self, nodes: torch.Tensor) -> torch.Tensor:
        assert self.reference.prune_adapter is not None
        return self.norm(nodes + low_rank(self.reference.prune_adapter, nodes))

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return rms_norm(self.decoder.module.norm, hidden, 1)


def _apply(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return convolve(module, x) if isinstance(module, nn.Linear) else module(x)


def _check_layers(model: StreamFusedReference) -> None:
    for index, layer in enumerate(model.decoder.layers):
        found = dict(layer.named_modules())
        norms = (name for name in found if "norm" in name)
        faults = [f"has no {name}" for name in _PARTS if name not in found]
        faults += [
            f"has a {name} that is no RMSNorm"
            for name in norms
            if not hasattr(found[name], "variance_epsilon")
        ]
        require(
            not faults,
            f"layer {index} {', '.join(faults[:1])}",
            expected="layers as Llama, Mistral, Qwen2 or Qwen3 have them, for --profile ane",
            do="use --profile gpu",
        )
