"""Which way of drafting is expected to be fastest, from costs and replayed answers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..model.streams import StreamFusedModel
from ..settings import PruneConfig, TreeConfig
from ..tuning.cost import DraftShape, MeasuredShape, StepCosts
from ..tuning.profile import SLACK, Profile, ProfileKey, mlx_version
from ..tuning.replay import Guesses, advance, depths_within, needed_sizes, needed_widths
from .costs import SCHEDULES
from .guesses import EXIT_TREE, Exits, RecordedAnswer, record_exits

FULL_WIDTHS = (1, 2, 3, 4)


@dataclass(frozen=True, kw_only=True)
class PricedShape:
    """A shape to draft in, and what is expected of it.

    Attributes:
        shape: what streams draft, and when.
        tokens_per_call: of the replayed answers, after the prompt's call.
        step_seconds: of one call.
        plain_seconds: of one call of plain decoding.
    """

    shape: DraftShape
    tokens_per_call: float
    step_seconds: float
    plain_seconds: float

    @classmethod
    def of(
        cls, shape: DraftShape, tokens_per_call: float, costs: StepCosts, context: float
    ) -> PricedShape:
        """As `costs` has it behind `context` tokens."""
        return cls(
            shape=shape,
            tokens_per_call=tokens_per_call,
            step_seconds=costs.step_seconds(shape, context),
            plain_seconds=costs.plain_seconds(context),
        )

    @property
    def tokens_per_second(self) -> float:
        """Expected, after the prompt."""
        return self.tokens_per_call / self.step_seconds

    @property
    def speedup(self) -> float:
        """Over plain decoding."""
        return self.tokens_per_second * self.plain_seconds

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        more = {"tokens_per_second": self.tokens_per_second, "speedup": self.speedup}
        return {**asdict(self), **more, "options": self.shape.options()}


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What shapes are judged by.

    Attributes:
        costs: of this machine.
        context: committed tokens that steps are priced behind.
        guesses: along answers.
    """

    costs: StepCosts
    context: float
    guesses: Sequence[Guesses]

    @property
    def num_streams(self) -> int:
        """G as trained."""
        return int(self.guesses[0].tokens.shape[1])

    def price(self, shape: DraftShape, tokens_per_call: float) -> PricedShape:
        """`shape`, priced."""
        return PricedShape.of(shape, tokens_per_call, self.costs, self.context)


@dataclass(frozen=True, eq=False)
class Choice:
    """All that was thought about, and what is fastest of it.

    Attributes:
        evidence: what it was judged by.
        candidates: every shape.
        chosen: the fastest behind the answers' own context.
        by_context: and behind each that forwards were timed behind.
    """

    evidence: Evidence
    candidates: list[PricedShape]
    chosen: PricedShape
    by_context: dict[int, PricedShape]

    @property
    def measured_shapes(self) -> tuple[MeasuredShape, ...]:
        """What was chosen, as a profile keeps it."""
        every = (self.chosen, *self.by_context.values())
        found = {one.shape: one.tokens_per_call for one in every}
        return tuple(
            MeasuredShape(shape=shape, tokens_per_call=one) for shape, one in found.items()
        )

    def profile(self, model: StreamFusedModel) -> Profile:
        """What is kept of it for the runtime."""
        return Profile(
            key=ProfileKey.of(model),
            made=time.strftime("%Y-%m-%d"),
            mlx=mlx_version(),
            context=int(self.evidence.context),
            shapes=self.measured_shapes,
            costs=self.evidence.costs,
        )


def choose(
    model: StreamFusedModel,
    answers: Sequence[RecordedAnswer],
    costs: StepCosts,
    sizes: Sequence[int],
) -> Choice:
    """The fastest way to draft these answers: trees first, then what pruning adds to them."""
    context = round(sum(one.middle for one in answers) / len(answers))
    guesses = [one.guesses for one in answers]
    evidence = Evidence(costs=costs, context=context, guesses=guesses)
    candidates = unpruned(evidence, sizes)
    if costs.early_exit is not None:
        streams = best(candidates).shape.num_streams
        small = [size for size in sizes if size <= EXIT_TREE]
        exits = record_exits(model, answers, streams)
        candidates += pruned(evidence, exits, candidates, streams, small)
    by_context = best_by_context(costs, candidates, costs.lower.contexts)
    return Choice(evidence, candidates, best(candidates), by_context)


def best(candidates: Sequence[PricedShape]) -> PricedShape:
    """The fastest; of those that are as good as equal, the one with the cheapest step."""
    fastest = max(one.tokens_per_second for one in candidates)
    equal = [one for one in candidates if one.tokens_per_second >= (1 - SLACK) * fastest]
    return min(equal, key=lambda one: (one.step_seconds, one.shape.num_nodes))


def best_by_context(
    costs: StepCosts, candidates: Sequence[PricedShape], contexts: Sequence[int]
) -> dict[int, PricedShape]:
    """The fastest of the candidates behind each context, as if they guessed as well behind any.

    Streams that were trained on short texts guess worse behind long ones; `ssmlx.decoding.pace`
    stops drafting there.
    """
    return {
        context: best(
            [PricedShape.of(one.shape, one.tokens_per_call, costs, context) for one in candidates]
        )
        for context in contexts
    }


def unpruned(evidence: Evidence, sizes: Sequence[int]) -> list[PricedShape]:
    """Best trees of `sizes` and full trees no larger, with every number of streams."""
    return [
        evidence.price(
            DraftShape(tree=tree, num_streams=streams, stream_schedule=schedule), per_call
        )
        for streams in range(1, evidence.num_streams + 1)
        for tree, per_call in _trees(evidence.guesses, streams, sizes)
        for schedule in SCHEDULES
    ]


def _trees(
    guesses: Sequence[Guesses], streams: int, sizes: Sequence[int]
) -> Iterator[tuple[TreeConfig, float]]:
    """Trees and the tokens per call that they would have had."""
    needed = [needed_sizes(one, streams, max(sizes)) for one in guesses]
    for size in sizes:
        held = advance([depths_within(one, size) for one in needed])
        yield TreeConfig(kind="best", size=size), held.tokens_per_call
    needed = [needed_widths(one)[:, :streams] for one in guesses]
    for width in FULL_WIDTHS:
        if sum(width**level for level in range(streams + 1)) <= max(sizes):
            held = advance([depths_within(one, width) for one in needed])
            yield TreeConfig(kind="full", width=width), held.tokens_per_call


def pruned(
    evidence: Evidence,
    exits: Sequence[Exits],
    candidates: Sequence[PricedShape],
    streams: int,
    sizes: Sequence[int],
) -> list[PricedShape]:
    """Best trees that early exit prunes to a budget, of `streams` streams.

    Early exit may have been replayed for fewer answers than drafts were: what pruning loses of
    the tokens per call is taken from those, and applied to what all answers say.

    Args:
        evidence: what shapes are judged by.
        exits: of some of the answers.
        candidates: the same trees, not pruned.
        streams: G.
        sizes: N and M, no larger than the trees in `exits`.
    """
    found = []
    for one in candidates:
        shape, nodes = one.shape, one.shape.num_nodes
        if (shape.tree.kind, shape.num_streams) != ("best", streams) or nodes not in sizes:
            continue
        whole = _advance_pruned(exits, nodes, nodes)
        for keep in (size for size in sizes if size < nodes):
            budget = replace(shape, prune=PruneConfig(kind="budget", keep=keep))
            left = _advance_pruned(exits, nodes, keep) / whole
            found.append(evidence.price(budget, one.tokens_per_call * left))
    return found


def _advance_pruned(exits: Sequence[Exits], nodes: int, keep: int) -> float:
    return advance([one.depths(nodes, keep) for one in exits]).tokens_per_call
