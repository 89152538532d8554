"""`python -m perf.paper.learning`: tokens per call against training steps, from the logs of runs.

A run that started from another's weights (`--init`) goes on where that one ended.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from ssmlx.commands.options import make_parser, run
from ssmlx.errors import require
from ssmlx.loading.files import make_folder
from ssmlx.training.record import LOG_FILE, read_record
from ssmlx.tuning.report import aligned, finish, new_figure, publish

from ..run.options import add_out, split_name

PROG = "perf.paper.learning"
COLOURS = ("#0b6e4f", "#b06f10", "#33658a", "#8a3358")
LINES = ("-", "--", ":", "-.")
EPILOG = """examples:
  python -m perf.paper.learning --run sql=runs/first,runs/second --run chat=runs/chat
  python -m perf.paper.learning --run "sql=runs/sql" --run "sql, identity f=runs/identity\""""

Point = tuple[int, float, float]
"""Steps in all, tokens per call of held-out text, and its loss of stream 1 in nats a token."""
Curves = Mapping[str, Sequence[Sequence[Point]]]
"""The rounds of each adapter."""


def validations(folder: Path) -> list[dict[str, Any]]:
    """The entries of a run's log in which streams were validated."""
    return [entry for entry in read_record(folder / LOG_FILE) if "tokens_per_call" in entry]


def read_rounds(text: str) -> tuple[str, list[list[Point]]]:
    """Name and rounds of `NAME=FOLDER,FOLDER`."""
    name, folders = split_name(text)
    wanted = "NAME=FOLDER[,FOLDER]"
    require(bool(name and folders), f"--run {text}", expected=wanted, do="name the folders' runs")
    assert name is not None
    rounds: list[list[Point]] = []
    for folder in map(Path, folders.split(",")):
        start = rounds[-1][-1][0] if rounds else 0
        found = validations(folder)
        require(
            bool(found),
            f"{folder} holds no validation",
            expected=f"{LOG_FILE} of a run with streams that was validated",
            do="check --run",
        )
        rounds.append(
            [(start + one["step"], one["tokens_per_call"], one["valid_stream_1_loss"])
             for one in found]
        )  # fmt: skip
    return name, rounds


def report(curves: Curves) -> str:
    """A line a validation."""
    rows = [["adapter", "round", "steps", "tokens/call", "stream 1 loss"]]
    for name, rounds in curves.items():
        for number, points in enumerate(rounds, 1):
            rows += [[name, str(number), str(s), f"{t:.2f}", f"{x:.3f}"] for s, t, x in points]
    return "\n".join(aligned(rows))


def styles(names: Sequence[str]) -> list[tuple[str, str]]:
    """Colour and line of every curve; `sql, identity f` has the colour of `sql`, dashed."""
    tasks = [name.partition(",")[0] for name in names]
    colours = dict(zip(dict.fromkeys(tasks), cycle(COLOURS), strict=False))
    return [
        (colours[task], LINES[tasks[:index].count(task) % len(LINES)])
        for index, task in enumerate(tasks)
    ]


def draw(curves: Curves, path: Path) -> None:
    """Tokens per call against steps, a line a round; the learning rate falls to zero in each."""
    figure = new_figure(6.5, 3.9)
    axes = figure.subplots()
    for (name, rounds), (colour, line) in zip(curves.items(), styles(list(curves)), strict=True):
        for points in rounds:
            steps, tokens = [p[0] for p in points], [p[1] for p in points]
            axes.plot(steps, tokens, marker="o", ms=3.5, color=colour, linestyle=line)
        last, reached, _ = rounds[-1][-1]
        axes.annotate(f"{name} {reached:.2f}", (last, reached), (6, 0), textcoords="offset points",
                      va="center", fontsize=9, color=colour)  # fmt: skip
    axes.set_xlabel("training steps; a line for each round, whose rate falls to zero")
    axes.set_ylabel("tokens per target call")
    axes.set_title("held-out answers, replayed", fontsize=10)
    axes.set_xlim(left=0)
    axes.margins(x=0.14)
    finish(figure, "", path)


def _main(args: argparse.Namespace) -> None:
    curves = dict(read_rounds(text) for text in args.run)
    make_folder(args.out)
    publish(curves, args.out / "learning", report(curves), draw)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = make_parser(PROG, "Tokens per call against training steps, run after run.", EPILOG)
    parser.add_argument(
        "--run", action="append", required=True, metavar="NAME=FOLDER[,FOLDER]",
        help="folders of convert.train or ssmlx.train, each started from the one before; may be "
        "given several times",
    )  # fmt: skip
    add_out(parser)
    args = parser.parse_args(argv)
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
