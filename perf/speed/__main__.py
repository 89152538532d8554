"""`python -m perf.speed`: tokens/s of streaming, of plain decoding, and of mlx-lm, in one run.

Every prompt is answered by each in turn, in an order that rotates, after a warm-up; the speed-up
is the ratio of medians over prompts, with a 95 % bootstrap interval. Then steps are taken apart:
the model's forward alone, and all else that a step does. Writes JSON and a picture.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from ssmlx.commands.options import make_parser, run
from ssmlx.loading.files import make_folder
from ssmlx.settings import GenerateConfig, TreeConfig
from ssmlx.tuning.machine import machine
from ssmlx.tuning.report import new_figure, publish

from ..run import results
from ..run.figures import task_result
from ..run.options import check_counts
from ..run.sample import add_sample_options, sample_experiment
from ..run.show import COLOURS, Columns, Row, bars, figure, interval, notes_of, same_text, table
from ..run.target import MLX_LM, PLAIN, STREAMS, System
from .step_cost import step_cost

PROG = "perf.speed"


def systems(max_tokens: int, tree_size: int) -> list[System]:
    """The systems to time, each greedy and with the same `max_tokens`."""
    plain = GenerateConfig(decoding="plain", max_tokens=max_tokens)
    tree = TreeConfig(kind="best", size=tree_size)
    streaming = replace(plain, decoding="streaming", tree=tree)
    return [
        System(MLX_LM, MLX_LM, plain),
        System(PLAIN, PLAIN, plain),
        System(STREAMS, STREAMS, streaming),
    ]


def report(summary: Row, cost: Row) -> str:
    """The result as text."""
    columns: Columns = {
        "system": lambda row: row["name"],
        "decode tokens/s": figure("decode_rate", 1),
        "over mlx-lm": lambda row: interval(row["speedup"], 2) if row["speedup"] else "-",
        "tokens/call": figure("tokens_per_call"),
        "same tokens as plain": same_text(summary["prompts"]),
    }
    streams = summary["systems"][-1]
    lines = [*table(columns, summary["systems"]), *notes_of(summary)]
    low, high = cost["interval"]
    allowed = streams["tokens_per_call"]["value"] * cost["one_row"] / cost["forward"]
    lines.append(
        f"one row takes {cost['one_row'] * 1e3:.1f} ms: the forward allows {allowed:.2f}x"
        + (
            f", {streams['speedup']['value'] / allowed:.2f} of it reached"
            * bool(streams["speedup"])
        )
    )
    forward, rest = (f"{cost[name] * 1e3:.1f} ms" for name in ("forward", "rest"))
    lines.append(
        f"a step of {cost['tree_size']} nodes: its forward {forward}, all else {rest}: "
        f"{cost['beside_forward']:.1%} [{low:.1%}, {high:.1%}] beside it"
    )
    return "\n".join(lines)


def draw(result: Row, path: Path) -> None:
    """A picture of the tokens/s."""
    summary = result["summary"]
    rows = summary["systems"]
    picture = new_figure(6.4, 2.6)
    axes = picture.subplots()
    label = "decode tokens/s (median over prompts)"
    colours = [COLOURS[row["kind"]] for row in rows]
    bars(axes, [row["decode_rate"] for row in rows], label, 1, color=colours)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.invert_yaxis()
    calls = rows[-1]["tokens_per_call"]["value"]
    axes.set_title(
        f"{summary['prompts']} prompts of {summary['data']}, {summary['task']}, float32, "
        f"{calls:.2f} tokens a call\n{result['machine']['machine']}",
        fontsize=8,
    )
    picture.savefig(path, dpi=150)


def _main(args: argparse.Namespace) -> int:
    three = systems(args.max_tokens, args.tree_size)  # nonsense is refused before loading
    measured = replace(sample_experiment(args, "all"), systems=three).run()
    model = measured.target.drafting(STREAMS).model
    cost = step_cost(model, measured.prompts[0], args.tree_size, args.repeats)
    summary = task_result(measured, data=args.prompts.name)
    make_folder(results.RESULTS)
    name = f"speed-{measured.experiment.name}" if args.adapter else "speed"
    result = {"machine": machine(), "summary": summary, "step": cost}
    publish(result, results.RESULTS / name, report(summary, cost), draw)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    description, _, more = (__doc__ or "").partition("\n\n")
    parser = make_parser(PROG, description, more)
    add_sample_options(parser, count=20)
    parser.add_argument("--tree-size", type=int, default=TreeConfig().size, metavar="N")
    parser.add_argument("--repeats", type=int, default=40, help="steps that are taken apart")
    args = parser.parse_args(argv)
    check_counts(parser, args, "repeats")
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
