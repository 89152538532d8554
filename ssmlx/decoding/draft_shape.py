"""The interface between a decoding loop and what decides how much is drafted; no MLX."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class DraftShape:
    """The drafter that drafts for a call, and the size of its tree."""

    drafter: str  # registered name, such as "streams"
    nodes: int  # rows that the next call verifies, the root included
    levels: int  # levels below the root


@dataclass(frozen=True)
class CallRecord:
    """A target call that is done, as the controller learns from it."""

    # verified tree, as `next` gave it (it may have fewer nodes); None for a bare root
    shape: DraftShape | None
    tokens: int  # that the answer advanced by
    context: int  # committed tokens before the call
    seconds: float | None  # None if nothing says how long it took
    drafted: DraftShape | None = None  # what was drafted after it, for the next call


class DraftController(Protocol):
    """Decides from call to call what is drafted: a loop asks `next`, and reports by `record`."""

    def next(self, *, is_read: bool = False) -> DraftShape | None:
        """Decide what to draft after the call under way; None for nothing.

        A loop asks before it reads the call, and perhaps once more, with `is_read`, when it has.

        Args:
            is_read: whether the call's tokens are read already. Drafters that need host tokens know
                them then, so the second answer may differ from the first.
        """

    def record(self, call: CallRecord) -> None:
        """Learn from a call that is done; called once for each, in order."""


@dataclass(frozen=True)
class Always:
    """A controller that drafts the same shape at every call."""

    shape: DraftShape

    def next(self, *, is_read: bool = False) -> DraftShape | None:
        return self.shape

    def record(self, call: CallRecord) -> None: ...


@dataclass(frozen=True)
class Never:
    """A controller that drafts nothing: plain decoding."""

    def next(self, *, is_read: bool = False) -> DraftShape | None:
        return None

    def record(self, call: CallRecord) -> None: ...
