"""How results are shown: tables as text, and bars with intervals; matplotlib may be missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ssmlx.tuning.report import aligned

from ..paper.published import Span
from .statistics import FEW, estimate

Row = Mapping[str, Any]
Cell = Callable[[Row], str]
Columns = Mapping[str, Cell]
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
PAPER_COLOUR, PAPER_TEXT = "#e09f3e", "#9a6410"
_NOTHING = {"value": 0.0, "low": 0.0, "high": 0.0}


def table(columns: Columns, rows: Sequence[Row], more: Sequence[Sequence[str]] = ()) -> list[str]:
    """A line a row, below the names of the columns; `more` are lines of cells below."""
    return aligned([list(columns), *cells(columns, rows), *more])


def cells(columns: Columns, rows: Sequence[Row]) -> list[list[str]]:
    """The cells of every row."""
    return [[cell(row) for cell in columns.values()] for row in rows]


def figure(name: str, digits: int = 2, scale: float = 1.0) -> Cell:
    """A cell with a figure of the row and its interval."""
    return lambda row: interval(row[name], digits, scale)


def number(name: str, nothing: str = "-") -> Cell:
    """A cell with a whole number of the row."""
    return lambda row: f"{row[name]:,}" if row[name] else nothing


def metrics(names: Sequence[str]) -> dict[str, Cell]:
    """A column for each metric."""
    return {f"{name}, %": _metric(name) for name in names}


def same_text(prompts: int) -> Cell:
    """A cell with how many answers are plain decoding's, token for token."""

    def cell(row: Row) -> str:
        count = row["same_as_plain"]
        return "draws of its own" if count is None else f"{count} of {prompts}"

    return cell


def _metric(name: str) -> Cell:
    return lambda row: interval(row["figures"][name], 1)


def interval(values: Mapping[str, float], digits: int, scale: float = 1.0) -> str:
    """`1.23 [1.10, 1.40]`."""
    return estimate({name: scale * values[name] for name in _NOTHING}).text(digits)


def notes_of(found: Row) -> list[str]:
    """What to keep in mind of a measurement: few prompts, and who else was computing."""
    few = f"fewer than {FEW} prompts: the intervals are narrower than they should be"
    lines = [few] if found["prompts"] < FEW else []
    return [*lines, f"load: {found['load']}"] if "load" in found else lines


def bars(
    axes: Any,
    rows: Sequence[Any],
    label: str,
    digits: int = 2,
    *,
    offset: float = 0.0,
    room: float = 1.25,
    **style: Any,
) -> None:
    """A bar a row with its interval, and its figure behind that.

    Args:
        axes: where to draw; rows go up until `invert_yaxis`.
        rows: figures of a result; None where there is none.
        label: of the axis.
        digits: of the figures.
        offset: of the bars' places, which are 0, 1 and so on.
        room: length of the axis over the longest bar's.
        style: of the bars.
    """
    estimates = [estimate(row or _NOTHING) for row in rows]
    places = [place + offset for place in range(len(rows))]
    values = [one.value for one in estimates]
    errors = list(zip(*(one.errors for one in estimates), strict=True))
    axes.barh(places, values, **style)
    axes.errorbar(values, places, xerr=errors, fmt="none", ecolor="#111111", capsize=3, lw=1)
    for place, one in zip(places, estimates, strict=True):
        axes.annotate(
            f"{one.value:.{digits}f}", (max(one.high, one.value), place), (6, 0),
            textcoords="offset points", va="center", fontsize=9,
            bbox={"facecolor": "white", "alpha": 0.75, "pad": 0.6, "edgecolor": "none"},
        )  # fmt: skip
    axes.set_xlabel(label, fontsize=9)
    axes.set_xlim(0, room * axes.dataLim.x1 or 1)
    axes.spines[["top", "right"]].set_visible(False)


def paper_band(axes: Any, span: Span, digits: int) -> None:
    """The paper's range across the axes."""
    low, high = span
    axes.set_xlim(0, max(axes.get_xlim()[1], 1.1 * high))
    axes.axvspan(low, high, color=PAPER_COLOUR, alpha=0.3, lw=0, zorder=0)
    for value in span:
        axes.axvline(value, color=PAPER_COLOUR, lw=1, ls="--", zorder=0)
    axes.annotate(
        f"paper {low:.{digits}f} to {high:.{digits}f}", ((low + high) / 2, 1.01),
        xycoords=("data", "axes fraction"), ha="center", va="bottom", fontsize=8, color=PAPER_TEXT,
    )  # fmt: skip
