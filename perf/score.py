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
from ssmlx.errors import InputError
from ssmlx.loading.files import make_folder
from ssmlx.tuning.machine import machine
from ssmlx.tuning.report import aligned, write_result

from .run.common import RESULTS, split_name
from .run.metrics import Scores, estimate, mean, paired_difference
from .run.tasks import TASKS, Example, add_data_options, data_file, read_examples, score_texts

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
    add_data_options(parser.add_argument_group("data"))
    parser.add_argument(
        "--out", type=Path, default=RESULTS, metavar="FOLDER", help="default: %(default)s"
    )
    return parser.parse_args(argv)


def named_files(items: Sequence[str]) -> dict[str, Path]:
    """Files by name, of `NAME=FILE`.

    Raises:
        InputError: one is of another form, or two have one name.
    """
    found: dict[str, Path] = {}
    for item in items:
        name, file = split_name(item)
        if not name or not file or name in found:
            raise InputError(
                item, expected="NAME=FILE.jsonl, each with a name of its own", do="correct it"
            )
        found[name] = Path(file).expanduser()
    return found


def read_answers(path: Path, examples: Sequence[Example]) -> list[str]:
    """The answer of a file to each example.

    Raises:
        InputError: the file is missing or broken, or lacks an answer.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        rows = [json.loads(line) for line in lines if line.strip()]
        texts = {row["prompt"]: row["completion"] for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} cannot be read ({type(error).__name__})",
            expected="a JSON object a line: prompt and completion",
            do="check the file",
        ) from error
    lacking = [example.prompt for example in examples if example.prompt not in texts]
    if lacking:
        raise InputError(
            f"{path} has no answer to {len(lacking)} of {len(examples)} prompts",
            expected="one to each, such as to the prompt " + json.dumps(lacking[0][:60]),
            do="answer the same data",
        )
    return [texts[example.prompt] for example in examples]


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
    figures = result["figures"]
    table = [["answers", *(f"{name}, %" for name in figures)]]
    for row in result["rows"]:
        table.append([row["name"], *(estimate(row["figures"][f]).text(1) for f in figures)])
    lines = [f"{result['task']}: {result['prompts']} prompts [95 % intervals]", "", *aligned(table)]
    for row in result["rows"][1:]:
        for figure in figures:
            gap = estimate(row["differences"][figure])
            less = f"{row['name']} less {result['rows'][0]['name']}, {figure}:"
            lines.append(f"{less} {gap.text(1, signed=True)}, {gap.verdict}")
    return "\n".join(lines)


def _main(args: argparse.Namespace) -> int:
    task = TASKS[args.task]
    examples = read_examples(data_file(task, args.data, args.data_dir), task, None)
    scores: dict[str, Scores] = {}
    for name, path in named_files(args.answers).items():
        found = score_texts(task, examples, read_answers(path, examples))
        if found is None:
            raise InputError(
                "some prompts have no reference",
                expected="`completion` or `references` with each",
                do="give other --data",
            )
        scores[name] = found
    make_folder(args.out)
    rows = compare(task.figures, scores)
    result = {
        "task": task.name,
        "prompts": len(examples),
        "figures": list(task.figures),
        "rows": rows,
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
