"""Held-out text replayed: how many tokens a target call would advance.

The text stands for what the target would have said, so one forward over it predicts every step:
at the last accepted token the streams draft a tree, the text says how far it holds, and the next
step starts behind it. For scope "streams", where the text is the base model's own, this is what
decoding does; for scope "all" it is an estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..model.tree import draft_topology, grow_tree
from ..settings import TreeConfig


@dataclass(frozen=True, eq=False)
class Guesses:
    """What the streams of one example predict.

    Attributes:
        tokens: [K, G, C] the C likeliest tokens of each stream of each carrier, best first.
        logprobs: [K, G, C] their log probabilities.
        answer: [A] the answer; carrier i stands before answer[i].
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    answer: np.ndarray


@dataclass(frozen=True)
class Replay:
    """What a replay comes to."""

    num_tokens: int
    num_calls: int

    @property
    def tokens_per_call(self) -> float:
        """Tokens advanced per target call, the prompt's call counted."""
        return self.num_tokens / max(1, self.num_calls)


def num_candidates(tree: TreeConfig, num_streams: int) -> int:
    """C, the candidates of each stream that a replay of `tree` needs."""
    return draft_topology(tree, num_streams).num_candidates


def replay(guesses: Sequence[Guesses], tree: TreeConfig) -> Replay:
    """Decode every answer with `tree` and without pruning."""
    calls = sum(_calls(example, tree) for example in guesses)
    return Replay(sum(len(example.answer) for example in guesses), calls)


def _calls(example: Guesses, tree: TreeConfig) -> int:
    """Target calls that the answer takes; the first comes with the prompt."""
    place, calls, answer = 0, 1, example.answer.tolist()
    while place + 1 < len(answer):
        # The step at carrier `place` gave answer[place], and drafts what comes behind it.
        tokens, logprobs = example.tokens[place], example.logprobs[place]
        drafted = grow_tree(mx.array([answer[place]]), mx.array(tokens), mx.array(logprobs), tree)
        place += 1 + _num_accepted(drafted.tokens, drafted.parents, answer[place + 1 :])
        calls += 1
    return calls


def _num_accepted(tokens: mx.array, parents: mx.array, following: list[int]) -> int:
    """How far down from the root the tree says what follows."""
    children = {
        (int(parent), int(token)): node
        for node, (parent, token) in enumerate(
            zip(np.array(parents), np.array(tokens), strict=True)
        )
        if node
    }
    node = depth = 0
    while depth < len(following) and (node, following[depth]) in children:
        node, depth = children[node, following[depth]], depth + 1
    return depth
