"""What an answer is worth, and how sure a figure is: metrics and bootstrap intervals.

Scores are percentages, one for each prompt. Intervals are of 95 %, by resampling prompts
(percentile bootstrap, seeded): the same prompts are drawn for every figure of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ssmlx.errors import InputError

RESAMPLES = 5000
SEED = 0
FEW = 30  # prompts below which an interval says too little
Scores = NDArray[np.float64]
Scorer = Callable[[str, Sequence[str]], tuple[float, ...]]


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float

    def text(self, digits: int = 2, *, signed: bool = False) -> str:
        """`1.23 [1.10, 1.40]`."""
        form = f"{'+' if signed else ''}.{digits}f"
        return f"{self.value:{form}} [{self.low:{form}}, {self.high:{form}}]"

    @property
    def verdict(self) -> str:
        """For a difference: whether it is more than the noise of these prompts."""
        if self.low <= 0.0 <= self.high:
            return "within noise"
        return f"not within noise: {'higher' if self.value > 0 else 'lower'}"


def estimate(values: Mapping[str, float]) -> Estimate:
    """A figure of a result."""
    return Estimate(values["value"], values["low"], values["high"])


@lru_cache(maxsize=1)
def resample_counts(num_prompts: int) -> NDArray[np.int64]:
    """[RESAMPLES, prompts] how often each resample draws each prompt."""
    rng = np.random.default_rng(SEED)
    return rng.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), RESAMPLES)


def ratio(numerator: ArrayLike, denominator: ArrayLike) -> Estimate:
    """Sum over sum, each [prompts], resampled together; 0 where nothing is below the line."""
    pairs = np.array([numerator, denominator], np.float64)
    above, below = (resample_counts(pairs.shape[1]) @ pairs.T).T
    ratios = np.divide(above, below, out=np.zeros_like(above), where=below > 0)
    low, high = np.quantile(ratios, [0.025, 0.975])
    total = pairs.sum(axis=1)
    return Estimate(float(total[0] / total[1]) if total[1] else 0.0, float(low), float(high))


def mean(values: ArrayLike) -> Estimate:
    """The mean of [prompts]."""
    array = np.asarray(values, np.float64)
    return ratio(array, np.ones_like(array))


def paired_difference(ours: ArrayLike, theirs: ArrayLike) -> Estimate:
    """Mean of ours - theirs, prompt by prompt."""
    return mean(np.asarray(ours, np.float64) - np.asarray(theirs, np.float64))


def ratio_interval(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Ratio of medians and its 95 % interval, by resampling prompts, the same ones for both."""
    pairs, rng = np.array([ours, theirs]), np.random.default_rng(0)
    picks = rng.integers(0, pairs.shape[1], (2000, pairs.shape[1]))
    medians = np.median(pairs[:, picks], axis=2)
    low, high = np.quantile(medians[0] / medians[1], [0.025, 0.975])
    middle = np.median(pairs, axis=1)
    return float(middle[0] / middle[1]), float(low), float(high)


def speedup(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float] | None:
    """Ratio of the medians of tokens/s, [prompts] each, as JSON values.

    An answer of a single token has none, which is 0 here: such prompts do not count. None where
    no other is left.
    """
    pairs = [pair for pair in zip(ours, theirs, strict=True) if all(pair)]
    if not pairs:
        return None
    return asdict(Estimate(*ratio_interval([a for a, _ in pairs], [b for _, b in pairs])))


def normalise_sql(text: str) -> str:
    """Every run of white space is one space, and none stands at the ends; nothing else changes."""
    return " ".join(text.split())


def exact_match(answer: str, references: Sequence[str]) -> tuple[float, float]:
    """(100 or 0, the same in any case): is the answer one of the references?"""
    found, expected = normalise_sql(answer), [normalise_sql(text) for text in references]
    any_case = found.casefold() in [text.casefold() for text in expected]
    return 100.0 * (found in expected), 100.0 * any_case


def rouge_scorer() -> Scorer:
    """ROUGE-1 and ROUGE-LSum F1 by `rouge_score`, with its stemmer.

    Each is the best over the references. ROUGE-LSum takes lines for sentences, as `rouge_score`
    does by default: on texts of one line it is ROUGE-L.

    Raises:
        InputError: `rouge_score` is not installed.
    """
    try:
        from rouge_score import rouge_scorer as rouge  # type: ignore
    except ImportError as error:
        raise InputError(
            "rouge-score is not installed",
            expected="it, for every task but sql",
            do='pip install -e ".[quality]"',
        ) from error
    names = ("rouge1", "rougeLsum")
    scorer: Any = rouge.RougeScorer(list(names), use_stemmer=True)

    def score(answer: str, references: Sequence[str]) -> tuple[float, ...]:
        best = scorer.score_multi(list(references), answer)
        return tuple(100.0 * best[name].fmeasure for name in names)

    return score


def score_all(
    scorer: Scorer, answers: Sequence[str], references: Sequence[Sequence[str]]
) -> Scores:
    """[figures, prompts] every answer's scores."""
    rows = [scorer(answer, texts) for answer, texts in zip(answers, references, strict=True)]
    return np.array(rows, np.float64).T
