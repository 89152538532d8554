"""What `ssmlx.calibrate` measures of a model and an adapter, and the choice from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import InputError
from ..model.streams import StreamFusedModel
from ..settings import GenerateConfig, TreeConfig
from ..tuning.cost import DraftShape, StepCosts, Way
from ..tuning.replay import Guesses
from .choice import Candidate, Setting, best, best_by_context, pruned, unpruned
from .costs import Bar, CostPlan, forward_costs, no_bar
from .guesses import Exits, contenders, exits_along, guesses_along
from .steps import with_beside
from .timing import ssmlx_answer

BESIDE_SIZES = (4, 16, 48)
BESIDE_PROMPTS = 3
EXIT_TREE, EXIT_TOKENS = 32, 300
_LEAST_TOKENS = 50


@dataclass(frozen=True)
class Answered:
    """A prompt, what the model says to it, and what its streams guess along that."""

    prompt: list[int]
    guesses: Guesses

    @property
    def middle(self) -> float:
        """Committed tokens half-way through the answer."""
        return len(self.prompt) + len(self.guesses.answer) / 2


@dataclass(frozen=True, eq=False)
class Measured:
    """All that the choice is made from, and the choice: behind the answers' own context, and
    behind each that forwards were timed behind."""

    setting: Setting
    candidates: list[Candidate]
    chosen: Candidate
    by_context: dict[int, Candidate]

    @property
    def ways(self) -> tuple[Way, ...]:
        """The choices as a profile keeps them."""
        every = (self.chosen, *self.by_context.values())
        found = {
            one.shape: Way(shape=one.shape, tokens_per_call=one.tokens_per_call) for one in every
        }
        return tuple(found.values())


def answer_prompts(
    model: StreamFusedModel,
    tokenizer: TokenizerWrapper,
    prompts: Sequence[list[int]],
    max_tokens: int,
    largest: int,
    bar: Bar = no_bar,
) -> list[Answered]:
    """Decode each prompt, and record what the streams guess along the answer.

    Raises:
        InputError: there is too little to learn from.
    """
    tree = TreeConfig()
    config = GenerateConfig(decoding="streaming", max_tokens=max_tokens, tree=tree)
    most = contenders(largest, model.draft_vocab_size, model.num_streams).topology.num_candidates
    found = []
    for prompt in bar(prompts, "answers"):
        answer = ssmlx_answer(model, tokenizer, prompt, config).tokens
        found.append(Answered(prompt, guesses_along(model, prompt, answer, most)))
    tokens = sum(len(one.guesses.answer) for one in found)
    if tokens < _LEAST_TOKENS:
        raise InputError(
            f"the answers have {tokens} tokens in all",
            expected=f"{_LEAST_TOKENS} or more",
            do="give --data with longer answers, or a larger --count or --max-tokens",
        )
    return found


def measure_costs(
    model: StreamFusedModel,
    prompts: Sequence[list[int]],
    plan: CostPlan,
    bar: Bar = no_bar,
) -> tuple[StepCosts, float]:
    """Seconds of the forwards, and of what lies beside them; and how much they varied."""
    text = [token for prompt in prompts for token in prompt]
    costs, noise = forward_costs(model, text, plan, bar=bar)
    shapes = [
        DraftShape(
            tree=TreeConfig(kind="best", size=size),
            num_streams=model.num_streams,
            stream_schedule=schedule,
        )
        for size in BESIDE_SIZES
        if size <= max(plan.rows)
        for schedule in ("second-pass", "fused")
    ]
    return with_beside(model, costs, prompts[:BESIDE_PROMPTS], shapes, bar=bar), noise


def choose(
    model: StreamFusedModel,
    answered: Sequence[Answered],
    costs: StepCosts,
    sizes: Sequence[int],
    bar: Bar = no_bar,
) -> Measured:
    """The fastest way to draft these answers: trees first, then what pruning adds to them."""
    context = sum(one.middle for one in answered) / len(answered)
    setting = Setting(
        costs=costs, context=round(context), guesses=[one.guesses for one in answered]
    )
    candidates = unpruned(setting, sizes)
    streams = best(candidates).shape.num_streams
    if costs.early_exit is not None:
        exits = record_exits(model, answered, streams, bar)
        small = [size for size in sizes if size <= EXIT_TREE]
        candidates += pruned(setting, exits, candidates, streams, small)
    by_context = best_by_context(setting, candidates, costs.lower.contexts)
    return Measured(setting, candidates, best(candidates), by_context)


def record_exits(
    model: StreamFusedModel, answered: Sequence[Answered], streams: int, bar: Bar = no_bar
) -> list[Exits]:
    """What early exit says along the first answers, some tokens of them."""
    taken, tokens = [], 0
    for one in answered:
        if tokens < EXIT_TOKENS:
            taken.append(one)
            tokens += len(one.guesses.answer)
    return [
        exits_along(model, one.prompt, one.guesses, streams, EXIT_TREE)
        for one in bar(taken, "early exits")
    ]
