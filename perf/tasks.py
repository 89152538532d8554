"""What `perf.quality` asks: tasks, and examples with the answers that would be right."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ssmlx.cli.generate import read_prompts
from ssmlx.errors import InputError


@dataclass(frozen=True)
class Task:
    """What is asked, and how answers are judged; `max_tokens` is the longest answer."""

    name: str
    max_tokens: int
    figures: tuple[str, str] = ("ROUGE-1", "ROUGE-LSum")


TASKS = {
    "sql": Task("sql", 64, ("exact match", "exact match, any case")),
    "e2e": Task("e2e", 96),
    "dialogsum": Task("dialogsum", 128),
    "chat": Task("chat", 160),
}


@dataclass(frozen=True)
class Example:
    """A prompt and the answers that would be right; none where only tokens are counted."""

    prompt: str
    references: tuple[str, ...]


def read_examples(path: Path, task: Task, count: int | None) -> list[Example]:
    """The first `count` examples of a data file; all for None.

    Raises:
        InputError: a line is broken, or lacks what answers are judged by.
    """
    if count is not None and count < 1:
        raise InputError(f"--count {count}", expected="1 or more", do="give a larger number")
    prompts = read_prompts(path)
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    examples = []
    for number, (prompt, line) in enumerate(zip(prompts, lines, strict=True), 1):
        row = json.loads(line)
        references = row.get("references") or [row.get("completion")]
        bad = not isinstance(references, list) or not all(isinstance(r, str) for r in references)
        if bad and (task.name != "chat" or references != [None]):
            raise InputError(
                f"{path}, object {number}, has no answer to compare with",
                expected="`completion`, a text, or `references`, a list of texts",
                do="correct the line",
            )
        examples.append(Example(prompt, () if bad else tuple(references)))
    return examples[:count]
