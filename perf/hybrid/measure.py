"""Measures what a small hybrid of a folder by `train` drafts, and what going back costs it.

Every system answers the same held-out prompts, greedily in float32, and must give plain decoding's
tokens. Then the head's drafts are replayed by PyTorch on these answers, and calls are timed after
chains of which none, some and all tokens were accepted.
"""

import argparse
from pathlib import Path

from convert import check_torch
from ssmlx.commands.parser import add_int_options, add_options
from ssmlx.commands.running import make_main
from ssmlx.errors import require

from .train import make_parser_with_texts

PROG = "perf.hybrid.measure"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser_with_texts(PROG, __doc__)
    parser.add_argument(
        "--model", type=Path, required=True, metavar="FOLDER", help="that perf.hybrid.train wrote"
    )
    add_options(parser, ("--out", "FOLDER", "for hybrid.json and hybrid.txt", Path()))
    add_int_options(
        parser,
        ("count", 20, "prompts"),
        ("prompt-tokens", 256, "tokens of a prompt"),
        ("max-tokens", 128, "tokens of an answer"),
    )
    return parser.parse_args(argv)


def _measure(args: argparse.Namespace) -> int:
    """Measure; exit code 1 if a system's answer is not plain decoding's."""
    needed = ("config.json", "model.safetensors", "tokenizer.json")
    require(
        all((args.model / name).is_file() for name in needed),
        f"--model {args.model}",
        expected=f"a folder with {', '.join(needed)}",
        do="run python -m perf.hybrid.train",
    )
    numbers = (args.count, args.prompt_tokens, args.max_tokens)
    require(
        min(numbers) > 0,
        "--count {} --prompt-tokens {} --max-tokens {}".format(*numbers),
        expected="numbers above 0",
        do="raise them",
    )
    check_torch()
    from .figures import measure

    return measure(
        args.model,
        args.data,
        args.documents,
        args.out,
        count=args.count,
        prompt_tokens=args.prompt_tokens,
        max_tokens=args.max_tokens,
    )


main = make_main(PROG, parse_args, _measure)

if __name__ == "__main__":
    raise SystemExit(main())
