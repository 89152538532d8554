"""What decides how much is drafted: what a decoding loop and an answer's plan ask of it.

Plain values: neither MLX nor a drafter is imported here.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True)
class DraftShape:
    """What is drafted for a call: which drafter, and how large a tree."""

    drafter: str  # its registered name, such as "streams"
    nodes: int  # rows that the next call verifies, the root included
    levels: int  # levels below the root


@dataclass(frozen=True)
class Call:
    """A target call that was done, as the controller learns from it."""

    # of the verified tree, as `next` gave it (it may have fewer nodes); None for a bare root
    shape: DraftShape | None
    tokens: int  # that it advanced by
    context: int  # committed tokens before it
    seconds: float | None  # None where nothing says what it took
    drafted: DraftShape | None = None  # what it drafted for the next call


class ExpectedCall(NamedTuple):
    """What a call should bring, and what it should take.

    Attributes:
        tokens: that the answer should advance by.
        plain_calls: as many of which it should take.
    """

    tokens: float
    plain_calls: float

    @property
    def speed(self) -> float:
        """Tokens per plain call; plain decoding has 1."""
        return self.tokens / self.plain_calls


class DraftController(Protocol):
    """Decides from call to call what is drafted: a loop asks `next`, and reports by `record`.

    An answer's plan asks `expected_fastest_call`, and calls `finish` when the answer is over.
    """

    def next(self, *, is_read: bool = False) -> DraftShape | None:
        """What to draft behind the call under way; None for nothing. Asking changes nothing.

        Args:
            is_read: whether the call's tokens are read already. Drafters that need host tokens know
                them then, and the answer may differ from the one before.
        """

    def record(self, call: Call) -> None:
        """Learn from a call that was done; called once for each, in order."""

    def expected_fastest_call(self) -> ExpectedCall:
        """What the fastest call should bring and take now.

        Returns:
            Of the fastest call that is known; 1 and 1 where none is faster than plain decoding.
        """

    def finish(self) -> None:
        """Keep what the answer has taught; called once, when it has ended or was given up."""


@dataclass(frozen=True)
class Always:
    """A controller that drafts the same shape at every call, and learns nothing."""

    shape: DraftShape

    def next(self, *, is_read: bool = False) -> DraftShape | None:
        """`shape`, whatever `is_read` says."""
        return self.shape

    def record(self, call: Call) -> None:
        """Nothing."""

    def expected_fastest_call(self) -> ExpectedCall:
        """1 and 1: nothing is known of what its calls bring."""
        return ExpectedCall(1.0, 1.0)

    def finish(self) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Never:
    """A controller that drafts nothing: plain decoding."""

    def next(self, *, is_read: bool = False) -> DraftShape | None:
        """None: nothing is drafted."""
        return None

    def record(self, call: Call) -> None:
        """Nothing."""

    def expected_fastest_call(self) -> ExpectedCall:
        """1 and 1: plain decoding's."""
        return ExpectedCall(1.0, 1.0)

    def finish(self) -> None:
        """Nothing."""
