"""How results are shown: tables as text, and bars with intervals."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from ssmlx.report import Columns, cells, new_figure

from .published import METHODS, Speed, span, speeds
from .statistics import FEW, estimate

Row = Mapping[str, Any]
Cell = Callable[[Row], str]
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
PAPER_COLOUR = "#e09f3e"
PAPER_TEXT = "#9a6410"
_NOTHING = {"value": 0.0, "low": 0.0, "high": 0.0}


def figure(name: str, digits: int = 2, scale: float = 1.0) -> Cell:
    """A cell with a figure of the row and its interval, if there is one."""
    return lambda row: interval(row[name], digits, scale) if row[name] else "-"


def number(name: str, nothing: str = "-") -> Cell:
    return lambda row: f"{row[name]:,}" if row[name] else nothing


def metrics(names: Sequence[str]) -> dict[str, Cell]:
    return {f"{name}, %": _metric(name) for name in names}


def _metric(name: str) -> Cell:
    return lambda row: interval(row["figures"][name], 1)


def same_text(prompts: int) -> Cell:
    """A cell with how many answers are plain decoding's, token for token."""

    def cell(row: Row) -> str:
        count = row["same_as_plain"]
        return "draws of its own" if count is None else f"{count} of {prompts}"

    return cell


def interval(values: Mapping[str, float], digits: int, scale: float = 1.0) -> str:
    """`1.23 [1.10, 1.40]`."""
    return estimate({name: scale * values[name] for name in _NOTHING}).text(digits)


def markdown_table(columns: Columns, rows: Sequence[Row]) -> str:
    lines = [list(columns), ["---"] * len(columns), *cells(columns, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def notes_of(found: Row) -> list[str]:
    """What to keep in mind of a measurement: few prompts, and who else was computing."""
    few = f"fewer than {FEW} prompts: the intervals are narrower than they should be"
    lines = [few] if found["prompts"] < FEW else []
    return [*lines, f"load: {found['load']}"] if "load" in found else lines


def heading(result: Row) -> str:
    machine = result["machine"]
    return (
        f"{_measured_text(result)}, "
        f"{machine['memory']}, {machine['os']}, power: {machine['power']}; mlx {machine['mlx']}, "
        f"mlx-lm {machine['mlx-lm']}, ssmlx {machine['ssmlx']} ({machine['commit']})"
    )


def _measured_text(result: Row) -> str:
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


@dataclass(frozen=True)
class Panel:
    label: str  # of the axis
    figure: str  # of a row
    column: Callable[[Speed], float]  # the same in the paper's table 1


PANELS = (
    Panel("speed-up over mlx-lm (decode tokens/s)", "speedup", lambda row: row.speedup),
    Panel("tokens per target call", "tokens_per_call", lambda row: row.call_reduction),
)


def draw(result: Row, path: Path) -> None:
    """Bars for every task and system; matplotlib may be missing."""
    tasks = result["tasks"]
    counts = [len(task["systems"]) for task in tasks]
    picture = new_figure(5.25 * len(PANELS), 1.0 + sum(1.0 + 0.36 * count for count in counts))
    parts = picture.subplots(
        len(tasks), len(PANELS), squeeze=False, gridspec_kw={"height_ratios": counts}
    )
    for task, row in zip(tasks, parts, strict=True):
        for axes, panel in zip(row, PANELS, strict=True):
            _draw_panel(axes, task, panel)
            names = [fill(one["name"] * (panel is PANELS[0]), 32) for one in task["systems"]]
            axes.set_yticks(range(len(names)), names)
            axes.invert_yaxis()
        name = ", ".join(dict.fromkeys([task["task"], task["adapter"] or task["task"]]))
        row[0].set_title(f"{name}: {task['prompts']} prompts", loc="left", fontsize=10)
    picture.suptitle(
        f"{_measured_text(result)}\n95 % intervals over prompts; pale bands: the paper's table 1, "
        "least to most over its models of 1.3B to 7B",
        fontsize=9,
    )
    picture.savefig(path, dpi=150)


def _draw_panel(axes: Any, task: Row, panel: Panel) -> None:
    """A bar a system with its interval, its figure behind that, and the paper's range around."""
    rows = task["systems"]
    found = [estimate(row[panel.figure] or _NOTHING) for row in rows]
    values = [one.value for one in found]
    places = range(len(rows))
    for place, row in zip(places, rows, strict=True):
        paper = speeds(task["task"], METHODS.get(row["kind"], ""))
        if paper:
            low, high = span(map(panel.column, paper))
            style = {"color": PAPER_COLOUR, "alpha": 0.35, "lw": 0, "zorder": 0}
            axes.barh(place, high - low, left=low, height=0.86, **style)
            axes.annotate(
                f"paper {low:.2f} to {high:.2f}",
                (1.0, place),
                xycoords=("axes fraction", "data"),
                ha="right",
                va="center",
                fontsize=7.5,
                color=PAPER_TEXT,
            )
    axes.barh(places, values, height=0.56, color=[COLOURS[row["kind"]] for row in rows])
    errors = list(zip(*(one.errors for one in found), strict=True))
    axes.errorbar(values, places, xerr=errors, fmt="none", ecolor="#111111", capsize=3, lw=1)
    for place, one, row in zip(places, found, rows, strict=True):
        text = "-" if row[panel.figure] is None else f"{one.value:.2f}"
        axes.annotate(
            text,
            (max(one.high, one.value), place),
            (6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            bbox={"facecolor": "white", "alpha": 0.75, "pad": 0.6, "edgecolor": "none"},
        )
    axes.set_xlabel(panel.label, fontsize=9)
    axes.set_xlim(0, 1.65 * axes.dataLim.x1 or 1)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
