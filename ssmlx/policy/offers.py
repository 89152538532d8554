"""Offers of drafters: the tokens that a call with so many nodes should bring."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol, Self, runtime_checkable

from ..decoding.draft_shape import DraftShape
from .acceptance import FIRST_RATIO
from .costs import ROWS, interpolate

RatioOf = Callable[[str, float], float]
"""Called with the name of a ratio and what it is at first: the acceptance ratio to expect."""


@dataclass(frozen=True)
class AcceptanceCount:
    """A call's evidence for one acceptance ratio."""

    name: str  # the ratio's
    first_ratio: float  # assumed if nothing was learned
    accepted: float  # drafted tokens
    offered: float  # drafted tokens that were expected at a ratio of 1


class Offer(Protocol):
    """The drafts that a drafter can make now, and how many of their tokens should be accepted.

    Attributes:
        drafter: its registered name.
        shapes: what it can draft, the fewest nodes first; may be empty.
        cost_name: the name under which costs of its calls are kept: the drafter's, or `ROWS`.
        needs_host_tokens: whether the call under way has to be read before it drafts.
    """

    @property
    def drafter(self) -> str: ...

    @property
    def shapes(self) -> Sequence[DraftShape]: ...

    @property
    def cost_name(self) -> str: ...

    @property
    def needs_host_tokens(self) -> bool: ...

    def expected_accepted(self, shape: DraftShape, ratio_of: RatioOf) -> float:
        """Drafted tokens of `shape` that should be accepted, the root not counted."""
        ...

    def acceptance_counts(self, shape: DraftShape, accepted: int) -> Iterator[AcceptanceCount]:
        """Counts for the ratios, from `accepted` drafted tokens of a tree of `shape`."""
        ...

    def after_tokens(self, tokens: int, ratio_of: RatioOf) -> "LaterOffer":
        """The rest of the offer when the text has `tokens` more, and how likely it still holds."""
        ...


class LaterOffer(NamedTuple):
    """An offer as it will be after tokens that are not known yet."""

    likelihood: float  # the probability that it holds then
    offer: Offer  # what is offered if it does


@dataclass(frozen=True)
class CurveOffer:
    """Trees of given shapes, whose accepted tokens are known in the mean, for any text."""

    drafter: str
    # drafted tokens of each shape that are accepted at a ratio of 1
    accepted: Mapping[DraftShape, float]
    needs_host_tokens: bool = False

    @cached_property
    def shapes(self) -> Sequence[DraftShape]:
        return list(self.accepted)

    @property
    def cost_name(self) -> str:
        return self.drafter

    @classmethod
    def of_curve(
        cls,
        # tree of the drafter; one of fewer nodes has at most one level fewer than nodes
        largest: DraftShape,
        tokens_by_nodes: Mapping[int, float],  # that a call advances by
    ) -> Self:
        """Trees of each number of nodes from 2 on, interpolated from those known."""
        known = {1: 1.0, **tokens_by_nodes}
        counts = sorted(known)
        tokens = [known[count] for count in counts]
        accepted = {
            DraftShape(largest.drafter, nodes, min(largest.levels, nodes - 1)): (
                interpolate(counts, tokens, nodes) - 1
            )
            for nodes in range(2, min(counts[-1], largest.nodes) + 1)
        }
        return cls(largest.drafter, accepted)

    @classmethod
    def of_shape(cls, shape: DraftShape, tokens: float, *, needs_host_tokens: bool = False) -> Self:
        """Trees of one shape alone, with which a call should advance by so many tokens."""
        return cls(shape.drafter, {shape: tokens - 1}, needs_host_tokens)

    def expected_accepted(self, shape: DraftShape, ratio_of: RatioOf) -> float:
        return ratio_of(self.drafter, FIRST_RATIO) * self.accepted[shape]

    def acceptance_counts(self, shape: DraftShape, accepted: int) -> Iterator[AcceptanceCount]:
        yield AcceptanceCount(self.drafter, FIRST_RATIO, accepted, self.accepted[shape])

    def after_tokens(self, tokens: int, ratio_of: RatioOf) -> LaterOffer:
        # It does not depend on the text.
        return LaterOffer(1.0, self)


FIRST_LEVEL_RATIO = 0.7
"""Share of guesses at each level that are accepted before any was learned, those above being
accepted: about what trained heads are reported to have."""


@dataclass(frozen=True)
class LevelsOffer:
    """A chain of guesses that does not depend on the text; each level has a ratio of its own."""

    largest: DraftShape
    needs_host_tokens: bool = True

    @property
    def drafter(self) -> str:
        return self.largest.drafter

    @property
    def cost_name(self) -> str:
        return self.drafter

    @cached_property
    def shapes(self) -> Sequence[DraftShape]:
        """Chains of every number of levels up to the largest's."""
        return [
            DraftShape(self.drafter, 1 + levels, levels)
            for levels in range(1, self.largest.levels + 1)
        ]

    def expected_accepted(self, shape: DraftShape, ratio_of: RatioOf) -> float:
        """The sum, over its levels, of the probability that all down to there are accepted."""
        likely = 1.0
        accepted = 0.0
        for level in range(shape.levels):
            likely *= ratio_of(self._ratio_name(level), FIRST_LEVEL_RATIO)
            accepted += likely
        return accepted

    def acceptance_counts(self, shape: DraftShape, accepted: int) -> Iterator[AcceptanceCount]:
        """A count for each level down to the first rejected token."""
        for level in range(min(accepted + 1, shape.levels)):
            is_accepted = float(level < accepted)
            yield AcceptanceCount(self._ratio_name(level), FIRST_LEVEL_RATIO, is_accepted, 1.0)

    def after_tokens(self, tokens: int, ratio_of: RatioOf) -> LaterOffer:
        # It does not depend on the text.
        return LaterOffer(1.0, self)

    def _ratio_name(self, level: int) -> str:
        return f"{self.drafter} level {1 + level}"


MATCH_LENGTHS = (1, 2, 3, 4, 6, 9, 13, 17, 33)
FIRST_RATIOS = (0.25, 0.45, 0.5, 0.55, 0.65, 0.75, 0.8, 0.9, 0.95)
"""The least tokens of each bucket of match lengths, and the share of next tokens accepted there
before any was learned: about as in answers to e2e's, dialogsum's and sql's test prompts."""
CHAIN_NODES = (2, 4, 8, 16, 24, 32)
"""Nodes of the chains that are offered: few, for every number is another kernel to compile."""


@lru_cache(maxsize=4096)
def match_ratio(drafter: str, length: int) -> tuple[str, float]:
    """The acceptance ratio of drafts after a match of `length` tokens: its name and first value."""
    bucket = bisect_right(MATCH_LENGTHS, length) - 1
    return f"{drafter} {MATCH_LENGTHS[bucket]}", FIRST_RATIOS[bucket]


@dataclass(frozen=True)
class ChainOffer:
    """A chain of the tokens that followed an earlier occurrence of the text's last ones.

    The match grows with each token that is right, and a longer one is right more often: ratios are
    kept by the length of the match.
    """

    largest: DraftShape  # chain that the drafter can draft
    match_length: int  # tokens at the text's end that occurred there
    following: int  # tokens that followed them there
    cost_name: str = ROWS
    needs_host_tokens: bool = True

    @property
    def drafter(self) -> str:
        return self.largest.drafter

    @cached_property
    def shapes(self) -> Sequence[DraftShape]:
        """Chains of `CHAIN_NODES`, and the largest, if more than half of the nodes have a token."""
        most = min(self.following, self.largest.levels)
        counts = [nodes for nodes in CHAIN_NODES if nodes < self.largest.nodes]
        return [
            DraftShape(self.drafter, nodes, min(nodes - 1, self.largest.levels))
            for nodes in (*counts, self.largest.nodes)
            if nodes < 2 * (1 + most)
        ]

    def expected_accepted(self, shape: DraftShape, ratio_of: RatioOf) -> float:
        """The sum, over tokens, of the probability that all down to there are accepted."""
        likely = 1.0
        accepted = 0.0
        for level in range(self._depth(shape)):
            likely *= ratio_of(*self._ratio(level))
            accepted += likely
        return accepted

    def acceptance_counts(self, shape: DraftShape, accepted: int) -> Iterator[AcceptanceCount]:
        """A count for each level down to the first rejected token, under its match's length."""
        for level in range(min(accepted + 1, self._depth(shape))):
            yield AcceptanceCount(*self._ratio(level), float(level < accepted), 1.0)

    def after_tokens(self, tokens: int, ratio_of: RatioOf) -> LaterOffer:
        # Beyond the chain's end too, as if it had tokens there.
        likely = 1.0
        for level in range(tokens):
            likely *= ratio_of(*self._ratio(level))
        left = max(0, self.following - tokens)
        return LaterOffer(likely, ChainOffer(self.largest, self.match_length + tokens, left))

    def _depth(self, shape: DraftShape) -> int:
        """Levels of a chain of `shape` that have a token."""
        return min(shape.levels, self.following)

    def _ratio(self, level: int) -> tuple[str, float]:
        """The name and first value of a level's ratio; level 0 is the first drafted token."""
        return match_ratio(self.drafter, self.match_length + level)


@runtime_checkable
class OfferSource(Protocol):
    """An object that the controller asks for offers: a drafter, or a `SteadySource` in its
    place."""

    def offer(self) -> Offer | None:
        """The draft that it could make after the tokens that it knows; None for nothing. Asking
        changes nothing."""
        ...


class SteadySource:
    """An offer source that makes the same offer at every call."""

    def __init__(self, offer: Offer) -> None:
        self._offer = offer

    def offer(self) -> Offer:
        return self._offer
