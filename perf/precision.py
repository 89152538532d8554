"""Count where speculative decoding differs from plain decoding in 16, 8 and 4 bits.

In 16 bits a row's logits depend on the rows beside it, and two that nearly tie may come out in
either order. Plain and speculative decoding answer the same prompts in each precision; tokens are
compared up to where an answer first differs from plain decoding's.
"""

import argparse
from dataclasses import asdict, replace
from statistics import median
from typing import Any

import mlx.core as mx

from ssmlx.commands.parser import make_parser
from ssmlx.commands.running import make_main
from ssmlx.model.shapes import to_float
from ssmlx.report import Columns

from .compare import difference_text
from .run.experiment import (
    Experiment,
    Measured,
    find_differences_from_plain,
    run_result,
    systems_parting_beyond_ties,
)
from .run.options import (
    add_experiment_options,
    add_out_option,
    build_task_experiment,
    check_counts,
)
from .run.results import print_and_save
from .run.show import (
    Result,
    Row,
    figure_cell,
    markdown_table,
    number_cell,
    setup_heading,
)
from .run.statistics import Estimate, ratio
from .run.target import MLX_LM, PLAIN, System
from .run.tasks import mean_score_differences, mean_scores

PROG = "perf.precision"
TASKS = ("sql", "e2e", "chat")
DTYPES = ("bfloat16", "float16", "8bit", "4bit")
VARIANTS = ("streams", "streams --tree full --tree-width 1")
METRICS = ("exact match", "ROUGE-LSum")
EPILOG = """examples:
  python -m perf.precision --task sql --dtype bfloat16 --count 50
  python -m perf.precision --count 50

Divergences per 1,000 tokens: answers that differ from plain decoding's, over the tokens up to the
first different one, which counts; of an equal answer, all. If none was seen, the interval ends at
3 in all. By one pass: of 1,000 tokens of plain decoding's, those that a forward over its whole text
chooses otherwise, which is rounding alone. The gap: between the target's logits of the two tokens
there, by such a pass, and as a share of the larger.
8bit and 4bit are quantized weights, with activations in float16. Without a GPU, products are summed
in float32 by BLAS and rounded, as on a GPU: MLX's CPU backend takes seconds per row in these types.
Writes precision.json and .txt. Every answer is kept: a stopped run can go on.
Exit code 1: answers differ by more than rounding explains."""


def build_experiments(args: argparse.Namespace) -> list[Experiment]:
    """Build one experiment for each task and precision, without mlx-lm and without warm-up."""
    found = []
    for task in args.task:
        for dtype in args.dtype:
            own = argparse.Namespace(**{**vars(args), "task": task, "dtype": dtype})
            whole = build_task_experiment(own, "precision")
            systems = [one for one in whole.systems if one.kind != MLX_LM]
            weights = replace(whole.weights, rounds=mx.default_device() == mx.cpu)
            found.append(replace(whole, weights=weights, systems=systems, warm_up=0))
    return found


def precision_result(measured: Measured) -> dict[str, Any]:
    plan = measured.experiment
    weights = measured.experiment.weights
    assert plan.task is not None
    return {
        "task": plan.task.name,
        "dtype": weights.dtype,
        "products": "float32, rounded" if weights.rounds else "MLX's own",
        "data": plan.data,
        "adapter": weights.folder.resolve().name if weights.folder else None,
        "prompts": len(plan.examples),
        "max_tokens": plan.systems[0].config.max_tokens,
        "load": measured.load,
        "one_pass": asdict(count_one_pass_differences(measured)),
        "systems": [_system_figures(measured, one) for one in plan.systems],
    }


def count_one_pass_differences(measured: Measured) -> Estimate:
    """Count tokens, per 1,000 of plain decoding, that one pass over the whole answer would change.

    That is what rounding alone does when a pass has another number of rows.
    """
    others = []
    lengths = []
    for prompt, kept in zip(measured.prompts, measured.answers_of_first_repeat(PLAIN), strict=True):
        tokens = kept.answer.tokens
        logits = measured.target.mlx_model(mx.array([[*prompt, *tokens[:-1]]]))[0]
        chosen = mx.argmax(logits[len(prompt) - 1 :], axis=-1)
        others.append(1000.0 * to_float(mx.sum(chosen != mx.array(tokens))))
        lengths.append(len(tokens))
    return ratio(others, lengths)


def _system_figures(measured: Measured, system: System) -> dict[str, Any]:
    """Tokens of an answer are compared up to its first difference from plain decoding's.

    "tokens", "target_calls" and the metric are of whole answers.
    """
    task = measured.experiment.task
    examples = measured.experiment.examples
    assert task is not None
    own = measured.answers_of_first_repeat(system.name)
    plain = measured.answers_of_first_repeat(PLAIN)
    texts = [one.text for one in own]
    expected = [one.text for one in plain]
    found = find_differences_from_plain(measured, system) or []
    compared = [len(one.answer.tokens) for one in own]
    parted = [0] * len(own)
    for one in found:
        compared[one["prompt"]] = one["token"] + 1
        parted[one["prompt"]] = 1
    rate = ratio([1000 * one for one in parted], compared)
    if not found:
        rate = replace(
            rate, high=3000 / sum(compared)
        )  # the 95 % bound on the rate of something never observed
    return {
        "name": system.name,
        "kind": system.kind,
        "compared": sum(compared),
        "per_thousand": None if system.kind == PLAIN else asdict(rate),
        "same_as_plain": len(own) - len(found),
        "differences": found,
        "tokens": sum(len(one.answer.tokens) for one in own),
        "target_calls": sum(one.answer.target_calls for one in own),
        "metric": _shown_metric(mean_scores(task, examples, texts)),
        "metric_less_plain": _shown_metric(mean_score_differences(task, examples, texts, expected)),
    }


def _shown_metric(values: Row) -> Any:
    """The metric of `METRICS` that the task has."""
    return next((values[name] for name in METRICS if name in values), None)


def drafting_rows(result: Result) -> list[dict[str, Any]]:
    """Rows of all systems except plain decoding, with their part's values and plain's metric."""
    return [
        {**part, **row, "plain": part["systems"][0]["metric"]}
        for part in result["tasks"]
        for row in part["systems"]
        if row["kind"] != PLAIN
    ]


def _gap_text(row: Row) -> str:
    """Format the gap of logits at differing tokens, and the largest relative to its logit."""
    found = [one for one in row["differences"] if one["gap"] is not None]
    if not found:
        return "-"
    gaps = [one["gap"] for one in found]
    share = 100 * max(one["gap"] / one["logit"] for one in found)
    return f"{median(gaps):.2g}, {max(gaps):.2g} ({share:.2g} %)"


COLUMNS: Columns = {
    "task, precision": lambda row: f"{row['task']}, {row['dtype']}",
    "decoding": lambda row: f"`{row['name']}`",
    "same answers": lambda row: f"{row['same_as_plain']} of {row['prompts']}",
    "compared tokens": number_cell("compared"),
    "divergences per 1,000": figure_cell("per_thousand", 1),
    "by one pass": figure_cell("one_pass", 1),
    "gap of logits, median and largest": _gap_text,
    "metric, %": figure_cell("metric", 1),
    "plain's": figure_cell("plain", 1),
    "difference": figure_cell("metric_less_plain", 1),
}


def format_markdown_report(result: Result) -> str:
    notes = [
        f"{row['task']}, {row['dtype']}, {row['name']}: {difference_text(one)}"
        for row in drafting_rows(result)
        for one in row["differences"]
    ]
    return "\n".join(
        [
            setup_heading(result),
            "",
            markdown_table(COLUMNS, drafting_rows(result)),
            "",
            *notes,
        ]
    )


def _measure(args: argparse.Namespace) -> int:
    """Measure; exit code 1 if a difference is more than rounding explains."""
    plans = build_experiments(args)
    parts = [precision_result(plan.measure()) for plan in plans]
    dtypes = ", ".join(dict.fromkeys(part["dtype"] for part in parts))
    result = {**run_result(plans[0], args.model, parts), "dtype": dtypes}
    print_and_save(result, args.out / "precision", format_markdown_report(result))
    return 1 if systems_parting_beyond_ties(result) else 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(PROG, f"{__doc__}\n{EPILOG}")
    add_experiment_options(parser, tasks=TASKS, systems=VARIANTS, dtypes=DTYPES)
    add_out_option(parser)
    args = parser.parse_args(argv)
    check_counts(parser, args, "repeats", "max_tokens")
    return args


main = make_main(PROG, parse_args, _measure)


if __name__ == "__main__":
    raise SystemExit(main())
