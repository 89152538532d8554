"""Why an exported model took another number of calls than MLX, for the same tokens.

Float32 sums of thirty layers differ in their last digits with the order of summation. Where two
nodes are all but equally likely and only one of them fits into the tree, that decides which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from ssmlx import exported as coreml
from ssmlx.exported.backends import DECODE, Arrays, Backend
from ssmlx.exported.tree import TreeTables, node_scores

TIE = 1e-4
"""Nodes that differ by less count as equally likely (log probability). On SmolLM2-135M the log
probabilities of two runtimes differed by up to 6e-5 in float32."""


class Recorder:
    """A backend that keeps the log probabilities of each draft.

    Args:
        backend: does the work.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.logprobs: list[np.ndarray] = []

    def make_state(self) -> Any:
        """See `Backend`."""
        return self._backend.make_state()

    def predict(self, function: str, inputs: Arrays, state: Any) -> Arrays:
        """See `Backend`."""
        found = self._backend.predict(function, inputs, state)
        if function == DECODE:
            self.logprobs.append(np.array(found["candidate_logprobs"]))
        return found


def margin(logprobs: np.ndarray, tables: TreeTables) -> float:
    """By how much the last node of a tree beats the first that is left out; inf where none is.

    Args:
        logprobs: [G, K] of each stream's candidates.
        tables: the nodes that there can be.
    """
    scores = np.sort(node_scores(logprobs, tables))[::-1]
    if len(scores) <= tables.size:
        return float("inf")
    return float(scores[tables.size - 1] - scores[tables.size])


def parting_call(mine: Sequence[int], theirs: Sequence[int]) -> int:
    """The first call that advances by another number of tokens.

    Args:
        mine: tokens that each call of one side advanced by.
        theirs: those of the other, of the same sum and another length.
    """
    return next(call for call, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b)


def deciding_margin(
    model: coreml.ExportedModel, prompt: Sequence[int], call: int, max_tokens: int
) -> float:
    """`margin` of the tree that `call` verified, in an answer to `prompt`."""
    recorder = Recorder(model.backend)
    watched = replace(model, backend=recorder)
    answer = coreml.stream_generate(watched, prompt, max_tokens=max_tokens)
    for _ in islice(answer, call):
        pass
    return margin(recorder.logprobs[call - 1], model.manifest.tree)
