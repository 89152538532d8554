"""`python -m ssmlx.exported`: answer prompts with an exported model."""

import argparse
import sys
from pathlib import Path

from ..commands.parser import add_int_options, add_options, make_parser
from ..commands.prompt_options import add_prompt_options, read_given_prompts
from ..commands.running import make_main, print_json
from .backends import COMPUTE_UNITS

PROG = "ssmlx.exported"
EPILOG = """examples:
  python -m ssmlx.exported --package exported/sql --prompt "..."
  python -m ssmlx.exported --package exported/sql --prompts questions.jsonl --jsonl > answers.jsonl

A Core ML package runs on macOS 15 or later; one of Core AI also on Linux. Decoding is greedy."""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(PROG, "Answer prompts with an exported model.", EPILOG)
    shown = {"metavar": "FOLDER", "help": "what `python -m ssmlx.export` wrote"}
    parser.add_argument("--package", type=Path, required=True, **shown)
    add_prompt_options(parser.add_argument_group("prompts"))
    add_int_options(parser, ("max-tokens", 256, "longest answer"))
    add_options(
        parser,
        (
            "--compute-units",
            None,
            "of Core ML (default: those that the model was exported for)",
            str,
            COMPUTE_UNITS,
        ),
        ("--jsonl", None, "print one JSON object a prompt, and nothing else", bool),
    )
    return parser.parse_args(argv)


def answer_prompts(args: argparse.Namespace) -> None:
    """The text goes to standard output as it comes, each summary to standard error; with --jsonl
    one JSON object for each complete answer."""
    from ..api import answer_record, summary_line
    from .api import load, prompt_tokens, stream_generate

    given = read_given_prompts(args, followed=("max_tokens",))
    model = load(args.package, compute_units=args.compute_units)
    for one in given:
        tokens = prompt_tokens(model, one.row)
        responses = []
        settings = {"max_tokens": args.max_tokens, **one.settings}
        for response in stream_generate(model, tokens, **settings):
            responses.append(response)
            if not args.jsonl:
                print(response.text, end="", flush=True)
        if args.jsonl:
            print_json(answer_record(one.row, responses))
        else:
            print(f"\n[{summary_line(responses[-1])}]", file=sys.stderr)


main = make_main(PROG, parse_args, answer_prompts)

if __name__ == "__main__":
    raise SystemExit(main())
