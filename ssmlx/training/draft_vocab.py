"""The draft vocabulary: the tokens that streams may guess."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .data import Example


def choose_draft_vocab(examples: Sequence[Example], size: int, vocab_size: int) -> np.ndarray:
    """[size] ids, ascending: the most frequent tokens of the answers.

    Where the answers have fewer kinds of token, those of the prompts follow, then the lowest
    ids. Tokens that are left out can never be guessed, only be decided by the target.
    """
    answers, prompts = np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.int64)
    for example in examples:
        np.add.at(answers, example.tokens[example.start :], 1)
        np.add.at(prompts, example.tokens[: example.start], 1)
    order = np.lexsort((np.arange(vocab_size), -prompts, -answers))
    return np.sort(order[: min(size, vocab_size)]).astype(np.int32)


def coverage(examples: Sequence[Example], draft_vocab: np.ndarray) -> float:
    """The share of answer tokens that are in the draft vocabulary."""
    answers = np.concatenate([example.tokens[example.start :] for example in examples])
    return float(np.isin(answers, draft_vocab).mean())


def draft_indices(targets: np.ndarray, draft_vocab: np.ndarray | None) -> np.ndarray:
    """Target ids as places in the draft vocabulary; -1 where they are not in it, or were -1."""
    if draft_vocab is None:
        return targets
    places = np.searchsorted(draft_vocab, targets).clip(max=len(draft_vocab) - 1)
    return np.where(draft_vocab[places] == targets, places, -1)
