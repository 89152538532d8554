"""Tables 1 and 2 of the paper: every way to decode, side by side on the same target.

Systems take turns prompt by prompt in an order that rotates; mlx-lm's own stream_generate is the
baseline of every speed-up, and plain decoding what every system's tokens must be.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ssmlx.commands.options import make_parser, run
from ssmlx.errors import require
from ssmlx.loading.files import make_folder
from ssmlx.settings import read_json
from ssmlx.tuning.report import publish

from ..run.experiment import failures, result_of, task_result
from ..run.options import add_experiment_options, check_counts, experiment_of
from ..run.results import RESULTS, reading
from .report import draw, markdown, report

PROG = "perf.compare"
EPILOG = """examples:
  python -m perf.compare --task sql --count 20 --systems streams lookahead prompt-lookup
  python -m perf.compare --task e2e --data e2e.jsonl --adapter adapters/e2e \\
      --medusa heads/e2e-medusa --draft-model org/small --out e2e
  python -m perf.compare --task sql --systems "streams --tree full --tree-width 2" \\
      "streams --tree full --tree-width 4" "medusa --tree-size 32"
  python -m perf.compare --from sql/compare.json e2e/compare.json --markdown

A system's own options are those of python -m ssmlx.generate, with it in quotes. A system whose
weights are not given is left out, and the report says so. For an adapter of scope "all" the
target of every system is the base with its LoRA merged; for scope "streams" it is the base.

Writes compare.json, .txt and .png. Every answer is kept in compare-TASK-*.part.jsonl as it comes:
the same command goes on where a run was stopped, and another choice of systems is another run.
Exit code 1: an answer that must be plain decoding's, token for token, is not."""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = make_parser(PROG, (__doc__ or "").partition("\n")[0], EPILOG)
    saved = parser.add_mutually_exclusive_group(required=True)
    saved.add_argument(
        "--from", dest="saved", type=Path, nargs="+", metavar="FILE.json",
        help="measure nothing; show the result of an earlier run again, or of several, each of "
        "another task, as one (with --out, written there as well)",
    )  # fmt: skip
    add_experiment_options(parser, saved, repeats=3)
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help=f"for the results (default: {RESULTS})"
    )
    parser.add_argument("--markdown", action="store_true", help="the table of perf/README.md too")
    args = parser.parse_args(argv)
    check_counts(parser, args, "repeats", "max_tokens")
    if args.task and args.out is None:
        args.out = RESULTS
    return args


def read_results(paths: Sequence[Path]) -> dict[str, Any]:
    """One result of the tasks of all files, in their order."""
    whole: dict[str, Any] = {}
    for path in paths:
        result = _read_result(path)
        whole = whole or {**result, "tasks": []}
        # One line above the tables says how all of them were measured.
        here, there = _settings(whole), _settings(result)
        for key, value in here.items():
            require(
                value == there.get(key),
                f"{key} is {value} in {paths[0]} and {there.get(key)} in {path}",
                expected="results that were measured in the same way",
                do="show them one by one, or measure again",
            )
        names = {task["task"] for task in whole["tasks"]}
        twice = [task["task"] for task in result["tasks"] if task["task"] in names]
        require(
            not twice,
            f"{path} holds {', '.join(twice)}, and so does a file before it",
            expected="every task once",
            do="leave one of the files out",
        )
        whole["tasks"] += result["tasks"]
    return whole


def _read_result(path: Path) -> dict[str, Any]:
    result = read_json(path, "a result of perf.compare")
    with reading(path, PROG):
        for show in (report, markdown, failures):
            show(result)
    return result


def _settings(result: dict[str, Any]) -> dict[str, Any]:
    shared = {key: value for key, value in result.items() if key not in ("tasks", "machine")}
    return {**shared, **result["machine"]}


def _main(args: argparse.Namespace) -> int:
    if args.task:
        experiment = experiment_of(args, "compare")
        result = result_of(experiment, args.model, [task_result(experiment.run())])
    else:
        result = read_results(args.saved)
    text = report(result)
    if args.out is None:
        print(text)
    else:
        make_folder(args.out)
        publish(result, args.out / "compare", text, draw)
    if args.markdown:
        print(markdown(result))
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
