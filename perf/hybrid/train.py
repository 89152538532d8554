"""Train a hybrid of ten million parameters, and a multi-token prediction head beside it.

The model is Qwen3.5's text model: three gated delta nets to one layer of attention. The head learns
from its hidden states; it learns nothing from the head. The folder has the form in which Qwen3.5's
are published: mlx-lm loads the model, and the head is in it as `mtp.`.
"""

import argparse
from pathlib import Path

from convert import check_torch
from ssmlx.commands.parser import Parser, add_int_options, add_options, make_parser
from ssmlx.commands.running import make_main
from ssmlx.errors import require

from .schedule import Schedule

PROG = "perf.hybrid.train"


def make_parser_with_texts(module: str, text: str | None) -> Parser:
    """Make a parser with a required --data, and with --documents."""
    parser = make_parser(module, text)
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="with a folder for each task, of train.jsonl and test.jsonl",
    )
    add_options(
        parser,
        ("--documents", "FOLDER", "whose Markdown is read (default: %(default)s)", Path()),
    )
    return parser


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser_with_texts(PROG, __doc__)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="for the model; it goes on there"
    )
    add_options(parser, ("--minutes", None, "of learning (default: %(default)s)", Schedule.minutes))
    add_int_options(parser, ("batch", Schedule.batch, "sequences of a step"))
    return parser.parse_args(argv)


def _train(args: argparse.Namespace) -> None:
    require(
        args.minutes > 0 and args.batch > 0,
        f"--minutes {args.minutes:g} --batch {args.batch}",
        expected="both above 0",
        do="raise them",
    )
    check_torch()
    from .learn import train

    schedule = Schedule(minutes=args.minutes, batch=args.batch)
    train(args.data, args.documents, args.out, schedule)


main = make_main(PROG, parse_args, _train)

if __name__ == "__main__":
    raise SystemExit(main())
