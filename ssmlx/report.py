"""Results in words, as tables and as figures; matplotlib, which may be missing, comes late."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from .errors import one_line

# By the head of a column, a function from a row's value to the text of its cell.
Columns = Mapping[str, Callable[[Any], str]]


def counted(count: int, noun: str) -> str:
    """A number with its noun: "1 answer", "2 answers"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def align_rows(
    rows: Sequence[Sequence[str]],  # one or more, all with as many cells
) -> list[str]:
    """The rows as lines with aligned columns, the first one flush left, the others right."""
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def cells(columns: Columns, rows: Iterable[Any]) -> list[list[str]]:
    return [[cell(row) for cell in columns.values()] for row in rows]


def table(columns: Columns, rows: Iterable[Any], more: Sequence[Sequence[str]] = ()) -> list[str]:
    """The lines of a text table; `more` are rows of finished cells at its end."""
    return align_rows([list(columns), *cells(columns, rows), *more])


def new_figure(width_inches: float, height_inches: float) -> Any:
    """An empty matplotlib figure, which opens no window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_figure(
    figure: Any,  # of `new_figure`; it is changed
    caption_below: str,  # is broken into lines
    path: Path,
) -> None:
    """Write a figure, in the format of the path's suffix."""
    if caption_below:
        width = int(15.5 * figure.get_figwidth())
        figure.supxlabel(fill(caption_below, width), x=0.01, ha="left", fontsize=8)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=150)
