"""Tables as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .metrics import Estimate

FEW = 30  # prompts below which a bootstrap interval says too little


def estimate(values: Mapping[str, float]) -> Estimate:
    """A figure of a result."""
    return Estimate(values["value"], values["low"], values["high"])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines
