"""What the frozen lower layers say of every example, as tensors (`ssmlx.training.lower_store`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from ssmlx.training import lower_store
from ssmlx.training.batches import Batch
from ssmlx.training.data import Example

_BITS = {2: torch.int16, 4: torch.int32}

Lower = Callable[[Batch], torch.Tensor]
"""A batch to [B, T, D] hidden states before layer N - Ns."""


class LowerStore:
    """[tokens of all examples, D] hidden states in a file.

    Args:
        path: the file.
        examples: whose states they are.
        width: D.
        dtype: of the states.
        identity: of the layers and the data; a file of another one is begun anew.
    """

    def __init__(
        self,
        path: Path,
        examples: Sequence[Example],
        width: int,
        dtype: torch.dtype,
        identity: str = "",
    ) -> None:
        self._dtype = dtype
        self._store = lower_store.LowerStore(path, examples, width, dtype.itemsize, identity)

    def fill(self, lower: Lower, progress: Callable[[Sequence[Batch]], Iterable[Batch]]) -> None:
        """Compute what is not there yet, in batches that depend on the examples alone."""
        bits = _BITS[self._dtype.itemsize]
        self._store.fill(lambda batch: lower(batch).cpu().view(bits).numpy(), progress)

    def get(self, batch: Batch) -> torch.Tensor:
        """[B, T, D] of a batch; zeros at its padding."""
        return torch.from_numpy(self._store.get(batch)).view(self._dtype)


def fits(examples: Sequence[Example], width: int, dtype: torch.dtype, gigabytes: float) -> bool:
    """Whether the states of all examples are within a budget."""
    return lower_store.fits(examples, width, dtype.itemsize, gigabytes)
