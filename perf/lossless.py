"""`python -m perf.lossless`: is streaming the same as plain decoding, token for token?

Answers prompts by mlx-lm's `stream_generate`, by our plain decoding and by streaming with every
kind of tree and pruning, greedy and in float32 unless told otherwise, and compares the tokens.
Half an hour or more on two CPU cores; `--count 10` for a look. What was answered is kept, for this
very code: a run that was stopped goes on.
"""

import argparse
from dataclasses import replace

from ssmlx.commands.options import make_parser, run
from ssmlx.commands.results import write_result
from ssmlx.tuning.report import Columns, table

from .run.experiment import result_of, task_result
from .run.options import (
    adapter_with_streams,
    add_experiment_options,
    add_out,
    check_counts,
    experiment_of,
)
from .run.show import figure, heading, number, same_text, task_heading

PROG = "perf.lossless"
VARIANTS = (
    "streams --tree full --tree-width 1",
    "streams --tree full --tree-width 2",
    "streams --tree best --tree-size 16",
    "streams --tree full --tree-width 2 --prune budget --prune-to 8",
    "streams --tree full --tree-width 2 --prune threshold=0.05",
    "streams --tree best --tree-size 16 --prune budget --prune-to 8",
)


def _main(args: argparse.Namespace) -> int:
    _, adapter = adapter_with_streams(args.adapter or args.task)
    experiment = experiment_of(args, PROG.removeprefix("perf."))
    can_prune = adapter.streams.prune is not None
    systems = [one for one in experiment.systems if can_prune or "--prune" not in one.name]
    task = task_result(replace(experiment, systems=systems, warm_up=0).run())
    result = result_of(experiment, args.model, [task])
    columns: Columns = {
        "decoding": lambda row: row["name"],
        "same tokens as plain": same_text(task["prompts"]),
        "tokens": number("tokens"),
        "target calls": number("target_calls"),
        "tokens/call": figure("tokens_per_call"),
    }
    lines = [heading(result), task_heading(task), *table(columns, task["systems"])]
    write_result(result, args.out / experiment.name, "\n".join(lines))
    # Where mlx-lm draws, it does so with noise of its own.
    same = {row["same_as_plain"] for row in task["systems"]} - {None}
    return 0 if same == {task["prompts"]} else 1


def main(argv: list[str] | None = None) -> int:
    """Entry point: exit code 1 if any answer differs."""
    parser = make_parser(PROG, __doc__)
    add_experiment_options(parser, task="sql", systems=VARIANTS)
    add_out(parser)
    args = parser.parse_args(argv)
    check_counts(parser, args, "repeats", "max_tokens")
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
