"""What earlier answers have taught of calls' costs and of acceptance, in lines and tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..generation.plan import Plan
    from ..model.streams import StreamFusedModel
    from ..policy.acceptance import AcceptancePrior
    from ..policy.costs import CostTable


def cost_table_rows(costs: CostTable) -> list[list[str]]:
    """The known costs as rows of cells, the head first; no rows if no cost is known."""
    found: dict[tuple[str, int], dict[int, str]] = {}
    for bucket, name, count, calls, _ in costs.to_dict()["costs"]:
        found.setdefault((name, bucket), {})[count] = f"{calls:.2f}"
    counts = sorted({count for row in found.values() for count in row})
    rows = [
        [f"{name}, from {bucket} tokens on", *(row.get(count, "") for count in counts)]
        for (name, bucket), row in sorted(found.items())
    ]
    return [["plain calls a call, by nodes", *map(str, counts)], *rows] if rows else []


def learned_lines(
    model: StreamFusedModel,
    plan: Plan,
    context: int,  # tokens that are committed
) -> Iterator[str]:
    """What is known of the plan's first drafter; no lines if nothing drafts or is learned."""
    from ..drafters.lookup import NAME
    from ..generation.learned import learned_of
    from ..generation.plan import offer_source_of
    from ..policy.costs import ROWS

    if plan.learned is None or plan.kind is None:
        return
    _, prior = learned_of(model)
    offer = offer_source_of(model, plan.drafters[0]).offer()
    cost_name = plan.kind if offer is None else offer.cost_name
    if plan.kind == NAME:  # it offers nothing unless it finds a match
        cost_name = ROWS
    yield _costs_line(plan.learned.costs, plan.kind, cost_name, context)
    yield _acceptance_line(prior, plan.kind, context)


def _costs_line(costs: CostTable, drafter: str, cost_name: str, context: int) -> str:
    known = costs.frozen(context).known
    calls = {count: one for (name, count), (one, _) in sorted(known.items()) if name == cost_name}
    if not calls:
        return f"costs: no call of {drafter} was timed here yet"
    shown = ", ".join(f"{count}: {one:.2f}" for count, one in calls.items())
    seconds = costs.plain_seconds(context)
    plain = "" if seconds is None else f" of {1000 * seconds:.1f} ms"
    return f"costs: plain calls{plain} that a call of {drafter} takes, by nodes: {shown}"


def _acceptance_line(prior: AcceptancePrior, drafter: str, context: int) -> str:
    from ..policy.offers import MATCH_LENGTHS, match_ratio

    known = prior.known_ratios(context)
    if drafter in known:
        return f"acceptance: {known[drafter]:.2f} of the drafted tokens that {drafter} should bring"
    by_length = {
        length: known[name]
        for length in MATCH_LENGTHS
        if (name := match_ratio(drafter, length)[0]) in known
    }
    if not by_length:
        return f"acceptance: no text was drafted with {drafter} here yet"
    shown = ", ".join(f"{length}: {share:.2f}" for length, share in by_length.items())
    return f"acceptance: of the next tokens that {drafter} drafts, by length of the match: {shown}"
