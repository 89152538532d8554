"""Additive masks inside the graph, from the mask of the nodes that the host gives."""

from __future__ import annotations

import torch

# Not minus infinity: on the Neural Engine and in float16 it turns into NaN where a row sees
# nothing, and exp(-1e4) is 0 in every precision.
MASKED = -1e4


def own_stream_mask(num_nodes: int, num_streams: int, dtype: torch.dtype) -> torch.Tensor:
    """[M * G, M * G] eq. 2 among stream rows: stream j of a node sees the node's streams 1 to j."""
    row = torch.arange(num_nodes * num_streams)
    same_node = row[:, None] // num_streams == row // num_streams
    visible = same_node & (row <= row[:, None])
    return torch.where(visible, 0.0, MASKED).to(dtype)


def upper_mask(nodes: torch.Tensor, own: torch.Tensor, num_streams: int) -> torch.Tensor:
    """[1, 1, M * (1 + G), S + M * G] mask of nodes and their streams (eqs. 1 and 2).

    Args:
        nodes: [1, 1, M, S] what each node sees; its streams see the same slots.
        own: [M * G, M * G] as `own_stream_mask`.
        num_streams: G.
    """
    _, _, num_nodes, num_slots = nodes.shape
    num_rows = own.shape[0]
    blind = torch.full((1, 1, num_nodes, num_rows), MASKED, dtype=nodes.dtype)
    node_rows = torch.cat([nodes, blind], dim=3)
    seen = nodes[0, 0, :, None].expand(num_nodes, num_streams, num_slots)
    seen = seen.reshape(1, 1, num_rows, num_slots)
    return torch.cat([node_rows, torch.cat([seen, own[None, None]], dim=3)], dim=2)
