"""Acceptance ratios: the drafted tokens that a text accepts, over those its drafter offers.

An acceptance ratio of 1 means as many accepted tokens as offered; of 0.5, half as many.
"""

import math
from dataclasses import dataclass
from typing import Any, Self

from .costs import context_bucket

FIRST_RATIO = 0.9
"""Accepted over offered tokens before any were learned. Below 1, because offers come from answers
to an adapter's own test questions; others' questions accepted two thirds of what these did."""
FIRST_WEIGHT = 10.0
"""Offered tokens that the first ratio counts as: an answer or two replace it."""
MAX_PRIOR_WEIGHT = 120.0
"""Offered tokens that earlier answers count as at most, so that a ratio follows a user's texts."""
PRIOR_WEIGHT_IN_ANSWER = 8.0
"""Offered tokens that the prior's ratio counts as within an answer: a few calls outweigh it."""
KEEP_PER_CALL = 0.97
"""Share of an answer's counts that is left with each call that verified a draft, for a text becomes
easier or harder as it goes on; half of it after 23 calls."""
KEEP_PER_PLAIN_TOKEN = 0.985
"""The same with each token that was decoded without a draft; half of it after 46 tokens, so that
drafting is tried again."""
_MOST_ENTRIES = 256  # ratios that a file may hold


@dataclass
class Ratio:
    """Accepted over offered tokens."""

    value: float = FIRST_RATIO
    weight: float = FIRST_WEIGHT  # offered tokens that it rests on


class AcceptancePrior:
    """The acceptance ratios of earlier answers with one adapter, by name and context bucket.

    A name is a drafter's, followed by the length of a match if that decides how much is accepted.
    """

    def __init__(self) -> None:
        self._ratios: dict[tuple[str, int], Ratio] = {}

    def ratio(self, name: str, context: int, first_ratio: float = FIRST_RATIO) -> float:
        """The ratio of the context's bucket, or the longest shorter one known; or `first_ratio`."""
        return self._nearest(name, context, first_ratio).value

    def learn(
        self,
        name: str,
        context: int,  # committed tokens when the answer began
        accepted: float,  # drafted tokens
        offered: float,  # drafted tokens that were expected at a ratio of 1
        first_ratio: float = FIRST_RATIO,  # of a new ratio, if no shorter bucket has one
    ) -> None:
        """Average an answer's counts into the ratio of a name and of the bucket of `context`."""
        if offered <= 0:
            return
        key = name, context_bucket(context)
        if key not in self._ratios:
            start = self._nearest(name, context, first_ratio)
            self._ratios[key] = Ratio(start.value, min(start.weight, FIRST_WEIGHT))
        ratio = self._ratios[key]
        ratio.weight = min(ratio.weight, MAX_PRIOR_WEIGHT) + offered
        ratio.value += (accepted / offered - ratio.value) * offered / ratio.weight

    def _nearest(self, name: str, context: int, first_ratio: float) -> Ratio:
        """The ratio that `ratio` gives; not to be changed, as it may be another bucket's."""
        bucket = context_bucket(context)
        known = [one for other, one in self._ratios if other == name and one <= bucket]
        return self._ratios[name, max(known)] if known else Ratio(first_ratio)

    def known_ratios(self, context: int) -> dict[str, float]:
        """The ratios by name, as `ratio` gives them; without those that were never learned."""
        bucket = context_bucket(context)
        names = {name for name, one in self._ratios if one <= bucket}
        return {name: self.ratio(name, context) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """JSON: {"ratios": [[name, bucket, value, weight], ...]}."""
        return {
            "ratios": [[*key, ratio.value, ratio.weight] for key, ratio in self._ratios.items()]
        }

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """A prior from what `to_dict` gave; ValueError for anything else."""
        prior = cls()
        try:
            if len(values["ratios"]) > _MOST_ENTRIES:
                raise ValueError("a prior of acceptance has too many entries")
            for drafter, bucket, value, weight in values["ratios"]:
                is_key = isinstance(drafter, str) and context_bucket(bucket) == bucket
                is_ratio = all(math.isfinite(one) and 0 <= one <= 1e4 for one in (value, weight))
                if not (is_key and is_ratio):
                    raise ValueError(
                        f"invalid acceptance ratio: {[drafter, bucket, value, weight]!r}"
                    )
                prior._ratios[drafter, bucket] = Ratio(float(value), float(weight))
        except (TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(f"invalid prior of acceptance: {error}") from None
        return prior


class AnswerAcceptance:
    """An answer's acceptance under one name: a prior ratio, more and more replaced by counts."""

    def __init__(
        self,
        prior_ratio: float,  # of earlier answers
        # assumed if there were none; only kept, for `AcceptancePrior.learn`
        first_ratio: float = FIRST_RATIO,
    ) -> None:
        self._prior_ratio = prior_ratio
        self.first_ratio = first_ratio
        self._accepted = 0.0  # of late: with decay
        self._offered = 0.0
        # Of the whole answer, without decay.
        self.total_accepted = 0.0
        self.total_offered = 0.0

    @property
    def ratio(self) -> float:
        """Accepted over offered tokens, as expected of the next call."""
        accepted = PRIOR_WEIGHT_IN_ANSWER * self._prior_ratio + self._accepted
        return accepted / (PRIOR_WEIGHT_IN_ANSWER + self._offered)

    def add(self, accepted: float, offered: float) -> None:
        """Add what a call that verified a draft accepted, of those `offered` at a ratio of 1."""
        self._decay(KEEP_PER_CALL)
        self._accepted += accepted
        self._offered += offered
        self.total_accepted += accepted
        self.total_offered += offered

    def add_plain_tokens(self, tokens: int) -> None:
        self._decay(KEEP_PER_PLAIN_TOKEN**tokens)

    def _decay(self, kept: float) -> None:
        self._accepted *= kept
        self._offered *= kept
