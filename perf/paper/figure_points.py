"""The points of `perf.paper.figures`, from the results of perf.compare and perf.quality."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssmlx.errors import InputError
from ssmlx.settings import read_json

from ..run.common import reading
from ..run.metrics import Estimate, estimate
from .theory import theoretical_speedup

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Parity:
    """A point of figure 4.

    Attributes:
        task: what was asked.
        latency_ratio: C_target / C_draft.
        advance_ratio: zeta / beta.
        measured: tokens/s of streaming over the draft model's.
        predicted: by eq. 6, with our gamma and the cost of our streams' calls.
    """

    task: str
    latency_ratio: float
    advance_ratio: float
    measured: Estimate
    predicted: float


@dataclass(frozen=True)
class Point:
    """Speed-up over mlx-lm and tokens per target call, at one x of a curve."""

    speedup: Estimate
    tokens_per_call: Estimate


@dataclass(frozen=True, order=True)
class Curve:
    """What tells one curve from another.

    Attributes:
        task: what was asked.
        label: how it was decoded.
    """

    task: str
    label: str


Curves = Mapping[Curve, Mapping[int, Point]]


def read_results(folders: Sequence[Path], pattern: str, key: str) -> list[Result]:
    """The results in `folders` and below, the newest last; each has a list `key`.

    Raises:
        InputError: a file is broken, incomplete, or holds something else.
    """
    paths = {path for folder in folders for path in folder.rglob(pattern)}
    results: list[Result] = []
    for path in sorted(paths, key=lambda path: path.stat().st_mtime):
        result, command = read_json(path, "a result"), f"perf.{path.stem.partition('-')[0]}"
        if not isinstance(result.get(key), list):
            raise InputError(
                f"{path} holds no result of {command}",
                expected=f"an entry {key!r}",
                do="move it elsewhere, or measure again",
            )
        with reading(path, command):
            _read_points(result)
        results.append(result)
    return results


def _read_points(result: Result) -> None:
    """Read all that the figures take from a result; KeyError and the like where it lacks some."""
    if "tasks" not in result:
        list(quality_points(result))
        return
    for points in (parity_points, sampling_curves, lambda found: tree_curves(found, [])):
        points([result])


def tasks_of(results: Sequence[Result], *, greedy: bool) -> Iterator[tuple[Result, Result]]:
    """Every task of the results that are greedy, or that are not, with its result."""
    for result in results:
        if (result["temp"] == 0) == greedy:
            for task in result["tasks"]:
                yield result, task


def parity_points(results: Sequence[Result]) -> list[Parity]:
    """Figure 4: tasks on which both streams and a draft model were measured."""
    points = {}
    for _, task in tasks_of(results, greedy=True):
        rows = {row["name"]: row for row in task["systems"]}
        needed = [rows.get(name) for name in ("plain", "streams", "draft-model")]
        if not all(row and row["call_seconds"] for row in needed) or not task["draft_call_seconds"]:
            continue
        plain, streams, draft = (rows[name] for name in ("plain", "streams", "draft-model"))
        latency_ratio = plain["call_seconds"] / task["draft_call_seconds"]
        overhead = streams["call_seconds"] / plain["call_seconds"]
        advance_ratio = draft["tokens_per_call"]["value"] / streams["tokens_per_call"]["value"]
        gamma = draft["options"]["levels"]
        points[task["task"]] = Parity(
            task["task"],
            latency_ratio,
            advance_ratio,
            estimate(streams["speedup_over_draft_model"]),
            theoretical_speedup(latency_ratio, advance_ratio, gamma, overhead),
        )
    return list(points.values())


def tree_curves(results: Sequence[Result], quality: Sequence[Result]) -> Curves:
    """Figure 5: full trees of streams by k, the children a level, pruned and not."""
    curves: dict[Curve, dict[int, Point]] = defaultdict(dict)
    for result in quality:
        for curve, k, point in quality_points(result):
            curves[curve][k] = point
    for _, task in tasks_of(results, greedy=True):
        for row in task["systems"]:
            tree = row["options"].get("tree", {})
            if row["kind"] != "streams" or tree.get("kind") != "full" or not row["speedup"]:
                continue
            curve = tree_curve(task["task"], row["options"]["levels"], row["options"]["prune"])
            k = tree["width"] or 3  # TreeConfig.full_width
            curves[curve][k] = point_of(row)
    return curves


def tree_curve(task: str, streams: int | None, prune: Mapping[str, Any]) -> Curve:
    """The curve of trees with this many streams and this pruning."""
    how = {"off": "without pruning", "budget": f"pruned to {prune['keep']} nodes",
           "threshold": f"pruned below {prune['threshold']:g}"}[prune["kind"]]  # fmt: skip
    return Curve(task, f"gamma = {streams or 'all'}, {how}")


def point_of(row: Result) -> Point:
    """A system's point."""
    return Point(estimate(row["speedup"]), estimate(row["tokens_per_call"]))


def quality_points(result: Result) -> Iterator[tuple[Curve, int, Point]]:
    """The full trees that a run of perf.quality tried, where mlx-lm was in it."""
    rows = result["systems"]
    base = next((row["tokens_per_second"]["value"] for row in rows if row["role"] == "mlx-lm"), 0)
    for row in rows if base else ():
        for tree in row.get("trees", ()):
            kind, _, width = tree["tree"].partition(":")
            if kind == "full" and "prune" in row:
                curve = tree_curve(result["task"], row["num_streams"], row["prune"])
                ratio = tree["tokens_per_second"]["value"] / base
                # The file holds no interval of this ratio.
                point = Point(Estimate(ratio, ratio, ratio), estimate(tree["tokens_per_call"]))
                yield curve, int(width), point


def sampling_curves(results: Sequence[Result]) -> Curves:
    """Figure 9b: streams and Medusa heads by the k of top-k sampling."""
    curves: dict[Curve, dict[int, Point]] = defaultdict(dict)
    for result, task in tasks_of(results, greedy=False):
        for row in task["systems"]:
            if row["name"] in ("streams", "medusa") and result["top_k"] and row["speedup"]:
                curves[Curve(task["task"], row["name"])][result["top_k"]] = point_of(row)
    return curves
