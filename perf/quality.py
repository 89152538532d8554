"""Table 1 of the paper: what the streams cost in quality, and what they save in target calls.

Systems answer the same prompts, as perf.compare has them do. An adapter of scope "all" is compared
with --baseline, the same LoRA trained without streams; an adapter of scope "streams" with the
untouched base, token for token. Each figure has a 95 % bootstrap interval over prompts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ssmlx.commands.options import make_parser, run
from ssmlx.loading.adapter import read_lora
from ssmlx.loading.names import CONFIG_FILE
from ssmlx.settings import read_json
from ssmlx.tuning.report import Columns, publish, table

from .run.experiment import Experiment, failures, result_of, task_result, texts_of
from .run.options import add_experiment_options, add_out, check_counts, experiment_of
from .run.published import STREAMS as PAPERS_STREAMS
from .run.published import span, speeds
from .run.show import (
    TOKENS_PER_CALL,
    Panel,
    Row,
    cut_text,
    difference_lines,
    draw_tasks,
    figure,
    heading,
    metrics,
    notes_of,
    number,
    paper_span,
    same_text,
    task_heading,
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


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command's options."""
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
    return args


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The systems' figures, and beside them the baseline's."""
    own = experiment_of(args, "quality")
    baseline = None if args.baseline is None else _baseline(args.baseline.expanduser(), own)
    if baseline is not None:
        baseline.load()  # its mistakes are told before the first answer
    measured = own.run()
    parts = [task_result(measured)]
    if baseline is not None:
        other = baseline.run()
        parts.append(task_result(other, adapter=BASELINE))
        texts = [texts_of(one.first(PLAIN)) for one in (measured, other)]
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
    """The result as text."""
    first, *others = result["tasks"]
    blocks = [
        [heading(result), task_heading(first)],
        *(table(_columns(task), task["systems"]) for task in result["tasks"]),
        difference_lines(first["adapter"], BASELINE, first["differences"]) if others else [],
        _note_lines(first),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _columns(task: Row) -> Columns:
    return {
        str(task["adapter"]): lambda row: row["name"],
        **metrics(task["figures"]),
        "tokens/call": figure("tokens_per_call"),
        "calls": number("target_calls"),
        "calls/answer": figure("target_calls_per_answer", 1),
        "tokens": number("tokens"),
        "tokens/answer": figure("tokens_per_answer", 1),
        "decode tokens/s": figure("decode_rate", 1),
        "extra parameters": number("extra_parameters"),
        "same tokens as plain": same_text(task["prompts"]),
    }


def _note_lines(task: Row) -> list[str]:
    """What the figures mean."""
    notes = ["[95 % intervals over prompts]", *notes_of(task)]
    if task["figures"] and task["task"] == "sql":
        notes.append("exact match: every run of white space counts as one space")
    elif task["figures"]:
        notes.append("ROUGE: F1 by rouge_score with stemmer, lines are sentences, best reference")
    notes.append(cut_text(task))
    paper = speeds(task["task"], PAPERS_STREAMS)
    if paper:
        calls, metric = span(r.call_reduction for r in paper), span(r.metrics[0] for r in paper)
        notes.append(
            f"the paper's table 1, {paper[0].dataset}, models of 1.3B to 7B: {calls[0]:.2f} to "
            f"{calls[1]:.2f} tokens per call, {[*task['figures'], 'metric'][0]} {metric[0]:.2f} to "
            f"{metric[1]:.2f}"
        )
    return notes


def draw(result: Row, path: Path) -> None:
    """The picture: the metric beside the tokens per call, each system a line."""
    tasks = result["tasks"]
    metric = [
        Panel(f"{name}, %", _figure_of(name), paper_span(lambda row: row.metrics[0]), 1)
        for name in tasks[0]["figures"][:1]
    ]
    draw_tasks(tasks, [*metric, TOKENS_PER_CALL], title_of(result), path)


def _figure_of(name: str) -> Callable[[Row], Any]:
    return lambda row: row["figures"][name]


def _main(args: argparse.Namespace) -> int:
    result = measure(args)
    publish(result, args.out / f"quality-{args.task}", report(result), draw)
    return 1 if failures(result) else 0


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = parse_args(argv)
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
