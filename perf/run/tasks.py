"""What is asked: tasks, examples with the answers that would be right, and their scores."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ssmlx.errors import InputError
from ssmlx.model.streams import StreamFusedModel
from ssmlx.prompts import as_messages, encode_prompt, read_prompts

from .common import ROOT
from .metrics import Scorer, Scores, exact_match, rouge_scorer, score_all

EXAMPLES = ROOT / "examples" / "data"
SAMPLE_PROMPTS = EXAMPLES / "sql_test_100.jsonl"


@dataclass(frozen=True)
class Task:
    """What is asked, and how answers are judged.

    Attributes:
        name: as in --task.
        max_tokens: longest answer.
        figures: the names of its scores.
        test: the data that ships for it, if any.
        valid: data that ships beside `test`, to choose settings with.
    """

    name: str
    max_tokens: int
    figures: tuple[str, str] = ("ROUGE-1", "ROUGE-LSum")
    test: Path | None = None
    valid: Path | None = None


TASKS = {
    "sql": Task("sql", 64, ("exact match", "exact match, any case"), test=SAMPLE_PROMPTS),
    "e2e": Task("e2e", 96, test=EXAMPLES / "e2e_test_100.jsonl"),
    "dialogsum": Task("dialogsum", 128),
    "chat": Task(
        "chat", 160, test=EXAMPLES / "chat_test.jsonl", valid=EXAMPLES / "chat_valid.jsonl"
    ),
}
DATA_HELP = (
    "a JSON object a line: prompt, and completion or references (default: the task's test.jsonl "
    "in --data-dir, or without it what ships in examples/data)"
)


@dataclass(frozen=True)
class Example:
    """What is asked, and the answers that would be right; none where only tokens are counted.

    Attributes:
        turns: role and text of each turn of a chat, the user's last; mostly one.
        references: right answers.
    """

    turns: tuple[tuple[str, str], ...]
    references: tuple[str, ...]

    @property
    def prompt(self) -> str:
        """The user's last turn."""
        return self.turns[-1][1]

    def tokens(
        self, model: StreamFusedModel, tokenizer: TokenizerWrapper, template: str | None
    ) -> list[int]:
        """Under a template; a chat of several turns under the model's own chat template."""
        messages = [{"role": role, "content": text} for role, text in self.turns]
        return encode_prompt({"messages": messages}, model, tokenizer, template)


def add_data_options(data: argparse._ArgumentGroup) -> None:
    """The task and its data."""
    data.add_argument("--task", choices=tuple(TASKS), required=True)
    data.add_argument(
        "--data",
        type=Path,
        metavar="FILE.jsonl",
        help=DATA_HELP,
    )
    add_data_dir(data)


def add_data_dir(data: argparse._ArgumentGroup) -> None:
    """Where whole data sets are."""
    data.add_argument("--data-dir", type=Path, metavar="FOLDER", help="holds TASK/test.jsonl")


def data_file(task: Task, data: Path | None, folder: Path | None = None) -> Path:
    """The data of a task: the file `data`, the task's own in `folder`, or what ships for it.

    Raises:
        InputError: it is not there.
    """
    path = data or (folder / task.name / "test.jsonl" if folder else task.test)
    if path is None or not path.is_file():
        raise InputError(
            f"no data file {path}" if path else f"no data ships for the task {task.name}",
            expected="a JSON object a line: prompt, and completion or references",
            do="give --data FILE.jsonl" if data else "give --data FILE.jsonl or --data-dir",
        )
    return path


def read_examples(path: Path, task: Task, count: int | None) -> list[Example]:
    """The first `count` examples of a data file; all for None.

    Raises:
        InputError: a line is broken, or lacks what answers are judged by.
    """
    if count is not None and count < 1:
        raise InputError(f"--count {count}", expected="1 or more", do="give a larger number")
    examples = []
    for number, row in enumerate(read_prompts(path, "--data"), 1):
        references = row.get("references") or [row.get("completion")]
        bad = not isinstance(references, list) or not all(isinstance(r, str) for r in references)
        if bad and (task.name != "chat" or references != [None]):
            raise InputError(
                f"{path}, object {number}, has no answer to compare with",
                expected="`completion`, a text, or `references`, a list of texts",
                do="correct the line",
            )
        turns = tuple((turn["role"], turn["content"]) for turn in as_messages(row))
        examples.append(Example(turns, () if bad else tuple(references)))
    return examples[:count]


def scorer_of(task: Task) -> Scorer:
    """How a task's answers are judged.

    Raises:
        InputError: what it needs is not installed.
    """
    return exact_match if task.name == "sql" else rouge_scorer()


def score_texts(task: Task, examples: Sequence[Example], texts: Sequence[str]) -> Scores | None:
    """[figures, prompts] what answers are worth; None where not all examples have references."""
    references = [example.references for example in examples]
    if not all(references):
        return None
    return score_all(scorer_of(task), [text.strip() for text in texts], references)
