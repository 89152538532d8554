"""What the pictures of comparisons share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..paper.published import Span
from .metrics import estimate

PAPER_COLOUR, PAPER_TEXT = "#e09f3e", "#9a6410"


def bars(axes: Any, places: Any, rows: Sequence[Any], digits: int, **style: Any) -> None:
    """Bars with intervals, and each figure written behind its interval."""
    estimates = [estimate(row) for row in rows]
    values = [e.value for e in estimates]
    # A resampled interval need not hold the value, with very few prompts.
    errors = [
        [max(0.0, e.value - e.low) for e in estimates],
        [max(0.0, e.high - e.value) for e in estimates],
    ]
    axes.barh(places, values, **style)
    axes.errorbar(values, places, xerr=errors, fmt="none", ecolor="#111111", capsize=3, lw=1)
    for place, one in zip(places, estimates, strict=True):
        spot = (max(one.high, one.value), place)
        axes.annotate(
            f"{one.value:.{digits}f}", spot, (6, 0), textcoords="offset points", va="center",
            fontsize=9, bbox={"facecolor": "white", "alpha": 0.75, "pad": 0.6, "edgecolor": "none"},
        )  # fmt: skip


def paper_band(axes: Any, span: Span, digits: int) -> None:
    low, high = span
    axes.axvspan(low, high, color=PAPER_COLOUR, alpha=0.3, lw=0, zorder=0)
    for value in span:
        axes.axvline(value, color=PAPER_COLOUR, lw=1, ls="--", zorder=0)
    axes.annotate(
        f"paper {low:.{digits}f} to {high:.{digits}f}", ((low + high) / 2, 1.01),
        xycoords=("data", "axes fraction"), ha="center", va="bottom", fontsize=8, color=PAPER_TEXT,
    )  # fmt: skip
