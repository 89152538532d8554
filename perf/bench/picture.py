"""The picture of `perf.bench`: answers above, speeds by length of context below."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssmlx.tuning.report import new_figure

from ..run.metrics import estimate
from ..run.pictures import bars
from .report import counted, interval
from .target import SYSTEMS

COLOURS = {"mlx-lm": "#2b2d42", "plain": "#8d99ae", "streaming": "#0b6e4f"}
Row = Mapping[str, Any]


def draw(result: Row, path: Path) -> None:
    """Draw the result."""
    tasks, has_contexts = result["answers"], bool(result["contexts"])
    columns = max(2, len(tasks))
    figure = new_figure(4.6 * columns, 5.6 if has_contexts else 2.9)
    grid = figure.add_gridspec(2 if has_contexts else 1, columns)
    for place, task in enumerate(tasks):
        spot = grid[0, place] if len(tasks) > 1 else grid[0, :]
        draw_task(task, figure.add_subplot(spot))
    if has_contexts:
        for place, (column, label) in enumerate(
            (
                ("tokens_per_second", "decode tokens/s"),
                ("prefill_tokens_per_second", "prefill tokens/s"),
            )
        ):
            draw_contexts(result["contexts"], figure.add_subplot(grid[1, place]), column, label)
    found = result["machine"]
    figure.suptitle(
        f"{found['machine']}, {found['memory']}; {result['model']}, {result['weights']}; mlx "
        f"{found['mlx']}\n95 % intervals; systems take turns",
        fontsize=9,
    )
    figure.savefig(path, dpi=150)


def draw_task(task: Row, axes: Any) -> None:
    """Decode tokens/s of each system, and what they are over mlx-lm's."""
    rows = [task["systems"][name]["tokens_per_second"] for name in SYSTEMS]
    bars(axes, range(len(SYSTEMS)), rows, 1, height=0.56, color=[COLOURS[s] for s in SYSTEMS])
    over = task["speedup"]["streaming"]
    calls = task["systems"]["streaming"]["tokens_per_call"]["value"]
    gain = f": {interval(over, task['prompts'], 2)} times mlx-lm" if over else ""
    axes.set_title(
        f"{task['adapter']}, {counted(task['prompts'], 'prompt')}{gain}\n"
        f"{calls:.2f} tokens a call",
        loc="left", fontsize=9,
    )  # fmt: skip
    axes.set_yticks(range(len(SYSTEMS)), list(SYSTEMS), fontsize=9)
    axes.set_xlabel("decode tokens/s", fontsize=9)
    axes.set_xlim(0, 1.25 * axes.dataLim.x1)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def draw_contexts(contexts: Any, axes: Any, column: str, label: str) -> None:
    """A line for each system over the lengths."""
    lengths = [one["tokens"] for one in contexts]
    for name in SYSTEMS:
        found = [estimate(one["systems"][name][column]) for one in contexts]
        values = [e.value for e in found]
        errors = [
            [max(0.0, e.value - e.low) for e in found],
            [max(0.0, e.high - e.value) for e in found],
        ]
        axes.errorbar(
            lengths, values, yerr=errors, label=name, color=COLOURS[name], marker="o", ms=4,
            capsize=3, lw=1.5,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.set_ylim(0, None)
    axes.set_xlabel("tokens of context", fontsize=9)
    axes.set_ylabel(label, fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
