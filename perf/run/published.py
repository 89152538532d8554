"""The figures of tables 1 and 2 of the paper (arXiv 2402.11131v1), as printed there.

Its models have 1.3 to 7 billion parameters, on an A100 in float16, greedy, with a batch of one.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

E2E = "E2E-NLG"
OPT = "OPT-1.3b"
DATASETS = {"sql": "SqlContext", "e2e": E2E, "dialogsum": "DialogSum"}
STREAMS = "SS (ours)"
MEDUSA = "Medusa"
TWO_MODEL = "Two-model SD"
METHODS = {"streams": STREAMS, "medusa": MEDUSA, "draft-model": TWO_MODEL}

Span = tuple[float, float]


@dataclass(frozen=True)
class Speed:
    dataset: str
    model: str
    method: str
    speedup: float
    call_reduction: float
    metrics: Sequence[float]
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


_TABLES = json.loads(Path(__file__).with_name("published.json").read_text())
TABLE_1 = tuple(Speed(*row) for row in _TABLES["table 1"])
TABLE_2 = tuple(Latency(*row) for row in _TABLES["table 2"])


def speeds(task: str, method: str) -> list[Speed]:
    """The lines of table 1 for one of our tasks and a method of the paper's."""
    return [row for row in TABLE_1 if (row.dataset, row.method) == (DATASETS.get(task), method)]


def latencies(task: str, method: str) -> list[Latency]:
    """The lines of table 2, as `speeds`."""
    return [row for row in TABLE_2 if (row.dataset, row.method) == (DATASETS.get(task), method)]


def span(values: Iterable[float]) -> Span:
    found = list(values)
    return min(found), max(found)
