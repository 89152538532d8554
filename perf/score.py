"""What answers that lie in files are worth, beside each other: metrics with 95 % intervals.

`convert.continuations` answers a whole test set in minutes, in batches. It does so greedily as
`perf.quality` does, but for near ties that a batch rounds differently, and it drafts nothing: so
here are metrics, and no tokens per call.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ssmlx.commands.options import make_parser, run
from ssmlx.errors import require
from ssmlx.loading.files import make_folder
from ssmlx.prompts import read_prompts, user_text
from ssmlx.tuning.machine import machine
from ssmlx.tuning.report import write_result

from .run.options import add_out, split_name
from .run.show import metrics, table
from .run.statistics import estimate, mean, paired_difference
from .run.tasks import (
    TASKS,
    Example,
    Scores,
    add_data_options,
    data_file,
    read_examples,
    score_texts,
)

PROG = "perf.score"
EPILOG = """examples:
  python -m convert.continuations --lora runs/sql-lora --dtype float32 --max-tokens 64 \\
      --prompts data/sql/test.jsonl --out lora.jsonl
  python -m convert.continuations --lora runs/sql --dtype float32 --max-tokens 64 \\
      --prompts data/sql/test.jsonl --out streams.jsonl
  python -m perf.score --task sql --data-dir data lora=lora.jsonl streams=streams.jsonl

Every file is compared with the first, prompt by prompt. Writes score-TASK.json and .txt."""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = make_parser(PROG, (__doc__ or "").partition("\n")[0], EPILOG)
    parser.add_argument(
        "answers", nargs="+", metavar="NAME=FILE.jsonl",
        help="a JSON object a line: prompt and completion",
    )  # fmt: skip
    data = parser.add_argument_group("data")
    data.add_argument("--task", choices=tuple(TASKS), required=True)
    add_data_options(data)
    add_out(parser)
    return parser.parse_args(argv)


def named_files(items: Sequence[str]) -> dict[str, Path]:
    """Files by name, of `NAME=FILE`."""
    found: dict[str, Path] = {}
    for item in items:
        name, file = split_name(item)
        require(
            bool(name and file) and name not in found,
            item, expected="NAME=FILE.jsonl, each with a name of its own", do="correct it",
        )  # fmt: skip
        found[str(name)] = Path(file).expanduser()
    return found


def read_answers(path: Path, examples: Sequence[Example]) -> list[str]:
    """The answer of a file to each example."""
    rows = read_prompts(path, "the files of answers")
    texts = {user_text(row): row.get("completion") for row in rows}
    answers = [texts.get(user_text(example.asked)) for example in examples]
    lacking = [
        user_text(e.asked) for e, text in zip(examples, answers, strict=True) if text is None
    ]
    require(
        not lacking,
        f"{path} has no answer to {len(lacking)} of {len(examples)} prompts",
        expected="`prompt` and `completion` for each, such as for the prompt "
        + json.dumps((lacking or [""])[0][:60]),
        do="answer the same data",
    )
    return [str(text) for text in answers]


def compare(figures: Sequence[str], scores: Mapping[str, Scores]) -> list[dict[str, Any]]:
    """A row for each file: its figures, and their difference from the first file's."""
    first = next(iter(scores.values()))
    return [
        {
            "name": name,
            "figures": {f: asdict(mean(row)) for f, row in zip(figures, own, strict=True)},
            "differences": {
                figure: asdict(paired_difference(row, other))
                for figure, row, other in zip(figures, own, first, strict=True)
            },
        }
        for name, own in scores.items()
    ]


def report(result: Mapping[str, Any]) -> str:
    """The result as text."""
    figures, rows = result["figures"], result["rows"]
    columns = {"answers": lambda row: row["name"], **metrics(figures)}
    lines = [f"{result['task']}: {result['prompts']} prompts [95 % intervals]", ""]
    lines += table(columns, rows)
    for row in rows[1:]:
        for figure in figures:
            gap = estimate(row["differences"][figure])
            less = f"{row['name']} less {rows[0]['name']}, {figure}:"
            lines.append(f"{less} {gap.text(1, signed=True)}, {gap.verdict}")
    return "\n".join(lines)


def _main(args: argparse.Namespace) -> int:
    task = TASKS[args.task]
    examples = read_examples(data_file(task, args.data, args.data_dir), task, args.count)
    files = named_files(args.answers)
    texts = {name: read_answers(path, examples) for name, path in files.items()}
    require(
        all(example.references for example in examples),
        "some prompts have no reference",
        expected="`completion` or `references` with each",
        do="give other --data",
    )
    found = {name: score_texts(task, examples, own) for name, own in texts.items()}
    scores = {name: own for name, own in found.items() if own is not None}
    make_folder(args.out)
    result = {
        "task": task.name,
        "prompts": len(examples),
        "figures": list(task.figures),
        "rows": compare(task.figures, scores),
        "machine": machine(),
    }
    write_result(result, args.out / f"score-{task.name}", report(result))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = parse_args(argv)
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
