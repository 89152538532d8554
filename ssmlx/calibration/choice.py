"""Which way of drafting is expected to be fastest, from costs and replayed answers.

Whether that was the truth is checked: some ways of decoding, timed on other prompts.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Self

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..bars import bar
from ..model.streams import StreamFusedModel
from ..settings import GenerateConfig, StreamSchedule, TreeConfig
from ..training.replay import Guesses, advance, depths_within, needed_sizes
from ..tuning.cost import DraftShape, MeasuredShape, StepCosts
from ..tuning.profile import MLX_VERSION, SLACK, Profile, ProfileKey
from .costs import config_of
from .recorded import RecordedAnswer
from .timing import TimedAnswer, in_turns, ssmlx_answer

PLAIN = "plain"
CHOSEN = "chosen"


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

    def to_dict(self) -> dict[str, Any]:
        more = {"tokens_per_second": self.tokens_per_second, "speedup": self.speedup}
        shape = self.shape
        options = (
            f'--drafter "streams schedule={shape.stream_schedule}" --tree best '
            f"--tree-size {shape.num_nodes} --num-streams {shape.num_streams}"
        )
        return {**asdict(self), **more, "options": options}


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


def check(
    model: StreamFusedModel,
    tokenizer: TokenizerWrapper,
    prompts: Sequence[list[int]],
    choice: Choice,
    max_tokens: int,
) -> list[dict[str, Any]]:
    """Decode `prompts` in several ways, and set what was expected beside what came."""
    shapes = shapes_to_check(choice.chosen, choice.candidates)
    configs = {name: config_of(one.shape, max_tokens=max_tokens) for name, one in shapes.items()}
    configs[PLAIN] = GenerateConfig(decoding="plain", max_tokens=max_tokens)
    answers: dict[str, list[TimedAnswer]] = {name: [] for name in configs}
    for config in configs.values():  # one each that does not count
        ssmlx_answer(model, tokenizer, prompts[0], config)
    for prompt, name in bar(list(in_turns(prompts, list(configs))), "held-out answers"):
        answers[name].append(ssmlx_answer(model, tokenizer, prompt, configs[name]))
    return compare(shapes, answers)


def shapes_to_check(
    chosen: PricedShape, candidates: Sequence[PricedShape]
) -> dict[str, PricedShape]:
    """The chosen shape, and others that it should beat: the default, a small tree, and the other
    schedule, as far as they are others."""
    shape = chosen.shape
    streams = max(one.shape.num_streams for one in candidates)
    schedule = "second-pass" if shape.stream_schedule == "fused" else "fused"
    wanted = {
        "default": DraftShape(tree=TreeConfig(), num_streams=streams),
        "small": DraftShape(tree=TreeConfig(size=4), num_streams=streams),
        "other schedule": replace(shape, stream_schedule=schedule),  # type: ignore[arg-type]
    }
    known = {one.shape: one for one in candidates if one.shape != shape}
    others = {name: known[one] for name, one in wanted.items() if one in known}
    return {CHOSEN: chosen, **others}


def compare(
    shapes: Mapping[str, PricedShape], answers: Mapping[str, Sequence[TimedAnswer]]
) -> list[dict[str, Any]]:
    """Expected beside measured, of each of `shapes` and of plain decoding, as JSON values.

    `expected` and `measured` are tokens/s after the prompt's call, `ratio` the one over the other;
    tokens per call, seconds of a call and the speed-up over plain decoding are told likewise.
    Empty where one has nothing to time: every answer is a single token.
    """
    totals = {
        name: (
            # The first token is the prompt's call's.
            sum(len(one.tokens) - 1 for one in own),
            sum(one.target_calls - 1 for one in own),
            sum(one.decode_seconds for one in own),
        )
        for name, own in answers.items()
    }
    if not all(calls and seconds for _, calls, seconds in totals.values()):
        return []
    plain_seconds = shapes[CHOSEN].plain_seconds
    plain_tokens, _, plain_took = totals[PLAIN]
    said = [one.tokens for one in answers[PLAIN]]
    found = []
    for name, (tokens, calls, seconds) in totals.items():
        priced = shapes.get(name)
        per_call = priced.tokens_per_call if priced else 1.0
        call_seconds = priced.step_seconds if priced else plain_seconds
        expected = per_call / call_seconds
        measured = tokens / seconds
        found.append(
            {
                "name": name,
                "what": str(priced.shape) if priced else "plain decoding",
                "expected": expected,
                "measured": measured,
                "ratio": expected / measured,
                "expected_per_call": per_call,
                "per_call": tokens / calls,
                "expected_seconds": call_seconds,
                "seconds": seconds / calls,
                "expected_speedup": expected * plain_seconds,
                "speedup": measured / (plain_tokens / plain_took),
                "same_tokens": [one.tokens for one in answers[name]] == said,
            }
        )
    return found
