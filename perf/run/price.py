"""What answers would take if every call took as long as such a call mostly does.

A watch on one answer has the noise of one answer. Its price is the sum over its calls of the
median seconds, in the whole run, of calls of the same kind: a change of a few per cent that one
watch cannot see, a price can. It sees nothing that moves all calls of a kind, so prices stand
beside watched times, never alone.
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

LEAST_SAMPLES = 5
"""Calls of a kind for a median of their own."""
LEAST_TOKENS = 24
"""Tokens of an answer from which on it counts among those that may not be slower."""
SLOWER = (0.93, 0.88)
"""Speeds over plain decoding's below which answers are counted."""
_LAUNCHED_AS_PLAIN = (MLX_LM, PLAIN, STREAMS, TEXT)
"""Systems that launch a bare root's call before its predecessor is read, as plain decoding does."""

Place = Literal["steady", "entry", "exit", "first", "last", "any"]
"""Where a call stands: "entry", a bare root behind which a tree is drafted; "exit", a tree behind
which nothing is; "first", a tree behind the prompt's call, whose drafting is in its time; "last",
a tree behind which no call is launched; "any" are all of these. Where a bare root's call is not
launched as plain decoding's is, it can be "first" and "last" too."""


class CallKind(NamedTuple):
    """What calls must share to take the same time, on the same weights: drafter, rows, context and
    place.
    """

    # who drafted the tree, at an entry that of the next call, or else the kind of system; `PLAIN`
    # for a bare root that plain decoding could have too
    drafter: str
    rows: int  # that are verified; at an entry, by the next call
    bucket: int  # of contexts, see `context_bucket`
    place: Place


@dataclass(frozen=True)
class Price:
    """The time that an answer should take, by the median of each kind of call.

    Attributes:
        seconds: of all calls, the prompt's included.
        tokens: of the answer.
        calls: priced calls, without the prompt's.
        without_place: of these, how many took the median over all places.
        by_nearest_rows: of these, how many took the median of another number of rows.
    """

    seconds: float
    tokens: int
    calls: int
    without_place: int
    by_nearest_rows: int


TimedAnswers = Sequence[Sequence[TimedAnswer]]
"""One system's answers: for every prompt, its repeats."""
Prices = Mapping[str, Sequence[Sequence[Price]]]
"""By system: for every prompt, the price of each repeat of its answer."""


class KindMedian(NamedTuple):
    """Median seconds of a kind of call, and whose calls they are of.

    Attributes:
        seconds: the median.
        taken_from: "own", of the kind itself; "rows", of the nearest number of rows, at the same
            place or at all; "place", of all places and the same rows.
    """

    seconds: float
    taken_from: Literal["own", "rows", "place"]


@dataclass
class CallSeconds:
    """Seconds of the calls of a run, by kind. All calls are added before the first price is asked
    for.
    """

    _seconds: dict[CallKind, list[float]] = field(default_factory=lambda: defaultdict(list))
    _medians: dict[CallKind, KindMedian] = field(default_factory=dict)

    def add(self, kind: CallKind, seconds: float) -> None:
        """Note a call of a kind; it also counts for the place "any"."""
        self._seconds[kind].append(seconds)
        self._seconds[kind._replace(place="any")].append(seconds)

    def median_of(self, kind: CallKind) -> KindMedian:
        """Return the median seconds of a kind of call, of which one at least must have been added.

        With fewer than `LEAST_SAMPLES` calls of the kind, the first of these that has as many
        stands for it: the nearest number of rows at the same place, unless that is "steady"; the
        same rows at all places; the nearest number of rows at all places. Where none has, the few
        of the same rows at all places do. What was found once is kept: calls that are added later
        do not change it.
        """
        if kind not in self._medians:
            self._medians[kind] = self._find_median(kind)
        return self._medians[kind]

    def _find_median(self, kind: CallKind) -> KindMedian:
        """Find what `median_of` returns for a kind, without keeping it."""
        own = self._seconds[kind]
        if len(own) >= LEAST_SAMPLES:
            return KindMedian(median(own), "own")
        # The place decides more than the rows do: a last call is a draft alone.
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
        """Return the samples of the kind that differs in rows alone, and least.

        Only kinds of at least `LEAST_SAMPLES` samples count; None where there is none.
        """
        enough = {
            one.rows: seconds
            for one, seconds in self._seconds.items()
            if one._replace(rows=kind.rows) == kind and len(seconds) >= LEAST_SAMPLES
        }
        nearest = min(enough, key=lambda rows: abs(rows - kind.rows), default=None)
        return None if nearest is None else enough[nearest]


def kinds_of_calls(system_kind: str, calls: Sequence[TimedCall]) -> Iterator[CallKind]:
    """Yield the kind of each call of an answer: its drafter, rows, bucket of contexts and place,
    which the calls before and behind it decide.

    Args:
        system_kind: of the system that answered, which decides how calls are launched. A bare
            root's call behind which no tree is drafted counts as plain decoding's where the system
            launches it alike; mlx-lm's counts as its own.
        calls: of one answer, in order, without the prompt's.
    """
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
        # A backend that computes while a call is launched has the tree's time in the entry.
        shown = next_rows if place == "entry" else rows[index]
        yield CallKind(drafter, shown, context_bucket(call.context), place)


def price_answers(system_kinds: Mapping[str, str], answers: Mapping[str, TimedAnswers]) -> Prices:
    """Return the price of every answer of a run, by system, prompt and repeat.

    Args:
        system_kinds: the kind of each system that takes part, by its name.
        answers: each system's, by its name.
    """
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
    """Return the name under which a system's calls for prompts are timed together.

    Systems that launch calls as plain decoding does share `PLAIN`; the others have their own.
    """
    return PLAIN if system_kind in _LAUNCHED_AS_PLAIN else system_kind


def _median_prompt_seconds(
    system_kinds: Mapping[str, str], answers: Mapping[str, TimedAnswers]
) -> list[dict[str, float]]:
    """Return, for each prompt, the median seconds until the first token, by the name of
    `_prompt_timing_group`.
    """
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
    """Price an answer: the seconds of the prompt and the median seconds of each of its calls.

    A call takes the median of its kind, or of another where there are too few of it, see
    `CallSeconds.median_of`; the price counts how many took another's.

    Args:
        system_kind: of the system, see `kinds_of_calls`.
        answer: its calls are priced.
        prompt_seconds: of the prompt's call.
        seconds: of all calls of the run.
    """
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
    """Return the system among `names` whose answers have the lowest sum of prices; None where
    `names` is empty.

    Args:
        prices: of each system, by prompt and repeat; a prompt's is the median of its repeats.
        names: of systems.
    """
    return min(
        names, key=lambda name: sum(medians_over_repeats(prices[name], _seconds_of)), default=None
    )


def price_ratios_and_slow_answers(
    name: str, prices: Prices, best_tree_system: str | None
) -> dict[str, Any]:
    """Return how a system's prices compare with plain decoding's and the best fixed tree's, as JSON
    values.

    Ratios above 1 mean that the system is cheaper; "over_best" is over plain decoding or the best
    fixed tree, whichever is cheaper in all. "answers" counts those of `LEAST_TOKENS` tokens or
    more, in all repeats; "slower" those of them below each speed of `SLOWER` over plain decoding's;
    "worst" is the slowest of them's speed, or None. The rest counts calls of all answers, and those
    priced by other kinds'.

    Args:
        name: the system.
        prices: of each system, by prompt and repeat.
        best_tree_system: name of the system that drafts the best fixed tree; None where none took
            part.
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
