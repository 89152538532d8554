"""Replays of recorded guesses against real decoding: the same calls, tree for tree."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from tiny import best_rank_paths, first_tokens, make_model

from ssmlx.api import token_steps
from ssmlx.calibration.costs import config_of
from ssmlx.calibration.guesses import Exits, exits_along, guesses_along, rank_table
from ssmlx.model.streams import StreamFusedModel
from ssmlx.model.tree import grow_tree
from ssmlx.settings import GenerateConfig, PruneConfig, TreeConfig
from ssmlx.tuning.cost import DraftShape
from ssmlx.tuning.replay import (
    NEVER,
    Guesses,
    advance,
    contenders,
    depths_within,
    needed_sizes,
    needed_widths,
    replay,
    true_ranks,
)

PROMPT, LENGTH, LARGEST = [3, 1, 4, 1, 5], 60, 24


DRAFT_VOCAB = (0, 2, 3, 5, 6, 8, 9, 11, 12)


@pytest.fixture(scope="module", params=["all", "streams", "draft vocabulary"])
def model(request):
    """A tiny model whose streams are right often enough: few tokens, wide trees."""
    if request.param != "draft vocabulary":
        return make_model(scope=request.param, seed=4)
    model = make_model(seed=4)
    config = replace(model.config, draft_vocab_size=len(DRAFT_VOCAB))
    streams = replace(model.streams, draft_vocab=mx.array(DRAFT_VOCAB, mx.int32))
    return StreamFusedModel(model.backbone, config, streams)


@pytest.fixture(scope="module")
def answer(model):
    config = GenerateConfig(decoding="plain")
    steps = token_steps(model, PROMPT, model.make_cache(), config)
    return first_tokens(steps, LENGTH)[0]


@pytest.fixture(scope="module")
def guesses(model, answer):
    return guesses_along(model, PROMPT, answer, 64)


def real_calls(model, shape: DraftShape) -> tuple[list[int], int]:
    """The answer, and the calls that really decoding it takes, after the prompt's."""
    steps = token_steps(model, PROMPT, model.make_cache(), config_of(shape))
    tokens, lengths = first_tokens(steps, LENGTH)
    return tokens, len(lengths) - 1


SHAPES = [
    DraftShape(tree=tree, num_streams=streams, stream_schedule=schedule)
    for streams, schedule in ((3, "second-pass"), (3, "fused"), (2, "second-pass"), (1, "fused"))
    for tree in (
        TreeConfig(size=2), TreeConfig(size=7), TreeConfig(size=LARGEST),
        TreeConfig(kind="full", width=1), TreeConfig(kind="full", width=3),
    )
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=DraftShape.text)
def test_a_replay_takes_the_calls_that_decoding_takes(model, answer, guesses, shape):
    tokens, calls = real_calls(model, shape)
    if shape.tree.kind == "best":
        needed, limit = needed_sizes(guesses, shape.num_streams, LARGEST), shape.tree.size
    else:
        needed, limit = needed_widths(guesses)[:, : shape.num_streams], shape.tree.width
    replayed = advance([depths_within(needed, limit)])
    assert tokens == answer
    assert (replayed.num_tokens, replayed.num_calls) == (LENGTH - 1, calls)


def test_the_trees_of_these_models_hold_something(guesses):
    """Or the tests here would show nothing."""
    large = advance([depths_within(needed_sizes(guesses, 3, LARGEST), LARGEST)])
    small = advance([depths_within(needed_sizes(guesses, 3, LARGEST), 2)])
    assert large.tokens_per_call > small.tokens_per_call + 0.1


@pytest.mark.parametrize("keep", [2, 6, 15])
@pytest.mark.parametrize("size", [16, LARGEST])
def test_a_pruned_replay_takes_the_calls_that_decoding_takes(model, guesses, size, keep):
    prune = PruneConfig(kind="budget", keep=keep)
    shape = DraftShape(tree=TreeConfig(size=size), num_streams=3, prune=prune)
    exits = exits_along(model, PROMPT, guesses, 3, LARGEST)
    _, calls = real_calls(model, shape)
    assert advance([exits.depths(size, keep)]).num_calls == calls


def test_without_pruning_exits_hold_what_the_tree_holds(model, guesses):
    exits = exits_along(model, PROMPT, guesses, 3, LARGEST)
    needed = needed_sizes(guesses, 3, LARGEST)
    for size in (3, 9, LARGEST):
        assert (exits.depths(size, LARGEST) == depths_within(needed, size)).all()


def test_pruning_follows_the_exits_and_not_the_draft():
    """A node survives among those of the tree that early exit finds likelier."""
    drafted = np.array([[0.0, -1.0, -2.0, -3.0]], np.float32)
    judged = np.array([[0.0, -9.0, -1.0, -2.0]], np.float32)
    exits = Exits(drafted, judged, np.array([[1, -1]], np.int32))
    assert exits.depths(4, 4) == exits.depths(2, 2) == [1]
    assert exits.depths(4, 3) == [0], "node 1 is the last of four"
    assert exits.depths(3, 2) == [0]
    assert exits.depths(1, 1) == [0], "the tree is the root alone"


@pytest.mark.parametrize("levels", [1, 2, 4])
def test_needed_sizes_are_those_of_the_trees_that_are_grown(levels):
    """Random guesses: the tree of N nodes holds a path from the needed size on, and not before."""
    rng = np.random.default_rng(levels)
    length, count, largest = 12, 9, 10
    logits = rng.normal(0, 1.5, (length, 4, 30))
    order = np.argsort(-logits, axis=-1)[..., :count]
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    logprobs = np.take_along_axis(logprobs, order, -1).astype(np.float32)
    # Every token of the text is one that the first stream before it ranks among its first four.
    text = [0, *(int(order[i, 0, rng.integers(4)]) for i in range(length - 1))]
    guesses = Guesses(order.astype(np.int32), logprobs, np.array(text))
    needed = needed_sizes(guesses, levels, largest)
    for size in range(2, largest + 1):
        config = TreeConfig(size=size, width=count)
        for place in range(length):
            held = (needed[place] <= size).sum()
            assert held == _held(guesses, place, levels, config)
    assert {2, NEVER} < set(needed.flatten().tolist()), "some near, some out of reach"


def _held(guesses: Guesses, place: int, levels: int, config: TreeConfig) -> int:
    """How far the tree that is really grown says what follows, found slowly."""
    count = min(config.size - 1, guesses.tokens.shape[2])
    tokens = mx.array(guesses.tokens[place, :levels, :count])
    logprobs = mx.array(guesses.logprobs[place, :levels, :count])
    tree = grow_tree(mx.array([0]), tokens, logprobs, replace(config, width=count))
    paths, words = tree.paths.tolist(), tree.tokens.tolist()
    depths = tree.depths.tolist()
    said = {tuple(words[n] for n in path[1 : d + 1]) for path, d in zip(paths, depths, strict=True)}
    following = guesses.answer[place + 1 : place + 1 + levels].tolist()
    return max(n for n in range(len(following) + 1) if tuple(following[:n]) in said)


def test_the_ranking_of_nodes_is_that_of_brute_force():
    rng = np.random.default_rng(3)
    probs = -np.sort(-rng.dirichlet(np.ones(8), size=3), axis=1)[:, :6]
    known = contenders(12, 6, 3)
    order = np.argsort(-known.scores(np.log(probs).astype(np.float32)))[:12]

    def ranks(node: int) -> tuple[int, ...]:
        above = known.parents[node]
        return () if node == 0 else (*ranks(above), int(known.ranks[node]))

    assert {ranks(int(node)) for node in order} == best_rank_paths(probs, 12, 6)


def test_a_replay_agrees_with_the_one_that_training_reports(guesses):
    tree = TreeConfig(size=9)
    theirs = replay(
        [Guesses(guesses.tokens[..., :8], guesses.logprobs[..., :8], guesses.answer)], tree
    )
    ours = advance([depths_within(needed_sizes(guesses, 3, 9), 9)])
    assert (ours.num_tokens + 1, ours.num_calls + 1) == (theirs.num_tokens, theirs.num_calls)


def test_ranks_are_where_the_answer_stands():
    tokens = np.array([[[5, 6], [7, 8]], [[6, 7], [9, 9]], [[1, 2], [3, 4]]], np.int32)
    guesses = Guesses(tokens, np.zeros((3, 2, 2), np.float32), np.array([4, 6, 7]))
    assert true_ranks(guesses).tolist() == [[1, 0], [1, NEVER], [NEVER, NEVER]]
    assert needed_widths(guesses).tolist() == [[2, 2], [2, NEVER], [NEVER, NEVER]]


def test_the_rank_table_counts_a_stream_where_those_before_it_had_theirs():
    tokens = np.array([[[5, 6], [7, 8]], [[6, 7], [9, 9]], [[1, 2], [3, 4]]], np.int32)
    guesses = Guesses(tokens, np.zeros((3, 2, 2), np.float32), np.array([4, 6, 7]))
    table = rank_table([guesses], [1, 2])
    assert table[0] == pytest.approx([0.0, 2 / 3])
    assert table[1] == pytest.approx([0.5, 0.5]), "of the two places where stream 1 had it"


def test_an_answer_of_one_token_takes_no_call_beyond_the_prompts():
    assert advance([np.zeros(1, np.int32)]).num_calls == 0
