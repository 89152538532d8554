"""Table 1 of the paper: what the streams cost in quality, and what they save in target calls.

Every system answers the same prompts, greedily and in float32. An adapter of scope "all" is
compared with --baseline, the same LoRA trained without streams; an adapter of scope "streams" with
the untouched base, token for token. Each figure has a 95 % bootstrap interval over prompts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import mlx.core as mx

from ssmlx.commands.options import add_drafting_options, make_parser, run, template_text
from ssmlx.tuning.machine import machine
from ssmlx.tuning.report import publish

from ..run.common import BASE, RESULTS
from ..run.tasks import TASKS, add_data_options
from .answers import answer_system
from .plan import make_plan
from .report import draw, report
from .summary import is_lossless, result_of

PROG = "perf.quality"
EPILOG = """examples:
  python -m perf.quality --task sql --data-dir data --adapter sql=adapters/sql \\
      --baseline adapters/sql-lora --trees "full:2,full:4,best:16,best:32,best:64" --with-mlx-lm
  python -m perf.quality --task chat --data chat.jsonl --adapter adapters/chat-streams

Exact match: the answer is a reference once every run of white space is one space. ROUGE: F1 by
rouge_score with its stemmer, best over the references; lines are ROUGE-LSum's sentences.
Writes quality-TASK.json, .txt and .png. Every answer is kept in quality-TASK-*.part.jsonl, so that
a run that was stopped goes on; settings or weights that differ have a file of their own.
The tree with the most tokens per call is chosen on the very prompts that it is reported on; give
--trees with valid.jsonl, and --tree with test.jsonl, to keep the two apart.
Exit code 1: answers that must be the same are not."""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command's options."""
    description = (__doc__ or "").partition("\n")[0]
    parser = make_parser(PROG, description, EPILOG)
    data = parser.add_argument_group("data")
    add_data_options(data)
    data.add_argument("--count", type=int, metavar="N", help="the first N prompts (default: all)")
    add_system_options(parser.add_argument_group("systems"))
    add_drafting_options(parser)
    parser.add_argument(
        "--trees",
        metavar="KIND:N,...",
        help='several trees on the same prompts, such as "full:2,best:16" (K children a level, or '
        "N nodes); the one with the most tokens per call is reported",
    )
    defaults = ", ".join(f"{task.name} {task.max_tokens}" for task in TASKS.values())
    parser.add_argument("--max-tokens", type=int, help=f"longest answer (default: {defaults})")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, metavar="FOLDER", help="default: %(default)s"
    )
    parser.add_argument("--fresh", action="store_true", help="use no answers of an earlier run")
    parser.set_defaults(decoding="streaming", temp=0.0, seed=None)
    args = parser.parse_args(argv)
    args.max_tokens = TASKS[args.task].max_tokens if args.max_tokens is None else args.max_tokens
    return args


def add_system_options(systems: argparse._ArgumentGroup) -> None:
    """Who is asked."""
    systems.add_argument(
        "--model",
        default=BASE,
        help="the base model: a local folder, a Hub name or an alias (default: %(default)s)",
    )
    systems.add_argument(
        "--adapter",
        action="append",
        required=True,
        metavar="[NAME=]FOLDER",
        help="an adapter with streams; may be given several times",
    )
    systems.add_argument(
        "--baseline",
        type=Path,
        metavar="FOLDER",
        help="the same LoRA trained without streams, as mlx-lm reads it (adapters.safetensors and "
        "adapter_config.json); decoded plainly",
    )
    systems.add_argument(
        "--with-mlx-lm",
        nargs="?",
        const="",
        metavar="NAME",
        help="mlx-lm's own stream_generate too, on the weights of adapter NAME (default: the "
        "first), or of `baseline`",
    )
    systems.add_argument(
        "--template",
        type=template_text,
        metavar="chat|raw|TEXT",
        help="for every system; \\n is a new line (default: each adapter's own; the first "
        "adapter's for a baseline that has none)",
    )


def _main(args: argparse.Namespace) -> int:
    plan = make_plan(args)
    answers = {}
    for system in plan.systems:
        answers[system.name] = answer_system(plan, system, fresh=args.fresh)
        mx.clear_cache()
    result = result_of(plan, answers)
    target = plan.out / f"quality-{plan.task.name}"
    publish({"machine": machine(), **result}, target, report(result), draw)
    return 0 if is_lossless(result) else 1


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = parse_args(argv)
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
