"""Figures 4, 5 and 9b of the paper, ours beside what its text gives in numbers.

Ours are drawn from the results of perf.compare. Figures 6 and 9a come from `python -m
perf.paper.training ablation`.

Figure 4 is eq. 6 (section 4.1.2), streams against a separate draft model. A token costs what a
verification step costs, over the tokens that the step advances by:

    (gamma * C_draft + C_target) / zeta    with a draft model, which runs gamma times a step
    C_ss / beta                            with streams, which need no call of their own

Cache adjustment and prompt processing are left out, as there. Costs are in any one unit of time.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from ssmlx.commands.options import add_options, make_parser, run
from ssmlx.errors import require
from ssmlx.json_files import read_json
from ssmlx.loading.files import make_folder
from ssmlx.report import every_pair, finish, new_figure
from ssmlx.settings import TreeConfig

from ..run.published import E2E, MEDUSA, OPT, STREAMS, TABLE_1
from ..run.results import RESULTS, ROOT, reading
from ..run.show import PAPER_COLOUR, PAPER_TEXT
from ..run.statistics import Estimate, estimate

PROG = "perf.paper.figures"
GAMMA = 4
"""Tokens that the draft model drafts a step, in figure 4 and table 2."""
ADVANCE_RATIOS = (0.6, 0.8, 1.0, 1.2, 1.4)  # zeta / beta of the paper's five curves
COLOURS = ("#0b6e4f", "#33658a", "#b06f10", "#7b5ea7", "#2b2d42", "#b23a48")
MARKS = ("o", "s", "^", "D")
PAPER_NAMES = {STREAMS: "streams", MEDUSA: "medusa"}
CAPTION_4 = (
    "Lines: eq. 6 as in the paper, C_ss = C_target, whose curves are this formula's. Diamonds: "
    "eq. 6 with our gamma and the time of our streams' calls. Bars: 95 % intervals over prompts."
)
CAPTION_5 = (
    "Ours with 95 % intervals over prompts. The paper (gamma = 3) gives no numbers for its curves, "
    "only that the speed-up rises with k, falls again as calls become compute-bound, and that "
    "pruning helps at larger k; its axis runs from 1 to 2."
)
CAPTION_9B = (
    "Ours with 95 % intervals over prompts. The paper (OPT-1.3b, E2E-NLG) gives no numbers for "
    "its curves, only that speed-ups fall as k grows and that its streams stay ahead of Medusa; "
    "the marks at the left are its greedy figures for the same model and task, from table 1."
)
Result = Mapping[str, Any]


def theoretical_speedup(
    latency_ratio: float, advance_ratio: float, gamma: int = GAMMA, overhead: float = 1.0
) -> float:
    """How many times faster streams are than a draft model, by eq. 6: of C_target / C_draft,
    zeta / beta, gamma, and C_ss / C_target, which the paper takes as 1."""
    return (gamma + latency_ratio) / advance_ratio / (overhead * latency_ratio)


@dataclass(frozen=True)
class Parity:
    task: str  # what was asked
    latency_ratio: float  # C_target / C_draft
    advance_ratio: float  # zeta / beta
    measured: Estimate  # tokens/s of streaming over the draft model's
    predicted: float  # by eq. 6, with our gamma and the cost of our streams' calls


Point = tuple[Estimate, Estimate]
"""Speed-up over mlx-lm and tokens per target call, at one x of a curve."""
Curve = tuple[str, str]
"""What was asked, and how it was decoded."""
Curves = Mapping[Curve, Mapping[int, Point]]


def read_results(folders: Sequence[Path]) -> list[Result]:
    """The results of perf.compare in `folders` and below, the newest last."""
    paths = {path for folder in folders for path in folder.rglob("compare.json")}
    results: list[Result] = []
    for path in sorted(paths, key=lambda path: path.stat().st_mtime):
        result = read_json(path, "a result")
        what = f"{path} holds no result of perf.compare"
        do = "move it elsewhere, or measure again"
        require(isinstance(result.get("tasks"), list), what, expected="an entry 'tasks'", do=do)
        with reading(path, "perf.compare"):
            parity_points([result]), sampling_curves([result]), tree_curves([result])
        results.append(result)
    return results


def point_of(row: Result) -> Point:
    return estimate(row["speedup"]), estimate(row["tokens_per_call"])


def tasks_of(results: Sequence[Result], *, greedy: bool) -> Iterator[tuple[Result, Result]]:
    """Every task of the results that are greedy, or that are not, with its result."""
    for result in results:
        if (result["temp"] == 0) == greedy:
            for task in result["tasks"]:
                yield result, task


def parity_points(results: Sequence[Result]) -> list[Parity]:
    """Figure 4: tasks on which both streams and a draft model were measured."""
    points = {}
    for _, task in tasks_of(results, greedy=True):
        rows = {row["name"]: row for row in task["systems"]}
        plain, streams, draft = (rows.get(name) for name in ("plain", "streams", "draft-model"))
        timed = all(row and row["call_seconds"] for row in (plain, streams, draft))
        if not timed or not task["draft_call_seconds"]:
            continue
        assert plain and streams and draft
        latency_ratio = plain["call_seconds"] / task["draft_call_seconds"]
        overhead = streams["call_seconds"] / plain["call_seconds"]
        advance_ratio = draft["tokens_per_call"]["value"] / streams["tokens_per_call"]["value"]
        gamma = draft["options"]["levels"]
        points[task["task"]] = Parity(
            task["task"],
            latency_ratio,
            advance_ratio,
            estimate(streams["speedup_over_draft_model"]),
            theoretical_speedup(latency_ratio, advance_ratio, gamma, overhead),
        )
    return list(points.values())


def tree_curves(results: Sequence[Result]) -> Curves:
    """Figure 5: full trees of streams by k, the children a level, pruned and not."""
    curves: dict[Curve, dict[int, Point]] = defaultdict(dict)
    for _, task in tasks_of(results, greedy=True):
        for row in task["systems"]:
            options = row["options"]
            tree = row["options"].get("tree") or {}
            if row["kind"] == "streams" and tree.get("kind") == "full" and row["speedup"]:
                prune = options["prune"]
                how = {
                    "off": "without pruning",
                    "budget": f"pruned to {prune['keep']} nodes",
                    "threshold": f"pruned below {prune['threshold']:g}",
                }[prune["kind"]]
                curve = task["task"], f"gamma = {options['levels'] or 'all'}, {how}"
                k = TreeConfig(kind="full", width=tree["width"]).full_width
                curves[curve][k] = point_of(row)
    return curves


def sampling_curves(results: Sequence[Result]) -> Curves:
    """Figure 9b: streams and Medusa heads by the k of top-k sampling."""
    curves: dict[Curve, dict[int, Point]] = defaultdict(dict)
    for result, task in tasks_of(results, greedy=False):
        for row in task["systems"]:
            if row["name"] in PAPER_NAMES.values() and result["top_k"] and row["speedup"]:
                curves[task["task"], row["name"]][result["top_k"]] = point_of(row)
    return curves


def draw_parity(points: Sequence[Parity], caption: str, path: Path) -> None:
    """Figure 4: eq. 6 as the paper draws it, and where our measurements lie."""
    figure = new_figure(7.6, 5.8)
    axes = figure.subplots()
    ratios = np.linspace(0.8, 100, 1000)
    shades = np.linspace(0.35, 1.0, len(ADVANCE_RATIOS))
    for ratio, shade in zip(ADVANCE_RATIOS, shades, strict=True):
        speedups = [theoretical_speedup(one, ratio) for one in ratios]
        axes.plot(ratios, speedups, color=PAPER_COLOUR, alpha=shade, lw=1.6)
        axes.annotate(
            f"ζ/β = {ratio:g}",
            (100, speedups[-1]),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
            color=PAPER_TEXT,
            annotation_clip=False,
        )
    axes.axhline(1.0, color="#2b2d42", lw=0.8, ls=":")
    parity = f"the paper's parity: ratio 10, ζ = {theoretical_speedup(10, 1.0):g} β"
    axes.plot(10, 1.0, marker="x", color=PAPER_TEXT, ls="none", label=parity)
    for point, colour in zip(points, cycle(COLOURS), strict=False):
        label = (
            f"ours, {point.task}: {point.measured.value:.2f} at ζ/β = {point.advance_ratio:.2f} "
            f"(eq. 6: {point.predicted:.2f})"
        )
        draw_line(axes, {point.latency_ratio: point.measured}, fmt="o", color=colour, label=label)
        axes.plot(point.latency_ratio, point.predicted, "D", mfc="none", color=colour)
    top = max([5.0, *(1.15 * max(p.measured.high, p.predicted) for p in points)])
    axes.set(
        xlim=(0, 100),
        ylim=(0, top),
        xlabel="latency ratio, $C_{target} / C_{draft}$",
        ylabel="speed-up of streams over a draft model",
    )
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    axes.set_title(f"Figure 4: eq. 6 with gamma = {GAMMA}, and our measurements", fontsize=10)
    finish(figure, caption, path)


def draw_line(axes: Any, points: Mapping[Any, Estimate], **style: Any) -> None:
    places = sorted(points)
    errors = list(zip(*(points[one].errors for one in places), strict=True))
    values = [points[one].value for one in places]
    axes.errorbar(places, values, yerr=errors, capsize=3, ms=4, **style)


def draw_curves(curves: Curves, title: str) -> Any:
    """Speed-ups at the left, tokens per call at the right, a line for each curve; and the axes."""
    figure = new_figure(9.6, 4.4)
    both = figure.subplots(1, 2)
    looks = every_pair(COLOURS, MARKS)
    for ((task, how), points), (colour, mark) in zip(sorted(curves.items()), looks, strict=False):
        style = {"fmt": mark, "ls": "--" if "without" in how else "-", "color": colour}
        for which, axes in enumerate(both):
            values = {place: point[which] for place, point in points.items()}
            draw_line(axes, values, label=f"{task}, {how}", **style)
    for axes, label in zip(both, ("speed-up over mlx-lm", "tokens per target call"), strict=True):
        axes.set_ylabel(label)
        axes.set_ylim(0, max(2.15, 1.1 * axes.dataLim.y1) if curves else 4.0)
    if curves:
        both[0].legend(frameon=False, fontsize=8, loc="lower left")
    figure.suptitle(title, fontsize=10)
    return figure, both


def draw_trees(curves: Curves, caption: str, path: Path) -> None:
    figure, both = draw_curves(curves, "Figure 5: full trees of k tokens a stream")
    both[0].axhspan(1.0, 2.0, color=PAPER_COLOUR, alpha=0.2, lw=0)
    both[0].annotate(
        "the paper's axis, 1 to 2",
        (0.99, 1.97),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="top",
        fontsize=8,
        color=PAPER_TEXT,
    )
    for axes in both:
        axes.set(xlabel="k, tokens sampled a stream", xlim=(0.7, 6.3), xticks=range(1, 7))
    finish(figure, caption, path)


def draw_sampling(curves: Curves, caption: str, path: Path) -> None:
    """Figure 9b: streams and Medusa heads by top-k; at the left edge the paper's greedy figures
    for the model and task of its own."""
    figure, both = draw_curves(curves, "Figure 9b: top-k sampling at temperature 1")
    for row in TABLE_1:
        if (row.dataset, row.model) == (E2E, OPT):
            for axes, value in zip(both, (row.speedup, row.call_reduction), strict=True):
                axes.plot([-12, 0], [value, value], color=PAPER_COLOUR, lw=2)
                axes.annotate(
                    f"{PAPER_NAMES[row.method]} {value:.2f}",
                    (-11.5, value),
                    (0, 2),
                    textcoords="offset points",
                    fontsize=6.5,
                    color=PAPER_TEXT,
                )
    for axes in both:
        axes.set(xlabel="k of top-k sampling", xlim=(-12, 54), xticks=range(10, 60, 10))
        axes.set_ylim(0, max(4.2, axes.get_ylim()[1]))
    finish(figure, caption, path)


def _main(args: argparse.Namespace) -> None:
    installed = find_spec("matplotlib") is not None
    require(installed, "matplotlib is not installed", expected="it", do="pip install matplotlib")
    for folder in args.results:
        what = f"--results {folder} is no folder"
        do = "check the path"
        require(folder.is_dir(), what, expected="folders with compare.json in or below them", do=do)
    make_folder(args.out)
    found = read_results(args.results)
    figures: dict[str, tuple[Any, Callable[[Any, str, Path], None], str]] = {
        "4": (parity_points(found), draw_parity, CAPTION_4),
        "5": (tree_curves(found), draw_trees, CAPTION_5),
        "9b": (sampling_curves(found), draw_sampling, CAPTION_9B),
    }
    for name, (points, draw, caption) in figures.items():
        path = args.out / f"figure-{name}.png"
        draw(points, caption if points else f"{caption} Ours: not measured yet.", path)
        print(path)
        if not points:
            print(f"figure {name}: nothing of ours yet; see perf/README.md", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(PROG, __doc__)
    add_options(
        parser,
        (
            "--results",
            "FOLDER",
            "where results are, in these folders and below (default: perf/results)",
            [RESULTS],
        ),
        (
            "--out",
            "FOLDER",
            "for figure-4.png and so on (default: perf/figures)",
            ROOT / "perf" / "figures",
        ),
    )
    args = parser.parse_args(argv)
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
