"""The picture of `perf.compare`: speed-up and tokens per call, every system a line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

from ssmlx.tuning.report import new_figure

from ..paper.published import METHODS, Speed, span, speeds
from ..run.show import COLOURS, PAPER_COLOUR, PAPER_TEXT, bars
from .report import decoding_text

ROW_INCHES = 0.36
PANELS: tuple[tuple[str, Callable[[Speed], float], str], ...] = (
    ("speedup", lambda row: row.speedup, "speed-up over mlx-lm (decode tokens/s)"),
    ("tokens_per_call", lambda row: row.call_reduction, "tokens per target call"),
)


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw every task below the other."""
    tasks = result["tasks"]
    rows = [len(task["systems"]) for task in tasks]
    figure = new_figure(10.5, 0.9 + sum(1.0 + ROW_INCHES * count for count in rows))
    parts = figure.subplots(
        len(tasks), 2, squeeze=False, gridspec_kw={"height_ratios": [2 + count for count in rows]}
    )
    for task, panels in zip(tasks, parts, strict=True):
        _draw_task(task, panels)
    figure.suptitle(
        f"{result['model']}, {decoding_text(result)}, {result['dtype']}; "
        f"{result['machine']['machine']}\n"
        "95 % intervals over prompts; pale bands: the paper's table 1, least to most over its "
        "models of 1.3B to 7B",
        fontsize=9,
    )
    figure.savefig(path, dpi=150)


def _draw_task(task: Mapping[str, Any], panels: Any) -> None:
    rows = task["systems"]
    colours = [COLOURS[row["kind"]] for row in rows]
    for axes, (name, column, label) in zip(panels, PANELS, strict=True):
        for place, row in enumerate(rows):
            paper = speeds(task["task"], METHODS.get(row["kind"], ""))
            if paper:
                _draw_paper(axes, place, *span(column(one) for one in paper))
        bars(axes, [row[name] for row in rows], label, room=1.65, height=0.56, color=colours)
        axes.axvline(1.0, color="#2b2d42", lw=0.8, ls=":", zorder=0)
        axes.tick_params(labelsize=8)
        axes.set_yticks([])
        axes.invert_yaxis()
    panels[0].set_yticks(range(len(rows)), [fill(row["name"], 32) for row in rows])
    panels[0].set_title(f"{task['task']}: {task['prompts']} prompts", loc="left", fontsize=10)


def _draw_paper(axes: Any, place: int, low: float, high: float) -> None:
    """The paper's range for the same method, as a pale band around its line."""
    axes.barh(
        place, high - low, left=low, height=0.86, color=PAPER_COLOUR, alpha=0.35, lw=0, zorder=0
    )
    axes.annotate(
        f"paper {low:.2f} to {high:.2f}", (1.0, place), xycoords=("axes fraction", "data"),
        ha="right", va="center", fontsize=7.5, color=PAPER_TEXT,
    )  # fmt: skip
