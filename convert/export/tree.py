"""What the decode step decides about its tree: pruning (section 3.2.3) and acceptance (A.1).

The rules are those of `ssmlx/prune.py` and `ssmlx/accept.py`, on fixed shapes. A node of depth -1
only fills the tree up.
"""

from __future__ import annotations

import torch

from ssmlx.model.tree import MAX_EDGE_LOGPROB, MIN_EDGE_LOGPROB

# Below every path that exists: less than any depth times the least edge, and a float16.
_IMPOSSIBLE = -1e4


def surviving_nodes(
    edges: torch.Tensor, depths: torch.Tensor, ancestors: torch.Tensor, keep: int
) -> torch.Tensor:
    """[M] int32 the `keep` nodes of the largest path probability, ascending.

    Args:
        edges: [N] early-exit log probability of each node given its parent.
        depths: [N] int32.
        ancestors: [N, N] 1 where the column's node is the row's or above it, else 0.
        keep: M.
    """
    below_root = (depths > 0).to(edges.dtype)
    clipped = edges.clamp(MIN_EDGE_LOGPROB, MAX_EDGE_LOGPROB) * below_root
    idle = (depths < 0).to(edges.dtype)
    scores = (ancestors * clipped).sum(dim=-1) + _IMPOSSIBLE * idle
    chosen = scores.topk(keep).indices.int()
    # Ascending, by a sort of small whole numbers, which float16 holds exactly.
    return -(-chosen.to(edges.dtype)).topk(keep).values.int()


def last_accepted(
    tokens: torch.Tensor,
    targets: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    ancestors: torch.Tensor,
) -> torch.Tensor:
    """[1] int32 the deepest node whose whole path carries the target's own tokens.

    Args:
        tokens: [M] int32 token of each node.
        targets: [M] int32 the target's token after each node.
        parents: [M] int32; the root's own is the root.
        depths: [M] int32.
        ancestors: [M, M] as in `surviving_nodes`.
    """
    agrees = torch.logical_or(tokens == targets[parents], depths == 0)
    faults = (ancestors * torch.logical_not(agrees).to(ancestors.dtype)).sum(dim=-1)
    reached = (depths + 1).to(ancestors.dtype) * (faults < 0.5).to(ancestors.dtype)
    return reached.argmax(dim=0, keepdim=True).int()


def renumbered(kept: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
    """[M] int32 where each of `nodes` [M] stands among `kept` [M]."""
    return (nodes[:, None] == kept).int().argmax(dim=-1).int()
