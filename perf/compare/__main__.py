"""Tables 1 and 2 of the paper: every way to decode, side by side on the same target.

Systems take turns prompt by prompt in an order that rotates; mlx-lm's own stream_generate is the
baseline of every speed-up, and plain decoding what every system's tokens must be.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ssmlx.commands.options import make_parser, run
from ssmlx.errors import require
from ssmlx.loading.files import make_folder
from ssmlx.settings import read_json
from ssmlx.tuning.report import publish

from ..run.figures import failures, result_of, task_result
from ..run.options import add_base, add_fresh, add_max_tokens, check_counts
from ..run.results import RESULTS, reading
from ..run.target import CHECKPOINTS, DRAFT_MODEL
from ..run.tasks import TASKS, add_data_options
from .picture import draw
from .plan import SYSTEMS, make_plan
from .report import check_markers, markdown, report, rewrite

PROG = "perf.compare"
EPILOG = """examples:
  python -m perf.compare --task sql --count 20 --systems streams lookahead prompt-lookup
  python -m perf.compare --task e2e --data e2e.jsonl --adapter adapters/e2e \\
      --medusa heads/e2e-medusa --draft-model org/small --out e2e
  python -m perf.compare --task sql --systems "streams --tree full --tree-width 2" \\
      "streams --tree full --tree-width 4" "medusa --tree-size 32"
  python -m perf.compare --from sql/compare.json e2e/compare.json --readme README.md

A system's own options are those of python -m ssmlx.generate, with it in quotes. A system whose
weights are not given is left out, and the report says so. For an adapter of scope "all" the
target of every system is the base with its LoRA merged; for scope "streams" it is the base.

Writes compare.json, .txt and .png. Every answer is kept in compare-TASK-*.part.jsonl as it comes:
the same command goes on where a run was stopped, and another choice of systems is another run.
Exit code 1: an answer that must be plain decoding's, token for token, is not."""
_WHOLE = {"tasks", "machine", "repeats"}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = make_parser(PROG, (__doc__ or "").partition("\n")[0], EPILOG)
    data = parser.add_argument_group("data")
    source = data.add_mutually_exclusive_group(required=True)
    source.add_argument("--task", choices=tuple(TASKS), help="what to ask")
    source.add_argument(
        "--from", dest="saved", type=Path, nargs="+", metavar="FILE.json",
        help="measure nothing; show the result of an earlier run again, or of several, each of "
        "another task, as one (with --out, written there as well)",
    )  # fmt: skip
    add_data_options(data)
    _add_weights_options(parser.add_argument_group("weights"))
    _add_run_options(parser.add_argument_group("run"))
    args = parser.parse_args(argv)
    check_counts(parser, args, "repeats", "max_tokens")
    if args.task and args.out is None:
        args.out = RESULTS
    return args


def _add_weights_options(weights: argparse._ArgumentGroup) -> None:
    add_base(weights)
    weights.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), default="float32",
        help="of all weights; in half precision near ties may part (default: %(default)s)",
    )  # fmt: skip
    weights.add_argument(
        "--adapter", metavar="NAME|FOLDER",
        help="streams and LoRA; `none` for the base alone (default: the bundled adapter of the "
        "task's name, where there is one)",
    )  # fmt: skip
    for kind in CHECKPOINTS:
        metavar = "MODEL" if kind == DRAFT_MODEL else "FOLDER"
        weights.add_argument(f"--{kind}", metavar=metavar, help=f"what `{kind}` drafts with")


def _add_run_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--systems", nargs="+", default=list(SYSTEMS), metavar="SYSTEM",
        help=f"which of {', '.join(SYSTEMS)}; mlx-lm and plain always take part (default: all)",
    )  # fmt: skip
    add_max_tokens(group)
    group.add_argument(
        "--repeats", type=int, default=3, metavar="N",
        help="times that every prompt is answered (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--temp", type=float, default=0.0, metavar="X",
        help="sampling temperature; 0 is greedy (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="sample from the K likeliest tokens"
    )
    group.add_argument("--seed", type=int, default=0, help="of sampling (default: %(default)s)")
    group.add_argument(
        "--out", type=Path, metavar="FOLDER", help=f"for the results (default: {RESULTS})"
    )
    group.add_argument(
        "--readme", type=Path, metavar="FILE",
        help="put the table between the marks <!-- perf.compare --> and <!-- /perf.compare -->",
    )  # fmt: skip
    add_fresh(group)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure what the options ask for."""
    plan = make_plan(args)
    for name, why in plan.left_out.items():
        print(f"{args.task}: {name} is left out, {why}", file=sys.stderr)
    more = {"data": plan.data.name, "left_out": dict(plan.left_out)}
    return result_of(plan.experiment, args.model, [task_result(plan.experiment.run(), **more)])


def read_results(paths: Sequence[Path]) -> dict[str, Any]:
    """One result of the tasks of all files, in their order.

    Raises:
        InputError: a file holds no result or not all that is shown of it, two hold the same task,
            or they were measured in different ways.
    """
    first, *others = (_read_result(path) for path in paths)
    tasks = list(first["tasks"])
    for path, result in zip(paths[1:], others, strict=True):
        _check_same_way(paths[0], first, path, result)
        names = {task["task"] for task in tasks}
        twice = [task["task"] for task in result["tasks"] if task["task"] in names]
        require(
            not twice,
            f"{path} holds {', '.join(twice)}, and so does a file before it",
            expected="every task once",
            do="leave one of the files out",
        )
        tasks += result["tasks"]
    return {**first, "tasks": tasks}


def _read_result(path: Path) -> dict[str, Any]:
    result = read_json(path, "a result of perf.compare")
    require(
        set(result) >= _WHOLE,
        f"{path} holds something else",
        expected="the compare.json of python -m perf.compare",
        do="check --from",
    )
    with reading(path, PROG):
        for show in (report, markdown, failures):
            show(result)
    return result


def _check_same_way(
    first_path: Path, first: Mapping[str, Any], path: Path, result: Mapping[str, Any]
) -> None:
    """One line above the tables says how all of them were measured."""
    here, there = _settings(first), _settings(result)
    for key, value in here.items():
        require(
            value == there.get(key),
            f"{key} is {value} in {first_path} and {there.get(key)} in {path}",
            expected="results that were measured in the same way",
            do="show them one by one, or measure again",
        )


def _settings(result: Mapping[str, Any]) -> dict[str, Any]:
    shared = {key: value for key, value in result.items() if key not in ("tasks", "machine")}
    return {**shared, **result["machine"]}


def _main(args: argparse.Namespace) -> int:
    if args.readme is not None:
        check_markers(args.readme)
    result = measure(args) if args.task else read_results(args.saved)
    if args.out is None:
        print(report(result))
    else:
        make_folder(args.out)
        publish(result, args.out / "compare", report(result), draw)
    if args.readme is not None:
        rewrite(args.readme, result)
        print("rewritten:", args.readme, file=sys.stderr)
    differing = failures(result)
    if differing:
        print(f"tokens differ from plain decoding's: {'; '.join(differing)}", file=sys.stderr)
    return 1 if differing else 0


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = parse_args(argv)
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
