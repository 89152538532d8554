"""Which way of drafting is expected to be fastest, from costs and replayed answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..settings import STREAM_SCHEDULES, PruneConfig, StreamSchedule, TreeConfig
from ..tuning.cost import DraftShape, StepCosts
from ..tuning.profile import SLACK
from ..tuning.replay import Guesses
from .guesses import Exits, advance, depths_within, needed_sizes, needed_widths

FULL_WIDTHS = (1, 2, 3, 4)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to draft, and what is expected of it.

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
class Setting:
    """What candidates are judged by.

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

    def candidate(self, shape: DraftShape, tokens_per_call: float) -> Candidate:
        """`shape`, priced."""
        return Candidate(
            shape=shape,
            tokens_per_call=tokens_per_call,
            step_seconds=self.costs.step_seconds(shape, self.context),
            plain_seconds=self.costs.plain_seconds(self.context),
        )


def best_by_context(
    setting: Setting, candidates: Sequence[Candidate], contexts: Sequence[int]
) -> dict[int, Candidate]:
    """The fastest of the candidates behind each context, as if they guessed as well behind any.

    Streams that were trained on short texts guess worse behind long ones; `ssmlx.decoding.pace`
    stops drafting there.
    """
    places = {context: replace(setting, context=context) for context in contexts}
    return {
        context: best([place.candidate(one.shape, one.tokens_per_call) for one in candidates])
        for context, place in places.items()
    }


def unpruned(setting: Setting, sizes: Sequence[int]) -> list[Candidate]:
    """Best trees of `sizes` and full trees no larger, with every number of streams."""
    found = []
    for streams in range(1, setting.num_streams + 1):
        for tree, per_call in _trees(setting.guesses, streams, sizes):
            for schedule in STREAM_SCHEDULES:
                shape = _shape(tree, streams, schedule)
                found.append(setting.candidate(shape, per_call))
    return found


def _shape(tree: TreeConfig, streams: int, schedule: str) -> DraftShape:
    known: StreamSchedule = "fused" if schedule == "fused" else "second-pass"
    return DraftShape(tree=tree, num_streams=streams, stream_schedule=known)


def _trees(
    guesses: Sequence[Guesses], streams: int, sizes: Sequence[int]
) -> Iterator[tuple[TreeConfig, float]]:
    """Trees and the tokens per call that they would have had."""
    needed = [needed_sizes(one, streams, max(sizes)) for one in guesses]
    for size in sizes:
        held = advance([depths_within(one, size) for one in needed])
        yield TreeConfig(kind="best", size=size), held.per_call
    widths = [needed_widths(one)[:, :streams] for one in guesses]
    for width in FULL_WIDTHS:
        if sum(width**level for level in range(streams + 1)) <= max(sizes):
            held = advance([depths_within(one, width) for one in widths])
            yield TreeConfig(kind="full", width=width), held.per_call


def best(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest; of those that are as good as equal, the one with the cheapest step."""
    fastest = max(one.tokens_per_second for one in candidates)
    equal = [one for one in candidates if one.tokens_per_second >= (1 - SLACK) * fastest]
    return min(equal, key=lambda one: (one.step_seconds, one.shape.num_nodes))


def pruned(
    setting: Setting,
    exits: Sequence[Exits],
    candidates: Sequence[Candidate],
    streams: int,
    sizes: Sequence[int],
) -> list[Candidate]:
    """Best trees that early exit prunes to a budget, of `streams` streams.

    Early exit may have been replayed for fewer answers than drafts were: what pruning loses of
    the tokens per call is taken from those, and applied to what all answers say.

    Args:
        setting: what candidates are judged by.
        exits: of some of the answers.
        candidates: the same trees, not pruned.
        streams: G.
        sizes: N and M, no larger than the trees in `exits`.
    """
    found = []
    for candidate in candidates:
        shape = candidate.shape
        if (shape.tree.kind, shape.num_streams) != ("best", streams):
            continue
        if shape.num_nodes not in sizes:
            continue
        whole = advance([one.depths(shape.num_nodes, shape.num_nodes) for one in exits]).per_call
        for keep in (size for size in sizes if size < shape.num_nodes):
            left = advance([one.depths(shape.num_nodes, keep) for one in exits]).per_call
            budget = replace(shape, prune=PruneConfig(kind="budget", keep=keep))
            found.append(setting.candidate(budget, candidate.tokens_per_call * left / whole))
    return found
