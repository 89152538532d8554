"""`python -m perf.speed`: tokens/s of streaming, of plain decoding, and of mlx-lm, in one run.

Every prompt is answered by each in turn, in an order that rotates, after a warm-up; the speed-up
is the ratio of medians over prompts, with a 95 % bootstrap interval. Then a step is taken apart:
the model's forward, and all else that it does. Writes JSON and a picture; `--count 20`
is enough for a look.
"""

import argparse
from pathlib import Path

from ssmlx.calibration.costs import CostPlan, forward_costs, with_whole_steps
from ssmlx.commands.machine import machine
from ssmlx.commands.options import make_parser, run
from ssmlx.commands.results import publish
from ssmlx.model.streams import StreamFusedModel
from ssmlx.settings import TreeConfig
from ssmlx.tuning.cost import DraftShape
from ssmlx.tuning.report import Columns, table

from .run.experiment import task_result
from .run.options import (
    adapter_with_streams,
    add_experiment_options,
    add_out,
    check_counts,
    experiment_of,
)
from .run.show import TOKENS_PER_CALL, Panel, Row, draw_tasks, figure, notes_of, same_text
from .run.target import STREAMS

PROG = "perf.speed"


def report(result: Row) -> str:
    summary, cost = result["summary"], result["step"]
    columns: Columns = {
        "system": lambda row: row["name"],
        "decode tokens/s": figure("decode_rate", 1),
        "over mlx-lm": figure("speedup"),
        "tokens/call": figure("tokens_per_call"),
        "same tokens as plain": same_text(summary["prompts"]),
    }
    streams = summary["systems"][-1]
    allowed = streams["tokens_per_call"]["value"] * cost["one_row"] / cost["forward"]
    found = streams["speedup"]
    reached = f", {found['value'] / allowed:.2f} of it reached" if found else ""
    one_row, forward, rest = (f"{cost[one] * 1e3:.1f} ms" for one in ("one_row", "forward", "rest"))
    lines = [
        *table(columns, summary["systems"]),
        *notes_of(summary),
        f"one row takes {one_row}: the forward allows {allowed:.2f}x{reached}",
        f"a step of {cost['tree_size']} nodes: its forward {forward}, all else {rest}",
    ]
    return "\n".join(lines)


def draw(result: Row, path: Path) -> None:
    task = {**result["summary"], "adapter": None}
    panel = Panel("decode tokens/s (median over prompts)", lambda row: row["decode_rate"], digits=1)
    title = f"{task['data']}, {result['dtype']}, {result['machine']['machine']}"
    draw_tasks([task], [panel, TOKENS_PER_CALL], title, path)


def step_cost(
    model: StreamFusedModel, prompt: list[int], size: int, repeats: int
) -> dict[str, float]:
    """Median seconds behind `prompt`, as `ssmlx.calibrate` measures them: of "one_row" through the
    model; of a step's "forward", its layers and heads; of the "rest", all else that it does."""
    shape, context = (
        DraftShape(tree=TreeConfig(size=size), num_streams=model.num_streams),
        len(prompt),
    )
    rows = tuple(sorted({1, shape.num_streams, shape.num_nodes}))
    plan = CostPlan(rows=rows, fused_nodes=(1,), contexts=(context,), repeats=repeats)
    costs, _ = forward_costs(model, prompt, plan)
    costs = with_whole_steps(model, costs, [prompt], [shape], steps=repeats)
    forward = costs.forward_seconds(shape, context)
    return {
        "one_row": sum(one.at(1, context) for one in (costs.lower, costs.upper, costs.head)),
        "forward": forward,
        "rest": costs.step_seconds(shape, context) - forward,
        "tree_size": shape.num_nodes,
    }


def _main(args: argparse.Namespace) -> int:
    adapter_with_streams(args.adapter or args.task)
    args.systems = [f"streams --tree best --tree-size {args.tree_size}"]
    measured = experiment_of(args, "speed").run()
    model = measured.target.drafting(STREAMS).model
    cost = step_cost(model, measured.prompts[0], args.tree_size, args.steps)
    result = {
        "machine": machine(),
        "dtype": args.dtype,
        "summary": task_result(measured),
        "step": cost,
    }
    publish(result, args.out / measured.experiment.name, report(result), draw)
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(PROG, __doc__)
    add_experiment_options(parser, task="sql", systems=())
    parser.add_argument("--tree-size", type=int, default=TreeConfig().size, metavar="N")
    parser.add_argument("--steps", type=int, default=40, help="that are taken apart (default: 40)")
    add_out(parser)
    args = parser.parse_args(argv)
    check_counts(parser, args, "repeats", "max_tokens", "steps")
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
