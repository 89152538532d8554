"""Streams of the accepted node in a pass of their own: the same drafts as the fused schedule."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from tiny import (
    ARCHITECTURES,
    LAYERS,
    VOCAB,
    WIDTH,
    first_tokens,
    make_base,
    make_lora,
    make_model,
    make_streams,
)

from ssmlx.api import stream_generate, token_steps
from ssmlx.decoding.loop import plain_decode, streaming_decode
from ssmlx.drafters.streams import StreamDrafter
from ssmlx.errors import InputError
from ssmlx.loading.adapter import Adapter, BaseIdentity
from ssmlx.loading.attach import fuse_streams
from ssmlx.model.backbone import Backbone
from ssmlx.model.cache import TreeCache
from ssmlx.model.masks import earlier_streams, stream_visibility
from ssmlx.plan import make_plan
from ssmlx.settings import STREAM_SCHEDULES, GenerateConfig, PruneConfig, StreamConfig, TreeConfig

PROMPT = [3, 1, 4, 1, 5]
TREES = (TreeConfig(kind="full", width=2), TreeConfig(kind="best", size=7))
PRUNINGS = (
    PruneConfig(),
    PruneConfig(kind="budget", keep=4),
    PruneConfig(kind="threshold", threshold=0.05),
)


class Recorder(StreamDrafter):
    """A drafter that keeps the trees that it proposes."""

    def start(self, tokens):
        super().start(tokens)
        self.trees = []

    def propose(self, verified):
        tree = super().propose(verified)
        self.trees.append((tree.tokens, tree.paths))
        return tree


def drafted(model, schedule, *, count=22, tree=TREES[0], prune=PRUNINGS[0], num_streams=None):
    """Tokens, and the tokens and paths of every tree that was proposed on the way."""
    drafter = Recorder(model, tree, num_streams or model.num_streams, schedule)
    cache = TreeCache(model.num_layers, step=4)  # grows often
    steps = streaming_decode(model, PROMPT, cache, drafter=drafter, prune=prune)
    tokens, lengths = first_tokens(steps, count)
    trees = [(tuple(np.array(t)), np.array(p).tolist()) for t, p in drafter.trees[: len(lengths)]]
    return tokens, lengths, trees


@pytest.mark.parametrize("scope", ["all", "streams"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_both_schedules_draft_the_same_trees(architecture, scope):
    model = make_model(architecture, scope)
    for tree, prune in product(TREES, PRUNINGS):
        fused = drafted(model, "fused", tree=tree, prune=prune)
        assert drafted(model, "second-pass", tree=tree, prune=prune) == fused
        assert max(fused[1]) > 1  # something was accepted


@pytest.mark.parametrize("num_streams", [1, 2])
def test_with_fewer_streams_than_trained(num_streams):
    model = make_model()
    fused = drafted(model, "fused", num_streams=num_streams)
    assert drafted(model, "second-pass", num_streams=num_streams) == fused


def rotated_model(scope, draft_vocab):
    config = StreamConfig(
        num_streams=3,
        num_msa_layers=2,
        num_layers=LAYERS,
        hidden_size=WIDTH,
        prune_rank=3,
        adapter_scope=scope,
        stream_design="value_rotation",
        rotation_step=0.4,
        draft_vocab_size=len(draft_vocab),
    )
    backbone = Backbone(make_base())
    streams = replace(make_streams(config, 2), embeddings=None, draft_vocab=mx.array(draft_vocab))
    lora = make_lora(backbone.model, config.insertion_layer, 1)
    adapter = Adapter(config, streams, BaseIdentity.of(backbone), lora)
    return fuse_streams(backbone, adapter, merge_lora=False)


@pytest.mark.parametrize("scope", ["all", "streams"])
def test_streams_told_apart_by_their_values(scope):
    model = rotated_model(scope, list(range(0, VOCAB, 2)))
    for prune in PRUNINGS:
        fused = drafted(model, "fused", prune=prune)
        assert drafted(model, "second-pass", prune=prune) == fused
    embedded = make_model("llama", scope)
    assert drafted(embedded, "second-pass")[2] != fused[2]


def test_a_second_pass_sees_what_a_fused_stream_sees():
    """Its rows are those of the last accepted node in the mask of the whole step."""
    ancestors = mx.array(np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool))
    whole = np.array(stream_visibility(ancestors, 2))
    for node, path in ((0, [0]), (2, [0, 2]), (3, [0, 2, 3])):
        padded = path + [path[-1]] * (3 - len(path))
        seen_of_path = np.tile(np.arange(3) < len(path), (2, 1))
        found = np.concatenate([np.array(earlier_streams(2)), seen_of_path], axis=1)
        rows = [4 + 2 * node, 5 + 2 * node]
        assert np.array_equal(found[:, :2], whole[np.ix_(rows, rows)])
        seen = [[padded[i] for i in range(3) if row[2 + i]] for row in found]
        assert seen == [[n for n in range(4) if whole[row, n]] for row in rows] == [path, path]


def test_the_next_answer_of_a_chat_sees_what_was_added_between():
    """A cache that went on without the drafter: its copy is made anew for every answer."""
    model = make_model()
    answers = {}
    for schedule in STREAM_SCHEDULES:
        cache, answers[schedule], context = model.make_cache(), [], []
        config = GenerateConfig(stream_schedule=schedule, tree=TREES[0])
        for turn in ([3, 1, 4], [2, 7, 1, 8], [6]):
            steps = token_steps(model, turn, cache, config, context=context)
            tokens, lengths = first_tokens(steps, 9)
            context = [*context, *turn, *tokens]
            cache.trim(len(context) - 1)
            answers[schedule].append((tokens, lengths))
            context.pop()
    assert answers["fused"] == answers["second-pass"]
    tokens = first_tokens(plain_decode(model, [3, 1, 4], model.make_cache()), 9)[0]
    assert answers["fused"][0][0] == tokens


def test_a_drafter_starts_anew_with_every_sequence():
    model = make_model()
    trees = {}
    for schedule in STREAM_SCHEDULES:
        drafter, trees[schedule] = Recorder(model, TREES[0], 3, schedule), []
        for prompt in (PROMPT, [9, 2, 6, 5, 3]):
            steps = streaming_decode(model, prompt, model.make_cache(), drafter=drafter)
            _, lengths = first_tokens(steps, 12)
            trees[schedule] += [tuple(np.array(t)) for t, _ in drafter.trees[: len(lengths)]]
    assert trees["fused"] == trees["second-pass"]


def test_a_step_has_no_stream_rows():
    model = make_model()
    rows = {
        schedule: make_plan(model, stream_schedule=schedule, tree=TREES[1]).scratch
        for schedule in STREAM_SCHEDULES
    }
    path = 3 + 1  # of the step before, while the host does not know how much of it counts
    assert rows == {"fused": 7 * 4 + path, "second-pass": 7 + path}


def test_the_copy_costs_the_upper_layers_share_of_the_cache():
    model, cache = make_model(), TreeCache(LAYERS, scratch=7)
    drafter = StreamDrafter(model, TREES[1], 3)
    next(streaming_decode(model, PROMPT, cache, drafter=drafter))
    buffers = drafter._cache._buffers.values()
    assert len(buffers) == LAYERS - model.insertion_layer
    room = 3 + 2 * 4  # the streams, and the entries of two paths
    assert all(buffer.shape[2] <= cache.capacity + room for buffer in buffers)


def test_unknown_schedules_are_refused():
    with pytest.raises(InputError, match="--drafter schedule=late"):
        GenerateConfig(stream_schedule="late")  # type: ignore[arg-type]


def test_streaming_through_the_api_uses_either():
    from tiny import make_tokenizer

    model, tokenizer = make_model(), make_tokenizer()
    tokens = {}
    for schedule in STREAM_SCHEDULES:
        config = GenerateConfig(max_tokens=15, stream_schedule=schedule)
        responses = list(stream_generate(model, tokenizer, PROMPT, config))
        tokens[schedule] = [t for r in responses for t in r.tokens], responses[-1].target_calls
    assert tokens["fused"] == tokens["second-pass"]
