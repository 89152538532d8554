"""Uncertainty of figures: 95 % intervals by resampling prompts.

A percentile bootstrap, seeded: the same prompts are drawn for every figure of a run.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 5000
SEED = 0
FEW = 30  # number of prompts below which an interval is unreliable


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval over prompts."""

    value: float
    low: float
    high: float

    def text(self, digits: int = 2, *, signed: bool = False) -> str:
        """Format as `1.23 [1.10, 1.40]`; `signed` puts a plus before numbers of at least 0."""
        form = f"{'+' if signed else ''}.{digits}f"
        return f"{self.value:{form}} [{self.low:{form}}, {self.high:{form}}]"

    @property
    def verdict(self) -> str:
        """Whether a difference is within noise, and otherwise its direction."""
        if self.low <= 0.0 <= self.high:
            return "within noise"
        return f"not within noise: {'higher' if self.value > 0 else 'lower'}"

    @property
    def error_bars(self) -> tuple[float, float]:
        """How far the interval reaches below and above; with few prompts it may miss the value."""
        return max(0.0, self.value - self.low), max(0.0, self.high - self.value)


def estimate_from_json(values: Mapping[str, float]) -> Estimate:
    return Estimate(values["value"], values["low"], values["high"])


@lru_cache(maxsize=16)
def _resampled_prompt_indices(num_prompts: int) -> NDArray[np.int64]:
    """Indices [RESAMPLES, prompts], the same at every call."""
    return np.random.default_rng(SEED).integers(0, num_prompts, (RESAMPLES, num_prompts))


def _bootstrap_over_prompts(
    statistic: Callable[[Any], Any],  # [rows, resamples, prompts] to [resamples]
    *rows: ArrayLike,  # [prompts] each, resampled together
) -> Estimate:
    """The statistic of all prompts, and its 2.5th and 97.5th percentile over resamples."""
    drawn = np.array(rows, np.float64)
    found = statistic(drawn[:, _resampled_prompt_indices(drawn.shape[1])])
    low, high = np.quantile(found, [0.025, 0.975])
    return Estimate(float(statistic(drawn[:, None])[0]), float(low), float(high))


def _ratio_of_sums(pair: Any) -> Any:
    """Reduce [2, resamples, prompts] to [resamples]; 0 if the denominator is 0."""
    above, below = pair.sum(axis=-1)
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


def _ratio_of_medians(pair: Any) -> Any:
    """Reduce [2, resamples, prompts] to [resamples]."""
    above, below = np.median(pair, axis=-1)
    return above / below


def ratio(
    numerator: ArrayLike,  # [prompts]
    denominator: ArrayLike,  # [prompts]
) -> Estimate:
    """The sum of one list over the sum of another, resampled together; 0 if that is 0."""
    return _bootstrap_over_prompts(_ratio_of_sums, numerator, denominator)


def mean(values: ArrayLike) -> Estimate:
    """The mean of [prompts]."""
    return ratio(values, np.ones(len(np.asarray(values))))


def medians_over_repeats(
    repeats_of_prompts: Sequence[Sequence[Any]], figure_of: Callable[[Any], float]
) -> list[float]:
    """The median of each prompt's repeats, [prompts]."""
    return [statistics.median(map(figure_of, repeats)) for repeats in repeats_of_prompts]


def paired_difference(ours: ArrayLike, theirs: ArrayLike) -> Estimate:
    """The mean of ours less theirs, [prompts] each."""
    return mean(np.asarray(ours, np.float64) - np.asarray(theirs, np.float64))


def median(values: Sequence[float]) -> Estimate:
    """The median of [prompts]."""
    return median_ratio(values, [1.0] * len(values))


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """The median of ours over the median of theirs, [prompts] each, resampled together."""
    return _bootstrap_over_prompts(_ratio_of_medians, ours, theirs)


def ratio_of_median_rates(
    our_rates: Sequence[float],  # [prompts] tokens/s
    their_rates: Sequence[float],  # [prompts] tokens/s
) -> dict[str, float] | None:
    """The ratio as JSON values; None if no prompt is left."""
    # The rate of an answer of one token is 0.
    pairs = [pair for pair in zip(our_rates, their_rates, strict=True) if all(pair)]
    if not pairs:
        return None
    return asdict(median_ratio([pair[0] for pair in pairs], [pair[1] for pair in pairs]))
