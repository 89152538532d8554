"""Bucketed batches, laid out so that every answer of a batch starts in one column.

    column     0   1   2   3   4   5   6      P = 3, the widest prompt
    row 0      .   a   b   A   B   C   /      . padding before the prompt
    row 1      d   e   f   D   /   .   .      / end token      . padding behind it

Node rows P - 1 to T - 2 carry streams: one list of carriers for the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .data import Example

_POOL = 32  # batches' worth of shuffled examples that are sorted by length among themselves


@dataclass(frozen=True, eq=False)
class Batch:
    """Examples side by side: B of them, T columns, K carriers, G streams.

    Attributes:
        indices: [B] which examples they are.
        tokens: [B, T] ids, 0 for padding.
        lengths: [B] tokens of each example.
        pads: [B] columns of padding before each example.
        prompt_width: P, the column in which answers start.
    """

    indices: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray
    pads: np.ndarray
    prompt_width: int

    @property
    def positions(self) -> np.ndarray:
        """[B, T] place of each token in its example; 0 for padding."""
        columns = np.arange(self.tokens.shape[1])
        return np.maximum(columns - self.pads[:, None], 0).astype(np.int32)

    @property
    def visible(self) -> np.ndarray:
        """[B, T, T] bool: what each node row sees; causal, padding hidden but from itself."""
        columns = np.arange(self.tokens.shape[1])
        causal = columns <= columns[:, None]
        own = columns[None, None, :] >= self.pads[:, None, None]
        return (causal & own) | np.eye(len(columns), dtype=bool)

    @property
    def carriers(self) -> np.ndarray:
        """[K] columns whose rows predict an answer token, and so carry streams."""
        return np.arange(self.prompt_width - 1, self.tokens.shape[1] - 1)

    def targets(self, ahead: int) -> np.ndarray:
        """[B, K] the token that stream `ahead` of each carrier predicts; -1 where there is none.

        Stream j predicts j + 1 places on (eq. 5); `ahead` 0 is the main stream.
        """
        at = self.carriers + ahead + 1
        padded = np.concatenate(
            [self.tokens, np.zeros((len(self.tokens), ahead + 1), self.tokens.dtype)], axis=1
        )
        inside = at < (self.pads + self.lengths)[:, None]
        return np.where(inside, padded[:, at], -1)


def collate(examples: Sequence[Example], indices: np.ndarray) -> Batch:
    """The batch of `examples[i]` for every i of `indices`."""
    chosen = [examples[i] for i in indices]
    prompt_width = max(example.start for example in chosen)
    columns = prompt_width + max(example.num_answer for example in chosen)
    pads = np.array([prompt_width - example.start for example in chosen])
    tokens = np.zeros((len(chosen), columns), np.int32)
    for row, (example, pad) in enumerate(zip(chosen, pads, strict=True)):
        tokens[row, pad : pad + len(example.tokens)] = example.tokens
    lengths = np.array([len(example.tokens) for example in chosen])
    return Batch(np.asarray(indices), tokens, lengths, pads, prompt_width)


def epoch_order(
    examples: Sequence[Example], batch_size: int, seed: int, epoch: int
) -> list[np.ndarray]:
    """Index arrays of one epoch's batches, each of at most `batch_size` alike in length.

    The examples are shuffled, sorted by length in pools of 32 batches, cut into batches, and
    the batches are shuffled. Depends on nothing but the arguments, so that a run resumes.
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(examples))
    batches = []
    for first in range(0, len(order), batch_size * _POOL):
        pool = order[first : first + batch_size * _POOL]
        sizes = [(examples[i].num_answer, examples[i].start) for i in pool]
        pool = pool[sorted(range(len(pool)), key=sizes.__getitem__)]
        batches += [pool[i : i + batch_size] for i in range(0, len(pool), batch_size)]
    return [batches[i] for i in rng.permutation(len(batches))]


class BatchPlan:
    """Which examples each step of a run sees."""

    def __init__(self, examples: Sequence[Example], batch_size: int, seed: int) -> None:
        self._examples, self._batch_size, self._seed = examples, batch_size, seed
        self._epoch = -1
        self._batches: list[np.ndarray] = []

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch."""
        return -(-len(self._examples) // self._batch_size)

    def batch(self, step: int) -> Batch:
        """The batch of `step`, counted from 0 over all epochs."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._batches = epoch_order(self._examples, self._batch_size, self._seed, epoch)
            self._epoch = epoch
        return collate(self._examples, self._batches[place])


def in_order(examples: Sequence[Example], batch_size: int) -> list[Batch]:
    """Every example once, those of like length together: for passes without learning."""
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].tokens))
    starts = range(0, len(order), batch_size)
    return [collate(examples, np.array(order[i : i + batch_size])) for i in starts]
