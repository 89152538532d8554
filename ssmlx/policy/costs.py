"""Costs of target calls, in plain calls: one table for a machine, a geometry, a dtype.

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
"""The key of a cost: (a drafter's name or `ROWS`, nodes), or (`BATCH`, texts)."""
BATCH = "batch"
ROWS = "rows"

# Values without another reason were chosen by replaying recorded answers: see `tests.replayed`.

# Weights say how well a cost is known, in runs:
#     0                   nothing of its name was measured: `assumed_extra_calls`
#     UNKNOWN_WEIGHT 0.3  beyond the measured numbers of nodes; below MIN_TIMED_WEIGHT 0.4 in
#                         `controller`, so it counts as never timed
#     SEED_WEIGHT 0.5     a head start, another context's cost, or one that turned out wrong
#     1                   learned from one run; averages of more, up to MAX_WEIGHT 8

BUCKETS = (0, 256, 1024, 3072)
"""Least committed tokens of each context bucket: attention over a longer context changes the ratios
of costs."""
DRAFT_COST = 0.3
ROW_COST = 0.1
"""Plain calls that a drafting pass, and each row beyond the first, take before any was measured.
Measured calls of 2 to 16 nodes start at 1.3 to 1.7 and gain 0.03 (CPU, float32) to 0.2 (Apple GPUs,
4 bits) a row: this is between, so that the first shape tried is one of few nodes."""
CAUTION = 1.2
"""Standard errors that are added to a cost to bound an answer's loss."""
FIRST_NOISE = 0.08
"""Standard deviation of a call's seconds over their mean, before any was measured: a quiet
machine's."""
MAX_NOISE = 0.3
"""The same at most, so that a few disturbed calls do not make every cost look uncertain."""
NOISE_WEIGHT = 12
"""Plain calls that the known noise counts as when new ones are averaged in."""
MEDIAN_ERROR = 1.25
"""Standard error of a median over that of a mean, of normal noise: sqrt(pi / 2)."""
TYPICAL_RUN_CALLS = 5
"""Calls of a typical run: as many as a weight of 1 means in computed errors."""
LEAST_COST = 1.01
"""Plain calls that a drafting call takes at least; a timing that says less is noise."""
ENTRY = 0.35
"""Plain calls that the first drafting pass after a plain call takes beside steady drafting calls;
a call that verifies and drafts nothing goes without it."""
SEED_WEIGHT = 0.5
"""Runs that a head start's timing counts as. Below 1, so that it does not count as learned: it was
timed on one text, before anything was answered."""
UNKNOWN_WEIGHT = 0.3
"""Runs that a cost beyond the measured numbers of nodes counts as: less than a head start."""
OPTIMISM = 0.15
"""Share of what a call takes beyond a plain one that a weight of 1 may be wrong by, to the good."""
MAX_WEIGHT = 8.0
"""Runs that the past counts as at most, so that a table follows its machine."""
DISTRUST_ERROR = 0.3
"""Relative error of a cost from which on its past counts as one run, or none: the machine is
another one now."""
FIRST_CLAMP = 0.5
CLAMP = 0.25
"""Relative change of a cost that one answer may cause at most: of one that is not yet learned, and
of one that is. A single disturbed answer does not overturn a table."""
FIRST_BANK = 3.0
"""Plain calls that probes may risk on a new machine, by estimated costs."""
BANK_MOST = 4.0
"""The same at most, however many tokens were written."""
BANK_REFILL = 0.012
"""Plain calls that the bank gains with each token: probes take about 1.2 % of all time. A full bank
also pays for a probe that risks more than it holds (`Controller._choose_probe`)."""
PROBE_WAIT = 64
PROBE_WAIT_MOST = 512
"""Tokens between two probes: at first, and at most after doubling with each that taught nothing."""
TIMING_WAIT = 1024
TIMING_WAIT_MOST = 4096
"""Tokens after which plain calls are timed again: at first, and at most after doubling."""
MAX_PLAIN_CALLS = 12
"""Plain calls that an answer times in a row at most: drafting waits for them."""
TIMING_PAUSE = 96
"""Tokens after such a timing before the next, however poor it is: on a busy machine, whose timings
do not agree, short answers would be timed and nothing else."""
MAX_AVERAGED_PLAIN_CALLS = 128
"""Plain calls that a timing averages at most, so that it follows its machine."""
_MOST_ENTRIES = 1024
"""Costs that a file may hold: more is no table of ours."""


@dataclass
class Mean:
    """A running mean of a cost, in which the past counts as `MAX_WEIGHT` runs at most."""

    value: float  # plain calls that a call takes
    weight: float  # runs that this rests on

    def average_in(self, value: float, most_relative_change: float) -> None:
        """Average in a run's `value`, which may change the mean by so much."""
        low = self.value * (1 - most_relative_change)
        high = self.value * (1 + most_relative_change)
        self.weight = min(self.weight, MAX_WEIGHT - 1) + 1
        self.value += (min(max(value, low), high) - self.value) / self.weight


@dataclass
class PlainTiming:
    """The seconds of plain calls in one context bucket."""

    seconds: float  # of one call
    tokens_since: int = 0  # written since the last timing
    wait: int = TIMING_WAIT  # tokens after which plain calls are timed again
    calls: int = 0  # timed in this process that agree; 0 if `seconds` is from an earlier one
    last_calls: int = 0  # calls of the last timing


def context_bucket(context: int) -> int:
    """The bucket of a context of so many tokens, as the least number of tokens in it."""
    return BUCKETS[bisect_right(BUCKETS, max(context, 0)) - 1]


def assumed_extra_calls(kind: Kind) -> float:
    """Plain calls that a call of a kind is assumed to take beyond 1 before any was measured."""
    name, rows = kind
    return ROW_COST * (rows - 1) + (0.0 if name in (BATCH, ROWS) else DRAFT_COST)


def interpolate(
    known: Sequence[float],  # ascending, one number or more
    values: Sequence[float],
    at: float,
) -> float:
    """The value at `at` on straight lines through the points (known, values); beyond, the end's."""
    right = bisect_right(known, at)
    if right == 0:
        return values[0]
    if right == len(known):
        return values[-1]
    share = (at - known[right - 1]) / (known[right] - known[right - 1])
    return values[right - 1] + share * (values[right] - values[right - 1])


@dataclass(frozen=True)
class FrozenCosts:
    """The costs of one context bucket, as an answer takes them: they do not change."""

    # plain calls of each measured kind, and the runs that this rests on
    known: Mapping[Kind, tuple[float, float]]
    noise: float = 0.0  # standard deviation of a call's seconds, over their mean
    plain_error: float = 0.0  # standard error of a plain call's seconds, over the seconds
    scale: float = 1.0  # factor on what calls take beyond a plain one; an answer's own finding
    _found: dict[Kind, tuple[float, float]] = field(default_factory=dict, compare=False)

    def calls(self, kind: Kind) -> float:
        """Plain calls that a call of a kind should take: measured, interpolated or assumed."""
        return 1 + self._extra(kind)[0]

    def optimistic_calls(self, kind: Kind) -> float:
        """Plain calls that a call may take at best: the fewer, the less is known."""
        extra, weight = self._extra(kind)
        return 1 + extra * (1 - OPTIMISM / max(weight, UNKNOWN_WEIGHT))

    def weight(self, kind: Kind) -> float:
        """Runs that the cost of a kind rests on; 0 if nothing like it was measured."""
        return self._extra(kind)[1]

    def pessimistic_calls(self, kind: Kind) -> float:
        """Plain calls that a call may take at worst: `CAUTION` standard errors more."""
        extra, weight = self._extra(kind)
        run_error = (
            MEDIAN_ERROR * self.noise / math.sqrt(TYPICAL_RUN_CALLS * max(weight, UNKNOWN_WEIGHT))
        )
        return (1 + extra) * (1 + CAUTION * math.hypot(run_error, self.plain_error))

    def largest_known(self, name: str) -> int:
        """The largest number of nodes that was measured under a name; 0 if none was."""
        # Rows alone cost no more than with drafting.
        names = {one for one, _ in self.known} - {BATCH} if name == ROWS else {name}
        return max((count for one, count in self.known if one in names), default=0)

    def scaled(self, factor: float) -> "FrozenCosts":
        return replace(self, scale=factor, _found={})

    def _extra(self, kind: Kind) -> tuple[float, float]:
        """Plain calls beyond 1 of a kind, and runs that they rest on; computed once."""
        if kind not in self._found:
            self._found[kind] = self._interpolate_extra(kind)
        return self._found[kind]

    def _interpolate_extra(self, kind: Kind) -> tuple[float, float]:
        name, count = kind
        counts = sorted(n for one, n in self.known if one == name)
        prior = assumed_extra_calls(kind)
        if not counts and name == ROWS:
            # As much over the prior as what is known of a drafter's calls.
            others = sorted({one for one, _ in self.known} - {BATCH})
            if others:
                extra, _ = self._extra((others[0], count))
                drafted = assumed_extra_calls((others[0], count))
                return prior * extra / drafted, UNKNOWN_WEIGHT
        if not counts:
            return prior * self.scale, 0.0
        # Measured over assumed is interpolated, and kept beyond the ends: one measured count moves
        # all others of its name.
        over = [(self.known[name, n][0] - 1) / assumed_extra_calls((name, n)) for n in counts]
        weights = [self.known[name, n][1] for n in counts]
        is_between = counts[0] <= count <= counts[-1]
        weight = interpolate(counts, weights, count) if is_between else UNKNOWN_WEIGHT
        return prior * interpolate(counts, over, count) * self.scale, weight


class CostTable:
    """Costs of calls on one machine, by context bucket, and the bank that pays for probes.

    Everything is in plain calls, so the table holds for a machine that is busy or slow.
    """

    def __init__(self) -> None:
        # Plain calls that probes may lose.
        self.bank = FIRST_BANK
        # Standard deviation of a call's seconds, over their mean.
        self.noise = FIRST_NOISE
        # Tokens that must lie between two probes; the first is allowed at once.
        self.probe_wait = PROBE_WAIT
        self.since_probe = PROBE_WAIT
        self._means: dict[int, dict[Kind, Mean]] = {}
        self._plain: dict[int, PlainTiming] = {}

    def frozen(self, context: int) -> FrozenCosts:
        """A copy of the costs of a context's bucket, or of the longest shorter one known."""
        means = self._nearest(context)
        known = {kind: (mean.value, mean.weight) for kind, mean in means.items()}
        return FrozenCosts(known, self.noise, self.plain_error(context))

    def set_head_start(
        self,
        costs: Mapping[Kind, float],  # plain calls that kinds of calls take
        context: int = 0,  # committed tokens after which they were timed
        plain_seconds: Sequence[float] = (),  # of the plain calls that they were compared with
    ) -> None:
        """Set costs that were timed before any answer; what answers have taught stays."""
        if plain_seconds:
            self.learn_plain_seconds(context, plain_seconds)
        means = self._own_bucket(context)
        for kind, calls in costs.items():
            if kind not in means or means[kind].weight <= SEED_WEIGHT:
                means[kind] = Mean(max(calls, LEAST_COST), SEED_WEIGHT)

    def learn(
        self,
        kind: Kind,
        context: int,  # committed tokens; only their bucket is changed
        calls: float,  # plain calls that it took
        is_surprise: bool = False,  # whether the answer found its costs to be wrong
    ) -> float:
        """Average in what calls of a kind took in an answer, as one run.

        Returns the factor by which what the kind takes beyond a plain call has changed.
        """
        means = self._own_bucket(context)
        before = self.frozen(context).calls(kind)
        mean = means.setdefault(kind, Mean(before, 0.0))
        off = abs(calls / before - 1)
        is_learned = mean.weight >= 1
        most_relative_change = CLAMP if is_learned else FIRST_CLAMP
        # The machine is another one now: the past counts as one run, or none.
        if off > DISTRUST_ERROR or is_surprise:
            mean.weight = 1.0 if is_learned else 0.0
        mean.average_in(calls, most_relative_change)
        mean.value = max(mean.value, LEAST_COST)
        if not is_learned and off > most_relative_change:
            mean.weight = SEED_WEIGHT  # still too far off to count as learned
        moved = (mean.value - 1) / (before - 1)
        # A head start that is wrong for one node count is mostly wrong for all; and if a learned
        # cost is this far off, so are the others of its name.
        has_changed = is_learned and off > CLAMP
        for (name, count), other in means.items():
            if name == kind[0] and count != kind[1] and (other.weight < 1 or has_changed):
                other.value = 1 + (other.value - 1) * moved
                other.weight = min(other.weight, SEED_WEIGHT)
        return moved

    def plain_seconds(self, context: int, only_of_this_process: bool = False) -> float | None:
        """Seconds of a plain call in a context's bucket, if it was timed."""
        timing = self._plain.get(context_bucket(context))
        if timing is None or (only_of_this_process and not timing.calls):
            return None
        return timing.seconds

    def is_timing_due(self, context: int, tolerable_error: float) -> bool:
        """Whether an answer should time plain calls: never timed, long ago, or too uncertain."""
        timing = self._plain.get(context_bucket(context))
        if timing is None or timing.tokens_since >= timing.wait:
            return True
        is_poor = timing.calls > 0 and self.plain_error(context) > tolerable_error
        has_more = timing.last_calls < MAX_PLAIN_CALLS or timing.tokens_since >= TIMING_PAUSE
        return is_poor and has_more

    def plain_error(self, context: int, more_calls: int = 0) -> float:
        """Relative standard error of a plain call's seconds, as if `more_calls` were timed too."""
        timing = self._plain.get(context_bucket(context))
        calls = more_calls + (timing.calls if timing else 0)
        return MEDIAN_ERROR * self.noise / math.sqrt(calls) if calls else 0.0

    def learn_plain_seconds(self, context: int, seconds: Sequence[float]) -> None:
        """Average in the median of the seconds of some plain calls in a row."""
        bucket = context_bucket(context)
        found = median(seconds)
        if len(seconds) >= 3:
            share = len(seconds) / (len(seconds) + NOISE_WEIGHT)
            self.noise += share * (min(stdev(seconds) / fmean(seconds), MAX_NOISE) - self.noise)
        timing = self._plain.setdefault(bucket, PlainTiming(found))
        agrees = 1 / (1 + CLAMP) < found / timing.seconds < 1 + CLAMP
        # One that does not agree replaces the timing: the machine has changed.
        before = timing.calls if agrees else 0
        timing.calls = min(before + len(seconds), MAX_AVERAGED_PLAIN_CALLS)
        timing.last_calls = len(seconds)
        timing.seconds += (found - timing.seconds) * min(len(seconds) / timing.calls, 1.0)
        if timing.tokens_since >= timing.wait:
            timing.wait = min(2 * timing.wait, TIMING_WAIT_MOST)
        timing.tokens_since = 0

    def note_tokens(self, tokens: int, context: int) -> None:
        """Note that an answer after `context` tokens advanced by `tokens`."""
        self.bank = min(BANK_MOST, self.bank + BANK_REFILL * tokens)
        self.since_probe += tokens
        timing = self._plain.get(context_bucket(context))
        if timing is not None:
            timing.tokens_since += tokens

    def may_probe(self, is_start: bool) -> bool:
        """Whether enough tokens have passed since the last probe."""
        # The text of another answer may be of another kind: the shortest wait is enough.
        return self.since_probe >= (PROBE_WAIT if is_start else self.probe_wait)

    def reset_probes(self) -> None:
        """Allow a probe at once: the last one taught something."""
        self.probe_wait = PROBE_WAIT
        self.since_probe = PROBE_WAIT

    def pay_for_probe(self, risk: float) -> None:
        """Take at most `risk` plain calls from the bank; the next probe waits twice as long."""
        self.bank = max(0.0, self.bank - risk)
        self.since_probe = 0
        self.probe_wait = min(2 * self.probe_wait, PROBE_WAIT_MOST)

    def _nearest(self, context: int) -> dict[Kind, Mean]:
        """The costs of the bucket, or of the longest shorter one with any. Not to be changed."""
        bucket = context_bucket(context)
        known = [one for one in self._means if one <= bucket]
        return self._means[max(known)] if known else {}

    def _own_bucket(self, context: int) -> dict[Kind, Mean]:
        """The costs of a context's own bucket, to be changed by the caller.

        A new bucket begins with the nearest one's, at a weight of at most `SEED_WEIGHT`.
        """
        bucket = context_bucket(context)
        if bucket not in self._means:
            inherited = self._nearest(context)
            self._means[bucket] = {
                kind: Mean(mean.value, min(mean.weight, SEED_WEIGHT))
                for kind, mean in inherited.items()
            }
        return self._means[bucket]

    def to_dict(self) -> dict[str, Any]:
        """The table as JSON, without waits and counts of timed calls."""
        costs = [
            [bucket, name, count, mean.value, mean.weight]
            for bucket, means in self._means.items()
            for (name, count), mean in means.items()
        ]
        plain = [[bucket, one.seconds, one.tokens_since] for bucket, one in self._plain.items()]
        return {"costs": costs, "plain": plain, "bank": self.bank, "noise": self.noise}

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """A table from what `to_dict` gave; ValueError for anything else."""
        try:
            return cls._parse(values)
        except (TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(f"invalid table of costs: {error}") from None

    @classmethod
    def _parse(cls, values: Any) -> Self:
        table = cls()
        table.bank = _require_between(values["bank"], 0.0, BANK_MOST)
        table.noise = _require_between(values["noise"], 0.0, MAX_NOISE)
        if len(values["costs"]) > _MOST_ENTRIES or len(values["plain"]) > len(BUCKETS):
            raise ValueError("a table of costs has too many entries")
        for bucket, name, count, calls, weight in values["costs"]:
            if bucket not in BUCKETS or not isinstance(name, str) or type(count) is not int:
                raise ValueError(
                    f"invalid kind of call: {name!r}, {count!r} after {bucket!r} tokens"
                )
            mean = Mean(
                _require_between(calls, 1.0, 1e3),
                _require_between(weight, 0.0, MAX_WEIGHT),
            )
            table._means.setdefault(bucket, {})[name, int(_require_between(count, 2, 4096))] = mean
        for bucket, seconds, tokens_since in values["plain"]:
            if bucket not in BUCKETS:
                raise ValueError(f"unknown context bucket: {bucket!r}")
            age = int(_require_between(tokens_since, 0, 1e12))
            table._plain[bucket] = PlainTiming(_require_between(seconds, 1e-9, 1e4), age)
        return table


def _require_between(value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"not a number: {value!r}")
    if not (math.isfinite(value) and low <= value <= high):
        raise ValueError(f"{value!r} is not between {low} and {high}")
    return value
