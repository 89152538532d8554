"""What drafters offer: the tokens that a call with so many nodes should bring."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from ..decoding.controller import DraftShape
from .costs import interpolate


@dataclass(frozen=True)
class Offer:
    """What a drafter should bring now.

    Attributes:
        drafter: its registered name.
        shapes: what it can draft, the fewest nodes first, each with the drafted tokens that should
            be accepted of it at an acceptance ratio of 1.
    """

    drafter: str
    shapes: Sequence[tuple[DraftShape, float]]

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
        shapes = [
            (
                DraftShape(largest.drafter, nodes, min(largest.levels, nodes - 1)),
                interpolate(counts, tokens, nodes) - 1,
            )
            for nodes in range(2, min(counts[-1], largest.nodes) + 1)
        ]
        return cls(largest.drafter, shapes)

    @classmethod
    def of_shape(cls, shape: DraftShape, tokens: float) -> Self:
        """Trees of one shape alone, with which a call should advance by so many tokens."""
        return cls(shape.drafter, [(shape, tokens - 1)])


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
