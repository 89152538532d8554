"""What drafters offer: the tokens that a call with so many nodes should bring."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from ..decoding.controller import DraftShape
from .costs import interpolate


@dataclass(frozen=True)
class Offer:
    """What a drafter should bring now.

    Args:
        drafter: its registered name.
        tokens_by_nodes: tokens that a call advances by, for some numbers of nodes (>= 2); for
            those between, interpolated. At an acceptance ratio of 1.
        max_levels: levels that its trees have at most; a chain has nodes - 1.
    """

    drafter: str
    tokens_by_nodes: Mapping[int, float]
    max_levels: int

    @cached_property
    def shapes(self) -> Sequence[tuple[DraftShape, float]]:
        """Shapes of every number of nodes, with the drafted tokens that should be accepted."""
        known = {1: 1.0, **self.tokens_by_nodes}
        counts = sorted(known)
        tokens = [known[count] for count in counts]
        return [
            (
                DraftShape(self.drafter, nodes, min(self.max_levels, nodes - 1)),
                interpolate(counts, tokens, nodes) - 1,
            )
            for nodes in range(2, counts[-1] + 1)
        ]


class OfferSource(Protocol):
    """A drafter's side of the controller."""

    def offer(self) -> Offer | None:
        """What it should bring now, or None where it has nothing; asking changes nothing."""
        ...


class CurveSource:
    """The same offer at every call: streams, by an adapter's tokens per call.

    Args:
        drafter: registered name.
        tokens_by_nodes: the adapter's `tokens_per_call`.
        num_streams: levels of its trees at most.
    """

    def __init__(
        self, drafter: str, tokens_by_nodes: Mapping[int, float], num_streams: int
    ) -> None:
        self._offer = Offer(drafter, tokens_by_nodes, num_streams)

    def offer(self) -> Offer:
        return self._offer


@dataclass(frozen=True)
class SingleShape:
    """The source of a drafter that proposes trees of one shape alone, and its offer at once.

    Args:
        shape: that shape.
        tokens: that a call should advance by, at an acceptance ratio of 1.
    """

    shape: DraftShape
    tokens: float

    @property
    def drafter(self) -> str:
        """Its registered name."""
        return self.shape.drafter

    @property
    def shapes(self) -> Sequence[tuple[DraftShape, float]]:
        """See `Offer`."""
        return [(self.shape, self.tokens - 1)]

    def offer(self) -> "SingleShape":
        """See `OfferSource`."""
        return self
