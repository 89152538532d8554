"""What the answers of `perf.quality` come to: figures, and who is compared with whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ..run.metrics import Scores, mean, paired_difference, ratio
from ..run.systems import MLX_LM, ModelUnderTest
from ..run.tasks import score_texts
from .answers import Kept
from .plan import Plan


def result_of(plan: Plan, answers: Mapping[str, Mapping[str, list[Kept]]]) -> dict[str, Any]:
    """All that is reported and saved."""
    rows = {s.name: system_row(plan, s, answers[s.name]) for s in plan.systems}
    order = {"base": 0, "baseline": 1, "adapter": 2}
    shown = mlx_lm_rows(plan, plan.systems, answers)
    shown += sorted(rows.values(), key=lambda row: order[row["role"]])
    return {
        "task": plan.task.name,
        "data": str(plan.data),
        "model": plan.model,
        "prompts": len(plan.examples),
        "max_tokens": plan.max_tokens,
        "most_references": max(len(example.references) for example in plan.examples),
        "figures": list(plan.task.figures) if all(e.references for e in plan.examples) else [],
        "systems": shown,
        **comparisons(plan, rows, answers),
    }


def system_row(
    plan: Plan, system: ModelUnderTest, answers: Mapping[str, list[Kept]]
) -> dict[str, Any]:
    """A system in the table: its best tree, and all that were tried."""
    own = {label: kept for label, kept in answers.items() if label != MLX_LM}
    variants = {label: summarise(plan, kept) for label, kept in own.items()}
    best = max(variants, key=lambda label: variants[label]["tokens_per_call"]["value"])
    row = {
        "name": system.name,
        "role": system.role,
        "scope": system.scope,
        "folder": str(system.folder) if system.folder else None,
        "decoding": best,
        "extra_parameters": system.extra_parameters,
        **variants[best],
    }
    if len(variants) > 1:
        row |= drafting(system, best)
        row["trees"] = [
            {"tree": label, "same_answers": same(kept, own[best]), **variants[label]}
            for label, kept in own.items()
        ]
    return row


def drafting(system: ModelUnderTest, label: str) -> dict[str, Any]:
    """What the trees of a system have in common."""
    config = system.variants[label]
    assert config is not None and config.prune is not None
    return {"num_streams": config.num_streams, "prune": asdict(config.prune)}


def mlx_lm_rows(
    plan: Plan, systems: Sequence[ModelUnderTest], answers: Mapping[str, Mapping[str, list[Kept]]]
) -> list[dict[str, Any]]:
    """mlx-lm in the table, where it was asked for."""
    return [
        {
            "name": f"{MLX_LM} ({system.name})",
            "role": MLX_LM,
            "scope": system.scope,
            "decoding": MLX_LM,
            "extra_parameters": 0,
            "same_answers": same(answers[system.name][MLX_LM], answers[system.name][own]),
            **summarise(plan, answers[system.name][MLX_LM]),
        }
        for system in systems
        if MLX_LM in system.variants
        for own in list(system.variants)[:1]
    ]


def comparisons(
    plan: Plan, rows: Mapping[str, Any], answers: Mapping[str, Mapping[str, list[Kept]]]
) -> dict[str, Any]:
    """Adapters of scope "all" against the baseline, those of scope "streams" against the base."""
    kept = {name: answers[name][row["decoding"]] for name, row in rows.items()}
    adapters = [system for system in plan.systems if system.role == "adapter"]
    return {
        "differences": [
            difference
            for system in adapters
            if system.scope == "all" and "baseline" in kept
            for difference in differences(plan, system.name, kept)
        ],
        "identical_to_base": [
            identity(plan, system, kept) for system in adapters if system.scope == "streams"
        ],
    }


def differences(
    plan: Plan, adapter: str, kept: Mapping[str, Sequence[Kept]]
) -> list[dict[str, Any]]:
    """An adapter's figures less the baseline's; none where there are no references."""
    ours, theirs = scores_of(plan, kept[adapter]), scores_of(plan, kept["baseline"])
    if ours is None or theirs is None:
        return []
    pair, rows = {"adapter": adapter, "baseline": "baseline"}, []
    for figure, our_row, their_row in zip(plan.task.figures, ours, theirs, strict=True):
        gap = paired_difference(our_row, their_row)
        rows.append({**pair, "figure": figure, **asdict(gap), "verdict": gap.verdict})
    return rows


def identity(
    plan: Plan, system: ModelUnderTest, kept: Mapping[str, Sequence[Kept]]
) -> dict[str, Any]:
    """How many of an adapter's answers are the untouched base's."""
    bases = (other for other in plan.systems if other.role == "base")
    base = next(other.name for other in bases if other.wording == system.wording)
    count = same(kept[system.name], kept[base])
    return {"adapter": system.name, "base": base, "same_answers": count}


def summarise(plan: Plan, kept: Sequence[Kept]) -> dict[str, Any]:
    """The figures of one variant of a system."""
    answers, scores = [answer.answer for answer in kept], scores_of(plan, kept)
    tokens = np.array([len(answer.tokens) for answer in answers])
    calls = np.array([answer.target_calls for answer in answers])
    seconds = [answer.decode_seconds for answer in answers]
    rows = dict(zip(plan.task.figures, scores, strict=True)) if scores is not None else {}
    return {
        "figures": {name: asdict(mean(row)) for name, row in rows.items()},
        "tokens_per_call": asdict(ratio(tokens, calls)),
        "target_calls": int(calls.sum()),
        "target_calls_per_answer": asdict(mean(calls)),
        "tokens": int(tokens.sum()),
        "tokens_per_answer": asdict(mean(tokens)),
        "tokens_per_second": asdict(ratio(tokens - 1, seconds)),
        "cut_at_max_tokens": int((tokens == plan.max_tokens).sum()),
    }


def scores_of(plan: Plan, kept: Sequence[Kept]) -> Scores | None:
    """[figures, prompts] what the answers are worth; None where there are no references."""
    return score_texts(plan.task, plan.examples, [answer.text for answer in kept])


def same(ours: Sequence[Kept], theirs: Sequence[Kept]) -> int:
    """How many answers are the same, token for token."""
    pairs = zip(ours, theirs, strict=True)
    return sum(a.answer.tokens == b.answer.tokens for a, b in pairs)


def is_lossless(result: Mapping[str, Any]) -> bool:
    """Whether all answers that must be the same are."""
    rows = [row for system in result["systems"] for row in (system, *system.get("trees", ()))]
    rows += result["identical_to_base"]
    counts = [row["same_answers"] for row in rows if "same_answers" in row]
    return all(count == result["prompts"] for count in counts)
