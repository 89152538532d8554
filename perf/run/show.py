"""Formats results: tables as text, and bar charts with intervals."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from ssmlx.report import Columns, cells, new_figure

from .statistics import FEW, estimate_from_json

Row = Mapping[str, Any]  # a row of a table: figures by name
Result = Mapping[str, Any]  # a whole result, as a command saves it
Cell = Callable[[Row], str]
COLOURS = {
    "mlx-lm": "#2b2d42",
    "plain": "#8d99ae",
    "streams": "#0b6e4f",
    "medusa": "#7b5ea7",
    "mlp-speculator": "#b565a7",
    "mtp": "#9c4f4f",
    "draft-model": "#33658a",
    "lookahead": "#4f9da6",
    "prompt-lookup": "#86bbd8",
    "text": "#e07a5f",
}
_NOTHING = {"value": 0.0, "low": 0.0, "high": 0.0}


def figure_cell(
    name: str,
    digits: int = 2,  # after the point
    scale: float = 1.0,
    *,
    with_interval: bool = True,
) -> Cell:
    """A cell for a figure; None is shown as "-"."""

    def cell(row: Row) -> str:
        if not row[name]:
            return "-"
        if with_interval:
            return interval_text(row[name], digits, scale)
        return f"{scale * row[name]['value']:.{digits}f}"

    return cell


def number_cell(
    name: str,
    nothing: str = "-",  # for 0 or None
) -> Cell:
    return lambda row: f"{row[name]:,}" if row[name] else nothing


def metric_cells(names: Sequence[str]) -> dict[str, Cell]:
    return {f"{name}, %": _metric_cell(name) for name in names}


def _metric_cell(name: str) -> Cell:
    return lambda row: interval_text(row["figures"][name], 1)


def same_tokens_cell(num_prompts: int) -> Cell:
    """A cell for "same_as_plain", which is None for a system with its own noise."""

    def cell(row: Row) -> str:
        count = row["same_as_plain"]
        return "draws of its own" if count is None else f"{count} of {num_prompts}"

    return cell


def interval_text(values: Mapping[str, float], digits: int, scale: float = 1.0) -> str:
    """Format an interval, as `1.23 [1.10, 1.40]`."""
    return estimate_from_json({name: scale * values[name] for name in _NOTHING}).text(digits)


def markdown_table(columns: Columns, rows: Sequence[Row]) -> str:
    lines = [list(columns), ["---"] * len(columns), *cells(columns, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def measurement_notes(
    found: Row,  # has "prompts", and sometimes "load"
) -> list[str]:
    few = f"fewer than {FEW} prompts: the intervals are narrower than they should be"
    lines = [few] if found["prompts"] < FEW else []
    return [*lines, f"load: {found['load']}"] if "load" in found else lines


def setup_heading(result: Result) -> str:
    machine = result["machine"]
    return (
        f"{_setup_text(result)}, "
        f"{machine['memory']}, {machine['os']}, power: {machine['power']}; mlx {machine['mlx']}, "
        f"mlx-lm {machine['mlx-lm']}, ssmlx {machine['ssmlx']} ({machine['commit']})"
    )


def _setup_text(result: Result) -> str:
    decoding = "greedy"
    if result["temp"]:
        top_k = f", top-k {result['top_k']}" if result["top_k"] else ""
        decoding = f"temperature {result['temp']:g}{top_k}, seed {result['seed']}"
    return f"{result['model']}, {decoding}, {result['dtype']}; {result['machine']['machine']}"


def task_heading(task: Row) -> str:
    target = {
        "all": f"the base with the LoRA of {task['adapter']} merged, for every system",
        "task": f"the base with the task's LoRA of {task['adapter']} merged, for every system",
        "streams": f"the base as it is; the adapter {task['adapter']} drafts",
        None: "the base as it is",
    }[task["scope"]]
    return (
        f"{task['task']}: {task['prompts']} prompts of {task['data']}, at most "
        f"{task['max_tokens']} tokens an answer; target: {target}"
    )


# the label of the axis, by the figure of a row
PANELS = {
    "speedup": "speed-up over mlx-lm (decode tokens/s)",
    "tokens_per_call": "tokens per target call",
}


def write_bar_chart(
    result: Result,
    path: Path,  # its suffix decides the format
) -> None:
    """Plot speed-up and tokens per call, for every task and system."""
    tasks = result["tasks"]
    counts = [len(task["systems"]) for task in tasks]
    picture = new_figure(5.25 * len(PANELS), 1.0 + sum(1.0 + 0.36 * count for count in counts))
    parts = picture.subplots(
        len(tasks), len(PANELS), squeeze=False, gridspec_kw={"height_ratios": counts}
    )
    for task, row in zip(tasks, parts, strict=True):
        names = [fill(one["name"], 32) for one in task["systems"]]
        for axes, (panel, label) in zip(row, PANELS.items(), strict=True):
            _draw_panel(axes, task, panel)
            axes.set_xlabel(label, fontsize=9)
            axes.set_yticks(range(len(names)), names if axes is row[0] else [])
            axes.invert_yaxis()
        name = ", ".join(dict.fromkeys([task["task"], task["adapter"] or task["task"]]))
        row[0].set_title(f"{name}: {task['prompts']} prompts", loc="left", fontsize=10)
    lead = _setup_text(result)
    picture.suptitle(f"{lead}\n95 % intervals over prompts", fontsize=9)
    picture.savefig(path, dpi=150)


def _draw_panel(
    axes: Any,
    task: Row,
    figure_name: str,  # such as "speedup"
) -> None:
    rows = task["systems"]
    found = [estimate_from_json(row[figure_name] or _NOTHING) for row in rows]
    values = [one.value for one in found]
    places = range(len(rows))
    axes.barh(places, values, height=0.56, color=[COLOURS[row["kind"]] for row in rows])
    errors = list(zip(*(one.error_bars for one in found), strict=True))
    axes.errorbar(values, places, xerr=errors, fmt="none", ecolor="#111111", capsize=3, lw=1)
    for place, one, row in zip(places, found, rows, strict=True):
        text = "-" if row[figure_name] is None else f"{one.value:.2f}"
        axes.annotate(
            text,
            (max(one.high, one.value), place),
            (6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            bbox={"facecolor": "white", "alpha": 0.75, "pad": 0.6, "edgecolor": "none"},
        )
    axes.set_xlim(0, 1.25 * axes.dataLim.x1 or 1)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
