"""Multi-stream attention for training, without the products that the mask would throw away.

With K carriers of G streams, a stream row sees the node rows and at most G of the K * G stream
rows. PyTorch's kernels would score it against all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

NAME = "ssmlx_streams"


def use_stream_attention(base: nn.Module, num_streams: int) -> None:
    """Let transformers' attention modules of `base` score stream rows sparsely.

    Node rows go to PyTorch's own kernel. For a model whose stream rows stand node by node, as
    `StreamFusedReference` has them.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **settings: Any,
    ) -> tuple[torch.Tensor, None]:
        if attention_mask is None or query.shape[2] == key.shape[2]:
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, scaling=scaling, **settings
            )
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        mixed = stream_attention(query, key, value, attention_mask, num_streams, scale)
        return mixed.transpose(1, 2), None

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    base.set_attn_implementation(NAME)


def stream_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    num_streams: int,
    scale: float,
) -> torch.Tensor:
    """Eq. 2 for the K * G stream rows: [B, H, K * G, Dh].

    Args:
        query: [B, H, K * G, Dh]
        key: [B, Hkv, T + K * G, Dh] of the node rows, then of the stream rows; `value` alike.
        mask: [B, 1, K * G, T + K * G] additive. Of its stream part only the rule matters, that
            stream j of a node sees the node's streams 1 to j.
        num_streams: G.
        scale: of the scores.
    """
    batch, heads, rows, width = query.shape
    kv_heads, num_nodes = key.shape[1], key.shape[2] - rows
    groups, num_carriers = heads // kv_heads, rows // num_streams
    # [B, Hkv, groups, K, G, Dh]: a KV head's query heads side by side
    parted = (query * scale).view(batch, kv_heads, groups, num_carriers, num_streams, width)
    folded = parted.reshape(batch, kv_heads, groups * rows, width)
    node_scores = folded @ key[:, :, :num_nodes].transpose(2, 3)
    node_scores = node_scores.view(batch, heads, rows, num_nodes) + mask[..., :num_nodes]

    def own(x: torch.Tensor) -> torch.Tensor:
        """The stream rows of keys or values, a matrix [G, Dh] for each KV head of each node."""
        return x[:, :, num_nodes:].reshape(-1, num_streams, width)

    def by_node(x: torch.Tensor) -> torch.Tensor:
        """[B, Hkv, groups, K, G, n] -> [B * Hkv * K, groups * G, n]."""
        return x.transpose(2, 3).reshape(-1, groups * num_streams, x.shape[-1])

    def by_row(x: torch.Tensor) -> torch.Tensor:
        """The way back, to [B, H, K * G, n]."""
        shape = batch, kv_heads, num_carriers, groups, num_streams, x.shape[-1]
        return x.view(shape).transpose(2, 3).reshape(batch, heads, rows, -1)

    own_scores = by_row(torch.bmm(by_node(parted), own(key).transpose(1, 2)))
    rank = torch.arange(rows, device=query.device) % num_streams
    later = rank[:, None] < torch.arange(num_streams, device=query.device)
    own_scores = own_scores.masked_fill(later, torch.finfo(own_scores.dtype).min)

    weights = torch.cat([node_scores, own_scores], dim=-1).float().softmax(dim=-1).to(value.dtype)
    on_nodes, on_own = weights.split([num_nodes, num_streams], dim=-1)
    mixed = on_nodes.reshape(batch, kv_heads, groups * rows, num_nodes) @ value[:, :, :num_nodes]
    on_own = on_own.reshape(*parted.shape[:-1], num_streams)
    return mixed.view(batch, heads, rows, width) + by_row(torch.bmm(by_node(on_own), own(value)))
