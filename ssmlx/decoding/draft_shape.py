"""What decides how much is drafted, as a decoding loop asks it.

Plain values: neither MLX nor a drafter is imported here.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class DraftShape:
    """What is drafted for a call: which drafter, and how large a tree."""

    drafter: str  # its registered name, such as "streams"
    nodes: int  # rows that the next call verifies, the root included
    levels: int  # levels below the root


@dataclass(frozen=True)
class CallRecord:
    """A target call that was done, as the controller learns from it."""

    # of the verified tree, as `next` gave it (it may have fewer nodes); None for a bare root
    shape: DraftShape | None
    tokens: int  # that it advanced by
    context: int  # committed tokens before it
    seconds: float | None  # None where nothing says what it took
    drafted: DraftShape | None = None  # what it drafted for the next call


class DraftController(Protocol):
    """Decides from call to call what is drafted: a loop asks `next`, and reports by `record`."""

    def next(self, *, is_read: bool = False) -> DraftShape | None:
        """What to draft behind the call under way; None for nothing. Asking changes nothing.

        Args:
            is_read: whether the call's tokens are read already. Drafters that need host tokens know
                them then, and the answer may differ from the one before.
        """

    def record(self, call: CallRecord) -> None:
        """Learn from a call that was done; called once for each, in order."""


@dataclass(frozen=True)
class Always:
    """A controller that drafts the same shape at every call, and learns nothing."""

    shape: DraftShape

    def next(self, *, is_read: bool = False) -> DraftShape | None:
        """`shape`, whatever `is_read` says."""
        return self.shape

    def record(self, call: CallRecord) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Never:
    """A controller that drafts nothing: plain decoding."""

    def next(self, *, is_read: bool = False) -> DraftShape | None:
        """None: nothing is drafted."""
        return None

    def record(self, call: CallRecord) -> None:
        """Nothing."""
