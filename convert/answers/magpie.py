"""Prompts that a chat model makes up itself: it continues its own template's user turn."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any

from .generation import Answer, Sampling, end_tokens, generate_batch

SHORTEST, LONGEST = 8, 400  # characters of a prompt
LEAST_ASCII = 0.97
MAX_TOKENS = 110
SAMPLING = {"temp": 1.0, "top_p": 0.95}
_SPECIAL = re.compile(r"<\|[^>]*\|>|<[a-z_]+>")
_MARKER = "\u2063user text\u2063"


def user_prefix(tokenizer: Any) -> list[int]:
    """Tokens of the chat template up to where the user's first text starts."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": _MARKER}], tokenize=False)
    return list(tokenizer.encode(text[: text.index(_MARKER)], add_special_tokens=False))


def normalised(text: str) -> str:
    """What two prompts share when they differ in case, spaces and punctuation only."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(re.findall(r"\w+", folded))


def is_good_prompt(text: str) -> bool:
    """Whether a sampled text can stand as a user's prompt."""
    ascii_share = sum(map(str.isascii, text)) / max(len(text), 1)
    words = normalised(text).split()
    return (
        SHORTEST <= len(text) <= LONGEST
        and ascii_share >= LEAST_ASCII
        and not _SPECIAL.search(text)
        and len(words) >= 2
        and len(set(words)) >= 0.4 * len(words)  # no loops
    )


def sample_prompts(
    model: Any,
    tokenizer: Any,
    count: int,
    *,
    batch_size: int,
    seed: int,
    taken: Iterable[str] = (),
    report: Callable[[int], None] = lambda found: None,
) -> list[str]:
    """`count` different prompts of the model's own, in the order in which they were found.

    Args:
        model: of transformers, as `load_generator` gives it.
        tokenizer: the model's.
        count: how many.
        batch_size: samples drawn together.
        seed: of the sampler.
        taken: prompts that may not come again.
        report: told how many more were found, after each batch.
    """
    sampling = Sampling(max_tokens=MAX_TOKENS, seed=seed, **SAMPLING)
    prefix, stop = user_prefix(tokenizer), end_tokens(model, tokenizer)
    seen, batch = {normalised(text) for text in taken}, 0
    found: list[str] = []
    while len(found) < count:
        answers = generate_batch(model, [prefix] * batch_size, sampling, stop, batch)
        before = len(found)
        for text in _finished(answers, tokenizer):
            key = normalised(text)
            if key not in seen and is_good_prompt(text):
                seen.add(key)
                found.append(text)
        report(min(len(found), count) - before)
        batch += 1
    return found[:count]


def _finished(answers: Iterable[Answer], tokenizer: Any) -> list[str]:
    """Texts of the samples that came to their own end."""
    return [
        tokenizer.decode(answer.tokens[:-1]).strip()
        for answer in answers
        if answer.finish_reason == "stop"
    ]
