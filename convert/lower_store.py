"""What the frozen lower layers say of every example, computed once and kept on disk.

Below layer N - Ns nothing is trained, so the hidden states there never change. The file is as
long as the data has tokens; the part of it that is in use stays in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from ssmlx.training.batches import Batch, in_order
from ssmlx.training.data import Example

_DTYPES = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float16: torch.int16}
_BATCH_SIZE = 32
_BATCHES_PER_MARK = 16

Lower = Callable[[Batch], torch.Tensor]
"""A batch to [B, T, D] hidden states before layer N - Ns."""


class LowerStore:
    """[tokens of all examples, D] hidden states in a file.

    Args:
        path: the file; `path` + ".json" beside it marks how much of it is done.
        examples: whose states they are.
        width: D.
        dtype: of the states.
    """

    def __init__(
        self, path: Path, examples: Sequence[Example], width: int, dtype: torch.dtype
    ) -> None:
        self._path, self._examples, self._width = path, examples, width
        ends = np.cumsum([len(example.tokens) for example in examples])
        self._starts = np.concatenate([[0], ends[:-1]])
        numbers = int(ends[-1]) * width
        self._mark = path.with_name(path.name + ".json")
        if not path.exists() or path.stat().st_size != numbers * dtype.itemsize:
            self._mark.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        flat = torch.from_file(str(path), shared=True, size=numbers, dtype=_DTYPES[dtype])
        self._states = flat.view(dtype).view(int(ends[-1]), width)

    @staticmethod
    def num_bytes(examples: Sequence[Example], width: int, dtype: torch.dtype) -> int:
        """How long the file would be."""
        return sum(len(example.tokens) for example in examples) * width * dtype.itemsize

    def fill(self, lower: Lower, progress: Callable[[Sequence[Batch]], Iterable[Batch]]) -> None:
        """Compute what is not there yet, in batches that depend on the examples alone."""
        batches = in_order(self._examples, _BATCH_SIZE)
        done = json.loads(self._mark.read_text())["batches"] if self._mark.exists() else 0
        if done == len(batches):
            return
        for number, batch in enumerate(progress(batches[done:]), done + 1):
            for row, states in zip(self._rows(batch), lower(batch).cpu(), strict=True):
                index, pad, length = row
                self._states[index : index + length] = states[pad : pad + length]
            if number % _BATCHES_PER_MARK == 0 or number == len(batches):
                self._save_mark(number)

    def get(self, batch: Batch) -> torch.Tensor:
        """[B, T, D] of a batch; zeros at its padding."""
        out = torch.zeros(*batch.tokens.shape, self._width, dtype=self._states.dtype)
        for row, (index, pad, length) in enumerate(self._rows(batch)):
            out[row, pad : pad + length] = self._states[index : index + length]
        return out

    def _rows(self, batch: Batch) -> Iterator[tuple[int, int, int]]:
        """(first state, column, tokens) of each row."""
        for index, pad, length in zip(batch.indices, batch.pads, batch.lengths, strict=True):
            yield int(self._starts[index]), int(pad), int(length)

    def _save_mark(self, batches: int) -> None:
        work = self._mark.with_suffix(".new")
        work.write_text(json.dumps({"batches": batches}))
        work.replace(self._mark)


def fits(examples: Sequence[Example], width: int, dtype: torch.dtype, gigabytes: float) -> bool:
    """Whether the states of all examples are within a budget."""
    return math.ceil(LowerStore.num_bytes(examples, width, dtype) / 2**30) <= gigabytes
