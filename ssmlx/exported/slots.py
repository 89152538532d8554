"""The host's side of an exported model's cache: which slot holds which token.

A slot is a place in every layer's keys and values. A step writes each node of its tree into a
free slot; accepting a node makes its slot a committed one, and the others are free again, still
full of what nobody will see. So nothing in the cache is ever moved, and rejecting costs nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import InputError

MASKED = -1e4
"""What is added to the score of a slot that a row does not see."""


class SlotCache:
    """The cache of one sequence.

    Args:
        state: the backend's own, as its `make_state` gave it.
        num_slots: S.
    """

    def __init__(self, state: Any, num_slots: int) -> None:
        self.state = state
        self._slots: list[int] = []
        self._used = np.zeros(num_slots, bool)

    @property
    def num_slots(self) -> int:
        """S."""
        return len(self._used)

    @property
    def offset(self) -> int:
        """L, committed tokens."""
        return len(self._slots)

    def free(self, count: int) -> np.ndarray:
        """[count] int32 free slots, ascending.

        Raises:
            InputError: there are not as many.
        """
        found = np.flatnonzero(~self._used)[:count].astype(np.int32)
        if len(found) < count:
            raise InputError(
                f"{self.offset} tokens are in a context of {self.num_slots}",
                expected=f"room for {count} more",
                do="shorten the prompt, or export with a larger --context",
            )
        return found

    def commit(self, slots: np.ndarray) -> None:
        """Make `slots` those of the next committed tokens, in this order."""
        self._slots += [int(slot) for slot in slots]
        self._used[slots] = True

    def trim(self, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` committed tokens."""
        if not 0 <= num_tokens <= self.offset:
            raise ValueError(f"cannot keep {num_tokens} tokens of {self.offset}")
        self._used[self._slots[num_tokens:]] = False
        del self._slots[num_tokens:]

    def mask(self, slots: np.ndarray, visible: np.ndarray) -> np.ndarray:
        """[1, 1, R, S] additive mask of rows that see all that is committed, and each other.

        Args:
            slots: [R] where the rows are written.
            visible: [R, R] bool, which row (first axis) sees which.
        """
        mask = np.where(self._used, 0, MASKED).astype(np.float32)
        mask = np.repeat(mask[None], len(slots), axis=0)
        mask[:, slots] = np.where(visible, 0, MASKED)
        return mask[None, None]
