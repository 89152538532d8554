"""What `perf.quality` shows: a table and a picture of a result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ssmlx.tuning.report import new_figure

from ..paper.published import PAPER
from ..run.show import (
    COLOURS,
    Columns,
    Row,
    bars,
    figure,
    metrics,
    notes_of,
    number,
    paper_band,
    same_text,
    table,
)
from ..run.statistics import estimate

BASELINE = "baseline"


def report(result: Row) -> str:
    """The result as text."""
    first, *others = result["tasks"]
    blocks = [
        [
            f"{first['task']}: {first['prompts']} prompts of {first['data']}, {result['model']}, "
            f"greedy, float32, at most {first['max_tokens']} tokens an answer; [95 % intervals "
            "over prompts]"
        ],
        *(table(_columns(task), task["systems"]) for task in result["tasks"]),
        _difference_lines(first) if others else [],
        _note_lines(first),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _columns(task: Row) -> Columns:
    return {
        str(task["adapter"]): lambda row: row["name"],
        **metrics(task["figures"]),
        "tokens/call": figure("tokens_per_call"),
        "calls": number("target_calls"),
        "calls/answer": figure("target_calls_per_answer", 1),
        "tokens": number("tokens"),
        "tokens/answer": figure("tokens_per_answer", 1),
        "decode tokens/s": figure("decode_rate", 1),
        "extra parameters": number("extra_parameters"),
        "same tokens as plain": same_text(task["prompts"]),
    }


def _difference_lines(task: Row) -> list[str]:
    gaps = {name: estimate(gap) for name, gap in task["differences"].items()}
    return [
        f"{task['adapter']} - {BASELINE}, {name}: {gap.text(1, signed=True)}, {gap.verdict}"
        for name, gap in gaps.items()
    ]


def _note_lines(task: Row) -> list[str]:
    """What the figures mean."""
    notes, names = (
        ["plain: what the streams draft for, without them", *notes_of(task)],
        task["figures"],
    )
    if names and task["task"] == "sql":
        notes.append("exact match: every run of white space counts as one space")
    elif names:
        notes.append("ROUGE: F1 by rouge_score with stemmer, lines are sentences, best reference")
    cut = next(row["cut_at_max_tokens"] for row in task["systems"] if row["kind"] == "plain")
    notes.append(f"cut at {task['max_tokens']} tokens: {cut} of plain's answers")
    paper = PAPER.get(task["task"])
    if paper:
        low, high = paper.call_reduction
        notes.append(
            f"the paper's table 1, {paper.name}, models of 1.3B to 7B: {low:.2f} to {high:.2f} "
            f"tokens per call, {names[0] if names else 'metric'} {paper.metric[0]:.2f} to "
            f"{paper.metric[1]:.2f}"
        )
    return notes


def draw(result: Row, path: Path) -> None:
    """The picture: the metric beside the tokens per call, each system a row."""
    tasks, first = result["tasks"], result["tasks"][0]
    rows = [(task["adapter"], row) for task in tasks for row in task["systems"]]
    names, paper = first["figures"], PAPER.get(first["task"])
    style: dict[str, Any] = {"color": [COLOURS[row["kind"]] for _, row in rows], "room": 1.13}
    picture = new_figure(10, 1.9 + 0.5 * len(rows))
    panels = picture.subplots(1, 2 if names else 1, sharey=True, squeeze=False)[0]
    for offset, alpha, name in zip((-0.19, 0.19), (1.0, 0.45), names, strict=False):
        values = [row["figures"][name] for _, row in rows]
        label = f"{names[0]}, %   (pale: {names[1]})"
        bars(panels[0], values, label, 1, offset=offset, height=0.34, alpha=alpha, **style)
    calls = [row["tokens_per_call"] for _, row in rows]
    bars(panels[-1], calls, "tokens per target call", height=0.6, **style)
    if paper:
        paper_band(panels[-1], paper.call_reduction, 2)
        if names:
            paper_band(panels[0], paper.metric, 1)
    panels[0].set_yticks(range(len(rows)), [f"{name}: {row['name']}" for name, row in rows])
    panels[0].invert_yaxis()
    picture.suptitle(
        f"{first['task']}: {first['prompts']} prompts, {result['model']}, greedy, float32, "
        "95 % intervals over prompts"
        + (f"; paper: {paper.name}, 1.3B to 7B models" if paper else ""),
        fontsize=9,
    )
    picture.savefig(path, dpi=150)
