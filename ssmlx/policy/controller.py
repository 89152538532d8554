"""The controller: what each call of one answer drafts.

It weighs what drafters offer (tokens a call should bring) against what calls cost, both in plain
calls, and drafts the shape that advances fastest, or nothing where plain decoding does. How far an
answer may fall behind plain decoding is bounded, and so is what probes of other shapes may lose (a
conservative bandit: Wu et al., 2016). See `CostTable` for costs, which are frozen while an answer
runs, and `AnswerAcceptance` for what is accepted.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from ..decoding.controller import Call, DraftShape
from .acceptance import AcceptancePrior, AnswerAcceptance
from .costs import BANK_MOST, ENTRY, MOST_PLAIN_CALLS, CostTable, Kind, context_bucket
from .offers import Offer, OfferSource

FIRST_NODES = 4
"""Nodes at most where no drafting call was timed; then twice as many as were."""
ENTER = 1.02
LEAVE = 0.9
"""Speeds over plain decoding at which drafting begins and ends. A text that gets harder loses
little while it is read; how much in all is bounded below."""
STAY = 1.03
"""What the present shape's speed is favoured by: each change is a kernel to compile, a run cut."""
BEHIND = 4.0
BEHIND_PER_TOKEN = 0.07
"""Plain calls that an answer may be behind plain decoding, should the next call bring one token:
the first, or the second a token, whichever is more. 0.07 a token is 0.93 of plain decoding."""
CREDIT = 4.0
"""Calls whose expected gain it may be behind beside that."""
RUN_CALLS = 3
"""Timed calls of one shape in a row that teach its cost at least."""
PROBE_CALLS = RUN_CALLS + 1
"""Calls of a probe: each verifies what the one before it drafted."""
PROBE_BEHIND = 1.0
"""Plain calls that an answer may be behind for a probe to begin."""
PROBE_GAIN = 1.08
"""What a shape has to promise over the best known for a probe."""
UNTIMED = 0.4
"""Runs that a cost rests on below which nothing of its size was ever timed."""
TEACHES = 0.1
"""Change of a cost from which on another probe may follow soon."""
SURPRISE = 0.18
SURPRISES = 3
"""Calls in a row that are so far off their cost make an answer take new costs. A machine that
throttles 1.6x makes calls dearer by a fourth to a third; noise of 8 % does not do it thrice."""
FOLLOWED = 4
"""Calls whose median is the cost after surprises."""
MOST_SCALED = 2.5
"""What an answer scales costs by at most."""
PLAIN_CALLS = 3
"""Plain calls that an answer times in a row at least."""
PLAIN_ERROR = 0.03
ERROR_OF_GAIN = 0.15
"""Standard error up to which they are timed: this, or this share of what drafting gains."""
PLAIN_KEPT = 64
"""Plain calls of an answer whose seconds are kept."""
HOST_WAIT = 0.1
"""Plain calls that it takes to wait for a call's tokens where the next call could have been under
way: what a device idles while the host looks up, drafts and launches."""
PLAIN_FRESH = 64
"""Tokens for which an answer's timing of plain calls counts as taken beside a call."""


@dataclass(frozen=True)
class Candidate:
    """A shape that can be drafted now."""

    shape: DraftShape
    offer: Offer
    tokens: float  # that a call should bring
    cost: float  # plain calls that it takes
    hope: float  # what it may turn out to take

    @property
    def speed(self) -> float:
        return self.tokens / self.cost

    @property
    def hoped_speed(self) -> float:
        return self.tokens / self.hope


@dataclass(frozen=True)
class Decision:
    """What the next call drafts, and why."""

    candidate: Candidate | None
    risk: float | None = None  # plain calls that it may lose, where it is a probe

    @property
    def shape(self) -> DraftShape | None:
        return self.candidate.shape if self.candidate else None


@dataclass
class Run:
    """Seconds of calls of one shape in a row."""

    shape: DraftShape
    seconds: list[float]


def size_to_time(offer: Offer, most_timed: int) -> int:
    """Nodes to time next: twice the `most_timed` so far (0 for none), but `FIRST_NODES` at least,
    and within what the offer has; its largest once that was timed."""
    size = max(2 * most_timed, FIRST_NODES, offer.shapes[0].nodes)
    return min(size, offer.shapes[-1].nodes)


class Controller:
    """Decides what each call of one answer drafts; see `DraftController`.

    Between calls it is a function of frozen costs and of what was accepted. Seconds are collected
    for `finish`, and have two uses before: a size that nobody has timed is known as soon as a few
    of its calls are, and calls in a row that are far off their cost, as on a machine that
    throttles, make the answer time plain calls again and scale its costs.

    Args:
        table: what calls cost here.
        prior: what earlier answers accepted of this adapter's drafts.
        sources: what each drafter offers.
        context: committed tokens when the answer begins; another bucket's costs are taken when the
            answer grows into it.
        reads_seconds: whether seconds are read at all.
    """

    def __init__(
        self,
        table: CostTable,
        prior: AcceptancePrior,
        sources: Sequence[OfferSource],
        *,
        context: int = 0,
        reads_seconds: bool = True,
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
        self._waits: set[str] = set()
        self._tokens = 0
        self._behind = 0.0  # plain calls that this answer is behind plain decoding
        self._probe: DraftShape | None = None
        self._probe_calls = 0  # that the probe has yet to draft
        self._runs: list[Run] = []
        self._is_run_open = False
        self._plain: deque[float] = deque(maxlen=PLAIN_KEPT)  # seconds, the latest
        self._since_plain = PLAIN_FRESH
        self._plain_calls_due = 0
        self._surprises = 0  # calls in a row that are far off their cost; below 0: too cheap
        self._follows_seconds = False
        self._latest: deque[tuple[Kind, float]] = deque(maxlen=FOLLOWED)
        if reads_seconds and table.is_timing_due(context, self._tolerable_plain_error()):
            self._plain_calls_due = MOST_PLAIN_CALLS

    @classmethod
    def deterministic(cls, sources: Sequence[OfferSource], context: int = 0) -> "Controller":
        """One that knows nothing of earlier answers, learns nothing and reads no seconds."""
        return cls(CostTable(), AcceptancePrior(), sources, context=context, reads_seconds=False)

    def next(self, *, is_read: bool = False) -> DraftShape | None:
        self._decisions.append(self._decide(is_read))
        return self._decisions[-1].shape

    def expected_call(self) -> tuple[float, float]:
        """Tokens and cost in plain calls of the shape that should advance fastest now.

        Both are 1 where plain decoding is as fast.
        """
        best = max(self._candidates(is_read=True), key=lambda one: one.speed, default=None)
        if best is None or best.speed <= 1:
            return 1.0, 1.0
        return best.tokens, best.cost

    def record(self, call: Call) -> None:
        if context_bucket(call.context) > context_bucket(self._context):
            self._switch_context_bucket(call.context)
        decision = self._find_decision(call.drafted)
        self._count_tokens(call)
        self._advance_probe(call, decision)
        if self._reads_seconds:
            self._record_seconds(call)
        self._pending = call.drafted
        self._pending_candidate = decision.candidate

    def finish(self) -> None:
        """Hand what the answer has taught to the table and the prior. To be called once."""
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
        """Hand what calls took to the table."""
        if len(self._plain) >= PLAIN_CALLS:
            self._table.learn_plain(self._context, self._plain)
            self._plain.clear()
        plain = self._table.plain_seconds(self._context, is_recent=True)
        if plain is None:
            return
        seconds: dict[DraftShape, list[float]] = {}
        for run in self._runs:
            if len(run.seconds) >= RUN_CALLS:
                seconds.setdefault(run.shape, []).extend(run.seconds)
        for shape, taken in seconds.items():
            moved = self._table.learn(
                self._kind(shape), self._context, median(taken) / plain, self._follows_seconds
            )
            if abs(moved - 1) > TEACHES:
                self._table.reset_probes()
        self._runs = [
            run
            for run in self._runs
            if run.shape.drafter in self._waits and len(run.seconds) < RUN_CALLS
        ]
        self._is_run_open = False

    def _switch_context_bucket(self, context: int) -> None:
        """Take the costs of contexts of another length."""
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
            self._plain_calls_due = MOST_PLAIN_CALLS

    def _decide(self, is_read: bool) -> Decision:
        if self._plain_calls_due:
            return Decision(None)
        candidates = list(self._candidates(is_read))
        if not candidates:
            return Decision(None)
        if self._probe_calls:
            for one in candidates:
                if one.shape == self._probe and self._is_unlearned(one.shape):
                    return Decision(one)
        best = max(
            candidates, key=lambda one: one.speed * (STAY if one.shape == self._pending else 1)
        )
        pays = self._may_draft(best)
        probe = self._choose_probe(best.speed if pays else 1.0)
        return probe or Decision(best if pays else None)

    def _is_unlearned(self, shape: DraftShape) -> bool:
        """Whether no answer has taught what a shape costs."""
        return self._costs.weight(self._kind(shape)) < 1

    def _kind(self, shape: DraftShape) -> Kind:
        """The kind of call that verifies a shape, and drafts another such where drafting costs."""
        return self._cost_names.get(shape.drafter, shape.drafter), shape.nodes

    def _candidates(self, is_read: bool) -> Iterator[Candidate]:
        """Every shape that can be drafted now; `is_read` is as `next` has it.

        Of a drafter's shapes these are the ones up to the largest that was timed, between which
        costs are interpolated, and one that is larger: to learn what comes next by.

        What has to wait for the tokens of the call under way may have nothing to offer behind them:
        then the next call is a plain one.
        """
        for source in self._sources:
            offer = source.offer()
            if offer is None:
                continue
            self._cost_names[offer.drafter] = offer.cost_name
            likely = 1.0
            wait = 0.0
            then = offer
            if offer.waits:
                self._waits.add(offer.drafter)
                if not is_read:
                    likely, then = offer.after_tokens(self._expected_unread_tokens, self._ratio_of)
                    is_awaited = self._pending is not None and self._pending.drafter in self._waits
                    wait = 0.0 if is_awaited else HOST_WAIT
            if not then.shapes:
                continue
            most_timed = self._costs.largest_known(offer.cost_name)
            next_size = size_to_time(then, most_timed)
            for shape in then.shapes:
                if shape.nodes <= (most_timed or FIRST_NODES) or shape.nodes == next_size:
                    kind = self._kind(shape)
                    yield Candidate(
                        shape,
                        offer,
                        1 + likely * then.expected(shape, self._ratio_of),
                        1 + likely * (self._costs.calls(kind) - 1) + wait,
                        1 + likely * (self._costs.optimistic_calls(kind) - 1) + wait,
                    )

    @property
    def _expected_unread_tokens(self) -> int:
        """Tokens that the call under way should bring."""
        pending = self._pending_candidate
        return 1 if pending is None else round(pending.tokens)

    def _may_draft(self, best: Candidate) -> bool:
        """Whether to draft, as far as the answer may fall behind plain decoding."""
        allowed = max(BEHIND, BEHIND_PER_TOKEN * self._tokens)
        allowed += CREDIT * max(0.0, best.tokens - best.cost)
        # A call that brings one token loses all that it takes beyond a plain one.
        loss = self._costs.pessimistic_calls(self._kind(best.shape)) - 1
        at_risk = self._behind + loss
        if self._pending is not None:
            return best.speed > LEAVE and at_risk <= allowed
        return best.speed > ENTER and at_risk + self._entry_cost(best.shape) <= allowed

    def _choose_probe(self, speed: float) -> Decision | None:
        """A shape that may be faster than what is known to be, if its probe can be afforded.

        What it risks is what its calls do, as if the call under way was read.
        """
        if self._behind > PROBE_BEHIND or not self._table.may_probe(is_start=self._tokens <= 1):
            return None
        is_parked = speed == 1.0
        probes = [
            (self._probe_risk(one, speed), one)
            for one in self._candidates(is_read=True)
            if is_parked or one.hoped_speed > speed * PROBE_GAIN
        ]
        affordable = [pair for pair in probes if pair[0] <= self._table.bank]
        if affordable:
            risk, probe = max(affordable, key=lambda pair: pair[1].hoped_speed)
            return Decision(probe, risk)
        if probes and is_parked and self._table.bank >= BANK_MOST:
            # Never parked for good: a full bank pays for whatever risks least.
            risk, probe = min(probes, key=lambda pair: pair[0])
            return Decision(probe, risk)
        return None

    def _probe_risk(self, probe: Candidate, speed: float) -> float:
        """Plain calls that a probe may lose over going on at `speed`."""
        entry = self._entry_cost(probe.shape) if self._pending is None else 0.0
        likely = (probe.cost + probe.hope) / 2
        return entry + PROBE_CALLS * max(0.0, likely - probe.tokens / speed)

    def _entry_cost(self, shape: DraftShape) -> float:
        """Plain calls that it costs to draft behind a plain call: a first drafting pass."""
        return 0.0 if shape.drafter in self._waits else ENTRY

    def _ratio_of(self, name: str, first_ratio: float) -> float:
        return self._acceptance_for(name, first_ratio).ratio

    def _acceptance_for(self, name: str, first_ratio: float) -> AnswerAcceptance:
        if name not in self._acceptance:
            prior = self._prior.ratio(name, self._first_context, first_ratio)
            self._acceptance[name] = AnswerAcceptance(prior, first_ratio)
        return self._acceptance[name]

    def _find_decision(self, drafted: DraftShape | None) -> Decision:
        """The decision that a recorded call followed; the loop may have asked once more."""
        found = (one for one in reversed(self._decisions) if one.shape == drafted)
        return next(found, Decision(None))

    def _table_cost(self, call: Call) -> float:
        """Plain calls that a recorded call took, by the table."""
        if call.shape is None:
            return 1.0 if call.drafted is None else 1 + self._entry_cost(call.drafted)
        steady = self._costs.pessimistic_calls(self._kind(call.shape))
        return steady if call.drafted else max(1.0, steady - self._entry_cost(call.shape))

    def _count_tokens(self, call: Call) -> None:
        self._tokens += call.tokens
        self._behind += self._table_cost(call) - call.tokens
        self._table.count_tokens(call.tokens, self._context)
        if call.shape is None:
            for counted in self._acceptance.values():
                counted.count_plain_tokens(call.tokens)
        elif self._pending_candidate is not None:
            for one in self._pending_candidate.offer.acceptance_counts(call.shape, call.tokens - 1):
                counted = self._acceptance_for(one.name, one.first_ratio)
                counted.count(one.accepted, one.offered)

    def _advance_probe(self, call: Call, decision: Decision) -> None:
        if self._probe_calls:
            self._probe_calls = self._probe_calls - 1 if call.drafted == self._probe else 0
        elif decision.risk is not None and call.drafted != call.shape:
            self._probe = call.drafted
            self._probe_calls = PROBE_CALLS - 1
            self._table.pay_for_probe(decision.risk)

    def _learn_first_timings(self) -> None:
        """The open run has timed a size that nobody had: end the probe, hand the seconds to the
        table, and go on with its costs, so that this answer gains too and not only later ones."""
        self._probe = None
        self._teach_costs()
        self._costs = self._table.frozen(self._context).scaled(self._costs.scale)

    def _record_seconds(self, call: Call) -> None:
        """Collect what calls took: of plain calls, and of runs of one shape."""
        self._since_plain += call.tokens
        if call.shape is None:
            self._is_run_open = False
            if call.drafted is None:
                self._record_plain_seconds(call)
            return
        seconds = call.seconds
        if call.drafted is None and seconds is not None:
            # It has drafted nothing: another of its shape would have taken longer.
            plain = self._table.plain_seconds(self._context)
            seconds = None if plain is None else seconds + self._entry_cost(call.shape) * plain
        if seconds is None:
            return
        run = self._run_for(call.shape)
        run.seconds.append(seconds)
        is_untimed = self._costs.weight(self._kind(call.shape)) < UNTIMED
        if len(run.seconds) == RUN_CALLS and is_untimed:
            self._learn_first_timings()
        else:
            self._check_for_surprise(call.shape, seconds)

    def _run_for(self, shape: DraftShape) -> Run:
        """The run that a call joins: where calls wait for each other's tokens, each is timed for
        itself, and they need not come one behind the other."""
        is_alone = shape.drafter in self._waits
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

    def _record_plain_seconds(self, call: Call) -> None:
        if call.seconds is not None:
            self._plain.append(call.seconds)
            self._since_plain = 0
        if self._plain_calls_due:
            self._plain_calls_due -= 1
            if self._is_plain_call_timed() or (not self._plain_calls_due and self._plain):
                self._plain_calls_due = 0
                self._table.learn_plain(self._context, self._plain)
                self._plain.clear()
                self._rescale_costs()

    def _is_plain_call_timed(self) -> bool:
        """Whether plain calls have been timed well enough."""
        count = len(self._plain)
        error = self._table.plain_error(self._context, count)
        return count >= PLAIN_CALLS and error <= self._tolerable_plain_error()

    def _tolerable_plain_error(self) -> float:
        """Error of the seconds of a plain call that does not matter: the clearer, the more."""
        tokens, cost = self.expected_call()
        return max(PLAIN_ERROR, ERROR_OF_GAIN * (tokens / cost - 1))

    def _check_for_surprise(self, shape: DraftShape, seconds: float) -> None:
        """See whether calls in a row are far off their cost, all to one side."""
        kind = self._kind(shape)
        self._latest.append((kind, seconds))
        if self._follows_seconds:
            self._rescale_costs()
            return
        plain = self._table.plain_seconds(self._context)
        if plain is None:
            return
        off = seconds / (plain * self._costs.calls(kind))
        if 1 / (1 + SURPRISE) <= off <= 1 + SURPRISE:
            self._surprises = 0
        elif off > 1:
            self._surprises = max(self._surprises, 0) + 1
        else:
            self._surprises = min(self._surprises, 0) - 1
        if abs(self._surprises) >= SURPRISES:
            self._follows_seconds = True
            if self._since_plain <= PLAIN_FRESH:
                self._rescale_costs()
            else:
                # The whole machine may be slower, plain calls too.
                self._plain_calls_due = MOST_PLAIN_CALLS

    def _rescale_costs(self) -> None:
        """After surprises: scale the answer's costs to what its latest calls took."""
        plain = self._table.plain_seconds(self._context, is_recent=True)
        if plain is None or not self._follows_seconds or not self._latest:
            return
        before = self._costs
        unscaled = before.scaled(1.0)
        scales = [
            (seconds / plain - 1) / (unscaled.calls(kind) - 1) for kind, seconds in self._latest
        ]
        self._costs = before.scaled(min(max(median(scales), 1 / MOST_SCALED), MOST_SCALED))
        if abs(self._surprises) >= SURPRISES:
            kind, _ = self._latest[-1]
            self._behind += SURPRISES * (self._costs.calls(kind) - before.calls(kind))
            self._surprises = 0
