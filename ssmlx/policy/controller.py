"""The controller: what each call of one answer drafts.

It weighs what drafters offer (tokens a call should bring) against what calls cost, both in plain
calls, and drafts the shape that advances fastest, or nothing if plain decoding does. How far an
answer may fall behind plain decoding is limited by estimated costs, and probes of other shapes are
paid from a bank (as a conservative bandit: Wu et al., 2016). See `CostTable` for costs, and
`AnswerAcceptance` for what is accepted. An answer's costs are frozen between three events: its text
enters another context bucket, a size is timed for the first time, calls are far off their cost.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from ..decoding.draft_shape import CallRecord, DraftShape
from .acceptance import AcceptancePrior, AnswerAcceptance
from .costs import BANK_MOST, ENTRY, MAX_PLAIN_CALLS, CostTable, Kind, context_bucket
from .offers import Offer, OfferSource

# Speeds are tokens over plain calls, so that plain decoding has the speed 1. Values without another
# reason were chosen by replaying recorded answers: see `tests.replayed`.

FIRST_NODES = 4
"""Nodes that a draft may have before any drafting call was timed; later, twice the largest timed
number. Four nodes pay on most machines, and lose little on others."""

ENTER_SPEED = 1.02
"""Speed above which drafting begins: a gain below 2 % is within the error of the costs."""
LEAVE_SPEED = 0.9
"""Speed below which drafting ends. Lower than `ENTER_SPEED`: a text that gets harder for a few
tokens loses less so than by beginning again; the loss in all is bounded below."""
STAY_BONUS = 1.03
"""Factor on the present shape's speed: another shape is another kernel to compile, and ends a run
of calls that teaches a cost."""

MAX_BEHIND = 4.0
"""Plain calls that an answer may fall behind plain decoding, were the next call to bring one token:
what a short answer may lose."""
MAX_BEHIND_PER_TOKEN = 0.07
"""The same for each token of the answer, if that is more: a long answer has at least about 0.93 of
plain decoding's speed."""
CREDIT_CALLS = 4.0
"""Calls whose expected gain is added to what the answer may be behind: if drafting promises
much, a few bad calls do not end it."""

MIN_RUN_CALLS = 3
"""Timed calls of one shape in a row from which its cost is learned: the fewest whose median leaves
out one that was disturbed."""
PROBE_CALLS = MIN_RUN_CALLS + 1
"""Calls of a probe: each verifies what the one before it drafted, so the first is not timed."""
MAX_BEHIND_FOR_PROBE = 1.0
"""Plain calls that an answer may be behind when a probe begins: an answer that is losing does not
probe."""
MIN_PROBE_GAIN = 1.08
"""Factor on the speed of the best known shape that another one has to promise for a probe; the
noise of a call's seconds is about 8 %."""
MIN_TIMED_WEIGHT = 0.4
"""Weight of a cost below which its size counts as never timed, see "Weights" in `costs`."""
INFORMATIVE_CHANGE = 0.1
"""Relative change of a cost from which on another probe may begin at once."""

SURPRISING_ERROR = 0.18
"""Relative error of a call's cost that counts as a surprise: over twice the usual noise of 8 %, and
below what a machine that throttles 1.6 times causes, a fourth to a third."""
SURPRISING_CALLS = 3
"""Surprises in a row, all to one side, that make the answer rescale its costs: noise of 8 % does
not do that three times."""
RESCALING_CALLS = 4
"""Latest calls whose median error gives the scale: few, to follow a machine quickly."""
MAX_SCALE = 2.5
"""Greatest factor, and the least as 1 / 2.5, on what calls take beyond a plain one."""

MIN_PLAIN_CALLS = 3
"""Plain calls that an answer times in a row at least: their median leaves out a disturbed one."""
PLAIN_ERROR = 0.03
"""Relative standard error of the seconds of a plain call that is always good enough."""
PLAIN_ERROR_OF_GAIN = 0.15
"""The same, as a share of what drafting gains: if it gains 60 %, an error of 9 % seldom
changes what is best."""
KEPT_PLAIN_CALLS = 64
"""Plain calls of an answer whose seconds are kept, the latest."""
PLAIN_FRESH_TOKENS = 64
"""Tokens for which an answer's own timing of plain calls stays comparable with its other calls."""
HOST_WAIT = 0.1
"""Plain calls that waiting for a call's tokens takes if the next call could have been under way:
the device idles while the host looks up, drafts and launches."""


class ExpectedCall(NamedTuple):
    """The tokens that a call should bring, and the plain calls that it should take."""

    tokens: float  # that the answer should advance by
    plain_calls: float  # that it should take

    @property
    def speed(self) -> float:
        """Tokens per plain call; plain decoding has 1."""
        return self.tokens / self.plain_calls


PLAIN_CALL = ExpectedCall(tokens=1.0, plain_calls=1.0)
"""A call of plain decoding."""


@dataclass(frozen=True)
class Candidate:
    """A shape that can be drafted now, and what is expected of the call that verifies it."""

    shape: DraftShape
    offer: Offer
    tokens: float  # that the call should advance by, 1 or more
    cost: float  # plain calls that it should take
    # plain calls that it may take at best: the less is known, the further below `cost`
    hoped_cost: float

    @property
    def speed(self) -> float:
        """Expected tokens per plain call; plain decoding has 1."""
        return self.tokens / self.cost

    @property
    def hoped_speed(self) -> float:
        return self.tokens / self.hoped_cost


@dataclass(frozen=True)
class Decision:
    """The draft that a call makes for the next one."""

    candidate: Candidate | None  # None for nothing
    risk: float | None = None  # plain calls that it may lose, if it begins a probe

    @property
    def shape(self) -> DraftShape | None:
        return self.candidate.shape if self.candidate else None


NOTHING = Decision(None)
"""Nothing is drafted."""


@dataclass
class Run:
    """Calls in a row that verified trees of one shape, and the seconds of each."""

    shape: DraftShape
    seconds: list[float]


def size_to_time(
    offer: Offer,
    most_timed: int,  # largest number of nodes that was timed so far, 0 for none
) -> int:
    """Number of nodes that is to be timed next; not always one of the offer's sizes."""
    size = max(2 * most_timed, FIRST_NODES, offer.shapes[0].nodes)
    return min(size, offer.shapes[-1].nodes)


class Controller:
    """Decides what each call of one answer drafts, by expected tokens and costs.

    Between calls it is a function of frozen costs and of what was accepted. Seconds are collected
    for `finish`, and have two uses before: a size that was never timed is known as soon as a few
    of its calls are, and calls in a row that are far off their cost, as on a machine that
    throttles, make the answer time plain calls again and scale its costs.
    """

    def __init__(
        self,
        table: CostTable,  # what calls cost here
        prior: AcceptancePrior,  # what earlier answers accepted of this adapter's drafts
        sources: Sequence[OfferSource],  # what each drafter offers
        *,
        context: int = 0,  # committed tokens when the answer begins
        reads_seconds: bool = True,  # if not, all calls are the same on every run
    ) -> None:
        self._table = table
        self._prior = prior
        self._sources = sources
        self._context = context  # of the bucket whose costs are taken
        self._first_context = context
        self._reads_seconds = reads_seconds
        self._costs = table.frozen(context)
        self._acceptance: dict[str, AnswerAcceptance] = {}
        self._decisions: deque[Decision] = deque(maxlen=3)  # the last ones that were asked for
        self._pending: DraftShape | None = None  # the tree that the next recorded call verifies
        self._pending_candidate: Candidate | None = None  # the same, as it was offered
        # of drafters that have offered something: what their costs are kept as, and who waits
        self._cost_names: dict[str, str] = {}
        self._need_host_tokens: set[str] = set()
        self._tokens = 0
        self._behind = 0.0  # plain calls that this answer is behind plain decoding
        self._probe: DraftShape | None = None
        self._probe_calls = 0  # that the probe has yet to draft
        self._runs: list[Run] = []
        self._is_run_open = False
        self._plain: deque[float] = deque(maxlen=KEPT_PLAIN_CALLS)  # seconds, the latest
        self._since_plain = PLAIN_FRESH_TOKENS
        self._plain_calls_due = 0
        self._surprises = 0  # calls in a row that are far off their cost; below 0: too cheap
        self._follows_seconds = False
        self._latest: deque[tuple[Kind, float]] = deque(maxlen=RESCALING_CALLS)
        if reads_seconds and table.is_timing_due(context, self._tolerable_plain_error()):
            self._plain_calls_due = MAX_PLAIN_CALLS

    @classmethod
    def deterministic(cls, sources: Sequence[OfferSource], context: int = 0) -> "Controller":
        """A controller that knows no earlier answers, learns nothing and reads no seconds."""
        return cls(CostTable(), AcceptancePrior(), sources, context=context, reads_seconds=False)

    def next(
        self,
        *,
        is_read: bool = False,  # whether drafters know that call's tokens already
    ) -> DraftShape | None:
        """Decide what the call under way is to draft; remembered for `record`."""
        self._decisions.append(self._decide(is_read))
        return self._decisions[-1].shape

    def expected_fastest_call(self) -> ExpectedCall:
        """The fastest call, as if drafters knew all tokens so far; `PLAIN_CALL` if it is that."""
        best = max(self._candidates(is_read=True), key=lambda one: one.speed, default=None)
        if best is None or best.speed <= 1:
            return PLAIN_CALL
        return ExpectedCall(best.tokens, best.cost)

    def record(self, call: CallRecord) -> None:
        """Learn from a call that is done: tokens, acceptance, seconds, probe."""
        if context_bucket(call.context) > context_bucket(self._context):
            self._enter_bucket(call.context)
        decision = self._find_decision(call.drafted)
        self._count(call)
        self._update_probe(call, decision)
        if self._reads_seconds:
            self._collect_seconds(call)
        self._pending = call.drafted
        self._pending_candidate = decision.candidate

    def finish(self) -> None:
        """Write what the answer has taught into the table and the prior. Called once."""
        for name, counted in self._acceptance.items():
            self._prior.learn(
                name,
                self._first_context,
                counted.total_accepted,
                counted.total_offered,
                counted.first_ratio,
            )
        self._teach_costs()
        if self._probe is not None:
            self._table.reset_probes()  # the answer has ended before it taught anything

    def _teach_costs(self) -> None:
        """Move the seconds that were collected into the table, as costs in plain calls."""
        if len(self._plain) >= MIN_PLAIN_CALLS:
            self._table.learn_plain_seconds(self._context, self._plain)
            self._plain.clear()
        plain = self._table.plain_seconds(self._context, only_of_this_process=True)
        if plain is None:
            return
        seconds: dict[DraftShape, list[float]] = {}
        for run in self._runs:
            if len(run.seconds) >= MIN_RUN_CALLS:
                seconds.setdefault(run.shape, []).extend(run.seconds)
        for shape, taken in seconds.items():
            moved = self._table.learn(
                self._cost_kind(shape), self._context, median(taken) / plain, self._follows_seconds
            )
            if abs(moved - 1) > INFORMATIVE_CHANGE:
                self._table.reset_probes()
        # Of drafters that wait for tokens, runs that are still too short go on.
        self._runs = [
            run
            for run in self._runs
            if run.shape.drafter in self._need_host_tokens and len(run.seconds) < MIN_RUN_CALLS
        ]
        self._is_run_open = False

    def _enter_bucket(self, context: int) -> None:
        """Teach what was timed to the bucket before, and go on with the costs of another one."""
        self._teach_costs()
        self._runs = []
        self._context = context
        self._costs = self._table.frozen(context).scaled(self._costs.scale)
        self._plain.clear()
        self._latest.clear()
        self._surprises = 0
        if self._reads_seconds and self._table.is_timing_due(
            context, self._tolerable_plain_error()
        ):
            self._plain_calls_due = MAX_PLAIN_CALLS

    def _decide(self, is_read: bool) -> Decision:
        """Decide what to draft now, by the first of these that applies.

        1. Nothing, while plain calls are timed, and if nothing can be drafted.
        2. The shape of the probe under way, if it can be drafted and its cost is not learned.
        3. The start of another probe, if one is due and affordable.
        4. The fastest shape, if it pays, with `STAY_BONUS` for the present one.
        5. Nothing.
        """
        if self._plain_calls_due:
            return NOTHING
        candidates = list(self._candidates(is_read))
        if not candidates:
            return NOTHING
        probed = self._probed(candidates)
        if probed is not None:
            return Decision(probed)
        fastest = max(candidates, key=self._favoured_speed)
        least_speed = ENTER_SPEED if self._pending is None else LEAVE_SPEED
        pays = fastest.speed > least_speed and self._may_lose(fastest)
        speed = fastest.speed if pays else 1.0
        probe = self._choose_probe(speed, is_parked=not pays)
        if probe is not None:
            return probe
        return Decision(fastest) if pays else NOTHING

    def _cost_kind(self, shape: DraftShape) -> Kind:
        """The kind under which the table has calls that verify, and draft, this shape."""
        return self._cost_names.get(shape.drafter, shape.drafter), shape.nodes

    def _candidates(self, is_read: bool) -> Iterator[Candidate]:
        """Every shape that can be drafted now, with what is expected of it.

        Also notes each drafter's cost name, whether it needs host tokens, and new ratios.
        """
        for source in self._sources:
            offer = source.offer()
            if offer is None:
                continue
            self._cost_names[offer.drafter] = offer.cost_name
            likelihood = 1.0
            wait_calls = 0.0
            offer_after_read = offer
            if offer.needs_host_tokens:
                self._need_host_tokens.add(offer.drafter)
                if not is_read:
                    wait_calls = self._wait_for_tokens()
                    # What is left of the offer after tokens that are not known yet.
                    likelihood, offer_after_read = offer.after_tokens(
                        self._expected_unread_tokens, self._acceptance_ratio
                    )
            for shape in self._shapes_to_consider(offer_after_read, offer.cost_name):
                kind = self._cost_kind(shape)
                accepted = offer_after_read.expected_accepted(shape, self._acceptance_ratio)
                yield Candidate(
                    shape,
                    offer,
                    1 + likelihood * accepted,
                    1 + likelihood * (self._costs.calls(kind) - 1) + wait_calls,
                    1 + likelihood * (self._costs.optimistic_calls(kind) - 1) + wait_calls,
                )

    def _shapes_to_consider(self, offer: Offer, cost_name: str) -> list[DraftShape]:
        """The shapes up to the most nodes that were timed (`FIRST_NODES` before any were), and the
        one of exactly `size_to_time` nodes, if it is offered."""
        if not offer.shapes:
            return []
        most_timed = self._costs.largest_known(cost_name)
        next_size = size_to_time(offer, most_timed)
        most = most_timed or FIRST_NODES
        return [one for one in offer.shapes if one.nodes <= most or one.nodes == next_size]

    def _wait_for_tokens(self) -> float:
        """Plain calls that waiting for the call under way takes; 0 if it has to be read anyway."""
        pending = self._pending
        is_awaited = pending is not None and pending.drafter in self._need_host_tokens
        return 0.0 if is_awaited else HOST_WAIT

    @property
    def _expected_unread_tokens(self) -> int:
        """Tokens that the call under way should bring, rounded; 1 for a plain call."""
        pending = self._pending_candidate
        return 1 if pending is None else round(pending.tokens)

    def _probed(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """The candidate of the probe under way, until its cost is learned."""
        if not self._probe_calls:
            return None
        for one in candidates:
            if one.shape == self._probe and self._costs.weight(self._cost_kind(one.shape)) < 1:
                return one
        return None

    def _favoured_speed(self, one: Candidate) -> float:
        return one.speed * (STAY_BONUS if one.shape == self._pending else 1)

    def _may_lose(self, one: Candidate) -> bool:
        """Whether a candidate may be drafted even if its call then brings one token."""
        allowed = max(MAX_BEHIND, MAX_BEHIND_PER_TOKEN * self._tokens)
        allowed += CREDIT_CALLS * max(0.0, one.tokens - one.cost)
        # A call that brings one token loses all that it takes beyond a plain one.
        loss = self._costs.pessimistic_calls(self._cost_kind(one.shape)) - 1
        return self._behind + loss + self._next_entry(one.shape) <= allowed

    def _choose_probe(
        self,
        speed: float,  # tokens per plain call without a probe
        *,
        is_parked: bool,  # whether plain decoding is best now
    ) -> Decision | None:
        """Begin a probe, if one is due: of a shape that may be faster than what is drafted now."""
        if self._behind > MAX_BEHIND_FOR_PROBE or not self._table.may_probe(
            is_start=self._tokens <= 1
        ):
            return None
        # If plain decoding is best every shape counts, however little it promises.
        probes = [
            (self._probe_risk(one, speed), one)
            for one in self._candidates(is_read=True)
            if is_parked or one.hoped_speed > speed * MIN_PROBE_GAIN
        ]
        affordable = [pair for pair in probes if pair[0] <= self._table.bank]
        if affordable:
            risk, probe = max(affordable, key=lambda pair: pair[1].hoped_speed)
            return Decision(probe, risk)
        if probes and is_parked and self._table.bank >= BANK_MOST:
            # Never parked for good: a full bank pays for the least risk, even if that exceeds it.
            risk, probe = min(probes, key=lambda pair: pair[0])
            return Decision(probe, risk)
        return None

    def _probe_risk(self, probe: Candidate, speed: float) -> float:
        """Plain calls that a probe may lose, compared with going on at `speed`."""
        entry = self._next_entry(probe.shape)
        # At the mean of expected and hoped cost.
        likely = (probe.cost + probe.hoped_cost) / 2
        return entry + PROBE_CALLS * max(0.0, likely - probe.tokens / speed)

    def _entry_cost(self, shape: DraftShape) -> float:
        """Plain calls that the first drafting pass after a plain call takes beside steady ones."""
        return 0.0 if shape.drafter in self._need_host_tokens else ENTRY

    def _next_entry(self, shape: DraftShape) -> float:
        """The entry cost if `shape` is drafted now: none if a tree is under way."""
        return self._entry_cost(shape) if self._pending is None else 0.0

    def _acceptance_ratio(self, name: str, first_ratio: float) -> float:
        """This answer's acceptance ratio under a name; see `offers.RatioOf`."""
        return self._acceptance_for(name, first_ratio).ratio

    def _acceptance_for(self, name: str, first_ratio: float) -> AnswerAcceptance:
        """This answer's counts under a name, begun with the prior's ratio."""
        if name not in self._acceptance:
            prior = self._prior.ratio(name, self._first_context, first_ratio)
            self._acceptance[name] = AnswerAcceptance(prior, first_ratio)
        return self._acceptance[name]

    def _find_decision(self, drafted: DraftShape | None) -> Decision:
        """The latest decision for the shape `drafted`: the loop may have asked once more since."""
        found = (one for one in reversed(self._decisions) if one.shape == drafted)
        return next(found, NOTHING)

    def _charge(self, call: CallRecord) -> float:
        """Plain calls that a call is charged with: its pessimistic frozen cost, not its seconds."""
        if call.shape is None:
            return 1.0 if call.drafted is None else 1 + self._entry_cost(call.drafted)
        steady = self._costs.pessimistic_calls(self._cost_kind(call.shape))
        return steady if call.drafted else max(1.0, steady - self._entry_cost(call.shape))

    def _count(self, call: CallRecord) -> None:
        self._tokens += call.tokens
        self._behind += self._charge(call) - call.tokens
        self._table.note_tokens(call.tokens, self._context)
        if call.shape is None:
            for counted in self._acceptance.values():
                counted.add_plain_tokens(call.tokens)
        elif self._pending_candidate is not None:
            for one in self._pending_candidate.offer.acceptance_counts(call.shape, call.tokens - 1):
                counted = self._acceptance_for(one.name, one.first_ratio)
                counted.add(one.accepted, one.offered)

    def _update_probe(self, call: CallRecord, decision: Decision) -> None:
        """Count a probe's calls down, end it if another shape was drafted, or begin one."""
        if self._probe_calls:
            self._probe_calls = self._probe_calls - 1 if call.drafted == self._probe else 0
        # A probe of the shape that is drafted already is neither begun nor paid for.
        elif decision.risk is not None and call.drafted != call.shape:
            self._probe = call.drafted
            self._probe_calls = PROBE_CALLS - 1
            self._table.pay_for_probe(decision.risk)

    def _learn_first_timings(self) -> None:
        """End the probe of a size that was never timed, and use its cost in this answer already."""
        self._probe = None
        self._teach_costs()
        self._costs = self._table.frozen(self._context).scaled(self._costs.scale)

    def _collect_seconds(self, call: CallRecord) -> None:
        """Collect a call's seconds: with plain calls, or in a run of the shape it verified."""
        self._since_plain += call.tokens
        if call.shape is None:
            self._is_run_open = False
            # A call that drafted without verifying is left out.
            if call.drafted is None:
                self._collect_plain_seconds(call)
            return
        seconds = call.seconds
        if call.drafted is None and seconds is not None:
            # It has drafted nothing: another of its shape would have taken longer.
            plain = self._table.plain_seconds(self._context)
            seconds = None if plain is None else seconds + self._entry_cost(call.shape) * plain
        if seconds is None:
            return
        run = self._run_of(call.shape)
        run.seconds.append(seconds)
        is_untimed = self._costs.weight(self._cost_kind(call.shape)) < MIN_TIMED_WEIGHT
        if len(run.seconds) == MIN_RUN_CALLS and is_untimed:
            self._learn_first_timings()
        else:
            self._watch_for_surprises(call.shape, seconds)

    def _run_of(self, shape: DraftShape) -> Run:
        """The run that a call of `shape` joins."""
        # Calls of drafters that wait for tokens are timed each for itself: they join their shape's
        # run from anywhere, and leave no run open.
        is_alone = shape.drafter in self._need_host_tokens
        if is_alone:
            found = next((run for run in self._runs if run.shape == shape), None)
        else:
            is_same = self._is_run_open and self._runs[-1].shape == shape
            found = self._runs[-1] if is_same else None
        if found is None:
            found = Run(shape, [])
            self._runs.append(found)
            self._surprises = 0
        self._is_run_open = not is_alone
        return found

    def _collect_plain_seconds(self, call: CallRecord) -> None:
        if call.seconds is not None:
            self._plain.append(call.seconds)
            self._since_plain = 0
        if self._plain_calls_due:
            self._plain_calls_due -= 1
            if self._is_plain_certain() or (not self._plain_calls_due and self._plain):
                self._plain_calls_due = 0
                self._table.learn_plain_seconds(self._context, self._plain)
                self._plain.clear()
                self._rescale_costs()

    def _is_plain_certain(self) -> bool:
        count = len(self._plain)
        error = self._table.plain_error(self._context, count)
        return count >= MIN_PLAIN_CALLS and error <= self._tolerable_plain_error()

    def _tolerable_plain_error(self) -> float:
        """Relative standard error of a plain call's seconds that changes no decision."""
        return max(PLAIN_ERROR, PLAIN_ERROR_OF_GAIN * (self.expected_fastest_call().speed - 1))

    def _watch_for_surprises(self, shape: DraftShape, seconds: float) -> None:
        """Count calls in a row whose seconds are far off their cost, all to one side."""
        kind = self._cost_kind(shape)
        self._latest.append((kind, seconds))
        if self._follows_seconds:
            self._rescale_costs()
            return
        plain = self._table.plain_seconds(self._context)
        if plain is None:
            return
        off = seconds / (plain * self._costs.calls(kind))
        if 1 / (1 + SURPRISING_ERROR) <= off <= 1 + SURPRISING_ERROR:
            self._surprises = 0
        elif off > 1:
            self._surprises = max(self._surprises, 0) + 1
        else:
            self._surprises = min(self._surprises, 0) - 1
        if abs(self._surprises) >= SURPRISING_CALLS:
            self._follows_seconds = True
            if self._since_plain <= PLAIN_FRESH_TOKENS:
                self._rescale_costs()
            else:
                # The whole machine may be slower, plain calls too.
                self._plain_calls_due = MAX_PLAIN_CALLS

    def _rescale_costs(self) -> None:
        """Scale the answer's costs, after surprises, to the median of its latest calls' seconds."""
        plain = self._table.plain_seconds(self._context, only_of_this_process=True)
        if plain is None or not self._follows_seconds or not self._latest:
            return
        before = self._costs
        unscaled = before.scaled(1.0)
        scales = [
            (seconds / plain - 1) / (unscaled.calls(kind) - 1) for kind, seconds in self._latest
        ]
        self._costs = before.scaled(min(max(median(scales), 1 / MAX_SCALE), MAX_SCALE))
        # The calls that surprised cost more than they were charged with, or less.
        if abs(self._surprises) >= SURPRISING_CALLS:
            kind, _ = self._latest[-1]
            self._behind += SURPRISING_CALLS * (self._costs.calls(kind) - before.calls(kind))
            self._surprises = 0
