"""The log of a run, one JSON object per line, and its picture."""

import json
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from ..errors import naming_file
from ..loading.files import write_whole
from ..report import new_figure, write_figure

LOG_FILE = "log.jsonl"
PICTURE_FILE = "curves.png"
_WINDOW = 20  # number of steps whose mean is plotted


class Record:
    """A training run's log: a file with one JSON object per line, one for each step."""

    def __init__(self, path: Path, step: int = 0) -> None:
        """Open the log, deleting entries of steps after `step`, the last saved one."""
        self._path = path
        kept = [entry for entry in read_log_entries(path) if entry["step"] <= step]
        write_whole(path, "".join(json.dumps(entry) + "\n" for entry in kept).encode())

    @property
    def entries(self) -> list[dict[str, Any]]:
        return read_log_entries(self._path)

    def add(self, entry: dict[str, Any]) -> None:
        with naming_file(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def read_log_entries(path: Path) -> list[dict[str, Any]]:
    """Read entries up to the first line that is not JSON: a kill may have truncated it."""
    if not path.exists():
        return []
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return entries


def draw_curves(entries: list[dict[str, Any]], picture: Path, title: str) -> None:
    if find_spec("matplotlib") is None:
        return
    figure = new_figure(11, 4)
    left, right = figure.subplots(1, 2)
    _draw_losses(left, entries)
    left.set(xlabel="step", ylabel="loss, nats a token", yscale="log", title=title)
    left.legend(
        frameon=False,
        fontsize=8,
        title="dashed: held out",
        title_fontsize=8,
        loc="upper left",
        bbox_to_anchor=(1, 1),
    )
    steps, values = _steps_and_values(entries, "tokens_per_call")
    if steps:
        right.plot(steps, values, marker="o", color="tab:green")
        right.annotate(
            f"{values[-1]:.2f}",
            (steps[-1], values[-1]),
            xytext=(-4, 7),
            textcoords="offset points",
            ha="right",
        )
    right.set(xlabel="step", ylabel="tokens per target call", title="held-out text, replayed")
    write_figure(figure, "", picture)


def _draw_losses(axes: Any, entries: list[dict[str, Any]]) -> None:
    """Plot training losses as means of `_WINDOW` steps, held-out losses dashed, as they are."""
    names = sorted({key for e in entries for key in e if key.endswith("_loss")})
    for name in (name for name in names if not name.startswith("valid_")):
        steps, values = _steps_and_values(entries, name)
        smooth = [fmean(values[max(0, i - _WINDOW + 1) : i + 1]) for i in range(len(values))]
        (line,) = axes.plot(steps, smooth, label=name.removesuffix("_loss"), linewidth=1.2)
        held_out = _steps_and_values(entries, f"valid_{name}")
        style = {"linewidth": 1, "alpha": 0.8}
        axes.plot(*held_out, "--", marker=".", color=line.get_color(), **style)


def _steps_and_values(entries: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    found = [entry for entry in entries if entry.get(name) is not None]
    return [entry["step"] for entry in found], [entry[name] for entry in found]
