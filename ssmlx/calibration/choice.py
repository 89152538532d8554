"""Which way of drafting is expected to be fastest, from costs and replayed answers."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Self

from ..model.streams import StreamFusedModel
from ..settings import StreamSchedule, TreeConfig
from ..tuning.cost import DraftShape, MeasuredShape, StepCosts
from ..tuning.profile import MLX_VERSION, SLACK, Profile, ProfileKey
from ..tuning.replay import Guesses, advance, depths_within, needed_sizes
from .guesses import RecordedAnswer


@dataclass(frozen=True, kw_only=True)
class PricedShape(MeasuredShape):
    step_seconds: float  # of one call
    plain_seconds: float  # of one call of plain decoding

    @classmethod
    def of(
        cls, shape: DraftShape, tokens_per_call: float, costs: StepCosts, context: float
    ) -> Self:
        return cls(
            shape=shape,
            tokens_per_call=tokens_per_call,
            step_seconds=costs.step_seconds(shape, context),
            plain_seconds=costs.plain_seconds(context),
        )

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_call / self.step_seconds

    @property
    def speedup(self) -> float:
        return self.tokens_per_second * self.plain_seconds


Price = Callable[[DraftShape, float], PricedShape]


@dataclass(frozen=True, eq=False, kw_only=True)
class Choice:
    """All that was thought about, and what is fastest of it."""

    costs: StepCosts  # of this machine
    context: int  # committed tokens that the answers had, half-way through
    guesses: list[Guesses]  # along the answers
    candidates: list[PricedShape]  # every shape, priced behind `context`
    chosen: PricedShape  # the fastest of them
    # the fastest behind each context that forwards were timed behind
    by_context: dict[int, PricedShape]

    def profile(self, model: StreamFusedModel) -> Profile:
        every = (self.chosen, *self.by_context.values())
        found = {one.shape: one.tokens_per_call for one in every}
        return Profile(
            key=ProfileKey.of(model),
            made=time.strftime("%Y-%m-%d"),
            mlx=MLX_VERSION,
            context=self.context,
            shapes=tuple(
                MeasuredShape(shape=shape, tokens_per_call=one) for shape, one in found.items()
            ),
            costs=self.costs,
        )


def choose(
    model: StreamFusedModel,
    answers: Sequence[RecordedAnswer],
    costs: StepCosts,
    sizes: Sequence[int],
) -> Choice:
    """The fastest way to draft these answers with best trees of `sizes`, pruned by nothing.

    A full tree holds an answer no further than the best one of as many nodes, and early exit keeps
    no better nodes than a smaller best tree has, for the price of the LM head on all of them.
    """
    guesses = [one.guesses for one in answers]
    middles = [len(one.prompt) + len(one.guesses.answer) / 2 for one in answers]
    context = round(sum(middles) / len(middles))
    price = partial(PricedShape.of, costs=costs, context=context)
    candidates = priced_trees(guesses, sizes, price, model.schedules)
    return Choice(
        costs=costs,
        context=context,
        guesses=guesses,
        candidates=candidates,
        chosen=best(candidates),
        by_context=best_by_context(candidates, costs, costs.lower.contexts),
    )


def best(candidates: Sequence[PricedShape]) -> PricedShape:
    """The fastest; of those that are as good as equal, the one with the cheapest step."""
    fastest = max(one.tokens_per_second for one in candidates)
    equal = [one for one in candidates if one.tokens_per_second >= (1 - SLACK) * fastest]
    return min(equal, key=lambda one: (one.step_seconds, one.shape.num_nodes))


def best_by_context(
    candidates: Sequence[PricedShape], costs: StepCosts, contexts: Sequence[int]
) -> dict[int, PricedShape]:
    """The fastest of the candidates behind each context, as if they guessed as well behind any."""
    return {
        context: best(
            [PricedShape.of(one.shape, one.tokens_per_call, costs, context) for one in candidates]
        )
        for context in contexts
    }


def priced_trees(
    guesses: Sequence[Guesses],
    sizes: Sequence[int],
    price: Price,
    schedules: Sequence[StreamSchedule],
) -> list[PricedShape]:
    """Trees of `sizes`, with every number of streams."""
    found = []
    for streams in range(1, guesses[0].tokens.shape[1] + 1):
        needed = [needed_sizes(one, streams, max(sizes)) for one in guesses]
        for size, schedule in product(sizes, schedules):
            held = advance([depths_within(one, size) for one in needed])
            tree = TreeConfig(size=size)
            shape = DraftShape(tree=tree, num_streams=streams, stream_schedule=schedule)
            found.append(price(shape, held.tokens_per_call))
    return found
