"""The tasks, their examples, and the scores of answers.

Scores are percentages, one for each prompt.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ssmlx.errors import InputError, require
from ssmlx.json_files import read_json_rows
from ssmlx.prompts import Prompt, read_prompts

from .environment import ROOT
from .statistics import mean, paired_difference

EXAMPLES = ROOT / "examples" / "data"
Scores = NDArray[np.float64]
Scorer = Callable[[str, Sequence[str]], tuple[float, ...]]


@dataclass(frozen=True)
class Task:
    """A kind of prompts, with the longest answer, the data and the scores for it."""

    name: str
    max_tokens: int
    figures: tuple[str, str] = ("ROUGE-1", "ROUGE-LSum")  # the names of its scores
    test: Path | None = None  # the data that ships with the package, if any
    is_judged: bool = True  # whether examples must have right answers
    adapter: str = ""  # a bundled adapter; by default the one of the task's name
    max_prompt_tokens: int | None = None  # longer prompts lose their middle
    file: str = "test.jsonl"  # in a folder of the task's name


SQL = Task(
    "sql", 64, ("exact match", "exact match, any case"), test=EXAMPLES / "sql_test_100.jsonl"
)
CHAT = Task("chat", 160, test=EXAMPLES / "chat_test.jsonl", is_judged=False)
SPEC_BENCH = Task(
    "spec_bench",
    64,
    is_judged=False,
    adapter="chat",
    max_prompt_tokens=1024,
    file="question.jsonl",
)
_OTHERS = (Task("e2e", 96, test=EXAMPLES / "e2e_test_100.jsonl"), Task("dialogsum", 128))
TASKS = {task.name: task for task in (SQL, *_OTHERS, CHAT, SPEC_BENCH)}

# Spec-Bench's categories with MT-Bench's questions: all first turns, as one category.
MT_BENCH = (
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
)
OTHER_CATEGORIES = ("summarization", "qa", "math_reasoning", "rag", "translation")
_SPEC_BENCH_ROW = f'"turns", texts, and "category", one of {", ".join(MT_BENCH + OTHER_CATEGORIES)}'
FIRST_OF_CATEGORY = 16  # number of questions from each of the other categories


@dataclass(frozen=True)
class Example:
    asked: Prompt
    references: tuple[str, ...] = ()
    category: str = ""  # empty for tasks without categories


def find_data_file(task: Task, data: Path | None, folder: Path | None = None) -> Path:
    """Find the data: `data`, else the task's file in `folder`, else the data that ships."""
    path = data or (folder / task.name / task.file if folder else task.test)
    if path is None or not path.exists():
        raise InputError(
            f"no data file {path}" if path else f"no data ships for the task {task.name}",
            expected="a JSON object per line: prompt, and completion or references",
            do="give --data FILE.jsonl" if data else "give --data FILE.jsonl or --data-dir",
        )
    return path


def read_examples(path: Path, task: Task, count: int | None = None) -> list[Example]:
    """Read examples; all lines are checked, also those after `count`."""
    require(
        count is None or count > 0,
        f"--count {count}",
        expected="1 or more",
        do="give a larger number",
    )
    if task is SPEC_BENCH:
        return _read_spec_bench(path)[:count]
    examples = []
    for number, row in enumerate(read_prompts(path, "--data"), 1):
        references = row.get("references") or [row.get("completion")]
        bad = not isinstance(references, list) or not all(isinstance(r, str) for r in references)
        require(
            not bad or (not task.is_judged and references == [None]),
            f"{path}, object {number}, has no answer to compare with",
            expected="`completion`, a text, or `references`, a list of texts",
            do="correct the line",
        )
        examples.append(Example(row, () if bad else tuple(references)))
    return examples[:count]


def _read_spec_bench(path: Path) -> list[Example]:
    """Read first turns, in the file's order; MT-Bench's categories become one, complete."""
    found: dict[str, list[Example]] = {}
    examples = []
    for where, row in read_json_rows(path, "--data", _SPEC_BENCH_ROW):
        category, question = _check_spec_bench_row(row, where)
        name = "mt_bench" if category in MT_BENCH else category
        own = found.setdefault(name, [])
        if name == "mt_bench" or len(own) < FIRST_OF_CATEGORY:
            own.append(Example({"prompt": question}, category=name))
            examples.append(own[-1])
    return examples


class SpecBenchQuestion(NamedTuple):
    category: str
    first_turn: str


def _check_spec_bench_row(row: Mapping[str, Any], where: str) -> SpecBenchQuestion:
    category = row.get("category")
    turns = row.get("turns")
    question = turns[0] if isinstance(turns, list) and turns else None
    is_fine = category in MT_BENCH + OTHER_CATEGORIES and isinstance(question, str)
    found = f"{where} is not a question of Spec-Bench"
    is_asked = is_fine and bool(str(question).strip())
    require(is_asked, found, expected=_SPEC_BENCH_ROW, do="check --data")
    return SpecBenchQuestion(str(category), str(question))


def leave_out_middle(tokens: list[int], max_tokens: int) -> list[int]:
    """Leave out the middle of a long prompt, so that both ends stay."""
    first = max_tokens // 2
    last = max_tokens - first
    return tokens if len(tokens) <= max_tokens else [*tokens[:first], *tokens[-last:]]


def normalise_sql(text: str) -> str:
    """Replace every run of white space by one space."""
    return " ".join(text.split())


class ExactMatch(NamedTuple):
    """Scores 100 if an answer is one of its references, else 0; and the same ignoring case."""

    exact: float
    any_case: float


def exact_match(answer: str, references: Sequence[str]) -> ExactMatch:
    """Score an answer; runs of white space count as one space."""
    found = normalise_sql(answer)
    expected = [normalise_sql(text) for text in references]
    any_case = found.casefold() in [text.casefold() for text in expected]
    return ExactMatch(100.0 * (found in expected), 100.0 * any_case)


def make_rouge_scorer() -> Scorer:
    """ROUGE-1 and ROUGE-LSum F1 in per cent, with stemming; for each score the best reference
    counts.

    As in `rouge_score`, a line is a sentence, so that ROUGE-LSum of one line is ROUGE-L.
    """
    try:
        from rouge_score import rouge_scorer as rouge  # type: ignore
    except ImportError as error:
        raise InputError(
            "rouge-score is not installed",
            expected="rouge-score, for every task except sql",
            do='pip install -e ".[quality]"',
        ) from error
    names = ("rouge1", "rougeLsum")
    scorer: Any = rouge.RougeScorer(list(names), use_stemmer=True)

    def score(answer: str, references: Sequence[str]) -> tuple[float, ...]:
        best = scorer.score_multi(list(references), answer)
        return tuple(100.0 * best[name].fmeasure for name in names)

    return score


def make_scorer(task: Task) -> Scorer:
    return exact_match if task is SQL else make_rouge_scorer()


def score_each_text(task: Task, examples: Sequence[Example], texts: Sequence[str]) -> Scores | None:
    """Scores [scores, prompts] in per cent; None if any example has no reference."""
    if not all(example.references for example in examples):
        return None
    scorer = make_scorer(task)
    pairs = zip(texts, examples, strict=True)
    rows = [scorer(text.strip(), example.references) for text, example in pairs]
    return np.array(rows, np.float64).T


def mean_scores(task: Task, examples: Sequence[Example], texts: Sequence[str]) -> dict[str, Any]:
    """Mean scores by name, as JSON values; empty if any example has no reference."""
    scores = score_each_text(task, examples, texts)
    rows = () if scores is None else zip(task.figures, scores, strict=True)
    return {name: asdict(mean(row)) for name, row in rows}


def mean_score_differences(
    task: Task, examples: Sequence[Example], ours: Sequence[str], theirs: Sequence[str]
) -> dict[str, Any]:
    """Differences of scores, ours less theirs, by name as in `mean_scores`."""
    pair = [score_each_text(task, examples, texts) for texts in (ours, theirs)]
    if pair[0] is None or pair[1] is None:
        return {}
    gaps = [asdict(paired_difference(a, b)) for a, b in zip(*pair, strict=True)]
    return dict(zip(task.figures, gaps, strict=True))
