"""`python -m perf.lossless`: is streaming the same as plain decoding, token for token?

Answers prompts by mlx-lm's `stream_generate`, by our plain decoding and by streaming with every
kind of tree and pruning, greedy and in float32, and compares the tokens. The sample checkpoint is
read in both adapter scopes. Half an hour or more on two CPU cores; `--count 10` for a look. What
was answered is kept, for this very code: a run that was stopped goes on.
"""

import argparse
import sys
from dataclasses import replace
from typing import Any

from ssmlx.commands.options import make_parser, run
from ssmlx.errors import require
from ssmlx.loading.files import make_folder
from ssmlx.settings import AdapterScope, SamplingConfig
from ssmlx.tuning.report import Columns, table

from .run import results
from .run.experiment import Measured, same_answers, task_result
from .run.options import add_sample_options, parse_systems, sample_experiment
from .run.show import (
    figure,
    number,
)
from .run.target import MLX_LM

PROG = "perf.lossless"


VARIANTS = (
    "streams --tree full --tree-width 1",
    "streams --tree full --tree-width 2",
    "streams --tree best --tree-size 16",
    "streams --tree full --tree-width 2 --prune budget --prune-to 8",
    "streams --tree full --tree-width 2 --prune threshold=0.05",
    "streams --tree best --tree-size 16 --prune budget --prune-to 8",
)


def rows_of(measured: Measured) -> list[dict[str, Any]]:
    """A row for each way to decode, with how many of its answers are mlx-lm's."""
    found, oracle = task_result(measured), measured.first(MLX_LM)
    same = {name: same_answers(measured.first(name), oracle) for name in measured.answers}
    more = {"scope": found["scope"], "prompts": len(oracle)}
    return [
        {"decoding": row["name"], "same_as_mlx_lm": same[row["name"]], **more, **row}
        for row in found["systems"][1:]
    ]


COLUMNS: Columns = {
    "decoding": lambda row: f"{row['scope']}: {row['decoding']}",
    "same as mlx-lm": lambda row: f"{row['same_as_mlx_lm']} of {row['prompts']}",
    "tokens": number("tokens"),
    "target calls": number("target_calls"),
    "tokens/call": figure("tokens_per_call"),
}


def _main(args: argparse.Namespace) -> int:
    # Nonsense is refused before anything is loaded.
    systems = parse_systems(VARIANTS, SamplingConfig(), args.max_tokens)
    require(
        args.adapter is None or args.scope is None,
        "--scope beside --adapter", expected="the adapter's own scope", do="drop --scope",
    )  # fmt: skip
    scopes: list[AdapterScope] = [args.scope] if args.scope else ["all", "streams"]
    rows = []
    for scope in scopes[: 1 if args.adapter else None]:
        sample = sample_experiment(args, scope)
        adapter = sample.weights.adapter
        can_prune = adapter is not None and adapter.streams.prune is not None
        make_folder(results.RESULTS)
        measured = replace(
            sample,
            name=f"lossless-{sample.name}-{scope}",
            systems=[one for one in systems if can_prune or "--prune" not in one.name],
            warm_up=0,
            out=results.RESULTS,
        ).run()
        found = rows_of(measured)
        print("\n".join(table(COLUMNS, found)))
        name = sample.name if args.adapter else scope
        print("saved", results.save(f"lossless-{name}", {"rows": found}), file=sys.stderr)
        rows += found
    return 0 if all(row["same_as_mlx_lm"] == row["prompts"] for row in rows) else 1


def main(argv: list[str] | None = None) -> int:
    """Entry point: exit code 1 if any answer differs."""
    description, _, more = (__doc__ or "").partition("\n\n")
    parser = make_parser(PROG, description, more)
    add_sample_options(parser, count=100)
    parser.add_argument(
        "--scope", choices=("all", "streams"), help="one scope of the sample checkpoint only"
    )
    args = parser.parse_args(argv)
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
