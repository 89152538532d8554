"""`python -m examples.recipes.chat_prompts`: the hand-written prompts that train chat adapters."""

import argparse
import math
import random
import re
import sys
import unicodedata
from pathlib import Path

from convert.continuations import write_jsonl
from ssmlx.commands.options import add_counts, command, make_parser
from ssmlx.errors import require
from ssmlx.loading.files import make_folder

PROG = "examples.recipes.chat_prompts"
EPILOG = """examples:
  python -m examples.recipes.chat_prompts --out prompts
  python -m convert.continuations --prompts prompts/chat_train.jsonl --out train.jsonl

Writes chat_train.jsonl, chat_valid.jsonl and chat_test.jsonl, from the templates of
chat_lists.txt. The three files share no prompt, and no template or topic of the lists."""

LISTS = Path(__file__).with_name("chat_lists.txt")
SPLITS = ("train", "valid", "test")
# Of each list, this share is for valid and as much for test.
HELD_OUT = 0.15
SHARE = 2.0  # the most prompts of one template, as a multiple of the mean
DRY_ROUNDS = 20  # without a new prompt, until the lists count as used up
NUMBERS = {"a": (2, 12), "b": (24, 480), "c": (3, 20), "d": (13, 99)}
COUNTS = {"train": 2700, "valid": 100, "test": 100}
_SLOT = re.compile(r"\{(\w+)\}")

Lists = dict[str, list[str]]
"""What goes into each slot, and the "templates" and "plain" prompts."""


def read_lists() -> Lists:
    lists: Lists = {}
    for line in LISTS.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = lists.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            section.append(line)
    return lists


def split_lists(seed: int) -> dict[str, Lists]:
    rng = random.Random(seed)
    splits: dict[str, Lists] = {split: {} for split in SPLITS}
    for name, items in read_lists().items():
        shuffled = rng.sample(items, len(items))
        held = max(1, round(HELD_OUT * len(items)))
        splits["valid"][name] = shuffled[:held]
        splits["test"][name] = shuffled[held : 2 * held]
        splits["train"][name] = shuffled[2 * held :]
    return splits


def write_prompts(lists: Lists, count: int, rng: random.Random) -> list[str]:
    """`count` different prompts: the plain ones, then every template in turn.

    A template rests where its slots have nothing new, or once it has had its share: those with
    numbers would otherwise never end.
    """
    found = {normalised(text): casual(text, rng) for text in lists["plain"][: count // 2]}
    templates = lists["templates"]
    left = dict.fromkeys(templates, math.ceil(SHARE * count / len(templates)))
    dry = 0
    while len(found) < count and dry < DRY_ROUNDS:
        before = len(found)
        for template in rng.sample(templates, len(templates)):
            text = fill(template, lists, rng)
            if left[template] and len(found) < count and normalised(text) not in found:
                found[normalised(text)] = casual(text, rng)
                left[template] -= 1
        dry = dry + 1 if len(found) == before else 0
    require(
        len(found) == count,
        f"the lists give {len(found)} different prompts",
        expected=f"{count}",
        do="lengthen chat_lists.txt, or lower the count",
    )
    return rng.sample(list(found.values()), count)


def fill(template: str, lists: Lists, rng: random.Random) -> str:
    """A template with something in each of its slots, and a capital where it needs one."""

    def choose(match: re.Match[str]) -> str:
        name = match[1]
        return str(rng.randint(*NUMBERS[name])) if name in NUMBERS else rng.choice(lists[name])

    text = _SLOT.sub(choose, template).replace("\\n", "\n")
    return text[0].upper() + text[1:] if template[0] == "{" else text


def casual(text: str, rng: random.Random) -> str:
    """Now and then, the prompt as somebody in a hurry types it."""
    draw = rng.random()
    if draw < 0.10:
        return text.lower() if len(text) < 120 else text
    if draw < 0.18:
        return text.rstrip("?.!")
    if draw < 0.22:
        return text.rstrip(".?") + rng.choice((" please", ", please.", ". Thanks!", " thx"))
    if draw < 0.25:
        return rng.choice(("Hi! ", "Hello, ", "hey, ", "Quick question: ")) + text
    return text


def written_prompts(seed: int) -> dict[str, list[str]]:
    lists = split_lists(seed)
    return {
        split: write_prompts(lists[split], COUNTS[split], random.Random(f"{seed} {split}"))
        for split in SPLITS
    }


def normalised(text: str) -> str:
    """What two prompts share when they differ in case, spaces and punctuation only."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(re.findall(r"\w+", folded))


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(PROG, "Make the prompts of a chat data set.", EPILOG)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="where to write the files"
    )
    add_counts(parser, ("seed", 0, "another one, other prompts"))
    return parser.parse_args(argv)


def _main(args: argparse.Namespace) -> None:
    written = written_prompts(args.seed)
    make_folder(args.out)
    for split, texts in written.items():
        write_jsonl(args.out / f"chat_{split}.jsonl", ({"prompt": text} for text in texts))
        print(f"{args.out}/chat_{split}.jsonl: {len(texts):,} prompts", file=sys.stderr)


main = command(PROG, parse_args, _main)

if __name__ == "__main__":
    raise SystemExit(main())
