"""What drafters offer: the tokens that a call with so many nodes should bring."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Self, runtime_checkable

from ..decoding.controller import DraftShape
from .acceptance import FIRST_RATIO
from .costs import ROWS, interpolate

RatioOf = Callable[[str, float], float]
"""The acceptance ratio that is known under a name; the second argument where none is."""


@dataclass(frozen=True)
class AcceptanceCount:
    """Drafted tokens that were accepted, of those that could have been, under a ratio's name."""

    name: str
    first_ratio: float  # where nothing was known
    accepted: float
    offered: float


class Offer(Protocol):
    """What a drafter should bring now.

    Attributes:
        drafter: its registered name.
        shapes: what it can draft, the fewest nodes first.
        cost_name: the name under which costs of its calls are kept.
        waits: whether it drafts only when the call under way was read.
    """

    @property
    def drafter(self) -> str: ...

    @property
    def shapes(self) -> Sequence[DraftShape]: ...

    @property
    def cost_name(self) -> str: ...

    @property
    def waits(self) -> bool: ...

    def expected(self, shape: DraftShape, ratio_of: RatioOf) -> float:
        """Drafted tokens of `shape` that should be accepted."""
        ...

    def acceptance_counts(self, shape: DraftShape, accepted: int) -> Iterator[AcceptanceCount]:
        """What it says of ratios that so many drafted tokens of `shape` were accepted."""
        ...

    def after_tokens(self, tokens: int, ratio_of: RatioOf) -> tuple[float, "Offer"]:
        """How likely it is to hold behind so many tokens more, and what it is then."""
        ...


@dataclass(frozen=True)
class CurveOffer:
    """Trees of some shapes, whatever the text is.

    Attributes:
        drafter, shapes, cost_name, waits: see `Offer`.
        accepted: drafted tokens of each shape that are accepted at a ratio of 1.
    """

    drafter: str
    accepted: Mapping[DraftShape, float]
    waits: bool = False

    @cached_property
    def shapes(self) -> Sequence[DraftShape]:
        return list(self.accepted)

    @property
    def cost_name(self) -> str:
        return self.drafter

    @classmethod
    def of_curve(cls, largest: DraftShape, tokens_by_nodes: Mapping[int, float]) -> Self:
        """Trees of every number of nodes, by what is known of some.

        Args:
            largest: what the drafter can draft at most; a chain has a level fewer than nodes.
            tokens_by_nodes: tokens that a call advances by, by nodes (2 or more); for numbers
                between, interpolated.
        """
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
    def of_shape(cls, shape: DraftShape, tokens: float, *, waits: bool = False) -> Self:
        """Trees of one shape alone, with which a call should advance by so many tokens."""
        return cls(shape.drafter, {shape: tokens - 1}, waits)

    def expected(self, shape: DraftShape, ratio_of: RatioOf) -> float:
        """See `Offer`."""
        return ratio_of(self.drafter, FIRST_RATIO) * self.accepted[shape]

    def acceptance_counts(self, shape: DraftShape, accepted: int) -> Iterator[AcceptanceCount]:
        """See `Offer`."""
        yield AcceptanceCount(self.drafter, FIRST_RATIO, accepted, self.accepted[shape])

    def after_tokens(self, tokens: int, ratio_of: RatioOf) -> tuple[float, Offer]:
        """See `Offer`."""
        return 1.0, self


MATCH_LENGTHS = (1, 2, 3, 4, 6, 9, 13, 17, 33)
FIRST_RATIOS = (0.25, 0.45, 0.5, 0.55, 0.65, 0.75, 0.8, 0.9, 0.95)
"""Least tokens of a match for each bucket, and how often its next token is right where nothing is
known of a text: about what answers to e2e's, dialogsum's and sql's test prompts had."""
CHAIN_NODES = (2, 4, 8, 16, 24, 32)
"""Nodes of the chains that are offered: few, for every number is another kernel to compile."""


def match_bucket(length: int) -> int:
    """Which of `MATCH_LENGTHS` a match belongs to."""
    return sum(least <= length for least in MATCH_LENGTHS) - 1


@dataclass(frozen=True)
class ChainOffer:
    """What followed the text's last tokens where they stood before.

    The match grows with each token that is right, and a longer one is right more often: ratios are
    kept by the length of the match.

    Attributes:
        drafter, shapes, cost_name, waits: see `Offer`.
        largest: what the drafter can draft at most.
        match_length: tokens at the text's end that stood there before.
        following: tokens that followed them there.
    """

    largest: DraftShape
    match_length: int
    following: int
    cost_name: str = ROWS
    waits: bool = True

    @property
    def drafter(self) -> str:
        return self.largest.drafter

    @cached_property
    def shapes(self) -> Sequence[DraftShape]:
        """Of those that are filled by half or more."""
        most = min(self.following, self.largest.levels)
        counts = [nodes for nodes in CHAIN_NODES if nodes < self.largest.nodes]
        return [
            DraftShape(self.drafter, nodes, min(nodes - 1, self.largest.levels))
            for nodes in (*counts, self.largest.nodes)
            if nodes < 2 * (1 + most)
        ]

    def expected(self, shape: DraftShape, ratio_of: RatioOf) -> float:
        """See `Offer`."""
        likely = 1.0
        accepted = 0.0
        for level in range(self._depth(shape)):
            likely *= ratio_of(*self._ratio(level))
            accepted += likely
        return accepted

    def acceptance_counts(self, shape: DraftShape, accepted: int) -> Iterator[AcceptanceCount]:
        """See `Offer`."""
        for level in range(min(accepted + 1, self._depth(shape))):
            yield AcceptanceCount(*self._ratio(level), float(level < accepted), 1.0)

    def after_tokens(self, tokens: int, ratio_of: RatioOf) -> tuple[float, Offer]:
        """See `Offer`."""
        likely = 1.0
        for level in range(tokens):
            likely *= ratio_of(*self._ratio(level))
        left = max(0, self.following - tokens)
        return likely, ChainOffer(self.largest, self.match_length + tokens, left)

    def _depth(self, shape: DraftShape) -> int:
        return min(shape.levels, self.following)

    def _ratio(self, level: int) -> tuple[str, float]:
        """The name of the ratio of a level of the chain, and what it is at first."""
        bucket = match_bucket(self.match_length + level)
        return f"{self.drafter} {MATCH_LENGTHS[bucket]}", FIRST_RATIOS[bucket]


@runtime_checkable
class OfferSource(Protocol):
    """A drafter's side of the controller."""

    def offer(self) -> Offer | None:
        """What it should bring now, or None where it has nothing; asking changes nothing."""
        ...


class SteadySource:
    """The same offer at every call.

    Args:
        offer: what its drafter should bring.
    """

    def __init__(self, offer: Offer) -> None:
        self._offer = offer

    def offer(self) -> Offer:
        """See `OfferSource`."""
        return self._offer
