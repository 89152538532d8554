"""What `ssmlx.calibrate` found, as text and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..loading.names import cache_dir
from ..tuning.cost import DraftShape, StepCosts
from ..tuning.report import aligned, every_pair, finish, new_figure

Result = Mapping[str, Any]
RANKS = (1, 2, 3, 4, 8, 16)
COLOURS = {"second-pass": "#0b6e4f", "fused": "#b06f10"}
CONTEXT_COLOURS = ("#33658a", "#7b5ea7", "#b23a48", "#2b2d42")
PLAIN_COLOUR = "#8d99ae"
BUSY = 0.15
"""A spread of timings beyond which the machine was not alone with us."""
_SHOWN_ROWS = (1, 2, 4, 8, 16, 32, 64)


def results_dir() -> Path:
    """Where results are kept unless a folder is named."""
    return cache_dir() / "calibration"


def forward_table(costs: StepCosts) -> list[str]:
    """Milliseconds of a forward on R nodes, by context."""
    rows = [row for row in _SHOWN_ROWS if row in costs.lower.rows]
    head = ["context", *(f"R = {row}" for row in rows), "plain call"]
    lines = [head]
    for context in costs.lower.contexts:
        times = [1e3 * forward_seconds(costs, row, context) for row in rows]
        plain = 1e3 * costs.plain_seconds(context)
        lines.append([str(context), *(f"{one:.1f}" for one in times), f"{plain:.1f}"])
    return aligned(lines)


def forward_seconds(costs: StepCosts, rows: int, context: float) -> float:
    """All layers and the head on `rows` nodes, without streams."""
    return costs.lower.at(rows, context) + costs.upper.at(rows, context) + costs.head.at(rows)


def rank_lines(table: Sequence[Sequence[float]]) -> list[str]:
    """How often each stream has the answer's token among its first ranks."""
    head = ["stream", *(f"first {rank}" for rank in RANKS)]
    rows = [[str(j), *(f"{one:.2f}" for one in line)] for j, line in enumerate(table, 1)]
    return aligned([head, *rows])


_WAY_CELLS: Mapping[str, Callable[[Result], str]] = {
    "draft": lambda one: DraftShape.from_dict(one["shape"]).text(),
    "behind": lambda one: str(one["context"]),
    "tokens per call": lambda one: f"{one['tokens_per_call']:.2f}",
    "ms a call": lambda one: f"{1e3 * one['step_seconds']:.1f}",
    "tokens/s": lambda one: f"{one['tokens_per_second']:.1f}",
    "over plain": lambda one: f"{one['speedup']:.2f}x",
}


def way_lines(ways: Sequence[Result], head: Sequence[str]) -> list[str]:
    """Ways to draft, one a line, with the columns that `head` names."""
    return aligned([head, *([_WAY_CELLS[name](one) for name in head] for one in ways)])


def choice_lines(candidates: Sequence[Result], count: int = 6) -> list[str]:
    """The fastest ways to draft, one a line: schedules and sizes beside each other."""
    ranked = sorted(candidates, key=lambda one: -one["tokens_per_second"])[:count]
    return way_lines(ranked, ("draft", "tokens per call", "ms a call", "tokens/s", "over plain"))


def context_lines(choices: Sequence[Result]) -> list[str]:
    """The fastest way to draft behind each context."""
    return way_lines(choices, ("draft", "behind", "tokens per call", "ms a call", "over plain"))


def check_lines(checks: Sequence[Result]) -> list[str]:
    """Expected beside measured."""
    head = ["held-out prompts", "tokens per call", "ms a call", "tokens/s", "ratio", "over plain"]
    rows = [
        [
            f"{one['name']}: {one['what']}",
            f"{one['expected_per_call']:.2f} / {one['per_call']:.2f}",
            f"{1e3 * one['expected_seconds']:.1f} / {1e3 * one['seconds']:.1f}",
            f"{one['expected']:.1f} / {one['measured']:.1f}",
            f"{one['ratio']:.2f}",
            f"{one['expected_speedup']:.2f} / {one['speedup']:.2f}",
        ]
        for one in checks
    ]
    same = all(one["same_tokens"] for one in checks)
    told = "all ways gave the same tokens" if same else "the ways gave DIFFERENT tokens"
    return [*aligned([head, *rows]), told]


def report(result: Result) -> str:
    """The result as text."""
    costs = StepCosts.from_dict(result["costs"])
    chosen = result["chosen"]
    verdict = f"chosen: {DraftShape.from_dict(chosen['shape']).text()}"
    if chosen["speedup"] <= 1:
        verdict = "chosen: plain decoding; the best draft would be " + verdict[8:]
    parts = [
        [f"{result['model']}, adapter {result['adapter']}, {result['dtype']}; {result['where']}"],
        ["milliseconds of a forward on R nodes, without streams", *forward_table(costs)],
        [
            f"streams on {result['answers']} answers of {result['data']}, {result['tokens']} "
            "tokens: how often the answer's token is among",
            *rank_lines(result["ranks"]),
        ],
        [
            f"expected behind {result['context']} tokens, {len(result['candidates'])} ways tried",
            *choice_lines(result["candidates"]),
        ],
        [f"{verdict}: {chosen['speedup']:.2f}x plain decoding", f"  {chosen['options']}"],
        ["the fastest way behind other contexts", *context_lines(result["by_context"])],
    ]
    if result["checks"]:
        parts.append(["expected / measured", *check_lines(result["checks"])])
    if result["noise"] > BUSY:
        parts.append([
            f"timings varied by {100 * result['noise']:.0f} %: something else was running, "
            "calibrate again when the machine has nothing else to do"
        ])  # fmt: skip
    return "\n\n".join("\n".join(lines) for lines in parts)


def draw(result: Result, path: Path) -> None:
    """Seconds against rows, and expected tokens/s against nodes, with what was measured."""
    figure = new_figure(10.4, 4.6)
    left, right = figure.subplots(1, 2)
    draw_costs(left, StepCosts.from_dict(result["costs"]))
    draw_speeds(right, result)
    figure.suptitle(
        f"{result['model']}, adapter {result['adapter']}, {result['dtype']}\n{result['where']}",
        fontsize=9,
    )
    caption = (
        "Left: all layers and the LM head on R nodes behind a context; dots are medians. Right: "
        "best trees of the chosen number of streams, expected from costs and replayed answers; "
        "diamonds are held-out prompts, measured."
    )
    finish(figure, caption, path)


def draw_costs(axes: Any, costs: StepCosts) -> None:
    """Milliseconds of a forward by rows, a line for each context."""
    looks = every_pair(CONTEXT_COLOURS, ("-", "--", "-.", ":"))
    for context, (colour, style) in zip(costs.lower.contexts, looks, strict=False):
        rows = costs.lower.rows
        times = [1e3 * forward_seconds(costs, row, context) for row in rows]
        axes.plot(rows, times, f"o{style}", ms=3, lw=1.2, color=colour, label=f"{context} tokens")
    axes.set(xlabel="rows R of a forward", ylabel="milliseconds")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8, title="behind", title_fontsize=8)


def draw_speeds(axes: Any, result: Result) -> None:
    """Tokens/s by nodes, of both schedules, beside plain decoding's."""
    chosen = result["chosen"]
    for schedule, colour in COLOURS.items():
        points = tree_points(result["candidates"], chosen["shape"]["num_streams"], schedule)
        axes.plot(*zip(*points, strict=True), "-", color=colour, label=schedule.replace("-", " "))
    plain = 1 / chosen["plain_seconds"]
    axes.axhline(plain, color=PLAIN_COLOUR, ls="--", label="plain decoding, expected")
    nodes = DraftShape.from_dict(chosen["shape"]).num_nodes
    axes.plot(nodes, chosen["tokens_per_second"], "*", ms=14, color="#b23a48", label="chosen")
    measured = [(one["nodes"], one["measured"]) for one in result["checks"]]
    if measured:
        axes.plot(*zip(*measured, strict=True), "D", ms=5, mfc="none", color="#2b2d42",
                  label="measured")  # fmt: skip
    axes.set(xlabel="nodes N of the tree (1: plain decoding)", ylabel="tokens/s after the first")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)


def tree_points(
    candidates: Sequence[Result], streams: int, schedule: str
) -> list[tuple[int, float]]:
    """(nodes, tokens/s) of the best trees, not pruned, of so many streams."""
    points = []
    for one in candidates:
        shape = one["shape"]
        fits = (shape["num_streams"], shape["stream_schedule"]) == (streams, schedule)
        if fits and shape["tree"]["kind"] == "best" and shape["prune"]["kind"] == "off":
            points.append((shape["tree"]["size"], one["tokens_per_second"]))
    return sorted(points)
