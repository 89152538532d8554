"""The price of answers: their time if every call took as long as such a call usually does.

One measured answer has the noise of one answer. Its price is the sum over its calls of the median
seconds, in the whole run, of calls of the same kind, which shows a change of a few per cent. It
does not show what slows down all calls of a kind, so prices stand beside measured times, never
alone.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, Literal, NamedTuple

from ssmlx.policy.costs import context_bucket

from .statistics import medians_over_repeats, ratio
from .target import MLX_LM, PLAIN, STREAMS, TEXT
from .timing import TimedAnswer, TimedCall

LEAST_SAMPLES = 5  # fewest calls of a kind that give their own median
LEAST_TOKENS = 24  # length from which an answer counts as slower or not
SLOWER = (0.93, 0.88)  # relative to plain decoding: answers below these speeds are counted
# Systems that launch a bare root's call before its predecessor is read, as plain decoding does.
_LAUNCHED_AS_PLAIN = (MLX_LM, PLAIN, STREAMS, TEXT)

# Where a call stands: "entry", a bare root after which a tree is drafted; "exit", a tree after
# which nothing is; "first", a tree after the prompt's call, whose drafting is in its time; "last",
# a tree after which no call is launched; "any" are all of these. If a bare root's call is not
# launched as plain decoding's is, it can be "first" and "last" too.
Place = Literal["steady", "entry", "exit", "first", "last", "any"]


class CallKind(NamedTuple):
    """The properties of calls that take the same time, on the same weights."""

    # who drafted the tree, at an entry that of the next call, or else the kind of system; `PLAIN`
    # for a bare root that plain decoding could have too
    drafter: str
    rows: int  # that are verified; for an entry, by the next call
    bucket: int  # of contexts, see `context_bucket`
    place: Place


@dataclass(frozen=True)
class Price:
    """The expected time of an answer, by the median of each kind of call."""

    seconds: float  # of all calls, the prompt's included
    tokens: int
    calls: int  # priced calls, without the prompt's
    without_place: int  # of these, priced by the median over all places
    by_nearest_rows: int  # of these, priced by the median for another number of rows


# one system's answers: for every prompt, its repeats
TimedAnswers = Sequence[Sequence[TimedAnswer]]
# by system: for every prompt, the price of each repeat
Prices = Mapping[str, Sequence[Sequence[Price]]]


class KindMedian(NamedTuple):
    """Median seconds of a kind of call, and the calls that it comes from."""

    seconds: float
    # the kind itself; the nearest number of rows; all places
    taken_from: Literal["own", "rows", "place"]


@dataclass
class CallSeconds:
    """Seconds of a run's calls, by kind; all calls are added before the first price."""

    _seconds: dict[CallKind, list[float]] = field(default_factory=lambda: defaultdict(list))
    _medians: dict[CallKind, KindMedian] = field(default_factory=dict)

    def add(self, kind: CallKind, seconds: float) -> None:
        """Add a call, which also counts for the place "any"."""
        self._seconds[kind].append(seconds)
        self._seconds[kind._replace(place="any")].append(seconds)

    def median_of(self, kind: CallKind) -> KindMedian:
        """The median of a kind; it is cached, and calls that are added later do not change it."""
        if kind not in self._medians:
            self._medians[kind] = self._find_median(kind)
        return self._medians[kind]

    def _find_median(self, kind: CallKind) -> KindMedian:
        """Find the median; the most similar kind replaces one with too few calls."""
        own = self._seconds[kind]
        if len(own) >= LEAST_SAMPLES:
            return KindMedian(median(own), "own")
        # The place matters more than the rows: a last call only drafts.
        nearest = None if kind.place == "steady" else self._samples_of_nearest_rows(kind)
        if nearest is not None:
            return KindMedian(median(nearest), "rows")
        anywhere = kind._replace(place="any")
        own = self._seconds[anywhere]
        if len(own) >= LEAST_SAMPLES:
            return KindMedian(median(own), "place")
        nearest = self._samples_of_nearest_rows(anywhere)
        if nearest is not None:
            return KindMedian(median(nearest), "rows")
        return KindMedian(median(own), "place")

    def _samples_of_nearest_rows(self, kind: CallKind) -> list[float] | None:
        """The samples of the kind with enough of them that differs only, and least, in rows."""
        enough = {
            one.rows: seconds
            for one, seconds in self._seconds.items()
            if one._replace(rows=kind.rows) == kind and len(seconds) >= LEAST_SAMPLES
        }
        nearest = min(enough, key=lambda rows: abs(rows - kind.rows), default=None)
        return None if nearest is None else enough[nearest]


def kinds_of_calls(
    system_kind: str,  # decides how calls are launched
    calls: Sequence[TimedCall],  # of one answer, in order, without the prompt's
) -> Iterator[CallKind]:
    """Classify calls by drafter, rows, bucket of contexts and place, which neighbours decide."""
    is_pipelined = system_kind in _LAUNCHED_AS_PLAIN
    rows = [call.rows for call in calls]
    for index, (call, following) in enumerate(pairwise([*calls, None])):
        assert call is not None
        next_rows = following.rows if following else 0
        is_bare = call.rows == 1 and is_pipelined
        place: Place = "steady"
        if is_bare:
            place = "entry" if next_rows > 1 else "steady"
        elif following is None:
            place = "last"
        elif index == 0:
            place = "first"
        elif next_rows == 1 and call.rows > 1:
            place = "exit"
        elif call.rows == 1 and next_rows > 1:
            place = "entry"
        is_plain = is_bare and place == "steady" and system_kind != MLX_LM
        tree = following if place == "entry" else call
        drafter = PLAIN if is_plain else (tree and tree.drafter) or system_kind
        # If a backend computes during the launch, the entry includes the tree's time.
        shown = next_rows if place == "entry" else rows[index]
        yield CallKind(drafter, shown, context_bucket(call.context), place)


def price_answers(
    system_kinds: Mapping[str, str],  # by the system's name
    answers: Mapping[str, TimedAnswers],
) -> Prices:
    """The prices, by system, prompt and repeat."""
    seconds = CallSeconds()
    for name, kind in system_kinds.items():
        for repeats in answers[name]:
            for answer in repeats:
                kinds = kinds_of_calls(kind, answer.calls)
                for call_kind, call in zip(kinds, answer.calls, strict=True):
                    seconds.add(call_kind, call.seconds)
    prompts = _median_prompt_seconds(system_kinds, answers)
    return {
        name: [
            [
                _price_answer(kind, answer, prompt[_prompt_timing_group(kind)], seconds)
                for answer in repeats
            ]
            for prompt, repeats in zip(prompts, answers[name], strict=True)
        ]
        for name, kind in system_kinds.items()
    }


def _prompt_timing_group(system_kind: str) -> str:
    """Whose prompt times a system shares: plain decoding's if it launches calls as that does."""
    return PLAIN if system_kind in _LAUNCHED_AS_PLAIN else system_kind


def _median_prompt_seconds(
    system_kinds: Mapping[str, str], answers: Mapping[str, TimedAnswers]
) -> list[dict[str, float]]:
    """Median seconds by prompt and `_prompt_timing_group`."""
    found = []
    for index in range(len(answers[next(iter(system_kinds))])):
        taken: dict[str, list[float]] = defaultdict(list)
        for name, kind in system_kinds.items():
            own = [answer.prefill_seconds for answer in answers[name][index]]
            taken[_prompt_timing_group(kind)] += own
        found.append({name: median(own) for name, own in taken.items()})
    return found


def _price_answer(
    system_kind: str, answer: TimedAnswer, prompt_seconds: float, seconds: CallSeconds
) -> Price:
    found = [seconds.median_of(kind) for kind in kinds_of_calls(system_kind, answer.calls)]
    how = Counter(one.taken_from for one in found)
    return Price(
        prompt_seconds + sum(one.seconds for one in found),
        len(answer.tokens),
        len(found),
        how["place"],
        how["rows"],
    )


def cheapest_system(prices: Prices, names: Sequence[str]) -> str | None:
    """The system with the least sum of prices; a prompt's price is the median of its repeats."""
    return min(
        names, key=lambda name: sum(medians_over_repeats(prices[name], _seconds_of)), default=None
    )


def price_figures(name: str, prices: Prices, best_tree_system: str | None) -> dict[str, Any]:
    """Figures as JSON values; ratios above 1 mean that the system is cheaper.

    "over_best" is over plain decoding or the best fixed tree, whichever is cheaper in all.
    "answers" counts those of `LEAST_TOKENS` tokens or more, in all repeats; "slower" those of them
    below each speed of `SLOWER`; "worst" is the slowest one's speed. The rest counts calls of all
    answers, and those priced by other kinds'.
    """
    own = medians_over_repeats(prices[name], _seconds_of)
    plain = medians_over_repeats(prices[PLAIN], _seconds_of)
    trees = (
        None
        if best_tree_system is None
        else medians_over_repeats(prices[best_tree_system], _seconds_of)
    )
    best = plain if trees is None or sum(plain) < sum(trees) else trees
    answers = [one for repeats in prices[name] for one in repeats]
    speeds = [
        base / one.seconds
        for base, repeats in zip(plain, prices[name], strict=True)
        for one in repeats
        if one.tokens >= LEAST_TOKENS
    ]
    return {
        "over_plain": asdict(ratio(plain, own)),
        "over_best_tree": None if trees is None else asdict(ratio(trees, own)),
        "over_best": asdict(ratio(best, own)),
        "least_tokens": LEAST_TOKENS,
        "answers": len(speeds),
        "slower": {str(limit): sum(speed < limit for speed in speeds) for limit in SLOWER},
        "worst": min(speeds, default=None),
        "calls": sum(one.calls for one in answers),
        "without_place": sum(one.without_place for one in answers),
        "by_nearest_rows": sum(one.by_nearest_rows for one in answers),
    }


def _seconds_of(price: Price) -> float:
    return price.seconds
