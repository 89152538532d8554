"""What a decoding loop asks of whoever decides how much is drafted.

Plain values: neither MLX nor a drafter is imported here.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class DraftShape:
    """What a call drafts."""

    drafter: str  # its registered name, such as "streams"
    nodes: int  # rows that the next call verifies, the root included
    levels: int  # levels below the root


@dataclass(frozen=True)
class Call:
    """A target call that was done."""

    # of the verified tree, as it was asked for (it may have fewer nodes); None for a bare root
    shape: DraftShape | None
    tokens: int  # that it advanced by
    context: int  # committed tokens before it
    seconds: float | None  # None where nothing says what it took
    drafted: DraftShape | None = None  # what it drafted for the next call


class DraftController(Protocol):
    """Decides from call to call what is drafted."""

    def next(self, *, is_read: bool = False) -> DraftShape | None:
        """What the call under way is to draft; None for nothing. Asking changes nothing.

        Args:
            is_read: whether drafters know its tokens already, as those do that wait for them. The
                answer may be another one then.
        """

    def record(self, call: Call) -> None:
        """Note a call that was done."""


@dataclass(frozen=True)
class Always:
    """Drafts one shape at every call."""

    shape: DraftShape

    def next(self, *, is_read: bool = False) -> DraftShape | None:
        """See `DraftController`."""
        return self.shape

    def record(self, call: Call) -> None:
        """See `DraftController`."""


@dataclass(frozen=True)
class Never:
    """Decodes plainly."""

    def next(self, *, is_read: bool = False) -> DraftShape | None:
        """See `DraftController`."""
        return None

    def record(self, call: Call) -> None:
        """See `DraftController`."""
