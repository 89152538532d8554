"""Prompt lookup beside another drafter, on the device."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest
from test_drafters import cycle_model, streams_model, written
from tiny import VOCAB, make_tokenizer, random_tree, tree_from_parents
from tiny_heads import cycle_heads

from ssmlx.api import stream_generate
from ssmlx.drafters.lookup import NGRAM, TextOnDevice, WithLookup, continuation, extend
from ssmlx.errors import InputError
from ssmlx.model.tree import PAD_TOKEN, root_tree
from ssmlx.plan import make_plan
from ssmlx.settings import GenerateConfig, TreeConfig


def looked_up(text, count):
    """What `continuation` should give, by hand: the longest n first, the newest place first."""
    for n in range(min(NGRAM, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                period = len(text) - end
                return [text[end + k % period] for k in range(count)]
    return [PAD_TOKEN] * count


@pytest.mark.parametrize("words", [2, 4, 40])
def test_what_followed_the_longest_last_words_at_their_newest_place(words):
    rng = random.Random(words)
    for _ in range(60):
        text = [rng.randrange(words) for _ in range(rng.randint(1, 30))]
        buffer = TextOnDevice(text)
        for start in (len(text), rng.randint(1, len(text))):
            # What lies behind the newest token is another call's, and is not looked at.
            last = mx.array([start - 1])
            found = continuation(buffer.tokens, last, 7).tolist()
            assert found == looked_up(text[:start], 7), text[:start]


def test_the_text_grows_and_may_be_written_twice():
    text = TextOnDevice([1, 2])
    expected = [1, 2]
    for call in range(200):
        new = [call % 7, call % 5, call % 5]  # two tokens that count, the last one repeated
        place = mx.array([len(expected)])
        for _ in range(1 + call % 2):
            text.write(mx.array(new, mx.int32), place)
        expected += new[:2]
        assert text.tokens[: len(expected)].tolist() == expected


def test_a_chain_goes_on_where_the_tree_stops_agreeing():
    tree = tree_from_parents([7, 1, 6, 3], [0, 0, 0, 1])
    for chain, node in (([1, 3, 9, 8, 2], 3), ([1, 5, 9, 8, 2], 1), ([6, 1, 3, 8, 2], 2),
                        ([4, 1, 3, 8, 2], 0), ([PAD_TOKEN] * 5, 0)):  # fmt: skip
        found = extend(tree, mx.array(chain, mx.int32), 3)
        depth = int(tree.depths[node])
        assert found.tokens.tolist() == [7, 1, 6, 3, *chain[depth : depth + 3]]
        assert found.parents.tolist() == [0, 0, 0, 1, node, 4, 5]
        assert found.depths.tolist() == [0, 1, 1, 2, depth + 1, depth + 2, depth + 3]
        assert found.num_internal == 6
        expected = tree_from_parents(found.tokens.tolist(), [0, 0, 0, 1, node, 4, 5])
        width = expected.paths.shape[1]
        assert found.paths[:, :width].tolist() == expected.paths.tolist()
        assert (found.paths[:, width:] == found.paths[:, -1:]).all()


def test_siblings_still_differ():
    rng = random.Random(1)
    for _ in range(40):
        tree = random_tree(rng, rng.randint(1, 12), 3)
        count = rng.randint(1, 4)
        chain = [rng.randrange(3) for _ in range(tree.paths.shape[1] - 1 + count)]
        found = extend(tree, mx.array(chain, mx.int32), count)
        edges = list(zip(found.parents.tolist()[1:], found.tokens.tolist()[1:], strict=True))
        before = list(zip(tree.parents.tolist()[1:], tree.tokens.tolist()[1:], strict=True))
        if len(set(before)) == len(before):
            assert len(set(edges)) == len(edges)


def test_a_bare_root_gets_the_chain():
    found = extend(root_tree(mx.array([5])), mx.array([1, 2], mx.int32), 2)
    assert (found.tokens.tolist(), found.parents.tolist()) == ([5, 1, 2], [0, 0, 1])


@pytest.mark.parametrize("schedule", ["second-pass", "fused"])
def test_a_text_that_repeats_itself_takes_fewer_calls(schedule):
    """A greedy tiny model runs into a period, which random streams do not foresee."""
    model, tree = streams_model(), TreeConfig(size=4)
    shape = {"tree": tree, "stream_schedule": schedule}
    prompt = [3, 1, 4, 1, 5]
    expected, alone = written(model, prompt, 120, **shape)
    tokens, beside = written(model, prompt, 120, **shape, lookup_nodes=8)
    assert tokens == expected
    assert max(beside) <= 1 + model.num_streams + 8
    assert max(beside) > 1 + model.num_streams and len(beside) < 0.6 * len(alone)


@pytest.mark.parametrize(("num_right", "guessed"), [(0, 0), (2, 2)])
def test_every_call_goes_on_by_the_whole_chain(num_right, guessed):
    """Heads foresee the first tokens of a text with a period, what was looked up the others."""
    model, nodes = cycle_model(), 5
    heads = cycle_heads("medusa", model.backbone, num_right=num_right)
    count = 1 + 60 * (1 + guessed + nodes)
    tokens, lengths = written(
        model, [*range(VOCAB), 0], count, heads=heads, tree=TreeConfig(size=3), lookup_nodes=nodes
    )
    assert tokens == [(1 + index) % VOCAB for index in range(count)]
    assert lengths == [1] + [1 + guessed + nodes] * 60


def test_turns_continue_the_text():
    """Places are those of the whole conversation, so its earlier turns are looked up too."""
    model, tokenizer = streams_model(), make_tokenizer()
    config = GenerateConfig(lookup_nodes=6)
    cache, history = model.make_cache(), []
    for turn in range(3):
        history += [(5 * turn + i) % VOCAB for i in range(3)]
        context, unseen = history[: cache.offset], history[cache.offset :]
        asked = stream_generate(
            model, tokenizer, unseen, config, cache=cache, context=context, max_tokens=7
        )
        tokens = [token for response in asked for token in response.tokens]
        plain = written(model, history, 7, decoding="plain")[0]
        assert tokens == plain
        history += tokens
        cache.trim(min(cache.offset, len(history) - 1))
    with pytest.raises(ValueError, match="tokens of context"):
        stream_generate(model, tokenizer, [1], config, cache=cache)


def test_the_drafter_is_told_of_every_text(monkeypatch):
    heard, both = [], make_plan(streams_model(), lookup_nodes=2).drafter
    monkeypatch.setattr(both.drafter, "start", heard.append)
    both.start([1, 2])
    both.start([3])
    assert heard == [[1, 2], [3]]


def test_nothing_waits_for_the_lookup(monkeypatch):
    """The loop still builds ahead, and reads one small result a call."""
    from ssmlx.decoding import loop as decode

    model, reads = streams_model(), []
    drafter = make_plan(model, lookup_nodes=4).drafter
    assert isinstance(drafter, WithLookup) and not drafter.waits
    read = decode.to_list
    monkeypatch.setattr(decode, "to_list", lambda array: reads.append(array.size) or read(array))
    _, lengths = written(model, [3, 1, 4], 30, lookup_nodes=4)
    assert len(reads) == len(lengths)
    assert set(reads) <= {2, 2 + drafter.num_levels}  # a bare root first


def test_what_reads_the_text_itself_takes_no_lookup():
    model = streams_model()
    with pytest.raises(InputError, match="lookup_nodes with --drafter prompt-lookup"):
        make_plan(model, drafter="prompt-lookup", lookup_nodes=4)
    for count in (-1, 257):
        with pytest.raises(InputError, match=f"--drafter lookup={count}"):
            GenerateConfig(lookup_nodes=count)
    assert np.isfinite(make_plan(model, lookup_nodes=256).drafter.max_nodes)
