"""Replays of recorded guesses against real decoding: the same calls, tree for tree."""

from dataclasses import replace

import mlx.core as mx
import pytest
from guessed import compute_guesses
from tiny import first_tokens, make_model, token_steps

from ssmlx.model.streams import StreamFusedModel
from ssmlx.settings import GenerateConfig, TreeConfig
from ssmlx.training import replay

PROMPT = [3, 1, 4, 1, 5]
LENGTH = 60
LARGEST = 24
DRAFT_VOCAB = (0, 2, 3, 5, 6, 8, 9, 11, 12)


@pytest.fixture(scope="module", autouse=True)
def steady_copies():
    """Replays trust them as if every token had been a call's, which is near but not the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ssmlx.drafters.copies.DOUBT", 1e9)
        yield


@pytest.fixture(
    scope="module",
    params=["all", "streams", "draft vocabulary", "condition", "condition, vocabulary"],
)
def guesser(request):
    """A tiny model whose streams are right often enough: few tokens, wide trees."""
    if request.param in ("all", "streams"):
        return make_model(scope=request.param, seed=4)
    rank = 4 if request.param.startswith("condition") else 0
    model = make_model(seed=4, adapter={"condition_rank": rank})
    if request.param == "condition":
        return model
    config = replace(model.config, draft_vocab_size=len(DRAFT_VOCAB))
    streams = replace(model.streams, draft_vocab=mx.array(DRAFT_VOCAB, mx.int32))
    return StreamFusedModel(model.backbone, config, streams)


@pytest.fixture(scope="module")
def guesses(guesser):
    config = GenerateConfig(decoding="plain")
    steps = token_steps(guesser, PROMPT, guesser.make_cache(), config)
    return compute_guesses(guesser, PROMPT, first_tokens(steps, LENGTH)[0], 64)


SHAPES = [  # nodes, streams, schedule
    (2, 3, "second-pass"),
    (7, 3, "second-pass"),
    (LARGEST, 3, "second-pass"),
    (7, 3, "fused"),
    (LARGEST, 2, "second-pass"),
    (7, 1, "fused"),
]


@pytest.mark.parametrize(("size", "num_streams", "schedule"), SHAPES)
def test_a_replay_takes_the_calls_that_decoding_takes(
    guesser, guesses, size, num_streams, schedule
):
    config = GenerateConfig(
        decoding="speculative",
        tree=TreeConfig(size=size),
        num_streams=num_streams,
        stream_schedule=schedule,
    )
    steps = token_steps(guesser, PROMPT, guesser.make_cache(), config)
    tokens, lengths = first_tokens(steps, LENGTH)
    needed = replay.smallest_tree_sizes(guesses, num_streams, LARGEST)
    replayed = replay.count_calls([replay.depths_within(needed, size)])
    assert tokens == guesses.answer.tolist()
    assert replayed.num_tokens == LENGTH - 1
    assert replayed.num_calls == len(lengths) - 1  # all but the prompt's
