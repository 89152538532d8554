"""What a decoding step costs on a machine, from seconds that were measured there.

A step is its forwards and their overhead; each forward was measured against its rows and
the context, and a step of any shape is their sum (figure 2 and section 3.2 of the paper):

    lower layers     N nodes                     R = N
    early exit       N nodes, where pruned       section 3.2.3
    upper layers     fused: the M nodes that are left, each with its G streams, R = M * (1 + G);
                     second pass: M nodes, then the G streams of the accepted one
    heads            M nodes, and the streams of the accepted node
    overhead         graph building, acceptance, cache, the host's read

Drafting pays where a step's tokens take less time than plain calls for as many would: where
tokens per call exceed step seconds / plain seconds. `ssmlx.calibrate` measures; here is no clock.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from ..settings import PruneConfig, StreamSchedule, TreeConfig

_LEAST = 0.75
"""Of its forwards' seconds, what a step takes at the least: figures that say less are noise."""


@dataclass(frozen=True, kw_only=True)
class DraftShape:
    """What streams draft, and when they run: what is left to choose on a machine."""

    tree: TreeConfig  # the tree that is drafted
    num_streams: int  # G
    # "off" or a budget; a threshold has no fixed number of rows, and so no cost here
    prune: PruneConfig = field(default_factory=PruneConfig)
    stream_schedule: StreamSchedule = "second-pass"  # "fused" or "second-pass"

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.tree.num_nodes(self.num_streams)

    @property
    def num_kept(self) -> int:
        """M."""
        budget = self.prune.kind == "budget"
        return min(self.prune.keep, self.num_nodes) if budget else self.num_nodes

    @property
    def is_pruned(self) -> bool:
        return self.num_kept < self.num_nodes

    def __str__(self) -> str:
        """Such as `best tree of 24 nodes, 5 streams, second pass`."""
        tree = self.tree
        kind = f"best tree of {tree.size} nodes"
        if tree.kind == "full":
            kind = f"full tree of {tree.full_width} a level, {self.num_nodes} nodes"
        pruned = [f"pruned to {self.num_kept}"] if self.is_pruned else []
        streams = f"{self.num_streams} stream{'s' if self.num_streams > 1 else ''}"
        return ", ".join([kind, *pruned, streams, self.stream_schedule.replace("-", " ")])


@dataclass(frozen=True, kw_only=True)
class MeasuredShape:
    """A shape, and the tokens per call that it was found to advance by after the prompt's."""

    shape: DraftShape
    tokens_per_call: float


@dataclass(frozen=True)
class Surface:
    """Seconds against rows and context, straight lines between what was measured."""

    rows: tuple[int, ...]  # rows that were measured, ascending
    contexts: tuple[int, ...]  # committed tokens that they were measured behind, ascending
    seconds: tuple[tuple[float, ...], ...]  # [contexts][rows]

    def __post_init__(self) -> None:
        ascending = all(
            axis and list(axis) == sorted(set(axis)) for axis in (self.rows, self.contexts)
        )
        full = len(self.seconds) == len(self.contexts) and all(
            len(line) == len(self.rows) for line in self.seconds
        )
        if not (ascending and full):
            raise ValueError("a surface needs ascending axes and a figure for every point")

    def at(self, rows: float, context: float = 0.0) -> float:
        """Seconds of `rows` rows behind `context` tokens; 0 for no rows.

        Beyond the last point, the last line goes on; before the first, the first figure stays.
        """
        if rows <= 0:
            return 0.0
        by_context = [interpolate(self.rows, line, rows) for line in self.seconds]
        return interpolate(self.contexts, by_context, context)

    @classmethod
    def of(cls, points: Mapping[tuple[int, int], float]) -> Self:
        """Of seconds by (rows, context), every row at every context."""
        rows = tuple(sorted({row for row, _ in points}))
        contexts = tuple(sorted({context for _, context in points}))
        lines = (tuple(points[row, context] for row in rows) for context in contexts)
        return cls(rows, contexts, tuple(lines))


def interpolate(known: Sequence[float], values: Sequence[float], at: float) -> float:
    """The value at `at` on straight lines through (known, values)."""
    if len(known) == 1 or at <= known[0]:
        return values[0]
    right = min(bisect_right(known, at), len(known) - 1)
    x0 = known[right - 1]
    x1 = known[right]
    y0 = values[right - 1]
    y1 = values[right]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    plain: Surface  # a call of plain decoding, as its loop takes it; one row
    lower: Surface  # the lower layers
    upper: Surface  # the upper layers on rows of one kind: nodes, or the streams of one node
    fused: Surface  # the upper layers on nodes with their streams beside them, all rows counted
    head: Surface  # the LM head
    draft_head: Surface  # the streams' head, which may be of fewer tokens
    # the LM head and the adapter of pruning; None where there is none
    early_exit: Surface | None = None
    # what a real step took beyond these, by nodes, of each schedule
    overhead: Mapping[str, Surface] | None = field(default=None, metadata={"json": "beside"})
    window: int | None = None  # tokens that a second pass reads at most; None for all

    def forward_seconds(self, shape: DraftShape, context: float) -> float:
        """The forwards of a step; ValueError where it prunes and nothing was measured of that."""
        nodes = shape.num_nodes
        kept = shape.num_kept
        streams = shape.num_streams
        seconds = self.lower.at(nodes, context) + self.head.at(kept)
        seconds += self.draft_seconds(shape, context)
        if shape.stream_schedule == "fused":
            seconds += self.fused.at(kept * (1 + streams), context)
        else:
            seconds += self.upper.at(kept, context)
        if shape.is_pruned:
            if self.early_exit is None:
                raise ValueError("nothing was measured of pruning")
            seconds += self.early_exit.at(nodes)
        return seconds

    def draft_seconds(self, shape: DraftShape, context: float) -> float:
        """What drafting the next tree takes of a step, where that is a pass of its own."""
        streams = shape.num_streams
        seen = context if self.window is None else min(context, self.window)
        own = self.upper.at(streams, seen) if shape.stream_schedule == "second-pass" else 0.0
        return own + self.draft_head.at(streams)

    def step_seconds(self, shape: DraftShape, context: float) -> float:
        """A whole step behind `context` tokens."""
        overhead = (self.overhead or {}).get(shape.stream_schedule)
        more = 0.0 if overhead is None else overhead.at(shape.num_nodes)
        forward = self.forward_seconds(shape, context)
        return max(forward + more, _LEAST * forward)

    def plain_seconds(self, context: float) -> float:
        """A call of plain decoding behind `context` tokens."""
        return self.plain.at(1, context)

    def batch_seconds(self, rows: int, context: float) -> float:
        """A call of plain decoding with a row of each of so many texts behind `context` tokens."""

        def forward(rows: int) -> float:
            return self.lower.at(rows) + self.upper.at(rows) + self.head.at(rows)

        own = self.plain_seconds(context) - self.plain_seconds(0)  # a text's keys and values
        return self.plain_seconds(0) + forward(rows) - forward(1) + rows * own

    def breakeven(self, shape: DraftShape, context: float) -> float:
        """Tokens per call from which on drafting pays."""
        return self.step_seconds(shape, context) / self.plain_seconds(context)
