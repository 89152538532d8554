"""Compares every way to decode on the same target, as in tables 1 and 2 of the paper.

Systems take turns prompt by prompt in an order that rotates; mlx-lm's own stream_generate is the
baseline of every speed-up, and plain decoding what every system's tokens must be.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from convert.continuations import prompt_key
from ssmlx.commands.parser import add_options, make_parser
from ssmlx.commands.running import make_main
from ssmlx.errors import require
from ssmlx.generation.memory import MIB
from ssmlx.json_files import read_json
from ssmlx.loading.files import make_folder
from ssmlx.prompts import read_prompts
from ssmlx.report import Columns, table

from .run import show
from .run.experiment import run_result, systems_parting_beyond_ties, task_result
from .run.options import (
    add_experiment_options,
    build_task_experiment,
    check_counts,
    split_name_and_value,
)
from .run.results import RESULTS, explain_broken_result, print_and_save
from .run.show import Row, write_bar_chart
from .run.statistics import estimate_from_json
from .run.target import MLX_LM, PLAIN
from .run.tasks import TASKS, find_data_file, mean_score_differences, mean_scores, read_examples

PROG = "perf.compare"
EPILOG = """examples:
  python -m perf.compare --task sql --count 20 --systems streams lookahead prompt-lookup
  python -m perf.compare --task e2e --data e2e.jsonl --adapter adapters/e2e \\
      --medusa heads/e2e-medusa --draft-model org/small --out e2e
  python -m perf.compare --task sql --systems "streams --tree full --tree-width 2" \\
      "streams --tree full --tree-width 4" "medusa --tree-size 32"
  python -m perf.compare --task sql --systems trees --repeats 1
  python -m perf.compare --task chat --model org/qwen3.5 --adapter none --systems text mtp
  python -m perf.compare --task spec_bench --data question.jsonl --systems default streams
  python -m perf.compare --task sql --answers lora=lora.jsonl streams=streams.jsonl
  python -m perf.compare --from sql/compare.json e2e/compare.json

A system and its own options, which are those of python -m ssmlx.generate, stand in quotes. A system
whose weights are not given is left out, and the report says so. For an adapter of scope "all" the
target of every system is the base with its LoRA merged; for scope "streams" it is the base.
`trees` are streams with every kind of tree and pruning. `mtp` drafts by the model's own head for
multi-token prediction, or by the one of --mtp.

Exact match: the answer is a reference once every run of white space is one space. ROUGE: F1 by
rouge_score with its stemmer, best over the references; lines are ROUGE-LSum's sentences. A system
that is chosen by prompts and reported on them looks better than it is: choose with other --data.

--answers decodes nothing: it judges files such as `convert.continuations` writes, which answers a
whole test set in minutes, in batches, and writes score-TASK.json and .txt. This compares LoRA with
streams and the same LoRA trained without them, prompt by prompt.

Writes compare.json, .txt and .png. Every answer is kept in compare-TASK-*.part.jsonl as it comes:
the same command goes on where a run was stopped, and another choice of systems is another run.
Exit code 1: an answer that must be plain decoding's, token for token, is not."""
NOTES = (
    "speed-up: ratio of median decode tokens/s to mlx-lm's own stream_generate; "
    "tokens per call: the paper's call reduction",
    "latency: of whole answers, from the prompt to the last token; over mlx-lm: ratio of means",
    "price: what an answer takes if each of its calls takes the median seconds of such a call in "
    "the run",
    "peak: the most memory used while answering, beyond the target's weights; with the KV cache",
)


def format_markdown_report(result: show.Result) -> str:
    lead = f"{show.setup_heading(result)}. {_intervals_and_repeats_text(result)}."
    tables = [table for task in result["tasks"] for table in _all_tables_of_task(task)]
    notes = [f"{task['task']}: {note}" for task in result["tasks"] for note in _task_notes(task)]
    return "\n\n".join([lead, *tables, "\n".join([*notes, *NOTES])])


def _all_tables_of_task(task: Row) -> list[str]:
    """Format a task's tables; results of earlier versions have no prices."""
    tables = [_heading_and_system_table(task)]
    if "price" in task["systems"][0]:
        tables.append(f"**{task['task']}, prices**\n\n{_price_ratio_table(task['systems'])}")
    for one in task.get("categories", ()):
        heading = f"**{task['task']}, {one['category']}: {one['prompts']} prompts**"
        tables.append(f"{heading}\n\n{_system_table_of_category(one['systems'])}")
    return tables


def _price_cell(ratio_name: str) -> show.Cell:
    """Format a ratio by price, and by measured time in brackets."""
    watched = f"latency_{ratio_name}"

    def cell(row: Row) -> str:
        if row["price"][ratio_name] is None:
            return "-"
        price = show.interval_text(row["price"][ratio_name], 3)
        return f"{price} ({show.interval_text(row[watched], 3)})"

    return cell


_PRICES: Columns = {
    "price over plain (watched)": _price_cell("over_plain"),
    "over the best fixed tree (watched)": _price_cell("over_best_tree"),
    "over the better of both": lambda row: show.interval_text(row["price"]["over_best"], 3),
}


def _price_ratio_table(rows: Sequence[Row]) -> str:
    price = rows[0]["price"]
    counted = f"answers of {price['least_tokens']} tokens or more"
    columns: Columns = {
        "system": lambda row: f"`{row['name']}`",
        **_PRICES,
        f"{counted} below {' and '.join(price['slower'])} of plain": _slower_answers_text,
        "worst": lambda row: _two_digits(row["price"]["worst"]),
        "calls priced by other places' and other rows' medians": _substituted_calls_text,
    }
    return show.markdown_table(columns, rows)


def _system_table_of_category(rows: Sequence[Row]) -> str:
    columns: Columns = {
        "system": lambda row: f"`{row['name']}`",
        "tokens per call": show.figure_cell("tokens_per_call"),
        "over mlx-lm": lambda row: _speedup_text(row, "latency_speedup"),
        **_PRICES,
    }
    return show.markdown_table(columns, rows)


def _slower_answers_text(row: Row) -> str:
    """Format answers, as `2 (3.3 %) and 0 (0.0 %) of 60`."""
    price = row["price"]
    counts = [
        f"{count} ({100 * count / max(1, price['answers']):.1f} %)"
        for count in price["slower"].values()
    ]
    return f"{' and '.join(counts)} of {price['answers']}"


def _substituted_calls_text(row: Row) -> str:
    """Format calls, as `3 and 1 of 60`."""
    price = row["price"]
    return f"{price['without_place']} and {price['by_nearest_rows']} of {price['calls']}"


def _two_digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _heading_and_system_table(task: Row) -> str:
    columns: Columns = {
        "system": lambda row: f"`{row['name']}`",
        "speed-up over mlx-lm": lambda row: _speedup_text(row, "speedup"),
        "tokens per call": show.figure_cell("tokens_per_call"),
        "latency, ms (over mlx-lm)": lambda row: (
            f"{1e3 * row['latency_seconds']['value']:.0f} ({_speedup_text(row, 'latency_speedup')})"
        ),
        "target calls (draft model's)": _calls_text,
        **show.metric_cells(task["figures"][:1]),
        "extra parameters": show.number_cell("extra_parameters", "0"),
        "peak memory beside the weights, MiB": lambda row: f"{row['peak_bytes'] / MIB:.1f}",
        "same tokens as plain": show.same_tokens_cell(task["prompts"]),
    }
    return f"**{show.task_heading(task)}**\n\n{show.markdown_table(columns, task['systems'])}"


def _speedup_text(
    row: Row,
    figure_name: str,  # such as "latency_speedup"
) -> str:
    if row["kind"] == "mlx-lm":
        return "1.00"
    return "-" if row[figure_name] is None else show.interval_text(row[figure_name], 2)


def _calls_text(row: Row) -> str:
    """Format target calls per answer, and a draft model's in brackets."""
    target, draft = (row[f"{kind}_calls_per_answer"]["value"] for kind in ("target", "draft"))
    return f"{target:.1f} ({draft:.1f})" if draft else f"{target:.1f}"


def _task_notes(task: Row) -> list[str]:
    rows = task["systems"]
    lines = [f"{name}: left out, {why}" for name, why in task["left_out"].items()]
    for row in rows:
        lines += [f"{row['name']}: {difference_text(one)}" for one in row["differences"]]
    for row in rows:
        over = row.get("speedup_over_draft_model")
        if over:
            lines.append(
                f"{row['name']}: {show.interval_text(over, 2)} over the draft model's tokens/s"
            )
    for row in rows:
        known = row.get("num_costs")
        if known is not None:
            what = f"{known} costs of calls that earlier answers taught" if known else "no costs"
            lines.append(f"{row['name']}: {what} known as the run began")
    longest = task.get("max_prompt_tokens")
    if longest:
        lines.append(f"prompts of more than {longest:,} tokens: their middle is left out")
    if task["draft_call_seconds"]:
        lines.append(f"draft model: {1e3 * task['draft_call_seconds']:.1f} ms a call")
    cut = next(row["cut_at_max_tokens"] for row in rows if row["name"] == "plain")
    last = f"cut at {task['max_tokens']} tokens: {cut} of plain's answers"
    return [*lines, *show.measurement_notes(task), last]


def difference_text(
    one: Row,  # of `describe_first_difference`; prompt and token are shown from 1 on
) -> str:
    place = f"prompt {one['prompt'] + 1} differs from plain at token {one['token'] + 1}"
    if one["gap"] is None:
        return place
    tie = ", a near tie in this precision" if one["near_tie"] else ""
    return f"{place}; the target's two logits are {one['gap']:.2g} apart{tie}"


def _intervals_and_repeats_text(result: show.Result) -> str:
    many = "s" if result["repeats"] > 1 else ""
    return (
        f"[95 % bootstrap intervals over prompts]; times are medians of {result['repeats']} "
        f"repeat{many} an answer, systems taking turns"
    )


def measure_task(args: argparse.Namespace) -> dict[str, Any]:
    """Measure a task; answers of an earlier run in --out are reused, unless --fresh is given."""
    own = build_task_experiment(args, "compare")
    return run_result(own, args.model, [task_result(own.measure())])


def compare_answers(args: argparse.Namespace) -> int:
    """Score the files of --answers, and compare each with the first one, prompt by prompt."""
    task = TASKS[args.task]
    examples = read_examples(find_data_file(task, args.data, args.data_dir), task, args.count)
    what = "some prompts have no reference"
    expected = "`completion` or `references` with each"
    are_whole = all(example.references for example in examples)
    require(are_whole, what, expected=expected, do="give other --data")
    texts: dict[str, list[Any]] = {}
    for item in args.answers:
        name, file = split_name_and_value(item)
        require(
            bool(name and file) and name not in texts,
            item,
            expected="NAME=FILE.jsonl, each with a name of its own",
            do="correct it",
        )
        rows = read_prompts(Path(file).expanduser(), "--answers")
        told = {prompt_key(row): row.get("completion") for row in rows}
        answers = [told.get(prompt_key(example.asked)) for example in examples]
        lacking = sum(not isinstance(one, str) for one in answers)
        what = f"{file} has no answer to {lacking} of {len(examples)} prompts"
        expected = "`prompt` and `completion`, a text, for each"
        require(not lacking, what, expected=expected, do="answer the same data")
        texts[str(name)] = answers
    first = next(iter(texts))
    own = list(task.figures)
    rows = [
        {
            "name": name,
            "figures": mean_scores(task, examples, said),
            "differences": mean_score_differences(task, examples, said, texts[first]),
        }
        for name, said in texts.items()
    ]
    result = {"task": task.name, "prompts": len(examples), "figures": own, "rows": rows}
    lines = [
        f"{task.name}: {len(examples)} prompts [95 % intervals]",
        *show.measurement_notes(result),
        "",
    ]
    lines += table({"answers": lambda row: row["name"], **show.metric_cells(own)}, rows)
    for row in rows[1:]:
        for figure, gap in row["differences"].items():
            found = estimate_from_json(gap)
            shown = f"{found.text(1, signed=True)}, {found.verdict}"
            lines.append(f"{row['name']} - {first}, {figure}: {shown}")
    make_folder(args.out)
    print_and_save(result, args.out / f"score-{task.name}", "\n".join(lines))
    return 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(PROG, (__doc__ or "").partition("\n")[0], EPILOG)
    saved = parser.add_mutually_exclusive_group(required=True)
    saved.add_argument(
        "--from",
        dest="saved",
        type=Path,
        nargs="+",
        metavar="FILE.json",
        help="show saved results of different tasks as one, and measure nothing; with --out, write "
        "them there too",
    )
    add_experiment_options(parser, saved, repeats=3)
    parser.add_argument(
        "--answers",
        nargs="+",
        metavar="NAME=FILE.jsonl",
        help="score these files instead: a JSON object per line, with prompt and completion",
    )
    add_options(
        parser,
        ("--out", "FOLDER", f"folder of the results (default: {RESULTS})", Path),
    )
    args = parser.parse_args(argv)
    check_counts(parser, args, "repeats", "max_tokens")
    judged = {"task", "answers", "data", "data_dir", "count"} if args.answers else vars(args)
    used = {"out", *({"saved"} if args.saved else judged)}
    for name, value in vars(args).items():
        if name not in used and value != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} would do nothing here: omit it")
    if args.task and args.out is None:
        args.out = RESULTS
    return args


def read_results_as_one(paths: Sequence[Path]) -> dict[str, Any]:
    """Read results in the order of the files, whose tasks must differ."""
    whole: dict[str, Any] = {}
    for path in paths:
        result = _read_checked_result(path)
        whole = whole or {**result, "tasks": []}
        # One line above the tables describes how all of them were measured.
        here = _how_measured(whole)
        there = _how_measured(result)
        for key, value in here.items():
            require(
                value == there.get(key),
                f"{key} is {value} in {paths[0]} and {there.get(key)} in {path}",
                expected="results that were measured in the same way",
                do="show them one by one, or measure again",
            )
        names = {task["task"] for task in whole["tasks"]}
        twice = [task["task"] for task in result["tasks"] if task["task"] in names]
        what = f"{path} holds {', '.join(twice)}, and so does a file before it"
        require(not twice, what, expected="every task once", do="leave one of the files out")
        whole["tasks"] += result["tasks"]
    return whole


def _read_checked_result(path: Path) -> dict[str, Any]:
    result = read_json(path, "a result of perf.compare")
    with explain_broken_result(path, PROG):
        kinds = [{row["kind"] for row in task["systems"]} for task in result["tasks"]]
        if not kinds or not all({MLX_LM, PLAIN} <= one <= show.COLOURS.keys() for one in kinds):
            raise ValueError("no tasks, one without mlx-lm or plain, or an unknown kind of system")
        format_markdown_report(result)
        systems_parting_beyond_ties(result)
    return result


def _how_measured(result: dict[str, Any]) -> dict[str, Any]:
    """Describe everything in a result but its tasks, machine entries included."""
    shared = {key: value for key, value in result.items() if key not in ("tasks", "machine")}
    return {**shared, **result["machine"]}


def _compare(args: argparse.Namespace) -> int:
    """Compare; exit code 1 if tokens differ from plain decoding's by more than near ties."""
    if args.task and args.answers:
        return compare_answers(args)
    result = measure_task(args) if args.task else read_results_as_one(args.saved)
    text = format_markdown_report(result)
    if args.out is None:
        print(text)
    else:
        make_folder(args.out)
        print_and_save(result, args.out / "compare", text, write_bar_chart)
    differing = systems_parting_beyond_ties(result)
    if differing:
        print(f"tokens differ from plain decoding's: {'; '.join(differing)}", file=sys.stderr)
    return 1 if differing else 0


main = make_main(PROG, parse_args, _compare)


if __name__ == "__main__":
    raise SystemExit(main())
