"""The profile `ane`: channels before rows, 1 x 1 convolutions, one-hot cache writes.

Hidden states are [1, D, 1, R], the Neural Engine's own layout. A layer's cache is two tensors [1,
Hkv * Dh, 1, S]. The layers are written out here, on the modules and weights of transformers'
layers, because those have rows before channels.
"""

from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ssmlx.errors import require

from ..reference.model import LoraLinear, LowRank, StreamFusedReference
from .parts import Profile, Rows
from .settings import GraphSizes

_KINDS = [f"{name}DecoderLayer" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")]
_PARTS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm",
)  # fmt: skip


def convolve(
    module: Any,
    x: torch.Tensor,  # [1, in, 1, R]
) -> torch.Tensor:  # [1, out, 1, R]
    """Apply a linear module, possibly low-rank or with LoRA, as a 1 x 1 convolution.

    LoRA of a `LoraLinear` is added only while its rows are streams, whatever its scope.
    """
    if isinstance(module, LowRank):
        return convolve(module.lora_B, convolve(module.lora_A, x))
    if isinstance(module, LoraLinear):
        y = convolve(module.linear, x)
        return y + module.scale * convolve(module.adapter, x) if module.rows_are_streams else y
    return functional.conv2d(x, module.weight[:, :, None, None], module.bias)


def rms_norm(norm: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
    """RMS norm over axis `dim` of four."""
    # Hidden states of these models reach tens of thousands, and their squares overflow float16, the
    # Neural Engine's only float type.
    peak = x.abs().amax(dim=dim, keepdim=True).clamp(min=1e-3)
    mean = (x / peak).square().mean(dim=dim, keepdim=True)
    floor = (norm.variance_epsilon**0.5 / peak).square()
    shape = [1, 1, 1, 1]
    shape[dim] = -1
    return x * (torch.rsqrt(mean + floor) / peak) * norm.weight.view(shape)


def rotate(
    x: torch.Tensor,  # [1, heads, Dh, R]
    cos: torch.Tensor,  # [1, 1, Dh, R]
    sin: torch.Tensor,  # [1, 1, Dh, R]
) -> torch.Tensor:
    """Apply rotary embeddings ("rotate half")."""
    half = x.shape[2] // 2
    turned = torch.cat([-x[:, :, half:], x[:, :, :half]], dim=2)
    return x * cos + turned * sin


def rotate_stream_values(
    values: torch.Tensor,  # [1, Hkv * Dh, 1, G]
    heads: int,  # Hkv
    step: float,  # radians
) -> torch.Tensor:
    """Rotate the values of stream j by j * `step` radians (eq. 7)."""
    num_streams = values.shape[3]
    angles = step * torch.arange(1, num_streams + 1, dtype=torch.float32)
    cos = angles.cos().to(values.dtype)
    sin = angles.sin().to(values.dtype)
    parted = values.reshape(heads, -1, num_streams)
    real, imaginary = parted.chunk(2, dim=1)
    turned = torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin], dim=1)
    return turned.reshape(values.shape)


def attend(
    query: torch.Tensor,  # [1, H, Dh, R], not scaled yet
    keys: torch.Tensor,  # [1, Hkv * Dh, 1, keys]
    values: torch.Tensor,  # [1, Hkv * Dh, 1, keys]
    mask: torch.Tensor,  # [1, 1, R, keys], additive
    scale: float,  # of the scores
) -> torch.Tensor:  # [1, H * Dh, 1, R]
    """Attention, with each KV head broadcast over its query heads."""
    _, heads, width, rows = query.shape
    kv = keys.shape[1] // width
    parted = (query * scale).reshape(kv, heads // kv, width, rows).transpose(2, 3)
    scores = parted @ keys.reshape(kv, 1, width, keys.shape[3]) + mask
    weights = scores.softmax(dim=-1)
    mixed = values.reshape(kv, 1, width, values.shape[3]) @ weights.transpose(2, 3)
    return mixed.reshape(1, heads * width, 1, rows)


class _NodeSlots(NamedTuple):
    """The cache slots that a layer's nodes write, as ones and zeros."""

    placed: torch.Tensor  # [1, 1, R, S] which row goes to which slot
    kept: torch.Tensor  # [1, 1, 1, S] which slots stay


class AneProfile(Profile):
    """A Llama, Mistral or Qwen decoder, channels first, on the reference's modules and weights."""

    axis = 3
    piece = 16384  # the Neural Engine's limit on a tensor's width
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
        """The shape [1, Hkv * Dh, 1, S]."""
        return 1, self._kv_heads * self._width, 1, self.sizes.num_slots

    def run(self, hidden: torch.Tensor, first: int, last: int, rows: Rows) -> torch.Tensor:
        """Run layers on hidden states [1, D, 1, R]."""
        cos, sin = (table[:, rows.positions][None, None].to(hidden.dtype) for table in self._tables)
        columns = torch.arange(self.sizes.num_slots, dtype=torch.int32)
        node_slots = None
        if rows.slots is not None:
            placed = (rows.slots[:, None] == columns).to(rows.mask.dtype)[None, None]
            node_slots = _NodeSlots(placed, 1 - placed.sum(dim=2, keepdim=True))
        for index in range(first, last):
            layer: Any = self.decoder.layers[index]
            normed = rms_norm(layer.input_layernorm, hidden, 1)
            query, keys, values = self._project_and_rotate(layer.self_attn, normed, cos, sin)
            keys, values = self._visible_keys(index, keys, values, rows, node_slots)
            mixed = attend(query, keys, values, rows.mask, layer.self_attn.scaling)
            hidden = hidden + convolve(layer.self_attn.o_proj, mixed)
            normed = rms_norm(layer.post_attention_layernorm, hidden, 1)
            mlp = layer.mlp
            gate = mlp.act_fn(convolve(mlp.gate_proj, normed))
            hidden = hidden + convolve(mlp.down_proj, gate * convolve(mlp.up_proj, normed))
        return hidden

    def _project_and_rotate(
        self,
        attention: Any,
        x: torch.Tensor,  # [1, D, 1, R], normed
        cos: torch.Tensor,  # [1, 1, Dh, R]
        sin: torch.Tensor,  # [1, 1, Dh, R]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute queries [1, H, Dh, R], keys and values [1, Hkv * Dh, 1, R]."""
        rows = x.shape[3]
        query = convolve(attention.q_proj, x).reshape(1, self._heads, self._width, rows)
        keys = convolve(attention.k_proj, x).reshape(1, self._kv_heads, self._width, rows)
        if hasattr(attention, "q_norm"):
            query = rms_norm(attention.q_norm, query, 2)
            keys = rms_norm(attention.k_norm, keys, 2)
        keys = rotate(keys, cos, sin).reshape(1, -1, 1, rows)
        return rotate(query, cos, sin), keys, convolve(attention.v_proj, x)

    def _visible_keys(
        self,
        layer: int,
        keys: torch.Tensor,  # [1, Hkv * Dh, 1, R]
        values: torch.Tensor,  # [1, Hkv * Dh, 1, R]
        rows: Rows,
        # None for streams, which see the slots, then each other, and write nothing
        node_slots: _NodeSlots | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What rows see: nodes [1, Hkv * Dh, 1, S], streams [1, Hkv * Dh, 1, S + R]."""
        key_cache, value_cache = rows.caches[2 * layer : 2 * layer + 2]
        if node_slots is None:
            if self.config.rotation_step:
                values = rotate_stream_values(values, self._kv_heads, self.config.rotation_step)
            return torch.cat([key_cache, keys], dim=3), torch.cat([value_cache, values], dim=3)
        placed, kept = node_slots
        for cache, new in ((key_cache, keys), (value_cache, values)):
            written = new.transpose(1, 2) @ placed
            cache[:] = cache * kept + written.transpose(1, 2)
        return key_cache, value_cache

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return rms_norm(self.decoder.module.norm, hidden, 1)


def _check_layers(model: StreamFusedReference) -> None:
    for index, layer in enumerate(model.decoder.layers):
        found = dict(layer.named_modules())
        norms = (name for name in found if "norm" in name)
        kind = type(layer).__name__
        faults = [] if kind in _KINDS else [f"is a {kind}"]
        faults += [f"has no {name}" for name in _PARTS if name not in found]
        faults += [
            f"has a {name} that is not an RMSNorm"
            for name in norms
            if not hasattr(found[name], "variance_epsilon")
        ]
        require(
            not faults,
            f"layer {index} {', '.join(faults[:1])}",
            expected="layers as Llama, Mistral, Qwen2 or Qwen3 have them, for --profile ane",
            do="use --profile gpu",
        )
