"""The fixed sizes of an exported graph."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GraphSizes:
    """Every shape of both functions follows from these and the model.

    Attributes:
        num_nodes: N, rows of a decode step; trees of fewer nodes are filled up.
        num_kept: M, nodes that pruning keeps; N where nothing is pruned.
        num_parents: I, leading nodes that may have children, for the early exit.
        num_streams: G, streams in use.
        num_candidates: K, ranked candidates of each stream.
        num_slots: S, slots of the cache.
        chunk: T, tokens of a prompt chunk.
    """

    num_nodes: int
    num_kept: int
    num_parents: int
    num_streams: int
    num_candidates: int
    num_slots: int
    chunk: int

    @property
    def is_pruned(self) -> bool:
        """Whether nodes are dropped half-way up."""
        return self.num_kept < self.num_nodes

    @property
    def num_positions(self) -> int:
        """Positions that a row may stand at: a stream looks G ahead of the last slot."""
        return self.num_slots + self.num_streams
