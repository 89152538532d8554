"""Results as text and as pictures; matplotlib, which may be missing, is imported late."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from textwrap import fill
from typing import Any

Columns = Mapping[str, Callable[[Any], str]]
"""What the cells of a row say, by the head of their column."""


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines: the first column to the left, the others to the right."""
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
    """A line a row, below the heads of the columns; `more` are lines of cells below."""
    return aligned([list(columns), *cells(columns, rows), *more])


def new_figure(width: float, height: float) -> Any:
    """An empty figure of these inches, without a window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def every_pair(colours: Sequence[str], styles: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Without end: all colours in the first style of line or mark, then in the next, and anew."""
    return cycle((colour, style) for style in styles for colour in colours)


def finish(figure: Any, caption: str, path: Path) -> None:
    if caption:
        width = int(15.5 * figure.get_figwidth())
        figure.supxlabel(fill(caption, width), x=0.01, ha="left", fontsize=8)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=150)
