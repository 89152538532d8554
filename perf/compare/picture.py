"""The picture of `perf.compare`: speed-up and tokens per call, every system a line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from ssmlx.tuning.report import new_figure

from ..paper.published import METHODS, Speed, span, speeds
from ..run.pictures import PAPER_COLOUR, PAPER_TEXT, bars
from .report import decoding_text

COLOURS = {
    "mlx-lm": "#2b2d42",
    "plain": "#8d99ae",
    "streams": "#0b6e4f",
    "medusa": "#7b5ea7",
    "mlp-speculator": "#b565a7",
    "draft-model": "#33658a",
    "lookahead": "#4f9da6",
    "prompt-lookup": "#86bbd8",
}
ROW_INCHES = 0.36
NOTHING = {"value": 0.0, "low": 0.0, "high": 0.0}


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw every task below the other."""
    tasks = result["tasks"]
    rows = [len(task["systems"]) for task in tasks]
    figure = new_figure(10.5, 0.9 + sum(1.0 + ROW_INCHES * count for count in rows))
    parts = figure.subplots(
        len(tasks), 2, squeeze=False, gridspec_kw={"height_ratios": [2 + count for count in rows]}
    )
    for task, (left, right) in zip(tasks, parts, strict=True):
        draw_task(task, left, right)
    machine = result["machine"]
    figure.suptitle(
        f"{result['model']}, {decoding_text(result)}, {result['dtype']}; {machine['machine']}\n"
        "95 % intervals over prompts; pale bands: the paper's table 1, least to most over its "
        "models of 1.3B to 7B",
        fontsize=9,
    )
    figure.savefig(path, dpi=150)


def draw_task(task: Mapping[str, Any], left: Any, right: Any) -> None:
    """A task's two panels, whose lines are the same systems."""
    rows = task["systems"]
    panels: list[tuple[Any, str, Callable[[Speed], float], str]] = [
        (left, "speedup", lambda row: row.speedup, "speed-up over mlx-lm (decode tokens/s)"),
        (right, "tokens_per_call", lambda row: row.call_reduction, "tokens per target call"),
    ]
    for axes, name, column, label in panels:
        for place, row in enumerate(rows):
            draw_paper(axes, place, speeds(task["task"], METHODS.get(row["kind"], "")), column)
        values = [row[name] or NOTHING for row in rows]
        colours = [COLOURS[row["kind"]] for row in rows]
        bars(axes, range(len(rows)), values, 2, height=0.56, color=colours)
        axes.axvline(1.0, color="#2b2d42", lw=0.8, ls=":", zorder=0)
        finish(axes, label)
    left.set_yticks(range(len(rows)), [fill(row["name"], 32) for row in rows])
    right.set_yticks([])
    left.set_title(f"{task['task']}: {task['prompts']} prompts", loc="left", fontsize=10)


def draw_paper(
    axes: Any, place: int, rows: Sequence[Speed], column: Callable[[Speed], float]
) -> None:
    """The paper's range for the same method, as a pale band around its line."""
    if not rows:
        return
    low, high = span(column(row) for row in rows)
    axes.barh(
        place, high - low, left=low, height=0.86, color=PAPER_COLOUR, alpha=0.35, lw=0, zorder=0
    )
    axes.annotate(
        f"paper {low:.2f} to {high:.2f}", (1.0, place), xycoords=("axes fraction", "data"),
        ha="right", va="center", fontsize=7.5, color=PAPER_TEXT,
    )  # fmt: skip


def finish(axes: Any, label: str) -> None:
    """Axes that leave room for the figures behind the bars, and the paper's at the edge."""
    axes.set_xlabel(label, fontsize=9)
    axes.set_xlim(0, 1.65 * axes.dataLim.x1)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.invert_yaxis()
