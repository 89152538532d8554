"""What answers that lie in files are worth, beside each other: metrics with 95 % intervals.

`convert.continuations` answers a whole test set in minutes, in batches. It does so greedily as
`perf.compare` does, but for near ties that a batch rounds differently, and it drafts nothing: so
here are metrics, and no tokens per call.
"""

import argparse
from pathlib import Path

from ssmlx.commands.machine import machine
from ssmlx.commands.options import make_parser, run
from ssmlx.commands.results import write_result
from ssmlx.errors import require
from ssmlx.loading.files import make_folder
from ssmlx.prompts import read_prompts, user_text
from ssmlx.tuning.report import table

from .run.options import add_out, split_name
from .run.show import Row, difference_lines, metrics
from .run.tasks import (
    TASKS,
    add_data_options,
    data_file,
    differences,
    figures,
    read_examples,
)

PROG = "perf.score"
EPILOG = """examples:
  python -m convert.continuations --lora runs/sql-lora --dtype float32 --max-tokens 64 \\
      --prompts data/sql/test.jsonl --out lora.jsonl
  python -m convert.continuations --lora runs/sql --dtype float32 --max-tokens 64 \\
      --prompts data/sql/test.jsonl --out streams.jsonl
  python -m perf.score --task sql --data-dir data lora=lora.jsonl streams=streams.jsonl

Every file is compared with the first, prompt by prompt. Writes score-TASK.json and .txt."""


def report(result: Row) -> str:
    first, *others = rows = result["rows"]
    columns = {"answers": lambda row: row["name"], **metrics(result["figures"])}
    lines = [f"{result['task']}: {result['prompts']} prompts [95 % intervals]", ""]
    lines += table(columns, rows)
    for row in others:
        lines += difference_lines(row["name"], first["name"], row["differences"])
    return "\n".join(lines)


def _main(args: argparse.Namespace) -> int:
    task = TASKS[args.task]
    examples = read_examples(data_file(task, args.data, args.data_dir), task, args.count)
    texts: dict[str, list[str]] = {}
    for item in args.answers:
        name, file = split_name(item)
        require(
            bool(name and file) and name not in texts,
            item, expected="NAME=FILE.jsonl, each with a name of its own", do="correct it",
        )  # fmt: skip
        rows = read_prompts(Path(file).expanduser(), "the files of answers")
        told = {user_text(row): row.get("completion") for row in rows}
        answers = [told.get(user_text(example.asked)) for example in examples]
        require(
            None not in answers,
            f"{file} has no answer to {answers.count(None)} of {len(examples)} prompts",
            expected="`prompt` and `completion` for each",
            do="answer the same data",
        )
        texts[str(name)] = [str(text) for text in answers]
    require(
        all(example.references for example in examples),
        "some prompts have no reference",
        expected="`completion` or `references` with each",
        do="give other --data",
    )
    first = next(iter(texts.values()))
    compared = [
        {
            "name": name,
            "figures": figures(task, examples, own),
            "differences": differences(task, examples, own, first),
        }
        for name, own in texts.items()
    ]
    make_folder(args.out)
    result = {
        "task": task.name,
        "prompts": len(examples),
        "figures": list(task.figures),
        "rows": compared,
        "machine": machine(),
    }
    write_result(result, args.out / f"score-{task.name}", report(result))
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(PROG, (__doc__ or "").partition("\n")[0], EPILOG)
    parser.add_argument(
        "answers", nargs="+", metavar="NAME=FILE.jsonl",
        help="a JSON object a line: prompt and completion",
    )  # fmt: skip
    add_data_options(parser.add_argument_group("data"))
    add_out(parser)
    args = parser.parse_args(argv)
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
