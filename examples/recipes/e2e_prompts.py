"""`python -m examples.recipes.e2e_prompts`: more meaning representations for the E2E task.

The task's training file has some 500 different ones. A fine-tuned model can answer any others, and
its answers teach the streams (`convert.continuations --lora`).
"""

import argparse
import random
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from convert.continuations import write_jsonl
from ssmlx.commands.parser import add_int_options, make_parser
from ssmlx.commands.running import make_main
from ssmlx.errors import require
from ssmlx.json_files import read_json
from ssmlx.prompts import read_prompts

PROG = "examples.recipes.e2e_prompts"
EPILOG = """examples:
  python -m examples.recipes.e2e_prompts --data data/e2e --out prompts.jsonl

A new prompt has the attributes of one of the training file's, and for each of them a value that
the training file has somewhere; half of the time one of examples/data/e2e_values.json instead,
which has 150 more names: a model that has seen 20 guesses a 21st badly.
The training file's own prompts come first; none is one of valid.jsonl or test.jsonl, and no name
or place nearby that only those have is taken from the values."""

VALUES = Path(__file__).parents[1] / "data" / "e2e_values.json"
DRY_ROUNDS = 10_000  # draws without a new prompt, until there are no more
MORE_SHARE = 0.5  # of `VALUES`
_UNSEEN = ("name", "near")  # attributes whose held-out values are not used
_ATTRIBUTE = re.compile(r"([^,\[\]]+)\[([^\[\]]*)\](?:, |$)")

Attributes = tuple[tuple[str, str], ...]  # such as (("name", "Aromi"), ("area", "riverside"))


def parse_attributes(text: str) -> Attributes:
    """Parse `name[Aromi], area[riverside]` into pairs, in order."""
    found = tuple(_ATTRIBUTE.findall(text))
    require(
        bool(found) and format_attributes(found) == text,
        f"the prompt {text!r}",
        expected="attributes such as name[Aromi], area[riverside]",
        do="give the E2E task's folder",
    )
    return found


def format_attributes(attributes: Attributes) -> str:
    """Format attributes; the inverse of `parse_attributes`."""
    return ", ".join(f"{name}[{value}]" for name, value in attributes)


def read_values_not_held_out(held_out: Collection[Attributes]) -> Mapping[str, Sequence[str]]:
    """Read values by attribute, without the names and places of held-out prompts."""
    kept_back = {pair for one in held_out for pair in one if pair[0] in _UNSEEN}
    return {
        name: [value for value in values if (name, value) not in kept_back]
        for name, values in read_json(VALUES, "values of attributes").items()
    }


def recombine_attributes(
    known: Sequence[Attributes],
    most: int,  # fewer are returned if `DRY_ROUNDS` draws in a row repeat earlier ones
    taken: Collection[str],  # prompts that must not be made
    seed: int,
    # further values by attribute, from which half of the draws come
    more_values: Mapping[str, Sequence[str]],
) -> list[str]:
    """Combine the attributes of a known prompt with the values of others; all results differ."""
    draw = random.Random(seed)
    seen = set(taken)
    values: dict[str, list[str]] = {}
    for attributes in known:
        for name, value in attributes:
            values.setdefault(name, []).append(value)

    def draw_value(name: str) -> str:
        new = more_values.get(name)
        return draw.choice(new if new and draw.random() < MORE_SHARE else values[name])

    found: list[str] = []
    dry = 0
    while len(found) < most and dry < DRY_ROUNDS:
        names = [name for name, _ in draw.choice(known)]
        text = format_attributes(tuple((name, draw_value(name)) for name in names))
        dry = dry + 1 if text in seen else 0
        if not dry:
            seen.add(text)
            found.append(text)
    return found


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(PROG, "Make more prompts of the E2E task.", EPILOG)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="the task")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON lines")
    add_int_options(
        parser, ("count", 4000, "new prompts"), ("seed", 0, "of the draws"), metavar="N"
    )
    return parser.parse_args(argv)


def _write_prompts(args: argparse.Namespace) -> None:
    require(args.count >= 1, f"--count {args.count}", expected="1 or more", do="raise it")
    own, *others = (
        [prompt.get("prompt", "") for prompt in read_prompts(args.data / f"{name}.jsonl", "--data")]
        for name in ("train", "valid", "test")
    )
    own = list(dict.fromkeys(own))
    held_out = [text for texts in others for text in texts]
    known = [parse_attributes(text) for text in own]
    more = read_values_not_held_out([parse_attributes(text) for text in held_out])
    new = recombine_attributes(known, args.count, {*own, *held_out}, args.seed, more)
    prompts = [text for text in own if text not in held_out] + new
    write_jsonl(args.out, ({"prompt": text} for text in prompts))
    print(f"{args.out}: {len(prompts):,} prompts, {len(new):,} of them new", file=sys.stderr)


main = make_main(PROG, parse_args, _write_prompts)

if __name__ == "__main__":
    raise SystemExit(main())
