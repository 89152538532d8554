"""The figures of tables 1 and 2 of the paper (arXiv 2402.11131v1), as printed there.

Its models have 1.3 to 7 billion parameters, on an A100 in float16, greedy, with a batch of one.
"""

from collections.abc import Iterable
from dataclasses import dataclass

SQL, DIALOG, E2E = "SqlContext", "DialogSum", "E2E-NLG"
DATASETS = {"sql": SQL, "e2e": E2E, "dialogsum": DIALOG}

OPT, PHI, LLAMA, OPT_LARGE = "OPT-1.3b", "PHI-1.3b", "OpenLlama-7b", "OPT-6.7b"
STREAMS, MEDUSA, TWO_MODEL = "SS (ours)", "Medusa", "Two-model SD"
METHODS = {"streams": STREAMS, "medusa": MEDUSA, "draft-model": TWO_MODEL}

Span = tuple[float, float]


@dataclass(frozen=True)
class Speed:
    dataset: str
    model: str
    method: str
    speedup: float
    call_reduction: float
    metrics: tuple[float, ...]
    extra_parameters: float


@dataclass(frozen=True)
class Latency:
    """A line of table 2; the draft model is OPT-125m, with gamma = 4."""

    dataset: str
    model: str
    method: str
    target_calls: float
    draft_calls: float
    milliseconds: float


TABLE_1 = (
    Speed(SQL, OPT, MEDUSA, 2.07, 2.79, (84.98,), 4.28e8),
    Speed(SQL, OPT, STREAMS, 2.39, 3.57, (87.40,), 4.096e4),
    Speed(SQL, PHI, MEDUSA, 2.58, 3.25, (88.71,), 4.36e8),
    Speed(SQL, PHI, STREAMS, 2.62, 3.53, (89.90,), 4.096e4),
    Speed(SQL, LLAMA, MEDUSA, 3.20, 4.10, (90.11,), 5.91e8),
    Speed(SQL, LLAMA, STREAMS, 3.14, 4.13, (91.70,), 8.19e4),
    Speed(DIALOG, OPT, MEDUSA, 1.56, 1.91, (43.40, 35.50), 4.28e8),
    Speed(DIALOG, OPT, STREAMS, 1.94, 2.62, (44.07, 35.99), 4.096e4),
    Speed(DIALOG, PHI, MEDUSA, 1.89, 2.28, (43.57, 35.60), 4.36e8),
    Speed(DIALOG, PHI, STREAMS, 1.83, 2.34, (43.36, 35.31), 4.096e4),
    Speed(DIALOG, LLAMA, MEDUSA, 1.76, 2.25, (44.20, 36.50), 5.91e8),
    Speed(DIALOG, LLAMA, STREAMS, 1.87, 2.51, (43.92, 35.70), 8.19e4),
    Speed(E2E, OPT, MEDUSA, 2.13, 2.95, (69.48, 50.17), 4.28e8),
    Speed(E2E, OPT, STREAMS, 2.45, 3.72, (69.32, 50.51), 4.096e4),
    Speed(E2E, PHI, MEDUSA, 2.78, 3.35, (67.90, 48.50), 4.36e8),
    Speed(E2E, PHI, STREAMS, 2.84, 3.69, (67.40, 48.52), 4.096e4),
    Speed(E2E, LLAMA, MEDUSA, 2.70, 3.22, (69.50, 50.30), 5.91e8),
    Speed(E2E, LLAMA, STREAMS, 2.96, 3.55, (68.66, 49.56), 8.19e4),
)

TABLE_2 = (
    Latency(SQL, OPT, TWO_MODEL, 6.59, 22.35, 269.24),
    Latency(SQL, OPT, STREAMS, 7.79, 0, 133.48),
    Latency(SQL, OPT_LARGE, TWO_MODEL, 6.60, 22.41, 301.10),
    Latency(SQL, OPT_LARGE, STREAMS, 6.88, 0, 157.04),
    Latency(DIALOG, OPT, TWO_MODEL, 11.65, 42.59, 493.59),
    Latency(DIALOG, OPT, STREAMS, 13.41, 0, 248.26),
    Latency(DIALOG, OPT_LARGE, TWO_MODEL, 12.15, 35.76, 555.99),
    Latency(DIALOG, OPT_LARGE, STREAMS, 14.39, 0, 442.83),
    Latency(E2E, OPT, TWO_MODEL, 8.86, 31.47, 345.72),
    Latency(E2E, OPT, STREAMS, 9.80, 0, 164.23),
    Latency(E2E, OPT_LARGE, TWO_MODEL, 8.90, 31.58, 412.02),
    Latency(E2E, OPT_LARGE, STREAMS, 10.26, 0, 243.62),
)


def speeds(task: str, method: str) -> list[Speed]:
    """The lines of table 1 for one of our tasks and a method of the paper's."""
    return [row for row in TABLE_1 if (row.dataset, row.method) == (DATASETS.get(task), method)]


def latencies(task: str, method: str) -> list[Latency]:
    """The lines of table 2, as `speeds`."""
    return [row for row in TABLE_2 if (row.dataset, row.method) == (DATASETS.get(task), method)]


def span(values: Iterable[float]) -> Span:
    found = list(values)
    return min(found), max(found)
