"""Results of earlier runs of `perf.compare`: read, checked, and joined task by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ssmlx.errors import InputError
from ssmlx.settings import read_json

from ..run.common import reading
from .readme import markdown
from .report import report
from .summary import failures

_WHOLE = {"tasks", "machine", "repeats"}


def read_results(paths: Sequence[Path]) -> dict[str, Any]:
    """One result of the tasks of all files, in their order.

    Raises:
        InputError: a file holds no result or not all that is shown of it, two hold the same task,
            or they were measured in different ways.
    """
    first, *others = (read_result(path) for path in paths)
    tasks = list(first["tasks"])
    for path, result in zip(paths[1:], others, strict=True):
        _check_same_way(paths[0], first, path, result)
        names = {task["task"] for task in tasks}
        twice = [task["task"] for task in result["tasks"] if task["task"] in names]
        if twice:
            raise InputError(
                f"{path} holds {', '.join(twice)}, and so does a file before it",
                expected="every task once",
                do="leave one of the files out",
            )
        tasks += result["tasks"]
    return {**first, "tasks": tasks}


def read_result(path: Path) -> dict[str, Any]:
    """The result of an earlier run.

    Raises:
        InputError: the file holds none, or not all that is shown of it.
    """
    result = read_json(path, "a result of perf.compare")
    if not set(result) >= _WHOLE:
        raise InputError(
            f"{path} holds something else",
            expected="the compare.json of python -m perf.compare",
            do="check --from",
        )
    with reading(path, "perf.compare"):
        for show in (report, markdown, failures):
            show(result)
    return result


def _check_same_way(
    first_path: Path, first: Mapping[str, Any], path: Path, result: Mapping[str, Any]
) -> None:
    """One line above the tables says how all of them were measured."""
    here, there = _settings(first), _settings(result)
    for key, value in here.items():
        if value != there.get(key):
            raise InputError(
                f"{key} is {value} in {first_path} and {there.get(key)} in {path}",
                expected="results that were measured in the same way",
                do="show them one by one, or measure again",
            )


def _settings(result: Mapping[str, Any]) -> dict[str, Any]:
    """How and on what it was measured, as one table."""
    shared = {key: value for key, value in result.items() if key not in ("tasks", "machine")}
    return {**shared, **result["machine"]}
