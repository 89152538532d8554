"""What to draft before each call, so that an answer is never slower than plain decoding.

Everything is counted in plain calls. A call that verifies a drafted tree and drafts the next takes
`extra` of them beyond one: what a table or a calibration expects, on a line through what the clock
found of other rungs here; it advances by `1 + theta * (tokens - 1)`, where `tokens` is what the
adapter's own answers had and `theta` is what this text makes of it. The rung of the ladder that
advances fastest is drafted, or may by what is not known yet; none, where plain decoding is as fast.
What trials may lose is bounded, by answer and over all (a conservative bandit: Wu et al., 2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .drafter import Drafter

ANSWER_LOSS = 0.6
SHORT_ANSWER = 24
"""Plain calls that an answer may be behind plain decoding, for every so many tokens."""
REFILL = 0.012
MOST_SAVED = 2.0
"""Plain calls that trials may lose: so many more a token, and so many at most."""
CREDIT = 10.0
"""Calls whose expected gain an answer may be behind, where drafting should pay."""
MARGIN = 1.03
STAY = 1.03
"""Times plain decoding's speed from which on drafting begins; and what the present rung is
favoured by."""
TEXT_DOUBT = 0.15
"""What an adapter's tokens per call may be wrong by on a text."""
_BASE = 0.3
_SLOPE = 0.4
_RUNG = 0.25
_TIMING = 0.2
"""Standard deviations: plain calls that a call takes beyond a table's, what rows cost over it and
a rung over that, and plain calls that a timing is off."""
TIMED = 2
"""Plain calls that are timed in a row."""
STALE = 512
"""Tokens after which plain calls are timed again."""
_SURPRISE = 0.3
# accepted drafts: what is known beforehand counts as, and at most
_PRIOR = 10.0
_MEMORY = 150.0
_FADES = 0.93
# what is left of what a text said, a call and a plain token on
_PER_CALL = 0.95
_PER_TOKEN = 0.985


@dataclass(frozen=True, eq=False, kw_only=True)
class Rung:
    """A shape to draft in, priced beforehand in plain calls."""

    shape: Any = None
    verify: float  # a call that verifies such a tree, and drafts nothing
    draft: float  # what drafting the next one adds
    tokens: float  # what a call advances by, on answers that the adapter was measured on
    drafter: Drafter | None = None  # what drafts it; None for the loop's own

    @property
    def extra(self) -> float:
        """What a call should take beyond a plain one; never nothing."""
        return max(self.verify - 1 + self.draft, 0.01)

    @property
    def speed(self) -> float:
        """Over plain decoding's, as expected."""
        return self.tokens / (1 + self.extra)


@dataclass(frozen=True)
class Price:
    extra: float  # what a call of a rung takes here beyond a plain one
    least: float  # what may be found
    draft: float  # what drafting is of it


@dataclass
class Mean:
    """A mean that forgets."""

    value: float = 1.0
    weight: float = 0.0

    def add(self, value: float, weight: float, most: float) -> None:
        """Take in a value; what came before counts as `most` at most."""
        self.weight = min(self.weight, most) + weight
        self.value += (value - self.value) * weight / self.weight


@dataclass
class Learned:
    """What the clock and the texts have taught: of a model with an adapter on a machine."""

    costs: dict[str, Mean] = field(default_factory=dict)  # of rungs, over their `extra`
    texts: dict[str, Mean] = field(default_factory=dict)  # theta by length of context
    saved: float = ANSWER_LOSS  # plain calls that trials may lose
    # of this process alone:
    speed: Mean = field(default_factory=Mean)  # seconds of a plain call over those expected
    seen: set[str] = field(default_factory=set)  # rungs that have run
    tokens_since: int = 0  # since a plain call was timed
    quiet: int = 0  # tokens since something was drafted

    def prices(self, ladder: Sequence[Rung]) -> dict[Rung, Price]:
        """What rungs take, by those of them that were timed: a Gaussian process about a line."""
        own = [self.costs.get(str(one.shape), Mean()) for one in ladder]
        x = np.array([one.extra for one in ladder])
        prior = _BASE**2 + _SLOPE**2 * np.outer(x, x) + np.diag((_RUNG * x) ** 2)
        noise = np.diag([_TIMING**2 / max(one.weight, 1e-9) for one in own])
        gain = prior @ np.linalg.inv(prior + noise)
        extra = np.maximum(x + gain @ (x * [one.value - 1 for one in own]), 0.2 * x)
        doubt = np.sqrt(np.maximum(np.diag(prior) - (gain * prior).sum(axis=1), 0.0))
        draft = extra * [one.draft / one.extra for one in ladder]
        found = np.stack([extra, np.maximum(extra - doubt, 0.2 * extra), draft], axis=1).tolist()
        return {one: Price(*price) for one, price in zip(ladder, found, strict=True)}


class Pace:
    """Decides from call to call what to draft.

    Args:
        ladder: what may be drafted, the smallest tree first.
        learned: what is known, and what is learned; without it the last rung is always drafted.
        plain: seconds of a plain call, as expected.
        context: what the text so far is like, for `Learned.texts`.

    Attributes:
        rung: what the next call is to draft; None for a plain call.
        num_drafted: nodes of the trees that were verified so far, the roots not counted.
    """

    def __init__(
        self,
        ladder: Sequence[Rung] = (),
        learned: Learned | None = None,
        *,
        plain: float = 1.0,
        context: str = "",
    ) -> None:
        self._ladder = ladder or [Rung(verify=1.0, draft=0.0, tokens=1.0)]
        self._learned = learned
        self._plain = plain
        self._context = context
        self._tokens = 0
        self._lost = 0.0  # plain calls that this answer is behind plain decoding
        self._accepted = self._expected = 0.0  # drafts, of late
        self._doubt = 0.0  # whether this text is like those before
        self._surprises = self._untimed = 0  # the latter: plain calls that are yet to be timed
        # plain calls; the last that was drafted for
        self._has_timed = False
        self._is_timed = True
        self.num_drafted = 0
        self._prices = {} if learned is None else learned.prices(self._ladder)
        self.rung: Rung | None = None
        self.rung = self._ladder[-1] if learned is None else self._decide(learned)

    @property
    def outlook(self) -> tuple[float, float]:
        """Tokens that a call should bring of this text, and plain calls that it takes; both are 1
        where plain decoding is fastest, or nobody knows."""
        known = [(1.0, 1.0)]
        learned = self._learned
        if learned is not None:
            theta, _ = self._theta(learned)
            for rung, price in self._prices.items():
                known.append((1 + theta * (rung.tokens - 1), 1 + price.extra))
        return max(known, key=lambda one: one[0] / one[1])

    def observe(
        self, num_tokens: int, *, verified: Rung | None = None, seconds: float | None = None
    ) -> None:
        """Tell of a call; `rung` is then what the next one is to draft.

        Args:
            num_tokens: that it advanced by, 1 or more.
            verified: the rung whose tree was drafted for it; None for a bare root.
            seconds: drafting and verifying took; None where nothing says so.
        """
        learned = self._learned
        if learned is None:
            return
        took = self._time(learned, verified, seconds)
        decay = _PER_TOKEN**num_tokens if verified is None else _PER_CALL
        self._accepted = decay * self._accepted
        self._expected = decay * self._expected
        # The more of this text is known, the less counts what others were like.
        self._doubt = self._doubt * decay if verified is None else 1 - _FADES * (1 - self._doubt)
        if verified is None:
            learned.quiet += num_tokens
        else:
            learned.quiet = 0
            self._read(learned, num_tokens - 1, verified.tokens - 1)
        self._count(learned, num_tokens, took)
        self._tokens += num_tokens
        learned.tokens_since += num_tokens
        before = self.rung
        self.rung = self._decide(learned)
        if verified and before and self.rung is None:  # The next tree is drafted already.
            self._count(learned, 0, self._prices[before].draft)

    def _count(self, learned: Learned, num_tokens: int, took: float) -> None:
        """Note how far this answer, and trials in all, are behind plain decoding."""
        self._lost += took - num_tokens
        saved = learned.saved + REFILL * num_tokens + num_tokens - took
        learned.saved = min(MOST_SAVED, saved)

    def _read(self, learned: Learned, accepted: int, expected: float) -> None:
        """What the drafts of a call say of the text."""
        self._accepted += accepted
        self._expected += expected
        if expected > 0:
            text = learned.texts.setdefault(self._context, Mean(weight=_PRIOR))
            text.add(accepted / expected, expected, _MEMORY)

    def _time(self, learned: Learned, rung: Rung | None, seconds: float | None) -> float:
        """Plain calls that a call took; and what its seconds teach."""
        key = str(rung.shape) if rung else ""
        is_first = key not in learned.seen  # a kernel may have been compiled
        learned.seen.add(key)
        if rung is None:
            self._untimed = max(0, self._untimed - 1)
            if seconds is not None and not is_first:
                ratio = seconds / self._plain
                if learned.speed.weight >= TIMED:
                    ratio = min(max(ratio, 0.5 * learned.speed.value), 2 * learned.speed.value)
                learned.speed.add(ratio, 1.0, 3.0)
                learned.tokens_since = 0
            return 1.0
        extra = self._prices[rung].extra
        own = learned.costs.setdefault(key, Mean())
        self._is_timed = seconds is not None
        if seconds is None or is_first:
            return 1 + extra
        if not learned.speed.weight:
            learned.speed.add(seconds / self._plain / (1 + extra), 0.5, 3.0)
        took = seconds / (self._plain * learned.speed.value)
        if abs(took - 1 - extra) > _SURPRISE * (1 + extra) and own.weight > TIMED:
            self._surprises += 1
            if learned.tokens_since > TIMED:  # has the machine become slower, or the call?
                if self._surprises >= 2:
                    self._untimed = TIMED + 1
                    self._surprises = 0
                return took
        else:
            self._surprises = 0
        found = min(max(took - 1, 0.3 * extra), 2.5 * extra) / rung.extra
        own.add(found, 1.0, 12.0)
        self._prices = learned.prices(self._ladder)
        return took

    def _theta(self, learned: Learned) -> tuple[float, float]:
        """How well this text is guessed, of the adapter's own; and how many drafts say so."""
        text = learned.texts.get(self._context) or Mean(weight=_PRIOR)
        weight = min(text.weight, 1.5 * _PRIOR) * (1 - self._doubt)
        theta = (weight * text.value + self._accepted) / (weight + self._expected)
        return theta, self._expected + (text.weight - _PRIOR) / 4

    def _decide(self, learned: Learned) -> Rung | None:
        if not self._has_timed and (learned.tokens_since > STALE or not self._knows_plain(learned)):
            self._has_timed = True
            self._untimed = TIMED + 1
        if self._untimed:
            return None
        theta, read = self._theta(learned)
        allowed = ANSWER_LOSS * max(1.0, self._tokens / SHORT_ANSWER)
        best: tuple[float, Rung | None] = (MARGIN, None)
        for rung, price in self._prices.items():
            tokens = 1 + theta * (rung.tokens - 1)
            cost = 1 + price.extra
            speed = tokens / cost * (STAY if rung is self.rung else 1.0)
            # A text that is guessed well makes up for a bad beginning.
            if speed > best[0] and self._lost <= CREDIT * (tokens - cost):
                best = speed, rung
        # What may be faster is tried, if it will be known; and texts may become easier to guess.
        patience = min(1.0, learned.quiet / 128)
        doubt = 0.0 if best[1] else TEXT_DOUBT * (1 / (1 + read / 8) + patience)
        trial: tuple[float, Rung | None] = (max(best[0], 1.05), best[1])
        for rung, price in self._prices.items():
            hope = (1 + theta * (1 + doubt) * (rung.tokens - 1)) / (1 + price.least)
            risk = price.extra + (0.0 if self.rung else price.draft)
            affordable = self._lost + risk <= allowed and risk <= learned.saved
            if hope > trial[0] and affordable and (self._is_timed or not best[1]):
                trial = hope, rung
        return trial[1]

    def _knows_plain(self, learned: Learned) -> bool:
        return learned.speed.weight >= TIMED or sum(m.weight for m in learned.costs.values()) > 8
