"""Tables 1 and 2 of the paper: every way to decode, side by side on the same target.

Systems take turns prompt by prompt in an order that rotates; mlx-lm's own stream_generate is the
baseline of every speed-up, and plain decoding what every system's tokens must be.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

from ssmlx.commands.options import make_parser, run
from ssmlx.loading.files import make_folder
from ssmlx.tuning.report import publish

from ..run.common import BASE, RESULTS
from ..run.tasks import DATA_HELP, TASKS, add_data_dir
from .bench import load_bench
from .picture import draw
from .plan import Plan, make_plan
from .readme import check_markers, rewrite
from .report import report
from .run import measure
from .saved import read_results
from .summary import failures, result_of, task_result
from .systems import CHECKPOINTS, SYSTEMS

PROG = "perf.compare"
EPILOG = """examples:
  python -m perf.compare --task sql --count 20 --systems streams lookahead prompt-lookup
  python -m perf.compare --task sql e2e chat --data e2e=e2e.jsonl --adapter e2e=adapters/e2e \\
      --medusa sql=heads/sql-medusa --draft-model org/small
  python -m perf.compare --task sql --systems "streams --tree full --tree-width 2" \\
      "streams --tree full --tree-width 4" "medusa --tree-size 32"
  python -m perf.compare --from sql/compare.json e2e/compare.json --readme README.md

A system's own options are those of python -m ssmlx.generate, with it in quotes. A system whose
weights are not given is left out, and the report says so. For an adapter of scope "all" the
target of every system is the base with its LoRA merged; for scope "streams" it is the base.

Writes compare.json, .txt and .png. Every answer is kept in compare-TASK-*.part.jsonl as it comes:
the same command goes on where a run was stopped, and another choice of systems is another run.
Exit code 1: an answer that must be plain decoding's, token for token, is not."""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = make_parser(PROG, (__doc__ or "").partition("\n")[0], EPILOG)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--task", nargs="+", choices=tuple(TASKS), help="what to ask")
    source.add_argument(
        "--from", dest="saved", type=Path, nargs="+", metavar="FILE.json",
        help="measure nothing; show the result of an earlier run again, or of several, each of "
        "other tasks, as one (with --out, written there as well)",
    )  # fmt: skip
    add_data_options(parser.add_argument_group("data"))
    add_weights_options(parser.add_argument_group("weights"))
    add_run_options(parser.add_argument_group("run"))
    args = parser.parse_args(argv)
    if args.task and args.out is None:
        args.out = RESULTS
    return args


def add_data_options(data: argparse._ArgumentGroup) -> None:
    """What is asked."""
    data.add_argument(
        "--data", action="append", default=[], metavar="[TASK=]FILE.jsonl", help=DATA_HELP
    )
    add_data_dir(data)
    data.add_argument("--count", type=int, metavar="N", help="the first N prompts (default: all)")


def add_weights_options(weights: argparse._ArgumentGroup) -> None:
    """What answers."""
    weights.add_argument(
        "--model", default=BASE,
        help="the base model: a local folder, a Hub name or an alias (default: %(default)s)",
    )  # fmt: skip
    weights.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), default="float32",
        help="of all weights; in half precision near ties may part (default: %(default)s)",
    )  # fmt: skip
    weights.add_argument(
        "--adapter", action="append", default=[], metavar="[TASK=]NAME|FOLDER",
        help="the task's streams and LoRA; `none` for the base alone (default: the bundled "
        "adapter of the task's name, where there is one)",
    )  # fmt: skip
    for kind in CHECKPOINTS:
        is_model = kind == "draft-model"
        weights.add_argument(
            f"--{kind}", action="append", default=[],
            metavar=f"[TASK=]{'MODEL' if is_model else 'FOLDER'}",
            help=f"what `{kind}` drafts with",
        )  # fmt: skip


def add_run_options(group: argparse._ArgumentGroup) -> None:
    """Who answers, how often, and where the results go."""
    group.add_argument(
        "--systems", nargs="+", default=list(SYSTEMS), metavar="SYSTEM",
        help=f"which of {', '.join(SYSTEMS)}; mlx-lm and plain always take part (default: all)",
    )  # fmt: skip
    most = ", ".join(f"{task.name} {task.max_tokens}" for task in TASKS.values())
    group.add_argument(
        "--max-tokens", action="append", default=[], metavar="[TASK=]N",
        help=f"longest answer (default: {most})",
    )  # fmt: skip
    group.add_argument(
        "--repeats", type=int, default=3, metavar="N",
        help="times that every prompt is answered (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--warm-up", type=int, default=1, metavar="N",
        help="answers of each system before the first that counts (default: %(default)s)",
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
    group.add_argument("--fresh", action="store_true", help="use no answers of an earlier run")


def run_plan(plan: Plan, *, fresh: bool) -> dict[str, Any]:
    """Measure every task; later ones are checked before the first."""
    for task in plan.tasks:
        for name, why in task.left_out.items():
            print(f"{task.task.name}: {name} is left out, {why}", file=sys.stderr)
    for task in plan.tasks[1:]:
        load_bench(plan, task)
    results = []
    for task in plan.tasks:
        mx.clear_cache()
        results.append(task_result(task, measure(plan, task, fresh=fresh)))
    return result_of(plan, results)


def _main(args: argparse.Namespace) -> int:
    if args.readme is not None:
        check_markers(args.readme)
    result = run_plan(make_plan(args), fresh=args.fresh) if args.task else read_results(args.saved)
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
