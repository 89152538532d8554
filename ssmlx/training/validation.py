"""Held-out examples: their losses, and the target calls that decoding them would take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from ..settings import TreeConfig
from ..tuning.replay import Guesses, num_candidates, replay
from .batches import Batch, in_order
from .config import TrainConfig
from .data import Example

_BATCH_SIZE = 16


class Objective(Protocol):
    """What a trainer must compute of a batch; its hidden states are its own affair."""

    @property
    def train(self) -> TrainConfig:
        """The settings of the run."""
        ...

    @property
    def draft_vocab_size(self) -> int:
        """Tokens that streams may guess."""
        ...

    def lower(self, batch: Batch) -> Any:
        """[B, T, D] what the frozen layers say."""
        ...

    def parts(self, batch: Batch, lower: Any) -> dict[str, float]:
        """Each part of eq. 5 in nats a token, without learning."""
        ...

    def guesses(self, batch: Batch, lower: Any, count: int) -> list[Guesses]:
        """The `count` likeliest tokens of every stream of every example."""
        ...


class Validation:
    """Held-out examples, with what the frozen layers say of them."""

    def __init__(self, objective: Objective, examples: Sequence[Example], tree_size: int) -> None:
        self._objective = objective
        # A stream cannot rank more tokens than it may guess.
        self._tree = TreeConfig(kind="best", size=tree_size, width=objective.draft_vocab_size)
        batches = in_order(examples, _BATCH_SIZE)
        self._batches = [(batch, objective.lower(batch)) for batch in batches]

    def __call__(self) -> dict[str, float]:
        """Mean losses, and tokens per call where there are streams."""
        entry: dict[str, float] = {}
        for batch, lower in self._batches:
            for name, value in self._objective.parts(batch, lower).items():
                entry[f"valid_{name}"] = entry.get(f"valid_{name}", 0.0) + value
        entry = {name: round(value / len(self._batches), 4) for name, value in entry.items()}
        num_streams = self._objective.train.num_streams
        if num_streams:
            count = num_candidates(self._tree, num_streams)
            found = [
                guess
                for batch, lower in self._batches
                for guess in self._objective.guesses(batch, lower, count)
            ]
            entry["tokens_per_call"] = round(replay(found, self._tree).tokens_per_call, 4)
        return entry


def answers(batch: Batch) -> Iterator[np.ndarray]:
    """The answer tokens of each example."""
    for tokens, pad, length in zip(batch.tokens, batch.pads, batch.lengths, strict=True):
        yield tokens[batch.prompt_width : pad + length]
