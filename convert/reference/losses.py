"""Eq. 5: cross-entropies of the main stream, of every speculative stream, and of early exit.

The logits are by far the largest arrays of a step. So loss and gradient are computed a few rows
at a time, in one go, and no logits are kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from ssmlx.training.objective import row_chunks

IGNORED = -1
"""The target of a row that has none."""


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    scales: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scaled sum of cross-entropies under a linear head, and each row's own.

    Args:
        hidden: [R, D], which the gradient reaches.
        weight: [V, D] the head, which it reaches unless that is frozen; bias: [V] or None,
            which it does not.
        targets: [R] token ids; a row with `IGNORED` counts nothing.
        scales: [R] the weight of each row in the sum.

    Returns:
        The sum, and [R] losses in nats that no gradient passes through.
    """
    total, losses = _LinearCrossEntropy.apply(hidden, weight, bias, targets, scales)
    return total, losses


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        scales: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        of_hidden = torch.empty_like(hidden)
        is_trained = ctx.needs_input_grad[1]
        of_weight = weight.new_zeros(weight.shape, dtype=torch.float32) if is_trained else None
        scales = scales * (targets != IGNORED)
        for rows in row_chunks(len(hidden), len(weight)):
            logits = F.linear(hidden[rows], weight, bias).float()
            chosen = targets[rows].clamp(min=0)[:, None]
            normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
            losses[rows] = (normaliser - logits.gather(1, chosen))[:, 0]
            # d loss / d logits: the probabilities, less one at the target
            slopes = logits.sub_(normaliser).exp_()
            slopes.scatter_add_(1, chosen, torch.full_like(normaliser, -1.0))
            slopes = slopes.mul_(scales[rows, None]).to(weight.dtype)
            of_hidden[rows] = slopes @ weight
            if of_weight is not None:
                of_weight += slopes.T @ hidden[rows]
        losses.masked_fill_(targets == IGNORED, 0.0)
        ctx.save_for_backward(of_hidden, None if of_weight is None else of_weight.to(weight.dtype))
        ctx.mark_non_differentiable(losses)
        return (losses * scales).sum(), losses

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found = (
            one if one is None else one * upstream[0].to(one.dtype) for one in ctx.saved_tensors
        )
        return *found, None, None, None


def mean_scales(targets: torch.Tensor, weight: float) -> torch.Tensor:
    """[R] scales with which the sum is `weight` times the mean over rows that have a target."""
    count = int((targets != IGNORED).sum())
    return torch.full(targets.shape, weight / max(1, count), device=targets.device)
