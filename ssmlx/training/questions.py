"""Prompts to answer for training: prompts that ship, and the model's own questions.

Prompts that ship are hand-written templates, filled in (`questions.txt`, Apache-2.0). A model's own
questions are its continuations of its chat template's user turn (Magpie, Xu et al. 2024).
"""

import math
import random
import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import require
from ..rendering import render_turns
from ..templates import frozen_at_new_year_2026

LISTS = Path(__file__).with_name("questions.txt")
Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
HELD_OUT = 0.15  # of each list, for valid, and as much for test
SHARE = 2.0  # the most prompts of one template, as a multiple of the mean
DRY_ROUNDS = 20  # without a new prompt, until the lists count as used up
NUMBERS = {"a": (2, 12), "b": (24, 480), "c": (3, 20), "d": (13, 99)}
OPENING_WORDS = 8

# Bounds on a prompt that the model makes up itself.
SHORTEST = 8  # characters
LONGEST = 400
LEAST_ASCII = 0.97  # of the characters
_SPECIAL = re.compile(r"<\|[^>]*\|>|<[a-z_]+>")
_MARKER = "\u2063user text\u2063"
_SLOT = re.compile(r"\{(\w+)\}")


# Prompts that ship, by use; splits share neither templates nor list items.
WRITTEN: Mapping[Split, int] = {"train": 2700, "valid": 100, "test": 100}
Lists = dict[str, list[str]]  # what goes into each slot; "templates", "plain" prompts, "follow-ups"


def read_question_lists() -> Lists:
    """Read the lines of each section."""
    lists: Lists = {}
    for line in LISTS.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = lists.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            section.append(line)
    return lists


def split_question_lists() -> dict[Split, Lists]:
    """Shuffle and split lines by section, in the same way for every seed."""
    rng = random.Random(0)
    splits: dict[Split, Lists] = {split: {} for split in SPLITS}
    for name, items in read_question_lists().items():
        shuffled = rng.sample(items, len(items))
        held = max(1, round(HELD_OUT * len(items)))
        splits["valid"][name] = shuffled[:held]
        splits["test"][name] = shuffled[held : 2 * held]
        splits["train"][name] = shuffled[2 * held :]
    return splits


def draw_prompts(lists: Lists, count: int, rng: random.Random) -> list[str]:
    """Draw different prompts in random order: at most half plain, then every template in turn."""
    found = {
        normalise_prompt(text): sometimes_make_casual(text, rng)
        for text in lists["plain"][: count // 2]
    }
    templates = lists["templates"]
    # Templates with numbers in them would otherwise never end.
    left = dict.fromkeys(templates, math.ceil(SHARE * count / len(templates)))
    dry = 0
    while len(found) < count and dry < DRY_ROUNDS:
        before = len(found)
        for template in rng.sample(templates, len(templates)):
            text = fill_template(template, lists, rng)
            if left[template] and len(found) < count and normalise_prompt(text) not in found:
                found[normalise_prompt(text)] = sometimes_make_casual(text, rng)
                left[template] -= 1
        dry = dry + 1 if len(found) == before else 0
    require(
        len(found) == count,
        f"the lists give {len(found)} different prompts",
        expected=f"{count}",
        do="lengthen questions.txt, or lower the count",
    )
    return rng.sample(list(found.values()), count)


def fill_template(template: str, lists: Lists, rng: random.Random) -> str:
    """Fill each slot `{name}` with a random item of the list `name`, or a number of `NUMBERS`."""

    def choose(match: re.Match[str]) -> str:
        name = match[1]
        return str(rng.randint(*NUMBERS[name])) if name in NUMBERS else rng.choice(lists[name])

    text = _SLOT.sub(choose, template).replace("\\n", "\n")
    return text[0].upper() + text[1:] if template[0] == "{" else text


def sometimes_make_casual(text: str, rng: random.Random) -> str:
    """Change at most one prompt in four to what a user in a hurry types."""
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


def draw_shipped_prompts(seed: int) -> dict[Split, list[str]]:
    """Draw prompts for each split; splits share no template and no list item."""
    lists = split_question_lists()
    return {
        split: draw_prompts(lists[split], WRITTEN[split], random.Random(f"{seed} {split}"))
        for split in SPLITS
    }


def opening_words(text: str) -> str:
    """The text's first words, by which near copies are found."""
    return " ".join(normalise_prompt(text).split()[:OPENING_WORDS])


@frozen_at_new_year_2026()
def user_turn_prefix(
    tokenizer: Any,  # mlx-lm's wrapper, or transformers' own
) -> list[int]:
    """Tokens before the text of a first user turn; ValueError if the template changes the text."""
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    text = render_turns(tokenizer, [{"role": "user", "content": _MARKER}])
    return list(tokenizer.encode(text[: text.index(_MARKER)], add_special_tokens=False))


def normalise_prompt(text: str) -> str:
    """Remove differences of case, spaces and punctuation, to compare prompts."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(re.findall(r"\w+", folded))


def is_good_prompt(text: str) -> bool:
    """Whether a sampled text can serve as a user's prompt."""
    ascii_share = sum(map(str.isascii, text)) / max(len(text), 1)
    words = normalise_prompt(text).split()
    return (
        SHORTEST <= len(text) <= LONGEST
        and ascii_share >= LEAST_ASCII
        and not _SPECIAL.search(text)
        and len(words) >= 2
        and len(set(words)) >= 0.4 * len(words)  # no loops
    )
