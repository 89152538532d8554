"""What the answers of `perf.compare` come to: the columns of tables 1 and 2, and what was equal."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ssmlx.tuning.machine import machine

from ..run.metrics import mean, ratio, speedup
from ..run.store import Kept
from ..run.systems import MLX_LM
from ..run.tasks import score_texts
from .bench import Bench
from .plan import Plan, TaskPlan
from .run import Answers, Measured
from .systems import DRAFT_ALONE, PLAIN, DecodingMethod

Prompts = Sequence[Sequence[Kept]]
"""One system's answers: for every prompt, its repeats."""


def result_of(plan: Plan, tasks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All that is reported and saved."""
    return {
        "machine": machine(),
        "model": plan.model,
        "dtype": plan.dtype,
        "temp": plan.sampling.temp,
        "top_k": plan.sampling.top_k,
        "seed": plan.sampling.seed,
        "repeats": plan.repeats,
        "warm_up": plan.warm_up,
        "tasks": list(tasks),
    }


def task_result(task: TaskPlan, measured: Measured) -> dict[str, Any]:
    """A task's part of the result."""
    answers = measured.answers
    shared = figures_of(task, answers[PLAIN])
    return {
        "task": task.task.name,
        "data": task.data.name,
        "prompts": len(task.examples),
        "max_tokens": task.max_tokens,
        "adapter": task.adapter.resolve().name if task.adapter else None,
        "scope": measured.bench.scope,
        "target_bytes": measured.bench.target_bytes,
        "figures": list(shared),
        "left_out": dict(task.left_out),
        "draft_call_seconds": call_seconds(answers.get(DRAFT_ALONE)),
        "systems": [system_row(task, system, measured, shared) for system in task.systems],
    }


def system_row(
    task: TaskPlan, system: DecodingMethod, measured: Measured, shared: Mapping[str, Any]
) -> dict[str, Any]:
    """A system's line of the tables; `shared` is the metric of plain decoding's answers."""
    bench, prompts = measured.bench, measured.answers[system.name]
    is_shared = is_same(prompts, measured.answers[PLAIN])
    differences = measured.differences.get(system.name)
    return {
        "name": system.name,
        "kind": system.kind,
        "options": options_of(system, bench),
        **counts(prompts, task.max_tokens),
        **times(prompts),
        **speedups(system, measured.answers),
        "figures": shared if is_shared else figures_of(task, prompts),
        "figures_of": PLAIN if is_shared else system.name,
        **memory(system, bench, prompts),
        "differences": [asdict(one) for one in differences or ()],
        "same_as_plain": None if differences is None else len(prompts) - len(differences),
    }


def options_of(system: DecodingMethod, bench: Bench) -> dict[str, Any]:
    """How a system drafts; empty where it does not."""
    extra = bench.extras[system.name]
    if system.config is None or not extra.levels:
        return {}
    config = asdict(system.config)
    names = {"draft-model": "draft", "mlp-speculator": "speculator_tree"}
    own = names.get(system.kind, system.kind.replace("-", "_"))
    shapes = {name: config[name] for name in ("tree", "prune", own) if name in config}
    return {"levels": extra.levels, "nodes": extra.nodes, **shapes}


def counts(prompts: Prompts, most: int) -> dict[str, Any]:
    """Tokens and calls, which are the same in every repeat."""
    first = [repeats[0].answer for repeats in prompts]
    tokens, calls = [len(a.tokens) for a in first], [a.target_calls for a in first]
    return {
        "tokens": sum(tokens),
        "target_calls": sum(calls),
        "draft_calls": sum(a.draft_calls for a in first),
        "tokens_per_call": asdict(ratio(tokens, calls)),
        "target_calls_per_answer": asdict(mean(calls)),
        "draft_calls_per_answer": asdict(mean([a.draft_calls for a in first])),
        "tokens_per_answer": asdict(mean(tokens)),
        "cut_at_max_tokens": sum(count == most for count in tokens),
    }


def medians(prompts: Prompts, name: str) -> list[float]:
    """[prompts] an attribute of `Answer`, the median of the repeats."""
    return [statistics.median(getattr(k.answer, name) for k in repeats) for repeats in prompts]


def times(prompts: Prompts) -> dict[str, Any]:
    """Seconds an answer, of the median repeat; tokens/s as the median over prompts."""
    names = {"latency": "seconds", "first_token": "prefill_seconds", "decode": "decode_seconds"}
    return {
        **{f"{name}_seconds": asdict(mean(medians(prompts, of))) for name, of in names.items()},
        "tokens_per_second": statistics.median(medians(prompts, "tokens_per_second")),
        "call_seconds": call_seconds(prompts),
    }


def call_seconds(prompts: Prompts | None) -> float | None:
    """Seconds a target call after the first, median over answers; None where there was none."""
    answers = [kept.answer for repeats in prompts or () for kept in repeats]
    times = [a.decode_seconds / (a.target_calls - 1) for a in answers if a.target_calls > 1]
    return statistics.median(times) if times else None


def speedups(system: DecodingMethod, answers: Answers) -> dict[str, Any]:
    """Tokens/s over mlx-lm's, and over the draft model's where there is one; whole answers too."""
    speeds = {name: medians(prompts, "tokens_per_second") for name, prompts in answers.items()}
    latencies = [medians(answers[name], "seconds") for name in (MLX_LM, system.name)]
    own = speeds[system.name]
    found: dict[str, Any] = {
        "speedup": speedup(own, speeds[MLX_LM]),
        "latency_speedup": asdict(ratio(*latencies)),
    }
    if "draft-model" in speeds and system.kind == "streams":
        found["speedup_over_draft_model"] = speedup(own, speeds["draft-model"])
    return found


def figures_of(task: TaskPlan, prompts: Prompts) -> dict[str, Any]:
    """The task's metric; none where there are no references."""
    scores = score_texts(task.task, task.examples, [repeats[0].text for repeats in prompts])
    rows = {} if scores is None else dict(zip(task.task.figures, scores, strict=True))
    return {name: asdict(mean(row)) for name, row in rows.items()}


def is_same(ours: Prompts, theirs: Prompts) -> bool:
    """Whether all answers are the same, token for token."""
    pairs = zip(ours, theirs, strict=True)
    return all(a[0].answer.tokens == b[0].answer.tokens for a, b in pairs)


def memory(system: DecodingMethod, bench: Bench, prompts: Prompts) -> dict[str, int]:
    """What a system takes beside the target's weights: its own, and at its peak."""
    extra = bench.extras[system.name]
    peak = max(kept.answer.peak_bytes for repeats in prompts for kept in repeats)
    return {
        "extra_parameters": extra.parameters,
        "weight_bytes": extra.weight_bytes,
        "peak_bytes": extra.weight_bytes + peak,
    }


def failures(result: Mapping[str, Any]) -> list[str]:
    """Lossless systems whose tokens are not plain decoding's, as "task, system".

    mlx-lm is not ours to promise: where it differs, the report says so. A near tie in half
    precision is rounding.
    """
    return [
        f"{task['task']}, {row['name']}"
        for task in result["tasks"]
        for row in task["systems"]
        if row["kind"] != MLX_LM and not all(one["near_tie"] for one in row["differences"])
    ]
