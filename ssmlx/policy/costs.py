"""What a target call costs, in plain calls: one table for a machine, a geometry, a dtype.

A call is of a kind: one that verifies and drafts n nodes of a drafter, `("streams", n)`; one that
verifies n nodes that were drafted on the host, at no cost, `("rows", n)`; or one plain call for b
texts together, `("batch", b)`. A few node counts are measured; those between are interpolated.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median, stdev
from typing import Any, Self

Kind = tuple[str, int]
"""A drafter's name or "rows" with nodes, or "batch" with texts."""
BATCH = "batch"
ROWS = "rows"

BUCKETS = (0, 256, 1024, 3072)
"""Least tokens of a context for each bucket: attention over a longer one changes the ratios."""
DRAFT_COST = 0.3
ROW_COST = 0.1
"""Plain calls that a drafting pass and each row beyond the first cost where nothing was measured.
Measured calls of 2 to 16 nodes start at 1.3 to 1.7 and gain 0.03 (CPU, float32) to 0.2 (Apple GPUs,
4 bits) a row: this is between, so that the first shape tried is one of few nodes."""
CAUTION = 1.2
"""Standard errors by which a cost may be higher where an answer's loss is bounded."""
FIRST_NOISE = 0.08
MOST_NOISE = 0.3
NOISE_CALLS = 12
"""Standard deviation of a call's seconds over their mean: at first, and at most; and the plain
calls that the former counts as."""
MEDIAN_ERROR = 1.25
"""Standard error of a median over that of a mean."""
RUN_CALLS = 5
"""Calls that a run has as a rule."""
LEAST_COST = 1.01
"""Plain calls that a drafting call takes at least; a timing that says less is noise."""
ENTRY = 0.35
"""Plain calls that beginning to draft costs beside steady calls: the first drafting pass."""
SEED_WEIGHT = 0.5
"""What a head start's timing counts as: half a run. A cost of less than one run is not learned."""
UNKNOWN_WEIGHT = 0.3
"""What a cost beyond the measured counts counts as."""
DOUBT = 0.15
"""Share of what a call takes beyond a plain one that a single run may be wrong by."""
MOST_WEIGHT = 8.0
"""Runs that the past counts as at most, so that a table follows its machine."""
DOUBTED = 0.3
"""What a cost may be off by; of one that is further off the past counts little."""
FIRST_CLAMP = 0.5
CLAMP = 0.25
"""What an answer may change a cost by: of one that is not yet learned, and of one that is."""
BANK = 3.0
BANK_MOST = 4.0
BANK_REFILL = 0.012
"""Plain calls that probes may lose: at first, at most, and gained with each token (1.2 %)."""
PROBE_WAIT = 64
PROBE_WAIT_MOST = 512
"""Tokens between probes: at first, and at most after doubling."""
TIMING_WAIT = 1024
TIMING_WAIT_MOST = 4096
"""Tokens after which plain calls are timed again: at first, and at most after doubling."""
MOST_PLAIN_CALLS = 12
"""Plain calls that an answer times in a row at most."""
TIMING_PAUSE = 96
"""Tokens behind such a timing before the next, however poor it is: on a busy machine, where timings
do not agree, short answers would be timed and nothing else."""
MOST_PLAIN = 128
"""Plain calls that a timing averages at most."""
_MOST_ENTRIES = 1024
"""Costs that a file may hold."""


@dataclass
class Mean:
    """A running mean that forgets."""

    value: float
    weight: float

    def add(self, value: float, clamp: float) -> None:
        """Take in `value`, held to `clamp` of the mean; the past counts as `MOST_WEIGHT`."""
        low = self.value * (1 - clamp)
        high = self.value * (1 + clamp)
        self.weight = min(self.weight, MOST_WEIGHT - 1) + 1
        self.value += (min(max(value, low), high) - self.value) / self.weight


@dataclass
class PlainTiming:
    """Seconds of a plain call in one context bucket."""

    seconds: float
    tokens_since: int = 0
    wait: int = TIMING_WAIT
    calls: int = 0  # calls of this process that agree: good enough to compare runs with
    last_calls: int = 0  # of the last timing


def context_bucket(context: int) -> int:
    """The least context of the bucket that a context of so many tokens belongs to."""
    return BUCKETS[bisect_right(BUCKETS, max(context, 0)) - 1]


def assumed_extra_calls(kind: Kind) -> float:
    """Plain calls that a kind should take beyond one where nothing was measured."""
    name, rows = kind
    return ROW_COST * (rows - 1) + (0.0 if name in (BATCH, ROWS) else DRAFT_COST)


def interpolate(known: Sequence[float], values: Sequence[float], at: float) -> float:
    """The value at `at` on straight lines through (known, values); the ends' values beyond."""
    right = bisect_right(known, at)
    if right == 0:
        return values[0]
    if right == len(known):
        return values[-1]
    share = (at - known[right - 1]) / (known[right] - known[right - 1])
    return values[right - 1] + share * (values[right] - values[right - 1])


@dataclass(frozen=True)
class FrozenCosts:
    """The costs of one context bucket, as an answer takes them: they do not change.

    Args:
        known: plain calls that measured kinds take, and how well that is known.
        noise: standard deviation of a call's seconds, over their mean.
        plain_error: standard error of the seconds of a plain call, over the seconds.
        scale: factor on what calls take beyond a plain one; an answer's own finding.
    """

    known: Mapping[Kind, tuple[float, float]]
    noise: float = 0.0
    plain_error: float = 0.0
    scale: float = 1.0
    _found: dict[Kind, tuple[float, float]] = field(default_factory=dict, compare=False)

    def calls(self, kind: Kind) -> float:
        """Plain calls that a call of a kind takes."""
        return 1 + self._extra_calls_and_weight(kind)[0]

    def optimistic_calls(self, kind: Kind) -> float:
        """What a call may turn out to take, by how little is known: less than `calls`."""
        extra, weight = self._extra_calls_and_weight(kind)
        return 1 + extra * (1 - DOUBT / max(weight, UNKNOWN_WEIGHT))

    def weight(self, kind: Kind) -> float:
        """Runs that the cost of a kind rests on."""
        return self._extra_calls_and_weight(kind)[1]

    def pessimistic_calls(self, kind: Kind) -> float:
        """What a call may take after all, by the errors of the timings behind its cost."""
        extra, weight = self._extra_calls_and_weight(kind)
        run_error = MEDIAN_ERROR * self.noise / math.sqrt(RUN_CALLS * max(weight, UNKNOWN_WEIGHT))
        return (1 + extra) * (1 + CAUTION * math.hypot(run_error, self.plain_error))

    def largest_known(self, name: str) -> int:
        """The largest number of nodes that was measured; 0 where none was.

        Rows alone cost no more than with drafting, so they are known where a drafter's calls are.
        """
        names = {one for one, _ in self.known} - {BATCH} if name == ROWS else {name}
        return max((count for one, count in self.known if one in names), default=0)

    def scaled(self, factor: float) -> "FrozenCosts":
        """The same costs with another factor on what is beyond a plain call."""
        return replace(self, scale=factor, _found={})

    def _extra_calls_and_weight(self, kind: Kind) -> tuple[float, float]:
        if kind not in self._found:
            self._found[kind] = self._interpolated(kind)
        return self._found[kind]

    def _interpolated(self, kind: Kind) -> tuple[float, float]:
        """Between measured counts, what they take over the prior is interpolated.

        So one measured count moves all others of its name, and a line goes on beyond the last.
        """
        name, count = kind
        counts = sorted(n for one, n in self.known if one == name)
        prior = assumed_extra_calls(kind)
        if not counts and name == ROWS:
            # As much over the prior as what is known of a drafter's calls.
            others = sorted({one for one, _ in self.known} - {BATCH})
            if others:
                extra, _ = self._extra_calls_and_weight((others[0], count))
                drafted = assumed_extra_calls((others[0], count))
                return prior * extra / drafted, UNKNOWN_WEIGHT
        if not counts:
            return prior * self.scale, 0.0
        over = [(self.known[name, n][0] - 1) / assumed_extra_calls((name, n)) for n in counts]
        weights = [self.known[name, n][1] for n in counts]
        is_between = counts[0] <= count <= counts[-1]
        weight = interpolate(counts, weights, count) if is_between else UNKNOWN_WEIGHT
        return prior * interpolate(counts, over, count) * self.scale, weight


class CostTable:
    """What calls cost on one machine, by context bucket, and what probes may lose.

    Everything is in plain calls, so the table holds for a machine that is busy or slow.

    Attributes:
        bank: plain calls that probes may lose.
        noise: standard deviation of a call's seconds, over their mean.
        since_probe: tokens since the last probe began.
        probe_wait: tokens that must lie between two probes.
    """

    def __init__(self) -> None:
        self.bank = BANK
        self.noise = FIRST_NOISE
        self.probe_wait = PROBE_WAIT
        self.since_probe = PROBE_WAIT
        self._means: dict[int, dict[Kind, Mean]] = {}
        self._plain: dict[int, PlainTiming] = {}

    def frozen(self, context: int) -> FrozenCosts:
        """An immutable view of the costs behind `context` tokens."""
        means = self._bucket(context)
        known = {kind: (mean.value, mean.weight) for kind, mean in means.items()}
        return FrozenCosts(known, self.noise, self.plain_error(context))

    def seed(
        self,
        costs: Mapping[Kind, float],
        context: int = 0,
        plain_seconds: Sequence[float] = (),
    ) -> None:
        """Take a head start's timings; what answers have taught is worth more and stays.

        Args:
            costs: plain calls that kinds of calls take.
            context: committed tokens behind which they were timed.
            plain_seconds: of the plain calls that they were compared with.
        """
        if plain_seconds:
            self.learn_plain(context, plain_seconds)
        means = self._bucket_to_change(context)
        for kind, calls in costs.items():
            if kind not in means or means[kind].weight <= SEED_WEIGHT:
                means[kind] = Mean(max(calls, LEAST_COST), SEED_WEIGHT)

    def learn(self, kind: Kind, context: int, calls: float, is_surprise: bool = False) -> float:
        """Take what calls of a kind took in an answer, in plain calls timed beside them.

        A head start that is wrong for one count is mostly wrong for all of them, so what is not
        yet learned moves along; and so does all where a learned cost is far off, as the machine
        has changed.

        Args:
            kind: what was measured.
            context: committed tokens behind which it was.
            calls: plain calls that it took.
            is_surprise: whether the answer found its costs to be wrong.

        Returns:
            The factor by which what the kind takes beyond a plain call has changed.
        """
        means = self._bucket_to_change(context)
        before = self.frozen(context).calls(kind)
        mean = means.setdefault(kind, Mean(before, 0.0))
        off = abs(calls / before - 1)
        is_learned = mean.weight >= 1
        clamp = CLAMP if is_learned else FIRST_CLAMP
        if off > DOUBTED or is_surprise:
            mean.weight = 1.0 if is_learned else 0.0
        mean.add(calls, clamp)
        mean.value = max(mean.value, LEAST_COST)
        if not is_learned and off > clamp:
            mean.weight = SEED_WEIGHT  # still too far off to count as learned
        moved = (mean.value - 1) / (before - 1)
        has_changed = is_learned and off > CLAMP
        for (name, count), other in means.items():
            if name == kind[0] and count != kind[1] and (other.weight < 1 or has_changed):
                other.value = 1 + (other.value - 1) * moved
                other.weight = min(other.weight, SEED_WEIGHT)
        return moved

    def plain_seconds(self, context: int, is_recent: bool = False) -> float | None:
        """Seconds of a plain call; None where unknown, or not `is_recent` where that is asked."""
        timing = self._plain.get(context_bucket(context))
        if timing is None or (is_recent and not timing.calls):
            return None
        return timing.seconds

    def is_timing_due(self, context: int, error: float) -> bool:
        """Whether plain calls should be timed: they never were, long ago, or, not just now, with
        more than this error."""
        timing = self._plain.get(context_bucket(context))
        if timing is None or timing.tokens_since >= timing.wait:
            return True
        is_poor = timing.calls > 0 and self.plain_error(context) > error
        has_more = timing.last_calls < MOST_PLAIN_CALLS or timing.tokens_since >= TIMING_PAUSE
        return is_poor and has_more

    def plain_error(self, context: int, more_calls: int = 0) -> float:
        """Standard error of the seconds of a plain call, over the seconds; 0 where never timed."""
        timing = self._plain.get(context_bucket(context))
        calls = more_calls + (timing.calls if timing else 0)
        return MEDIAN_ERROR * self.noise / math.sqrt(calls) if calls else 0.0

    def learn_plain(self, context: int, seconds: Sequence[float]) -> None:
        """Take the seconds of a few plain calls in a row.

        Timings that agree are averaged; one that does not says that the machine has changed.
        """
        bucket = context_bucket(context)
        found = median(seconds)
        if len(seconds) >= 3:
            share = len(seconds) / (len(seconds) + NOISE_CALLS)
            self.noise += share * (min(stdev(seconds) / fmean(seconds), MOST_NOISE) - self.noise)
        timing = self._plain.setdefault(bucket, PlainTiming(found))
        agrees = 1 / (1 + CLAMP) < found / timing.seconds < 1 + CLAMP
        before = timing.calls if agrees else 0
        timing.calls = min(before + len(seconds), MOST_PLAIN)
        timing.last_calls = len(seconds)
        timing.seconds += (found - timing.seconds) * min(len(seconds) / timing.calls, 1.0)
        if timing.tokens_since >= timing.wait:
            timing.wait = min(2 * timing.wait, TIMING_WAIT_MOST)
        timing.tokens_since = 0

    def count_tokens(self, tokens: int, context: int) -> None:
        """Note that an answer advanced by `tokens`: the bank gains, and timings age."""
        self.bank = min(BANK_MOST, self.bank + BANK_REFILL * tokens)
        self.since_probe += tokens
        timing = self._plain.get(context_bucket(context))
        if timing is not None:
            timing.tokens_since += tokens

    def may_probe(self, is_start: bool) -> bool:
        """Whether a probe may begin; when an answer starts, a text may be of another kind."""
        return self.since_probe >= (PROBE_WAIT if is_start else self.probe_wait)

    def reset_probes(self) -> None:
        """Allow a probe at once: the last one taught something."""
        self.probe_wait = PROBE_WAIT
        self.since_probe = PROBE_WAIT

    def pay_for_probe(self, risk: float) -> None:
        """Pay for a probe, with all there is at most; the next has to wait twice as long."""
        self.bank = max(0.0, self.bank - risk)
        self.since_probe = 0
        self.probe_wait = min(2 * self.probe_wait, PROBE_WAIT_MOST)

    def _bucket(self, context: int) -> dict[Kind, Mean]:
        """The costs of a context's bucket, or else of the next shorter one that has any."""
        bucket = context_bucket(context)
        known = [one for one in self._means if one <= bucket]
        return self._means[max(known)] if known else {}

    def _bucket_to_change(self, context: int) -> dict[Kind, Mean]:
        """The costs of a context's own bucket; they start as those of the next shorter one."""
        bucket = context_bucket(context)
        if bucket not in self._means:
            inherited = self._bucket(context)
            # Another context's costs are a head start, no more.
            self._means[bucket] = {
                kind: Mean(mean.value, min(mean.weight, SEED_WEIGHT))
                for kind, mean in inherited.items()
            }
        return self._means[bucket]

    def to_dict(self) -> dict[str, Any]:
        """What is written to disk."""
        costs = [
            [bucket, name, count, mean.value, mean.weight]
            for bucket, means in self._means.items()
            for (name, count), mean in means.items()
        ]
        plain = [[bucket, one.seconds, one.tokens_since] for bucket, one in self._plain.items()]
        return {"costs": costs, "plain": plain, "bank": self.bank, "noise": self.noise}

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """The table that `to_dict` gave.

        Raises:
            ValueError: where it is none, or holds what no table would.
        """
        try:
            return cls._read(values)
        except (TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(f"no table of costs: {error}") from None

    @classmethod
    def _read(cls, values: Any) -> Self:
        table = cls()
        table.bank = _checked_number(values["bank"], 0.0, BANK_MOST)
        table.noise = _checked_number(values["noise"], 0.0, MOST_NOISE)
        if len(values["costs"]) > _MOST_ENTRIES or len(values["plain"]) > len(BUCKETS):
            raise ValueError("a table of costs has too many entries")
        for bucket, name, count, calls, weight in values["costs"]:
            if bucket not in BUCKETS or not isinstance(name, str) or type(count) is not int:
                raise ValueError(f"no kind of call: {name!r}, {count!r} behind {bucket!r} tokens")
            mean = Mean(_checked_number(calls, 1.0, 1e3), _checked_number(weight, 0.0, MOST_WEIGHT))
            table._means.setdefault(bucket, {})[name, int(_checked_number(count, 2, 4096))] = mean
        for bucket, seconds, tokens_since in values["plain"]:
            if bucket not in BUCKETS:
                raise ValueError(f"no bucket of contexts: {bucket!r}")
            age = int(_checked_number(tokens_since, 0, 1e12))
            table._plain[bucket] = PlainTiming(_checked_number(seconds, 1e-9, 1e4), age)
        return table


def _checked_number(value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"no number: {value!r}")
    if not (math.isfinite(value) and low <= value <= high):
        raise ValueError(f"{value!r} is not between {low} and {high}")
    return value
