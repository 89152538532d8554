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
    def of_curve(cls, drafter: str, tokens_by_nodes: Mapping[int, float], max_levels: int) -> Self:
        """Trees of every number of nodes, by what is known of some.

        Args:
            drafter: its registered name.
            tokens_by_nodes: tokens that a call advances by, by nodes (2 or more); for numbers
                between, interpolated.
            max_levels: levels of its trees at most; a chain has nodes - 1.
        """
        known = {1: 1.0, **tokens_by_nodes}
        counts = sorted(known)
        tokens = [known[count] for count in counts]
        shapes = [
            (
                DraftShape(drafter, nodes, min(max_levels, nodes - 1)),
                interpolate(counts, tokens, nodes) - 1,
            )
            for nodes in range(2, counts[-1] + 1)
        ]
        return cls(drafter, shapes)

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
