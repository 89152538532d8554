"""The interface to a model's cache of one text, for any kind of model.

For a model whose layers run one by one it is a `cache.TreeCache`: rows of attention, which the
package writes itself. For one that is called as a whole it is a `state_cache.StateCache`: mlx-lm's
own caches. A signature that says `TextCache` takes either; one that says `TreeCache` needs the rows
of tokens, or the nodes of a tree; one that says `StateCache` needs a chain.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

import mlx.core as mx

CACHE_STEP = 256  # tokens by which the room for a text grows at once, as in mlx-lm's own caches


class TextCache(ABC):
    """A model's cache of one text.

    Some of the text's first tokens are committed: what they left is kept. A call may leave more, of
    which `commit_accepted` says how much becomes text.

    Attributes:
        scratch: rows of a step that there is room for beside the committed tokens; 0 if steps need
            no room.
        can_build_ahead: whether a call may be built after one that left drafted tokens here, of
            which `commit_accepted` has not said how many are text.
    """

    scratch: int = 0
    can_build_ahead: bool = False

    @property
    @abstractmethod
    def offset(self) -> int:
        """L, the committed tokens that the host knows of."""

    @property
    def root_position(self) -> mx.array:
        """[1] int32, not waited for: tokens before the next call's first row."""
        return mx.array([self.offset], mx.int32)

    @property
    def has_uncounted_paths(self) -> bool:
        """Whether an accepted path is kept of which the host does not know yet how much counts:
        tokens cannot be appended after it."""
        return False

    @property
    @abstractmethod
    def state(self) -> list[mx.array]:
        """All that is kept, for `mx.eval`."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of what is kept, including the room that is reserved for more."""

    @property
    def row_bytes(self) -> int:
        """Bytes of `nbytes` for each token or row that there is room for; 0 if no room is reserved,
        or nothing was written yet."""
        return 0

    @property
    def mask_bytes(self) -> int:
        """Bytes of the masks that are kept from step to step, beside `nbytes`."""
        return 0

    @abstractmethod
    def reserve(self, *, more_tokens: int, step_rows: int = 0) -> None:
        """Make room for `more_tokens` beside the committed ones, and a step of `step_rows` rows."""

    @abstractmethod
    def commit_accepted(self, num_tokens: int) -> None:
        """Commit the first `num_tokens` rows of the oldest call that waits for it.

        ValueError if no call waits, or `num_tokens` is not from 1 to the number of its rows; then
        nothing is changed.
        """

    @property
    def has_fixed_places(self) -> bool:
        """Whether `keep_first` can only go back to certain offsets of the text."""
        return False

    def mark_here_alone(self) -> bool:
        """Let `keep_first` come back to the present end of the text, and no longer to offsets
        marked before. Returns whether it can."""
        return True

    @abstractmethod
    def longest_keepable(self, num_tokens: int) -> int:
        """The number of a text's first `num_tokens` that `keep_first` and `fork` can keep: never
        more than are committed."""

    @abstractmethod
    def keep_first(self, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` committed tokens, and what is not committed;
        ValueError unless `longest_keepable` says that it can."""

    @abstractmethod
    def fork(self, num_tokens: int) -> Self:
        """A new cache of the first `num_tokens` committed tokens, which goes on by itself;
        ValueError unless `longest_keepable` says that it can.

        Both may hold the same buffers, of which MLX makes a copy when one of them writes.
        """

    @abstractmethod
    def snapshot(self) -> Self:
        """A copy of what is kept now, to `restore` should the next call not be run.

        Both share their arrays, and MLX cannot write in place into what a copy holds: drop it
        before evaluating.
        """

    def restore(self, held: Self) -> None:
        """Take over everything from `held`, a snapshot or another cache of the same model, which
        must not be used any more."""
        vars(self).update(vars(held))

    @abstractmethod
    def keys_and_values(
        self,
        layer: int,  # its number among the layers that keep something
    ) -> tuple[mx.array, mx.array]:  # [1, H, R, Dh] and [1, H', R, Dh']
        """Keys and values of the committed tokens in one layer; keys carry their rotary
        positions. Slices of the buffers: drop them before the cache is written to, or it is
        copied."""
