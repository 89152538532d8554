"""What `perf.quality` shows: a table and a picture of a result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ssmlx.tuning.report import aligned, new_figure

from ..paper.published import PAPER
from ..run.metrics import FEW, estimate
from ..run.pictures import bars, paper_band

COLOURS = {"mlx-lm": "#2b2d42", "base": "#8d99ae", "baseline": "#8d99ae", "adapter": "#0b6e4f"}


def system_cells(row: Mapping[str, Any], figures: Sequence[str]) -> list[str]:
    """A system's line of the table."""
    return [
        row["name"],
        row["decoding"],
        *(estimate(row["figures"][name]).text(1) for name in figures),
        estimate(row["tokens_per_call"]).text(),
        f"{row['target_calls']:,}",
        estimate(row["target_calls_per_answer"]).text(1),
        f"{row['tokens']:,}",
        estimate(row["tokens_per_answer"]).text(1),
        estimate(row["tokens_per_second"]).text(1),
        f"{row['extra_parameters']:,}" if row["extra_parameters"] else "-",
    ]


def system_table(result: Mapping[str, Any]) -> list[str]:
    """A line for each system."""
    head = [
        "system",
        "decoding",
        *(f"{name}, %" for name in result["figures"]),
        "tokens/call",
        "calls",
        "calls/answer",
        "tokens",
        "tokens/answer",
        "decode tokens/s",
        "extra parameters",
    ]
    return aligned([head, *(system_cells(row, result["figures"]) for row in result["systems"])])


def tree_table(row: Mapping[str, Any], prompts: int) -> list[str]:
    """A line for each tree that a system tried."""
    head = [f"trees of {row['name']}", "tokens/call", "calls", "decode tokens/s", "same answers"]
    lines = [
        [
            tree["tree"] + (" *" if tree["tree"] == row["decoding"] else ""),
            estimate(tree["tokens_per_call"]).text(),
            f"{tree['target_calls']:,}",
            estimate(tree["tokens_per_second"]).text(1),
            f"{tree['same_answers']} of {prompts}",
        ]
        for tree in row["trees"]
    ]
    return [*aligned([head, *lines]), "* most tokens per call on these prompts, shown above"]


def comparison_lines(result: Mapping[str, Any]) -> list[str]:
    """What was compared with what, in words."""
    count = result["prompts"]
    lines = [
        f"{row['adapter']} - {row['baseline']}, {row['figure']}: "
        f"{estimate(row).text(1, signed=True)}, {row['verdict']}"
        for row in result["differences"]
    ]
    for row in result["identical_to_base"]:
        lines.append(
            f"{row['adapter']} and the untouched {row['base']}: {row['same_answers']} of {count} "
            "answers the same, token for token"
        )
    for row in result["systems"]:
        if row["role"] == "mlx-lm":
            lines.append(
                f"{row['name']} and ssmlx on the same weights: {row['same_answers']} of {count} "
                "answers the same, token for token"
            )
        elif row["role"] == "adapter" and row["scope"] == "all" and not result["differences"]:
            lines.append(f"{row['name']}: nothing to compare its metric with")
    return lines


def note_lines(result: Mapping[str, Any]) -> list[str]:
    """What the figures mean."""
    notes = []
    if result["figures"] and result["task"] == "sql":
        notes.append("exact match: every run of white space counts as one space")
    elif result["figures"]:
        many = result["most_references"]
        best = f", best over up to {many} references" if many > 1 else ""
        notes.append(f"ROUGE: F1 by rouge_score with stemmer, lines are sentences{best}")
    if result["prompts"] < FEW:
        notes.append(f"fewer than {FEW} prompts: the intervals are narrower than they should be")
    cut = [f"{r['cut_at_max_tokens']} of {r['name']}" for r in result["systems"]]
    notes.append(f"answers as long as {result['max_tokens']} tokens: {', '.join(cut)}")
    paper = PAPER.get(result["task"])
    if paper:
        low, high = paper.call_reduction
        notes.append(
            f"the paper's table 1, {paper.name}, models of 1.3B to 7B: {low:.2f} to {high:.2f} "
            f"tokens per call, {result_metric(result)} {paper.metric[0]:.2f} to "
            f"{paper.metric[1]:.2f}"
        )
    return notes


def result_metric(result: Mapping[str, Any]) -> str:
    """The name of the first figure."""
    return result["figures"][0] if result["figures"] else "metric"


def report(result: Mapping[str, Any]) -> str:
    """The result as text."""
    prompts = result["prompts"]
    blocks = [
        [
            f"{result['task']}: {prompts} prompts of {result['data']}, {result['model']}, greedy, "
            f"float32, at most {result['max_tokens']} tokens an answer; [95 % intervals over "
            "prompts]"
        ],
        system_table(result),
        *(tree_table(row, prompts) for row in result["systems"] if "trees" in row),
        comparison_lines(result),
        note_lines(result),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def row_label(row: Mapping[str, Any]) -> str:
    """A system's name and how it decoded, on two lines."""
    if row["role"] in ("base", "baseline"):
        return f"{row['name']}\nplain decoding"
    return row["name"] if row["role"] == "mlx-lm" else f"{row['name']}\n{row['decoding']} tree"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """The picture: the metric beside the tokens per call, each system a row."""
    rows, figures = result["systems"], result["figures"]
    colours = [COLOURS[row["role"]] for row in rows]
    paper = PAPER.get(result["task"])
    figure = new_figure(10, 1.9 + 0.75 * len(rows))
    panels = figure.subplots(1, 2 if figures else 1, sharey=True, squeeze=False)[0]
    for offset, alpha, name in zip((-0.19, 0.19), (1.0, 0.45), figures, strict=False):
        values = [row["figures"][name] for row in rows]
        places = [index + offset for index in range(len(rows))]
        bars(panels[0], places, values, 1, height=0.34, color=colours, alpha=alpha)
    if figures:
        panels[0].set_xlabel(f"{figures[0]}, %   (pale: {figures[1]})")
    calls = [row["tokens_per_call"] for row in rows]
    bars(panels[-1], range(len(rows)), calls, 2, height=0.6, color=colours)
    panels[-1].set_xlabel("tokens per target call")
    if paper:
        paper_band(panels[-1], paper.call_reduction, 2)
        if figures:
            paper_band(panels[0], paper.metric, 1)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0, 1.13 * axes.dataLim.x1 or 1)
    panels[0].set_yticks(range(len(rows)), [row_label(row) for row in rows])
    panels[0].invert_yaxis()
    figure.suptitle(
        f"{result['task']}: {result['prompts']} prompts, {result['model']}, greedy, float32, "
        "95 % intervals over prompts"
        + (f"; paper: {paper.name}, 1.3B to 7B models" if paper else ""),
        fontsize=9,
    )
    figure.savefig(path, dpi=150)
