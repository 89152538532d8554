"""The results in README.md: a Markdown table between two marks, made from the result alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ssmlx.errors import InputError
from ssmlx.loading.files import write_whole

from ..run.metrics import estimate
from .report import (
    MIB,
    heading,
    latency_speedup_text,
    same_text,
    speedup_text,
    task_heading,
    timing_text,
)

FIRST, LAST = "<!-- perf.compare -->", "<!-- /perf.compare -->"


def check_markers(path: Path) -> None:
    """Check that a file has the two marks, each once and in order.

    Raises:
        InputError: it has not.
    """
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    places = [text.find(mark) for mark in (FIRST, LAST)]
    counts = [text.count(mark) for mark in (FIRST, LAST)]
    if counts != [1, 1] or places[0] > places[1]:
        raise InputError(
            f"--readme {path} has no place for the table",
            expected=f"a file with a line {FIRST} and, below it, a line {LAST}",
            do="add the two lines where the table shall stand",
        )


def rewrite(path: Path, result: Mapping[str, Any]) -> None:
    """Put the tables between the marks; the rest of the file stays as it is.

    Raises:
        InputError: the marks are missing.
    """
    check_markers(path)
    # Bytes, so that line ends stay what they are.
    text = path.read_bytes().decode("utf-8")
    before, rest = text.split(FIRST)
    after = rest.split(LAST)[1]
    write_whole(path, f"{before}{FIRST}\n{markdown(result)}\n{LAST}{after}".encode())


def markdown(result: Mapping[str, Any]) -> str:
    """A table for each task, and how it was measured."""
    lead = f"{heading(result)}. {timing_text(result)}."
    return "\n\n".join([lead, *(task_markdown(task) for task in result["tasks"])])


def task_markdown(task: Mapping[str, Any]) -> str:
    """A task's table."""
    figure = task["figures"][:1]
    head = [
        "system",
        "speed-up over mlx-lm",
        "tokens per call",
        "latency, ms (over mlx-lm)",
        *(f"{name}, %" for name in figure),
        "extra parameters",
        "peak memory beside the weights, MiB",
        "same tokens as plain",
    ]
    rows = [head, ["---"] * len(head)]
    rows += [cells(task, row, figure) for row in task["systems"]]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    missing = "; ".join(f"{name}: {why}" for name, why in task["left_out"].items())
    title = "**" + task_heading(task).removeprefix("== ") + "**"
    return "\n\n".join([title, table, *([f"Left out: {missing}."] if missing else [])])


def cells(task: Mapping[str, Any], row: Mapping[str, Any], figures: Sequence[str]) -> list[str]:
    """A system's line."""
    return [
        f"`{row['name']}`",
        speedup_text(row),
        estimate(row["tokens_per_call"]).text(),
        f"{1e3 * row['latency_seconds']['value']:.0f} ({latency_speedup_text(task, row)})",
        *(estimate(row["figures"][name]).text(1) for name in figures),
        f"{row['extra_parameters']:,}" if row["extra_parameters"] else "0",
        f"{row['peak_bytes'] / MIB:.1f}",
        same_text(row, task["prompts"]),
    ]
