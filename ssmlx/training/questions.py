"""What a model is asked, to learn from its own answers: prompts that ship, and its own questions.

Prompts that ship are hand-written templates, filled in (`questions.txt`, Apache-2.0). A model's own
questions are its continuations of its chat template's user turn (Magpie, Xu et al. 2024).
"""

import math
import random
import re
import unicodedata
from pathlib import Path
from typing import Any

from ..errors import require
from ..templates import bounded_rendering, frozen_date

LISTS = Path(__file__).with_name("questions.txt")
SPLITS = ("train", "valid", "test")
# Of each list, this share is for valid and as much for test.
HELD_OUT = 0.15
SHARE = 2.0  # the most prompts of one template, as a multiple of the mean
DRY_ROUNDS = 20  # without a new prompt, until the lists count as used up
NUMBERS = {"a": (2, 12), "b": (24, 480), "c": (3, 20), "d": (13, 99)}
OPENING_WORDS = 8

# Of a prompt that the model makes up itself.
# characters
SHORTEST = 8
LONGEST = 400
LEAST_ASCII = 0.97
_SPECIAL = re.compile(r"<\|[^>]*\|>|<[a-z_]+>")
_MARKER = "\u2063user text\u2063"
_SLOT = re.compile(r"\{(\w+)\}")


WRITTEN = {"train": 2700, "valid": 100, "test": 100}
"""Prompts that ship, by what they are for: those of one share nothing with those of another."""
Lists = dict[str, list[str]]
"""What goes into each slot, and the "templates", "plain" prompts and "follow-ups"."""


def read_lists() -> Lists:
    """Read `questions.txt`: the lines of each section, by the section's name; comments are left
    out.
    """
    lists: Lists = {}
    for line in LISTS.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = lists.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            section.append(line)
    return lists


def split_lists() -> dict[str, Lists]:
    """Split the lines of every section into "train", "valid" and "test".

    The same for every seed: what is held out stays held out.
    """
    rng = random.Random(0)
    splits: dict[str, Lists] = {split: {} for split in SPLITS}
    for name, items in read_lists().items():
        shuffled = rng.sample(items, len(items))
        held = max(1, round(HELD_OUT * len(items)))
        splits["valid"][name] = shuffled[:held]
        splits["test"][name] = shuffled[held : 2 * held]
        splits["train"][name] = shuffled[2 * held :]
    return splits


def draw_prompts(lists: Lists, count: int, rng: random.Random) -> list[str]:
    """Write `count` different prompts: plain ones for at most a half, then every template in turn.

    A template is left alone once it has given `SHARE` times the mean number of prompts: those with
    numbers in them would otherwise never end.

    Raises:
        InputError: the lists are too short for so many.
    """
    found = {
        normalise_prompt(text): make_casual(text, rng) for text in lists["plain"][: count // 2]
    }
    templates = lists["templates"]
    left = dict.fromkeys(templates, math.ceil(SHARE * count / len(templates)))
    dry = 0
    while len(found) < count and dry < DRY_ROUNDS:
        before = len(found)
        for template in rng.sample(templates, len(templates)):
            text = fill_template(template, lists, rng)
            if left[template] and len(found) < count and normalise_prompt(text) not in found:
                found[normalise_prompt(text)] = make_casual(text, rng)
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
    """Put a random item of its list, or a random number, into each slot `{name}` of a template.

    A text that begins with a slot gets a capital letter.
    """

    def choose(match: re.Match[str]) -> str:
        name = match[1]
        return str(rng.randint(*NUMBERS[name])) if name in NUMBERS else rng.choice(lists[name])

    text = _SLOT.sub(choose, template).replace("\\n", "\n")
    return text[0].upper() + text[1:] if template[0] == "{" else text


def make_casual(text: str, rng: random.Random) -> str:
    """Change one prompt in four to what somebody in a hurry types: lower case, no full stop, a
    greeting.
    """
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


def draw_shipped_prompts(seed: int) -> dict[str, list[str]]:
    """Return the prompts that ship, "train", "valid" and "test", drawn by a seed; splits share
    none.
    """
    lists = split_lists()
    return {
        split: draw_prompts(lists[split], WRITTEN[split], random.Random(f"{seed} {split}"))
        for split in SPLITS
    }


def opening_words(text: str) -> str:
    """Return the first eight words of a prompt, normalised: near copies share them."""
    return " ".join(normalise_prompt(text).split()[:OPENING_WORDS])


@frozen_date()
def user_prefix(tokenizer: Any) -> list[int]:
    """Return the tokens of the chat template up to where the user's first text begins.

    Raises:
        InputError: the template refuses a user's turn.
    """
    with bounded_rendering("a user's turn"):
        text = tokenizer.apply_chat_template([{"role": "user", "content": _MARKER}], tokenize=False)
    return list(tokenizer.encode(text[: text.index(_MARKER)], add_special_tokens=False))


def normalise_prompt(text: str) -> str:
    """Return a prompt's words in lower case with single spaces: prompts that differ in case, spaces
    and punctuation alone become equal.
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(re.findall(r"\w+", folded))


def is_good_prompt(text: str) -> bool:
    """Whether a sampled text can stand as a user's prompt: by length, ASCII share, two words or
    more, no special tokens, and few repeated words.
    """
    ascii_share = sum(map(str.isascii, text)) / max(len(text), 1)
    words = normalise_prompt(text).split()
    return (
        SHORTEST <= len(text) <= LONGEST
        and ascii_share >= LEAST_ASCII
        and not _SPECIAL.search(text)
        and len(words) >= 2
        and len(set(words)) >= 0.4 * len(words)  # no loops
    )
