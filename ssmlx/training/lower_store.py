"""What the frozen lower layers say of every example, computed once and kept on disk.

Below layer N - Ns nothing is trained, so the hidden states there never change. The file is as
long as the data has tokens; the part of it that is in use stays in memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import require
from .batches import Batch, in_order
from .data import Example
from .objective import Objective
from .record import bar

_BITS: dict[int, np.dtype] = {2: np.dtype(np.int16), 4: np.dtype(np.int32)}
_BATCH_SIZE = 32
_BATCHES_PER_MARK = 16

Lower = Callable[[Batch], Any]
"""A batch to [B, T, D] hidden states before layer N - Ns."""


class LowerStore:
    """[tokens of all examples, D] hidden states in a file.

    Args:
        path: the file; `path` + ".json" beside it marks how much of it is done.
        examples: whose states they are.
        objective: computes them.
        identity: of the layers and the data; a file of another one is begun anew.
    """

    def __init__(
        self, path: Path, examples: Sequence[Example], objective: Objective, identity: str = ""
    ) -> None:
        self._examples, self._objective, self._identity = examples, objective, identity
        ends = np.cumsum([len(example.tokens) for example in examples])
        self._starts = np.concatenate([[0], ends[:-1]])
        shape = int(ends[-1]), objective.hidden_size
        self._mark = path.with_name(path.name + ".json")
        size = num_bytes(examples, objective)
        if not path.exists() or path.stat().st_size != size or not self._is_own():
            self._mark.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        if not path.exists():
            _check_room(path.parent, size)
            with path.open("wb") as file:
                file.truncate(size)
        self._states: np.ndarray = np.memmap(path, _BITS[objective.state_bytes], "r+", shape=shape)

    def fill(self, label: str = "") -> None:
        """Compute what is not there yet, in batches that depend on the examples alone.

        Args:
            label: of the progress bar.
        """
        batches, done = in_order(self._examples, _BATCH_SIZE), self._read_mark().get("batches", 0)
        if done == len(batches):
            return
        for number, batch in enumerate(bar(batches[done:], label), done + 1):
            bits = self._objective.to_bits(self._objective.lower(batch))
            for (index, pad, length), states in zip(self._rows(batch), bits, strict=True):
                self._states[index : index + length] = states[pad : pad + length]
            if number % _BATCHES_PER_MARK == 0 or number == len(batches):
                self._save_mark(number)

    def get(self, batch: Batch) -> Any:
        """[B, T, D] of a batch, as the objective has them; zeros at its padding."""
        out = np.zeros((*batch.tokens.shape, self._objective.hidden_size), self._states.dtype)
        for row, (index, pad, length) in enumerate(self._rows(batch)):
            out[row, pad : pad + length] = self._states[index : index + length]
        return self._objective.from_bits(out)

    def _rows(self, batch: Batch) -> Iterator[tuple[int, int, int]]:
        """(first state, column, tokens) of each row."""
        for index, pad, length in zip(batch.indices, batch.pads, batch.lengths, strict=True):
            yield int(self._starts[index]), int(pad), int(length)

    def _is_own(self) -> bool:
        return self._read_mark().get("identity") == self._identity

    def _read_mark(self) -> dict:
        return json.loads(self._mark.read_text()) if self._mark.exists() else {}

    def _save_mark(self, batches: int) -> None:
        work = self._mark.with_suffix(".new")
        work.write_text(json.dumps({"batches": batches, "identity": self._identity}))
        work.replace(self._mark)


def _check_room(folder: Path, size: int) -> None:
    """A mapped file may be larger than its disk; writing to it would end the process."""
    free = shutil.disk_usage(folder).free
    require(
        size <= free,
        f"{folder} has {free / 2**30:.1f} GiB free",
        expected=f"{size / 2**30:.1f} for the frozen layers' results",
        do="free some, or give --cache-gb 0",
    )


def num_bytes(examples: Sequence[Example], objective: Objective) -> int:
    """What the states of all examples take on disk."""
    tokens = sum(len(example.tokens) for example in examples)
    return tokens * objective.hidden_size * objective.state_bytes
