"""Where results lie, and how they are kept and read again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ssmlx.errors import InputError
from ssmlx.loading.files import write_whole
from ssmlx.tuning.machine import machine

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "perf" / "results"


def machine_load() -> str:
    """How busy the machine is: a measurement shares it with whatever else runs."""
    return f"{os.getloadavg()[0]:.1f} of {os.cpu_count()} cores busy when it began"


def save(name: str, result: dict[str, Any]) -> Path:
    """Write a result as JSON into perf/results."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    saved = json.dumps({"machine": machine(), **result}, indent=1)
    write_whole(path, f"{saved}\n".encode())
    return path


@contextmanager
def reading(path: Path, command: str) -> Iterator[None]:
    """Tell in one line that a saved result lacks what the block reads of it.

    Raises:
        InputError: it does.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(
            f"{path} is incomplete ({what})",
            expected=f"what this version of python -m {command} writes",
            do="measure again",
        ) from error
