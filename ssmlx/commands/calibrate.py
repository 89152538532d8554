"""Measure this machine, and tell streams how to draft on it.

Seconds of a model's forwards are measured against rows and context, and what an adapter's streams
guess is recorded along some answers. From the two follow the expected tokens/s of every way to
draft: size of the tree, number of streams, schedule. The fastest is kept for this machine, model
and adapter (in the cache folder, see `SSMLX_CACHE`), and with it those that are faster behind
shorter or longer contexts, where a row costs less or more. `ssmlx.generate`,
`ssmlx.chat` and the Python API use them from then on where none of these is asked for, and decode
plainly where nothing pays. At the end the choice and others are timed on prompts that were not
used for it. Takes a few minutes; nothing else should run.

    python -m ssmlx.calibrate --adapter sql
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from ..calibration import BUSY, CONTEXTS
from ..errors import require
from ..loading.names import cache_dir, resolve_adapter, resolve_model
from ..settings import ATTENTIONS, DRAFT_HEADS
from .options import add_counts, add_model_options, add_options, command, load_target, make_parser

PROG = "ssmlx.calibrate"
DEFAULT_ADAPTER = "chat"
PROMPTS_FILE = "prompts.jsonl"
NOTHING_CHECKED = "nothing was checked: the held-out answers are a single token each"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(PROG, __doc__)
    add_model_options(parser, DEFAULT_ADAPTER)
    told = "(default: %(default)s)"
    add_options(
        parser.add_argument_group("streams, as --drafter tells ssmlx.generate"),
        (
            "--draft-head",
            None,
            f"weights of the head that guesses: head= {told}",
            DRAFT_HEADS[0],
            DRAFT_HEADS,
        ),
        (
            "--attention",
            None,
            f"what computes it on rows of trees: attention= {told}",
            ATTENTIONS[0],
            ATTENTIONS,
        ),
    )
    group = parser.add_argument_group("calibration")
    add_options(
        group,
        (
            "--data",
            "FILE.jsonl",
            "prompts such as the adapter will be asked: a JSON object with "
            f"`prompt` or `messages` a line (default: {PROMPTS_FILE} in the adapter's folder)",
            Path,
        ),
        (
            "--out",
            "FOLDER",
            "for calibrate-ADAPTER.json and .txt (default: calibration in the cache folder)",
            cache_dir() / "calibration",
        ),
        (
            "--contexts",
            "L",
            "committed tokens behind which forwards are timed (default: %(default)s)",
            list(CONTEXTS),
        ),
        ("--no-store", None, "show the choice, and keep the one that is in use", bool),
        ("--noisy", None, f"keep it even if timings varied by more than {100 * BUSY:.0f} %%", bool),
    )
    add_counts(
        group,
        ("count", 24, "prompts to learn from, the last of the data"),
        ("check", 10, "prompts before those to check on; 0 checks nothing"),
        ("max-tokens", 64, "longest answer"),
        ("repeats", 5, "rounds in which every forward is timed"),
        ("largest-tree", 64, "nodes of the largest tree to think about"),
    )
    return parser.parse_args(argv)


def plan_of(args: argparse.Namespace) -> Any:
    from ..calibration.costs import CostPlan

    for flag, least in (
        ("repeats", args.repeats),
        ("contexts", min(args.contexts)),
        ("max-tokens", args.max_tokens),
    ):
        require(least >= 1, f"--{flag} {least}", expected="1 or more", do="give more")
    rows = tuple(row for row in CostPlan.rows if row <= args.largest_tree)
    found = f"--largest-tree {args.largest_tree}"
    require(len(rows) > 1, found, expected="2 or more nodes", do="give more")
    return CostPlan(rows=rows, contexts=tuple(sorted(set(args.contexts))), repeats=args.repeats)


def load_streams(args: argparse.Namespace) -> Any:
    from ..loading.attach import adapters_for

    model, tokenizer = load_target(
        args, DEFAULT_ADAPTER, draft_head=args.draft_head, attention=args.attention
    )
    fitting = ", ".join(adapters_for(model)) or "none that ships with ssmlx"
    require(
        model.num_streams > 0,
        "the model has no streams to calibrate",
        expected=f"an adapter; for this model: {fitting}",
        do="give --adapter NAME or FOLDER",
    )
    return model, tokenizer


def prompts_of(args: argparse.Namespace) -> Path:
    folder = resolve_adapter(args.adapter) if args.adapter else resolve_model(args.model)
    path = (folder or Path()) / PROMPTS_FILE
    require(
        folder is not None and path.is_file(),
        f"no prompts ship with the adapter {Path(args.adapter or args.model).name}",
        expected="prompts such as it will be asked",
        do="give --data FILE.jsonl, a JSON object with `prompt` or `messages` a line",
    )
    return path


def _main(args: argparse.Namespace) -> None:
    from ..calibration.choice import check, choose
    from ..calibration.costs import measure_costs
    from ..calibration.recorded import read_tokens, record_answers, split_prompts
    from ..calibration.report import report, result_of
    from ..loading.files import make_folder
    from ..tuning.profile import store_profile
    from .machine import machine
    from .results import write_result

    plan = plan_of(args)
    make_folder(args.out)
    model, tokenizer = load_streams(args)
    data = args.data or prompts_of(args)
    tokens = read_tokens(data, model, tokenizer)
    prompts, held_out = split_prompts(tokens, args.count, args.check)
    answers = record_answers(model, tokenizer, prompts, args.max_tokens, max(plan.rows))
    costs, noise = measure_costs(model, prompts, plan)
    choice = choose(model, answers, costs, [rows for rows in plan.rows if rows > 1])
    profile = choice.profile(model)
    # Before the check, which may be stopped.
    if args.no_store:
        print("not kept, as --no-store says")
    elif noise > BUSY and not args.noisy:
        print("not kept: such timings decide by chance; --noisy keeps the choice all the same")
    else:
        print(f"kept {store_profile(profile)}; used where nothing else is asked for")
    checks = check(model, tokenizer, held_out, choice, args.max_tokens) if held_out else []
    if held_out and not checks:
        print(NOTHING_CHECKED, file=sys.stderr)
    adapter = Path(args.adapter or args.model).name  # a fused model's streams have its own name
    named = {"model": str(args.model), "adapter": adapter, "data": data.name}
    result = {
        **named,
        "machine": machine(),
        **result_of(model, profile, choice, checks),
        "noise": noise,
    }
    write_result(result, args.out / f"calibrate-{adapter}", report(result))


main = command(PROG, parse_args, _main)
