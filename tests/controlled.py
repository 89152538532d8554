"""Answers under a controller that is told what calls cost."""

from dataclasses import replace

from tiny import first_tokens

from ssmlx.decoding.step import DraftTotals
from ssmlx.generation.plan import decode_plan, make_plan, offer_source_of
from ssmlx.policy.acceptance import AcceptancePrior
from ssmlx.policy.controller import Controller
from ssmlx.policy.costs import CostTable

PROMPT = [3, 1, 4, 1, 5]


def table_of(extra: float) -> CostTable:
    """Rows that cost so many plain calls each."""
    table = CostTable()
    for nodes in (2, 4, 8, 16, 32):
        for _ in range(8):
            table.learn(("rows", nodes), 0, 1 + extra * (nodes - 1))
            table.learn(("streams", nodes), 0, 1.1 + extra * (nodes - 1))
    return table


def answer(model, count, *, prompt=PROMPT, row_cost=0.01, prior=None, **settings):
    """Tokens of an answer, how many each call brought, and what was drafted."""
    plan = make_plan(model, context=len(prompt), **settings)
    if plan.drafters:
        sources = [offer_source_of(model, one) for one in plan.drafters]
        known = table_of(row_cost), prior or AcceptancePrior()
        plan = replace(plan, controller=Controller(*known, sources, reads_seconds=False))
    totals = DraftTotals()
    steps = decode_plan(plan, model, prompt, model.make_cache())
    tokens, lengths = first_tokens(steps, count, totals)
    return tokens, lengths, totals.drafts
