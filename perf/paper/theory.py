"""Eq. 6 of the paper (section 4.1.2): Speculative Streaming against a separate draft model.

A token's latency cost is that of a verification step over the tokens that the step advances by:

    (gamma * C_draft + C_target) / zeta    with a draft model, which runs gamma times a step
    C_ss / beta                            with streams, which need no call of their own

Cache adjustment and prompt processing are left out, as there. Costs are in any one unit of time.
"""

from __future__ import annotations

GAMMA = 4
"""Tokens that the draft model drafts a step, in figure 4 and table 2."""


def draft_target_cost(draft: float, target: float, zeta: float, gamma: int = GAMMA) -> float:
    """Cost of a token with a draft model.

    Args:
        draft: C_draft, a forward pass of the draft model.
        target: C_target, a forward pass of the target.
        zeta: tokens advanced a verification step.
        gamma: forward passes of the draft model a step.
    """
    return (gamma * draft + target) / zeta


def streaming_cost(streaming: float, beta: float) -> float:
    """Cost of a token with streams.

    Args:
        streaming: C_ss, a forward pass of the target with its streams.
        beta: tokens advanced a verification step.
    """
    return streaming / beta


def theoretical_speedup(
    latency_ratio: float, advance_ratio: float, gamma: int = GAMMA, overhead: float = 1.0
) -> float:
    """How many times faster streams are than a draft model: figure 4.

    Args:
        latency_ratio: C_target / C_draft.
        advance_ratio: zeta / beta.
        gamma: forward passes of the draft model a step.
        overhead: C_ss / C_target; the paper takes them as equal.
    """
    with_draft = draft_target_cost(1.0, latency_ratio, advance_ratio, gamma)
    return with_draft / streaming_cost(overhead * latency_ratio, 1.0)


def parity(latency_ratio: float, gamma: int = GAMMA, overhead: float = 1.0) -> float:
    """zeta / beta at which both are equally fast: 1.4 for a latency ratio of 10."""
    return theoretical_speedup(latency_ratio, 1.0, gamma, overhead)
