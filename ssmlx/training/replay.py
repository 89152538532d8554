"""Replays held-out text: how many tokens would a target call advance?

The text stands for what the target would have said, so one forward over it predicts every step: at
the last accepted token the streams draft a tree, the text decides how much is accepted, and the
next step starts after it. For the model's own answers this is what decoding does, call for call;
for other texts it is an estimate.

No tree is grown: the text's place among the guesses says from which size on the best tree would
have held it, and so serves every tree at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..settings import MAX_EDGE_LOGPROB, MIN_EDGE_LOGPROB

NEVER = np.iinfo(np.int32).max
Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Guesses:
    """The streams' guesses at every token of an answer of A tokens, C candidates per stream."""

    tokens: np.ndarray  # [A, G, C] the C likeliest tokens of each stream, best first
    # [A, G, C] their log probabilities, or [A, G, C, C] given each of the stream before, those of
    # the first stream given the root in any row
    logprobs: np.ndarray
    # [A] the answer; the step that says answer[i] guesses tokens[i] for what follows
    answer: np.ndarray

    @cached_property
    def edges(self) -> Floats:
        """Float32, clipped as in trees: [A, G, C, C], or [A, G, 1, C] without a condition."""
        given = self.logprobs if self.logprobs.ndim == 4 else self.logprobs[:, :, None]
        return np.clip(given, MIN_EDGE_LOGPROB, MAX_EDGE_LOGPROB).astype(np.float32)


@dataclass(frozen=True)
class Replay:
    """Tokens, and the number of target calls that gave them."""

    num_tokens: int
    num_calls: int

    @property
    def tokens_per_call(self) -> float:
        return self.num_tokens / max(1, self.num_calls)

    def without_prompts(self, prompts: int) -> "Replay":
        """Subtract one call and one token for each prompt."""
        return Replay(self.num_tokens - prompts, self.num_calls - prompts)


def replay(guesses: Sequence[Guesses], size: int) -> Replay:
    """Replay best trees of `size` nodes, the root included; a prompt's call gives one token."""
    levels = guesses[0].tokens.shape[1] if guesses else 0
    after = count_calls(
        [depths_within(smallest_tree_sizes(one, levels, size), size) for one in guesses]
    )
    return Replay(after.num_tokens + len(guesses), after.num_calls + len(guesses))


def count_calls(
    # for each answer [A]: number of drafted tokens after each token that agree with it
    depths: Sequence[Ints],
) -> Replay:
    """Count calls; each gives one token, and those of its draft that agree."""
    tokens = calls = 0
    for held in depths:
        place = 0
        last = len(held) - 1
        tokens += last
        while place < last:
            place += 1 + int(held[place])
            calls += 1
    return Replay(tokens, calls)


def depths_within(
    needed: Ints,  # [A, levels] as `smallest_tree_sizes` gives it
    limit: int,  # nodes, the root included
) -> Ints:
    """For each of A tokens, how many that follow are in the best tree of `limit` nodes."""
    depths: Ints = (needed <= limit).sum(axis=1).astype(np.int32)
    return depths


def answer_slots(guesses: Guesses) -> Ints:
    """Which candidate (from 0) of each stream is the answer's token, [A, G]."""
    length, streams, _ = guesses.tokens.shape
    places = np.arange(length)[:, None] + 1 + np.arange(streams)
    # Stream j (1 to G) at token a of the answer guesses token a + j.
    following = guesses.answer[np.minimum(places, length - 1)]
    hits = (guesses.tokens == following[:, :, None]) & (places < length)[:, :, None]
    return np.where(hits.any(axis=2), hits.argmax(axis=2), NEVER).astype(np.int32)


class AnswerPath(NamedTuple):
    """Positions of an answer's own tokens among the candidates."""

    # [A, G] as `answer_slots`; `NEVER` also if the stream before has `NEVER` and
    # candidates depend on it
    slots: Ints
    candidate_logprobs: Floats  # [A, G, C] of all of each stream's candidates, on that path


def find_answer_path(guesses: Guesses) -> AnswerPath:
    slots = answer_slots(guesses)
    edges = guesses.edges
    before = np.concatenate([np.zeros_like(slots[:, :1]), slots[:, :-1]], axis=1)
    if edges.shape[2] == 1:  # not given the one before
        before[:] = 0
    rows = np.where(before < NEVER, before, 0)[:, :, None, None]
    among = np.take_along_axis(edges, rows, axis=2)[:, :, 0]
    path_slots = np.where(before < NEVER, slots, NEVER).astype(np.int32)
    return AnswerPath(path_slots, among)


def smallest_tree_sizes(guesses: Guesses, levels: int, largest: int) -> Ints:
    """Nodes of the smallest best tree with the answer's tokens down to each level, [A, levels].

    Best trees of one draft are nested, so one ranking of nodes serves every size up to `largest`.
    The root counts.
    """
    slots, among = find_answer_path(guesses)
    own = np.take_along_axis(among, np.where(slots < NEVER, slots, 0)[:, :, None], axis=2)
    is_held = np.logical_and.accumulate(slots[:, :levels] < NEVER, axis=1)
    scores = np.cumsum(own[:, :levels, 0], axis=1, dtype=np.float32)
    others = path_scores_covering_best_tree(guesses.edges[:, :levels], largest)
    better = (others[:, None] > scores[:, :, None]).sum(axis=2)
    needed = np.where(is_held, better + 2, NEVER)  # with the root and itself
    return np.where(needed <= largest, needed, NEVER).astype(np.int32)


def path_scores_covering_best_tree(
    edges: Floats,  # [A, G, C or 1, C], see `Guesses.edges`
    size: int,  # nodes, the root included
) -> Floats:
    """Log probabilities [A, n] of paths, with those of all non-root nodes of the best tree.

    The tree grows as `ssmlx.model.tree.grow_conditional_tree` does it, level by level.
    """
    length, levels, _, count = edges.shape
    scores = np.zeros((length, 1), np.float32)
    slots = np.zeros((length, 1), int)
    found = []
    for level in range(min(levels, size - 1)):
        own = edges[:, level]
        rows = own if own.shape[1] == 1 else np.take_along_axis(own, slots[:, :, None], axis=1)
        below = (scores[:, :, None] + rows).reshape(length, -1)
        kept = min(size - 1 - level, below.shape[1])
        best = np.argpartition(-below, kept - 1, axis=1)[:, :kept]
        scores = np.take_along_axis(below, best, axis=1)
        slots = best % count
        found.append(scores)
    return np.concatenate([np.zeros((length, 0), np.float32), *found], axis=1)
