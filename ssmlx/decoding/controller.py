"""The question that the decoding loop asks before each call: what to draft for the next one."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class DraftShape:
    """What a call drafts: by which drafter, how many nodes, how many levels."""

    drafter: str  # registered name, such as "streams"
    nodes: int  # rows that the next call verifies, the root included (>= 2)
    levels: int  # levels below the root


@dataclass(frozen=True)
class Call:
    """A target call that was done."""

    shape: DraftShape | None  # shape of the tree that it verified; None for a bare root
    tokens: int  # tokens that it advanced by
    context: int  # committed tokens before it
    seconds: float | None  # None where nothing says what it took
    drafted: DraftShape | None = None  # what it drafted for the next call


class DraftController(Protocol):
    """Decides what each call of an answer drafts.

    The loop asks `next` once for every call that it builds, and records every call that is done,
    in order. It may have built one call more than it has recorded.
    """

    def next(self) -> DraftShape | None:
        """What the call that is built now is to draft; None for nothing.

        Asking changes nothing: asked twice, the answer is the same.
        """
        ...

    def record(self, call: Call) -> None:
        """Note a call that is done."""
        ...


class Always:
    """Drafts one shape at every call."""

    def __init__(self, shape: DraftShape) -> None:
        self._shape = shape

    def next(self) -> DraftShape | None:
        return self._shape

    def record(self, call: Call) -> None:
        pass


class Never:
    """Drafts nothing: plain decoding."""

    def next(self) -> DraftShape | None:
        return None

    def record(self, call: Call) -> None:
        pass
