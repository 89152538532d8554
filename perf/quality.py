"""Table 1 of the paper: what the streams cost in quality, and what they save in target calls.

Systems answer the same prompts, as perf.compare has them do. An adapter of scope "all" is compared
with --baseline, the same LoRA trained without streams; an adapter of scope "streams" with the
untouched base, token for token. Each figure has a 95 % bootstrap interval over prompts.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from ssmlx.commands.options import make_parser, run
from ssmlx.commands.results import publish
from ssmlx.loading.adapter import read_lora
from ssmlx.loading.names import CONFIG_FILE
from ssmlx.settings import read_json

from .compare import report as compare_report
from .run.experiment import Experiment, failures, result_of, task_result
from .run.options import add_experiment_options, add_out, check_counts, experiment_of
from .run.show import (
    TOKENS_PER_CALL,
    Panel,
    Row,
    difference_lines,
    draw_tasks,
    paper_span,
    title_of,
)
from .run.target import MLX_LM, PLAIN, STREAMS, Weights
from .run.tasks import differences

BASELINE = "baseline"
PROG = "perf.quality"
EPILOG = """examples:
  python -m perf.quality --task sql --data-dir data --adapter adapters/sql \\
      --baseline adapters/sql-lora --systems "streams --tree-size 16" "streams --tree-size 64"
  python -m perf.quality --task chat --data chat.jsonl --adapter adapters/chat-streams

Exact match: the answer is a reference once every run of white space is one space. ROUGE: F1 by
rouge_score with its stemmer, best over the references; lines are ROUGE-LSum's sentences.
Writes quality-TASK.json, .txt and .png. Every answer is kept in quality-TASK-*.part.jsonl, so that
a run that was stopped goes on; settings or weights that differ have a file of their own.
The tree with the most tokens per call is chosen on the very prompts that it is reported on; try
several with valid.jsonl, and one with test.jsonl, to keep the two apart.
Exit code 1: answers that must be the same are not."""


def measure(args: argparse.Namespace) -> dict[str, Any]:
    own = experiment_of(args, "quality")
    baseline = None if args.baseline is None else _baseline(args.baseline.expanduser(), own)
    if baseline is not None:
        baseline.load()  # its mistakes are told before the first answer
    measured = own.run()
    parts = [task_result(measured)]
    if baseline is not None:
        other = baseline.run()
        parts.append(task_result(other, adapter=BASELINE))
        texts = [[kept.text for kept in one.first(PLAIN)] for one in (measured, other)]
        assert own.task is not None
        parts[0]["differences"] = differences(own.task, own.examples, *texts)
    return result_of(own, args.model, parts)


def _baseline(folder: Path, first: Experiment) -> Experiment:
    """LoRA without streams; template and end tokens are its own where it has them."""
    lora, own = read_lora(folder, "--baseline"), dict[str, Any]()
    if (folder / CONFIG_FILE).exists():
        own = read_json(folder / CONFIG_FILE, "the settings of an ssmlx adapter")
    shared = first.weights.adapter and first.weights.adapter.config
    ends = own.get("end_token_ids") or (shared.end_token_ids if shared else ())
    weights = Weights(
        first.weights.base, first.weights.dtype, lora=lora, end_tokens=tuple(ends), folder=folder
    )
    template = own.get("prompt_template") or (shared.prompt_template if shared else None)
    systems = [one for one in first.systems if one.kind in (MLX_LM, PLAIN)]
    return replace(first, weights=weights, template=template, systems=systems)


def report(result: Row) -> str:
    first, *others = result["tasks"]
    notes = difference_lines(first["adapter"], BASELINE, first["differences"]) if others else []
    if first["figures"] and first["task"] == "sql":
        notes.append("exact match: every run of white space counts as one space")
    elif first["figures"]:
        notes.append("ROUGE: F1 by rouge_score with stemmer, lines are sentences, best reference")
    return "\n".join([compare_report(result), *notes])


def draw(result: Row, path: Path) -> None:
    tasks, panels = result["tasks"], [TOKENS_PER_CALL]
    if tasks[0]["figures"]:
        name, paper = tasks[0]["figures"][0], paper_span(lambda row: row.metrics[0])
        panels.insert(0, Panel(f"{name}, %", lambda row: row["figures"][name], paper, 1))
    draw_tasks(tasks, panels, title_of(result), path)


def _main(args: argparse.Namespace) -> int:
    result = measure(args)
    publish(result, args.out / f"quality-{args.task}", report(result), draw)
    return 1 if failures(result) else 0


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(PROG, (__doc__ or "").partition("\n")[0], EPILOG)
    add_experiment_options(parser, systems=[STREAMS])
    parser.add_argument(
        "--baseline", type=Path, metavar="FOLDER",
        help="the same LoRA trained without streams, as mlx-lm reads it (adapters.safetensors and "
        "adapter_config.json); decoded plainly",
    )  # fmt: skip
    add_out(parser)
    args = parser.parse_args(argv)
    check_counts(parser, args, "repeats", "max_tokens")
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
