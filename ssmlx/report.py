"""Results as text and as pictures; matplotlib, which may be missing, is imported late."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from .errors import one_line

Columns = Mapping[str, Callable[[Any], str]]
"""By the head of a column, a function from a row's value to the text of its cell."""


def align_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines of equal columns: the first one flush left, the others right.

    Two spaces stand between columns; none at the end of a line. What cannot be printed in a cell is
    written as escapes.

    Args:
        rows: one or more, all with as many cells.
    """
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def cells(columns: Columns, rows: Iterable[Any]) -> list[list[str]]:
    """The texts of the cells of each row."""
    return [[cell(row) for cell in columns.values()] for row in rows]


def table(columns: Columns, rows: Iterable[Any], more: Sequence[Sequence[str]] = ()) -> list[str]:
    """The lines of a text table: the heads of `columns`, a line for each of `rows`, and below them
    `more`, rows of finished cells.

    There is no rule between head and rows; see `align_rows` for how cells are set.
    """
    return align_rows([list(columns), *cells(columns, rows), *more])


def new_figure(width_inches: float, height_inches: float) -> Any:
    """An empty matplotlib figure of such a size, which opens no window.

    Raises:
        ImportError: there is no matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def style_and_write_figure(figure: Any, caption_below: str, path: Path) -> None:
    """Write a figure to `path`, at 150 dots an inch, with light axes; an older file is written
    over.

    Its axes lose their top and right edges and get a grid. The format is that of the path's suffix.
    The figure stays open.

    Args:
        figure: of `new_figure`; it is changed.
        caption_below: what stands there, broken into lines; "" for nothing.
        path: the file, in a folder that is there.
    """
    if caption_below:
        width = int(15.5 * figure.get_figwidth())
        figure.supxlabel(fill(caption_below, width), x=0.01, ha="left", fontsize=8)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=150)
