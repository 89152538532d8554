"""The pictures of `perf.paper.figures`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from ssmlx.tuning.report import every_pair, finish, new_figure

from ..run.pictures import PAPER_COLOUR, PAPER_TEXT
from .figure_points import Curves, Parity, Point
from .published import E2E, MEDUSA, OPT, STREAMS, TABLE_1
from .theory import GAMMA, parity, theoretical_speedup

ADVANCE_RATIOS = (0.6, 0.8, 1.0, 1.2, 1.4)  # zeta / beta of the paper's five curves
COLOURS = ("#0b6e4f", "#33658a", "#b06f10", "#7b5ea7", "#2b2d42", "#b23a48")
MARKS = ("o", "s", "^", "D")
DRAFTER_COLOURS = {"streams": "#0b6e4f", "medusa": "#7b5ea7"}
PAPER_METHODS = {"streams": STREAMS, "medusa": MEDUSA}


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
            f"ζ/β = {ratio:g}", (100, speedups[-1]), (4, 0), textcoords="offset points",
            va="center", fontsize=7, color=PAPER_TEXT, annotation_clip=False,
        )  # fmt: skip
    axes.axhline(1.0, color="#2b2d42", lw=0.8, ls=":")
    axes.plot(10, 1.0, marker="x", color=PAPER_TEXT, ls="none",
              label=f"the paper's parity: ratio 10, ζ = {parity(10):g} β")  # fmt: skip
    for point, colour in zip(points, cycle(COLOURS), strict=False):
        draw_parity_point(axes, point, colour)
    top = max([5.0, *(1.15 * max(p.measured.high, p.predicted) for p in points)])
    axes.set(xlim=(0, 100), ylim=(0, top), xlabel="latency ratio, $C_{target} / C_{draft}$",
             ylabel="speed-up of streams over a draft model")  # fmt: skip
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    axes.set_title(f"Figure 4: eq. 6 with gamma = {GAMMA}, and our measurements", fontsize=10)
    finish(figure, caption, path)


def draw_parity_point(axes: Any, point: Parity, colour: str) -> None:
    """A measurement with its interval, and beside it what eq. 6 says."""
    errors = error_bars([point.measured])
    axes.errorbar(
        point.latency_ratio, point.measured.value, yerr=errors, fmt="o", color=colour, capsize=3,
        label=f"ours, {point.task}: {point.measured.value:.2f} at ζ/β = "
        f"{point.advance_ratio:.2f} (eq. 6: {point.predicted:.2f})",
    )  # fmt: skip
    axes.plot(point.latency_ratio, point.predicted, marker="D", ls="none", mfc="none", color=colour)


def error_bars(estimates: Sequence[Any]) -> list[list[float]]:
    """[2, points] what lies below and above each value."""
    # A resampled interval need not hold the value, with very few prompts.
    below = [max(0.0, one.value - one.low) for one in estimates]
    return [below, [max(0.0, one.high - one.value) for one in estimates]]


def draw_line(axes: Any, points: Mapping[int, Point], name: str, **style: Any) -> None:
    """A curve with its intervals; `name` is the attribute of `Point` that it shows."""
    places = sorted(points)
    values = [getattr(points[place], name) for place in places]
    axes.errorbar(
        places, [one.value for one in values], yerr=error_bars(values), capsize=3, ms=4, **style
    )


def draw_trees(curves: Curves, caption: str, path: Path) -> None:
    """Figure 5: speed-up and tokens per call of full trees, by k."""
    figure = new_figure(9.6, 4.4)
    left, right = figure.subplots(1, 2)
    left.axhspan(1.0, 2.0, color=PAPER_COLOUR, alpha=0.2, lw=0)
    left.annotate("the paper's axis, 1 to 2", (0.99, 1.97), xycoords=("axes fraction", "data"),
                  ha="right", va="top", fontsize=8, color=PAPER_TEXT)  # fmt: skip
    looks = every_pair(COLOURS, MARKS)
    for (curve, points), (colour, mark) in zip(sorted(curves.items()), looks, strict=False):
        dashed = "--" if "without" in curve.label else "-"
        style = {"fmt": mark, "ls": dashed, "color": colour}
        draw_line(left, points, "speedup", label=f"{curve.task}, {curve.label}", **style)
        draw_line(right, points, "tokens_per_call", **style)
    left.set_ylabel("speed-up over mlx-lm")
    right.set_ylabel("tokens per target call")
    for axes in (left, right):
        axes.set(xlabel="k, tokens sampled a stream", xlim=(0.7, 6.3), xticks=range(1, 7))
    left.set_ylim(0, max(2.15, 1.1 * left.dataLim.y1))
    right.set_ylim(0, max(1.0, 1.1 * right.dataLim.y1) if curves else 1)
    if curves:
        left.legend(frameon=False, fontsize=8, loc="lower left")
    figure.suptitle("Figure 5: full trees of k tokens a stream", fontsize=10)
    finish(figure, caption, path)


def draw_sampling(curves: Curves, caption: str, path: Path) -> None:
    """Figure 9b: a panel for each task, streams and Medusa heads by top-k."""
    tasks = sorted({curve.task for curve in curves}) or [""]
    figure = new_figure(max(6.4, 4.8 * len(tasks)), 4.8)
    panels = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    for task, axes in zip(tasks, panels, strict=True):
        draw_paper_greedy(axes)
        for curve, points in sorted(curves.items()):
            if curve.task == task:
                colour = DRAFTER_COLOURS[curve.label]
                draw_line(axes, points, "tokens_per_call", fmt="o", ls="-", color=colour,
                          label=f"{curve.label}: tokens per call")  # fmt: skip
                draw_line(axes, points, "speedup", fmt="s", ls="--", color=colour,
                          label=f"{curve.label}: speed-up over mlx-lm")  # fmt: skip
        axes.set(xlabel="k of top-k sampling", xlim=(-12, 54), xticks=range(10, 60, 10))
        axes.set_title(task, fontsize=10)
        axes.set_ylim(0, 1.25 * max(4.0, axes.dataLim.y1))
    if curves:
        panels[0].legend(frameon=False, fontsize=7.5, loc="upper right", ncols=2)
    panels[0].set_ylabel("ratio")
    figure.suptitle("Figure 9b: top-k sampling at temperature 1", fontsize=10)
    finish(figure, caption, path)


def draw_paper_greedy(axes: Any) -> None:
    """The paper's greedy figures for the model and task of figure 9b, at the left edge."""
    rows = [row for row in TABLE_1 if (row.dataset, row.model) == (E2E, OPT)]
    names = {method: kind for kind, method in PAPER_METHODS.items()}
    for row in rows:
        for value, what in ((row.call_reduction, "CR"), (row.speedup, "speed-up")):
            axes.plot([-12, 0], [value, value], color=PAPER_COLOUR, lw=2)
            axes.annotate(f"{names[row.method]} {what} {value:.2f}", (-11.5, value), (0, 2),
                          textcoords="offset points", fontsize=6.5, color=PAPER_TEXT)  # fmt: skip
