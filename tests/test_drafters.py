"""Every drafter against plain decoding: exact tokens, constructed step counts, and statistics."""

import argparse
import json
import math
import random
import shutil
from dataclasses import replace
from functools import lru_cache
from itertools import cycle, islice, product

import ssmlx  # first: it prefers OpenBLAS

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from drafter_cases import (
    BUDGET,
    DRAFTERS,
    FEW_TOKENS,
    bare_model,
    drafter_settings,
    streams_model,
)
from guessed import mix_copies_along
from loops import continuation, plain_tokens, speculative_steps
from real import tokens_of, write_base, write_tiny_adapter
from refusals import found_in, mentions, one_line, refusal
from tiny import (
    VOCAB,
    first_tokens,
    make_base,
    make_model,
    make_tokenizer,
    slow,
    target_of,
    token_steps,
    tree_from_parents,
)
from tiny_heads import HEAD_KINDS, LEVELS, cycle_heads, make_heads, random_heads, token_paths

from ssmlx.api import stream_generate
from ssmlx.commands import generate
from ssmlx.commands.decoding_options import add_decoding_options, generate_config
from ssmlx.decoding.accept import Acceptance, accept
from ssmlx.decoding.drafter import Verified
from ssmlx.decoding.loop import prefill
from ssmlx.decoding.prune import surviving_nodes, transition_logprobs
from ssmlx.decoding.sampling import Sampling, filter_logprobs, log_softmax
from ssmlx.decoding.step import DraftCounts, DraftTotals
from ssmlx.drafters import copies as text_copies
from ssmlx.drafters import draft_model
from ssmlx.drafters.copies import (
    Copies,
    TextOnDevice,
    count_hits_and_trials,
    mix_copies,
)
from ssmlx.drafters.draft_model import (
    DraftCache,
    DraftModel,
    require_same_vocabulary,
)
from ssmlx.drafters.heads import attach_heads, save_heads
from ssmlx.drafters.lookahead import LookaheadDrafter
from ssmlx.drafters.lookup import PromptLookupDrafter
from ssmlx.drafters.medusa import MedusaHeads
from ssmlx.drafters.mlp_speculator import MlpSpeculator
from ssmlx.drafters.registry import (
    drafter_class,
    settings_in,
    split_drafter,
)
from ssmlx.drafters.stream_drafter import TEXT_TOKENS, DraftVocab
from ssmlx.drafters.trie import Trie
from ssmlx.generation.plan import decode_plan, make_plan
from ssmlx.loading.load import may_have_drafting_heads
from ssmlx.mlx_thread import run_on_mlx_thread
from ssmlx.model.backbone import Backbone
from ssmlx.model.cache import TreeCache
from ssmlx.model.lora import RowLora
from ssmlx.model.shapes import to_list
from ssmlx.model.streams import StreamFusedModel
from ssmlx.model.tree import PAD_TOKEN
from ssmlx.settings import (
    DraftModelConfig,
    GenerateConfig,
    LookaheadConfig,
    MtpConfig,
    PromptLookupConfig,
    PruneConfig,
    SpeculatorTreeConfig,
    TreeConfig,
)

PROMPT = [3, 1, 4, 1, 5]


def parts_of(name):
    """What the adapter of a model has more that drafts by these settings."""
    return {"condition_rank": 4, "root_init_rank": 3} if name.startswith("conditional") else {}


def test_a_drafter_has_the_name_that_lists_it():
    listed = [*ssmlx.settings.DRAFTERS]
    assert [drafter_class(name).name for name in listed] == listed


def test_settings_of_another_class_are_refused():
    assert settings_in(GenerateConfig(), "mtp") == MtpConfig()
    mine = MtpConfig(num_draft_tokens=2)
    assert settings_in(GenerateConfig(drafter_settings=mine), "mtp") is mine
    given = GenerateConfig(drafter_settings={"num_draft_tokens": 3})
    assert mentions(refusal(settings_in, given, "mtp"), "MtpConfig", "mtp")


def drafter_of(model, settings):
    """What drafts by some of `drafter_settings`, ready to start."""
    return make_plan(model, decoding="speculative", **settings).drafters[0]


def written(model, prompt, count, config=None, **settings):
    """Tokens, and how many of them each call brought, where every call drafts."""
    config = config or GenerateConfig()
    config = replace(config, decoding=config.decoding or "speculative")
    steps = token_steps(model, prompt, model.make_cache(), config, **settings)
    return first_tokens(steps, count)


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_writes_what_plain_decoding_writes(name):
    """In a cache that has room for its largest tree from the beginning."""
    sampling = {"temp": 0.8, "top_k": 6, "seed": 1, "repetition_penalty": 1.3}
    model = streams_model(**parts_of(name))
    settings = drafter_settings()[name]
    prompt = [random.Random(name).randrange(VOCAB) for _ in range(6)]
    sampler = Sampling(GenerateConfig(**sampling), VOCAB)
    expected = plain_tokens(model, prompt, 18, sampler)
    cache = model.make_cache()
    steps = token_steps(model, prompt, cache, **sampling, **settings)
    assert [*next(steps).tokens] == expected[:1]
    room = cache.scratch
    tokens, lengths = first_tokens(steps, 17)
    assert tokens == expected[1:]
    drafter = drafter_of(model, settings)
    if isinstance(settings.get("drafter"), str):  # what was loaded drafts beside the text
        assert max(lengths) <= 1 + drafter.largest.levels
    assert cache.scratch == room  # it was made once, and not anew by the largest tree
    kind = drafter.largest.drafter
    if kind != "streams" and drafter_class(kind).loader is None:
        assert drafter.num_parameters == 0


def markov_base(seed=0, cycle=False, **changes):
    """Attention and MLP add nothing. With `cycle`, t is followed by (t + 1) % VOCAB."""
    model = make_base(seed=seed, **changes)
    for layer in model.layers:
        layer.self_attn.o_proj.weight = mx.zeros_like(layer.self_attn.o_proj.weight)
        layer.mlp.down_proj.weight = mx.zeros_like(layer.mlp.down_proj.weight)
    if cycle:
        model.model.embed_tokens.weight = mx.eye(VOCAB, model.args.hidden_size)
        model.model.norm.weight = mx.ones(model.args.hidden_size)
        after = [(token - 1) % VOCAB for token in range(VOCAB)]
        model.lm_head.weight = 5 * mx.eye(VOCAB, model.args.hidden_size)[mx.array(after)]
    return model


def cycle_model():
    return StreamFusedModel(Backbone(markov_base(cycle=True)))


def test_prompt_lookup_in_a_text_with_a_period():
    """Nothing to look up in the first round; from then on every draft holds, beyond one period."""
    model = cycle_model()
    start = 4
    config = GenerateConfig(
        drafter="prompt-lookup", prompt_lookup=PromptLookupConfig(num_draft_tokens=20, size=21)
    )
    tokens, lengths = written(model, [start], VOCAB + 3 * 21, config)
    assert tokens == [(start + 1 + index) % VOCAB for index in range(len(tokens))]
    # `start` itself comes again as the 13th token, and then the first match is found.
    assert lengths == [1] * VOCAB + [21] * 3
    prompt = [*range(VOCAB), 0, 1]
    plan = make_plan(model, config, decoding="speculative")
    totals = DraftTotals()
    steps = decode_plan(plan, model, prompt, model.make_cache())
    _, lengths = first_tokens(steps, 1 + 2 * 21, totals)
    assert lengths == [1, 21, 21]
    # A tree of 24 nodes holds the root, 20 drafted tokens and 3 nodes that fill it up.
    assert totals.drafts == {"prompt-lookup": DraftCounts(2, drafted=40, accepted=40, nodes=48)}
    assert totals.drafted_tokens == 40


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 4])
@pytest.mark.parametrize("width", [1, 3])
def test_the_target_as_its_own_draft_model(num_draft_tokens, width):
    """Every draft holds, greedy and sampled: K + 1 tokens a call, and K draft calls."""
    model = bare_model()
    draft = DraftModelConfig(num_draft_tokens=num_draft_tokens, width=width)
    for sampling in ({}, {"temp": 1.0, "seed": 2, "repetition_penalty": 1.5}):
        settings = {"drafter": DraftModel(make_base()), "draft": draft, **sampling}
        settings["decoding"] = "speculative"
        settings["max_tokens"] = 1 + 4 * (num_draft_tokens + 1)
        responses = list(stream_generate(model, make_tokenizer(), [3, 1], **settings))
        assert [len(r.tokens) for r in responses] == [1] + [num_draft_tokens + 1] * 4
        # The prompt, and a draft behind each of the five calls but the last.
        assert responses[-1].draft_model_calls == 1 + 4 * num_draft_tokens
        assert not responses[-1].lossy


def test_lookahead_learns_a_cycle():
    """Once its window has gone round, every step advances by a whole n-gram or more."""
    model = cycle_model()
    lookahead = LookaheadConfig(window=4, ngram=4, guesses=4, pool_from_prompt=False)
    config = GenerateConfig(drafter="lookahead", lookahead=lookahead)
    tokens, lengths = written(model, [4], 60, config)
    assert tokens == [(5 + index) % VOCAB for index in range(60)]
    assert lengths[0] == 1
    assert len(lengths) < 30
    assert min(lengths[-8:]) >= 1 + 3  # the n-gram's other tokens, and the correction
    pooled = replace(config, lookahead=replace(lookahead, pool_from_prompt=True))
    _, lengths = written(model, [*range(VOCAB), 0], 1 + 4 * 2, pooled)
    assert lengths[0] == 1 and min(lengths[1:]) >= 4  # the prompt's n-grams hold at once


def test_a_trie_merges_what_is_equal():
    trie = Trie(9, 8)
    assert trie.add([1, 2, 3]) == 3
    assert trie.add([1, 2, 4]) == 4
    assert trie.add([1, 2, 3]) == 3
    assert trie.add([5], 1) == 5
    tree = trie.to_padded_tree(4)
    index = trie.indices_in_tree()
    assert tree.tokens.tolist() == [9, 1, 2, 5, 3, 4, PAD_TOKEN, PAD_TOKEN]
    assert tree.depths.tolist() == [0, 1, 2, 2, 3, 3, 1, 1]
    assert tree.parents.tolist() == [0, 0, 1, 1, 2, 2, 0, 0]
    assert tree.paths.tolist()[5] == [0, 1, 2, 5, 5]
    assert index == [0, 1, 2, 4, 5, 3]
    assert tree.num_internal == 3
    found = accept(tree, mx.array([1, 2, 4, 0, 0, 7, 0, 0]))
    assert (found.num_accepted.item(), found.correction.item()) == (3, 7)
    assert trie.add([1, 2, 3, 6, 7, 8]) == 7 and trie.is_full
    assert trie.tokens[6:] == [6, 7]


def test_padding_is_never_kept_before_a_node():
    trie = Trie(0, 8)
    trie.add([1, 2, 3, 4])
    tree = trie.to_padded_tree(5)
    assert tree.num_nodes == 8
    edges = transition_logprobs(tree, mx.zeros((4, VOCAB)))
    kept = surviving_nodes(tree, edges, PruneConfig(kind="budget", keep=5))
    assert kept.tolist() == [0, 1, 2, 3, 4]
    kept = surviving_nodes(tree, edges, PruneConfig(kind="threshold", threshold=0.0))
    assert set(range(5)) <= set(kept.tolist())


def verified_root(token):
    """What a call on a bare root leaves that `token` follows."""
    target = mx.array([token])
    accepted = Acceptance(mx.array([0]), target, mx.array([0]))
    hidden = mx.zeros((1, 1, 2))
    tree = tree_from_parents([0], [0])
    return Verified(tree, target, accepted, hidden, None, None, mx.array([0]), TreeCache(1))


def draft_behind(drafter, token):
    """What is drafted behind `token`, which is new in the text."""
    drafter.follow([token], 0)
    return drafter.propose(verified_root(token), drafter.largest)


def test_prompt_lookup_takes_the_longest_then_the_newest():
    drafter = PromptLookupDrafter(PromptLookupConfig(ngram=2, num_draft_tokens=2, size=7))
    drafter.start([1, 2, 3, 4, 5, 2, 6, 7, 1])
    tree = draft_behind(drafter, 2)  # ... 1 2: first after "1 2", then after "2"
    assert tree.tokens.tolist()[:5] == [2, 3, 6, 4, 7]
    assert tree.tokens.tolist()[5:] == [PAD_TOKEN] * 3
    nothing = draft_behind(drafter, 11)
    assert nothing.tokens.tolist() == [11]


def test_prompt_lookup_drafts_from_a_reference_alone():
    """Which follows the prompt, as the answer does."""
    config = PromptLookupConfig(ngram=3, num_draft_tokens=3, reference=(5, 6, 7, 8))
    drafter = PromptLookupDrafter(config)
    drafter.start([9, 1, 2, 9, 1, 2])
    for root, drafted in ((5, [5, 6, 7, 8]), (8, [8]), (1, [1]), (2, [2, 5, 6, 7])):
        assert draft_behind(drafter, root).tokens.tolist()[: len(drafted)] == drafted
    model = cycle_model()
    config = replace(config, reference=(1, 2, 3, 9, 9))
    settings = GenerateConfig(drafter="prompt-lookup", prompt_lookup=config)
    tokens, lengths = written(model, [0], 6, settings)
    assert tokens == [1, 2, 3, 4, 5, 6] and lengths == [1, 3, 1, 1]


WINDOW = LookaheadConfig(window=3, ngram=3, guesses=2, pool_from_prompt=False)


def window_of(tree):
    """Tokens of a tree of a window of three columns and two levels: the chain below the root, and
    the guess below each node of it. All differ."""
    tokens = tree.tokens.tolist()
    depths = tree.depths.tolist()
    parents = tree.parents.tolist()
    *chain, last = tree.paths.tolist()[depths.index(4)][1:]
    below = [
        next(n for n in range(1, 7) if parents[n] == above and n not in chain)
        for above in chain[:2]
    ]
    return [tokens[n] for n in chain], [tokens[n] for n in (*below, last)]


def test_the_window_sees_what_the_paper_says():
    """Each guess sees the root, the chain up to its own column, and its own column."""
    drafter = LookaheadDrafter(WINDOW)
    drafter.start(range(100, 500))
    tree = draft_behind(drafter, 9)
    (a, b, c), (d, e, f) = window_of(tree)
    assert len({a, b, c, d, e, f}) == 6 and tree.tokens.tolist().count(PAD_TOKEN) == 1
    assert token_paths(tree.select(mx.arange(7))) == {
        (a,), (a, b), (a, b, c), (a, d), (a, b, e), (a, b, c, f),
    }  # fmt: skip


def test_a_window_learns_from_its_own_trees_alone():
    """Not from another drafter's tree of as many nodes, nor from one before which it paused."""
    drafter = LookaheadDrafter(WINDOW)
    drafter.start(range(100, 500))
    tree = draft_behind(drafter, 9)
    chain, below = window_of(tree)
    decided = [50 + node for node in range(tree.num_nodes)]  # by the target, after each node
    own = replace(verified_root(chain[1]), tree=tree, target_tokens=mx.array(decided))
    drafter.follow([chain[1]], 40)
    ngram = (below[1], decided[tree.tokens.tolist().index(below[1])])
    learned = drafter.propose(own, drafter.largest)
    # The level below has taken the chain's place; an n-gram that is complete begins at the root.
    assert ngram in token_paths(learned.select(mx.arange(9)))
    paths = token_paths(learned.select(mx.arange(9))) - {ngram[:1], ngram}
    ends = [decided[tree.tokens.tolist().index(token)] for token in below]
    for place in range(3):
        assert {tuple(below[: place + 1]), (*below[: place + 1], ends[place])} <= paths
    # It has not drafted before the call that is read now: of another's tree it learns nothing.
    drafter.follow([3], 41)
    drafter.follow([4], 42)
    others = replace(own, tree=replace(learned), target_tokens=mx.arange(learned.num_nodes))
    assert window_of(drafter.propose(others, drafter.largest)) == (below, ends)


# --- Lookup beside another drafter, on the device ---


@pytest.mark.parametrize("words", [2, 4, 40])
def test_what_followed_the_longest_last_words_at_their_newest_place(words):
    rng = random.Random(words)
    for _ in range(60):
        text = [rng.randrange(words) for _ in range(rng.randint(1, 30))]
        buffer = TextOnDevice(text)
        for start in (len(text), rng.randint(1, len(text))):
            # What lies behind the newest token is another call's, and is not looked at.
            last = mx.array([start - 1, 0])
            found = buffer.find_continuations(last, 7).tolist()
            assert found == [continuation(text[:start], 7), [PAD_TOKEN] * 7], text[:start]


def test_a_text_that_outgrows_its_room_is_copied_whole():
    rng = random.Random(0)
    text = [rng.randrange(40) for _ in range(250)]
    buffer = TextOnDevice(text)
    for _ in range(100):
        more = [rng.randrange(40) for _ in range(3)]
        buffer.write(mx.array(more), mx.array([len(text)]))
        text += more
    found = buffer.find_continuations(mx.array([len(text) - 1]), 7)
    assert found.tolist() == [continuation(text, 7)]


def test_the_newest_other_tokens_of_the_text_may_be_guessed(monkeypatch):
    model = make_model(adapter={"draft_vocab": (3, 5, 8), "condition_rank": 2})
    hidden = mx.ones((1, 3, 32))
    text = [9, 8, 4, PAD_TOKEN, 9, 2, 4]
    for most, own in {3: [4, 2, 9], 2: [4, 2], 5: [4, 2, 9, 0, 1], 0: []}.items():
        monkeypatch.setattr("ssmlx.drafters.stream_drafter.TEXT_TOKENS", most)
        found = DraftVocab(model, text)
        assert found.tokens.tolist() == [3, 5, 8, *own]
        vocab = np.array([3, 5, 8, *own])
        logits = np.array(model.backbone.logits(hidden))[:, vocab]
        tokens, _ = found.rank_stream_tokens(hidden, mx.array([1]), 3)
        assert np.array_equal(tokens[0], vocab[np.argsort(-logits, kind="stable")[:, :3]])
    assert DraftVocab(model).tokens.tolist() == [3, 5, 8]
    everything = make_model(adapter={"draft_vocab": tuple(range(VOCAB))})
    assert DraftVocab(everything, text).tokens.size == VOCAB < TEXT_TOKENS


def test_copies_are_mixed_into_what_streams_guess():
    """By the definition, number by number."""
    rng = np.random.default_rng(0)
    tokens = mx.array(np.stack([rng.permutation(8)[:4] for _ in range(15)]).reshape(5, 3, 4))
    probs = 0.9 * rng.dirichlet(np.ones(4), (5, 3, 4)).astype(np.float32)
    copied = mx.array([[3, 1, 4], [9, 9, 9], [PAD_TOKEN] * 3, [3, PAD_TOKEN, 2], [8, 1, 9]])
    told = mx.array(rng.uniform(0.5, 1, (5, 2, 2)) * [[0.5], [1]], mx.float32)
    found, logprobs = mix_copies(tokens, mx.log(mx.array(probs)), copied, told)
    for place, level in product(range(5), range(3)):
        own = tokens[place, level].tolist()
        copy = copied[place, level].item()
        is_new = copy != PAD_TOKEN and copy not in own
        expected = [*own[:3], copy] if is_new else own
        assert found[place, level].tolist() == expected
        for row in range(4):
            follows = not level or found[place, level - 1, row] == copied[place, level - 1]
            could = bool(follows) and copy != PAD_TOKEN
            which = int(level > 0)
            weight = could * np.divide(*np.array(told[place, :, which]))
            given = probs[place, level, row] * [1, 1, 1, 1 - is_new]
            mixed = (1 - weight) * given + weight * (np.array(expected) == copy)
            assert np.allclose(np.exp(logprobs[place, level, row]), mixed, atol=1e-6)


def test_copies_are_trusted_by_what_they_foretold():
    """Of each token the share of the copy, beside what the streams gave it."""
    tokens = mx.array([[3, 1], [4, 2], [7, 5]])
    probs = np.full((3, 2, 2), 0.5, np.float32)
    probs[0, :, 0] = 0.25
    probs[1, 0] = [0.1, 0.9]
    probs[2, 1] = [0.0, 1.0]
    cases = [  # of copies and text, shares, and how many levels count
        ([3, 2, 5], [3, 2, 5], [0.8, 1 / 1.9, 0.5], 3),
        ([3, 4, 6], [3, 4, 6], [0.8, 1 / 1.1, 1.0], 3),
        ([3, 2, 5], [3, 4, 5], [0.8, 0.0, 0.0], 2),
        ([9, 2, 5], [3, 2, 5], [0.0, 0.0, 0.0], 1),
        ([PAD_TOKEN] * 3, [3, 2, 5], [0.0] * 3, 0),
    ]
    for copied, said, shares, count in cases:
        found = count_hits_and_trials(
            tokens, mx.log(mx.array(probs)), mx.array(copied), mx.array(said)
        )
        assert np.allclose(found[0], shares, atol=1e-6)
        assert found[1].tolist() == [1.0] * count + [0.0] * (3 - count)
    # A call shows as much as it accepted, and the word that put it right.
    copies = Copies([3, 2, 5, 9])
    guesses = (tokens, mx.log(mx.array(probs)))

    def learn_and_mix(*given):
        return copies.learn_and_mix(guesses, *map(mx.array, given))

    def assert_trusted(found, text):
        copied = mx.array(continuation(text, 3))
        told = text_copies.initial_hits_and_trials() + mx.array([[1, 1], [2, 1]])
        for one, expected in zip(found, mix_copies(*guesses, copied, told), strict=True):
            assert np.allclose(one, expected, atol=1e-6)

    learn_and_mix([3], [0], [4]), learn_and_mix([2, 5, 5], [1], [5])
    assert_trusted(learn_and_mix([7], [0], [7]), [3, 2, 5, 9, 3, 2, 5, 7])
    # What was guessed before a hole is no guess of what stands after it.
    copies.follow([3, 2], 8)
    assert_trusted(learn_and_mix([5], [0], [10]), [3, 2, 5, 9, 3, 2, 5, 7, 3, 2, 5])


def test_replays_trust_copies_by_what_was_said_before():
    """At each token by what those up to it showed, a first level and the one behind it each."""
    rng = np.random.default_rng(1)
    prompt = [3, 2, 5, 3, 1]
    answer = [3, 2, 5, 3, 2, 1, 3]
    tokens = np.stack([rng.permutation(6)[:4] for _ in range(21)]).reshape(7, 3, 4).astype(np.int32)
    logprobs = np.log(rng.dirichlet(np.ones(4), (7, 3, 4)).astype(np.float32))
    found = mix_copies_along(prompt, answer, tokens, logprobs)
    told = text_copies.initial_hits_and_trials()
    text = TextOnDevice(prompt + answer)
    shown = []
    for place in range(7):
        copied = text.find_continuations(mx.array([5 + place]), 3)[0]
        guesses = mx.array(tokens[place]), mx.array(logprobs[place]), copied
        for level, before in enumerate(shown[-2:][::-1]):
            told = told + mx.stack([before[:, n] * (n == level) for n in range(2)], axis=1)
        for one, expected in zip(found, mix_copies(*guesses, told), strict=True):
            assert np.allclose(one[place], expected, atol=1e-5)
        shown.append(
            count_hits_and_trials(*guesses, mx.array([*answer[place + 1 :], -2, -2, -2][:3]))
        )
    assert told[1].tolist() != text_copies.initial_hits_and_trials()[1].tolist()


def test_streams_go_on_with_a_copy_as_far_as_they_reach():
    """A text with a period is foreseen, whatever untrained streams guess."""
    adapter = {"condition_rank": 2}
    base = markov_base(cycle=True)
    model = make_model(scope="streams", base=base, adapter=adapter)
    calls = 1 + model.num_streams
    _, lengths = written(model, [*range(VOCAB), 0], 1 + 9 * calls, tree=TreeConfig(size=40))
    assert lengths == [1] + [calls] * 9


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_heads_that_guess_as_the_target_does_foresee_what_it_draws(kind, monkeypatch):
    """By the noise of each place: every draft holds."""
    model = bare_model()
    row = mx.random.normal((1, VOCAB), key=mx.random.key(3))
    monkeypatch.setattr(Backbone, "logits", lambda _, rows, *head: mx.repeat(row, rows.shape[1], 0))
    monkeypatch.setattr(MedusaHeads, "medusa_logits", lambda *_: mx.repeat(row, LEVELS, 0))
    monkeypatch.setattr(
        MlpSpeculator,
        "run_stage",
        lambda _, n, state, last: (state, mx.repeat(row, last.shape[0], 0)),
    )
    settings = {**CHAIN, "drafter": make_heads(kind, model.backbone)}
    sampling = {"temp": 0.7, "seed": 4}
    tokens, lengths = written(model, PROMPT, 40, **settings, **sampling)
    assert tokens == plain(model, PROMPT, 40, **sampling)
    assert set(lengths[1:-1]) == {1 + LEVELS}


def plain(model, prompt, count, **settings):
    return written(model, prompt, count, decoding="plain", **settings)[0]


def trees_along(model, settings, prompt, count):
    """The text that is written, and the tree after each call with the text that it continues."""
    drafter = drafter_of(model, settings)
    trees = []
    propose = drafter.propose
    drafter.propose = lambda *given: trees.append(propose(*given)) or trees[-1]
    tokens, lengths = first_tokens(speculative_steps(model, prompt, [drafter]), count)
    ends = np.cumsum(lengths).tolist()
    seen = [
        ([*prompt, *tokens[:end]], tree)
        for tree, end in zip(trees, ends, strict=True)
        if end <= count
    ]
    return tokens, seen


def own_tree(heads, model, text):
    """The tree that heads grow from mlx-lm's own hidden state of a text but its last token."""
    state = model.backbone.model.model(mx.array(text[:-1])[None])[0, -1:]
    shape = TreeConfig() if heads.drafter == "medusa" else SpeculatorTreeConfig()
    return heads.propose_tree(mx.array(text[-1:], mx.int32), state, shape)


@pytest.mark.parametrize(("architecture", "kind", "settings"), [
    ("llama", "medusa", {}),
    ("qwen2", "medusa", {"num_layers": 2, "shared_heads": (0, 2)}),
    ("phi3", "medusa", {"shared_heads": (0, 1, 2), "vocab": FEW_TOKENS}),
    ("qwen2", "mlp-speculator", {"scale_input": True}),
    ("phi3", "mlp-speculator", {"tie_weights": True, "vocab": FEW_TOKENS}),
])  # fmt: skip
def test_every_tree_is_the_heads_own(architecture, kind, settings):
    """At every call, from mlx-lm's own hidden state of the text so far."""
    model = bare_model(architecture)
    heads = make_heads(kind, model.backbone, **settings)
    drafter = drafter_of(model, {"drafter": heads})
    assert drafter.num_parameters == heads.config.num_parameters
    tokens, seen = trees_along(model, {"drafter": heads}, PROMPT, 16)
    assert tokens == plain(model, PROMPT, 16) and len(seen) > 3
    for text, tree in seen:
        expected = own_tree(heads, model, text)
        assert tree.tokens.tolist() == expected.tokens.tolist()
        assert tree.paths.tolist() == expected.paths.tolist()
        assert tree.depths.tolist() == expected.depths.tolist()
        assert set(tree.tokens.tolist()[1:]) <= set(settings.get("vocab", range(VOCAB)))
        assert tree.num_nodes == drafter.largest.nodes
        assert int(tree.depths.max().item()) <= drafter.largest.levels


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_drafting_waits_for_nothing(kind):
    """MLX refuses to read a value while it traces a function."""
    model = bare_model()
    heads = make_heads(kind, model.backbone, vocab=FEW_TOKENS)
    drafter = drafter_of(model, {"drafter": heads})
    assert not drafter.needs.host_tokens

    def draft(root, hidden):
        accepted = Acceptance(mx.array([0]), root, mx.array([0]))
        verified = replace(verified_root(7), acceptance=accepted, node_hidden=hidden)
        return drafter.propose(verified, drafter.largest).arrays

    state = mx.random.normal((1, 1, model.backbone.hidden_size), key=mx.random.key(0))
    given = mx.array([7], mx.int32), state
    for found, expected in zip(mx.compile(draft)(*given), draft(*given), strict=True):
        assert found.tolist() == expected.tolist()
    with pytest.raises(ValueError, match="eval"):
        mx.compile(lambda root: mx.array(to_list(root)))(given[0])


def speculator(heads, **tree):
    return {"drafter": heads, "speculator_tree": SpeculatorTreeConfig(**tree)}


CHAIN = {"tree": TreeConfig(kind="full", width=1), **speculator(None, widths=(1,) * LEVELS)}


@pytest.mark.parametrize("kind", HEAD_KINDS)
@pytest.mark.parametrize(
    ("num_right", "shape"), [*((right, CHAIN) for right in range(LEVELS + 1)), (LEVELS, {})]
)
def test_acceptance_ends_where_the_heads_go_wrong(kind, num_right, shape):
    model = cycle_model()
    settings = {**shape, "drafter": cycle_heads(kind, model.backbone, num_right=num_right)}
    tokens, lengths = written(model, [4], 1 + 6 * (num_right + 1), **settings)
    assert lengths == [1] + [num_right + 1] * 6
    assert tokens == [(5 + index) % VOCAB for index in range(len(tokens))]


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_acceptance_ends_where_the_draft_vocabulary_does(kind):
    model = cycle_model()
    heads = cycle_heads(kind, model.backbone, vocab=FEW_TOKENS)
    settings = {**CHAIN, "drafter": heads}
    lengths = [1]
    token = 5
    while sum(lengths) < 40:
        ahead = [(token + 1 + level) % VOCAB for level in range(LEVELS)]
        right = next((n for n, t in enumerate(ahead) if t not in FEW_TOKENS), LEVELS)
        lengths.append(right + 1)
        token = (token + right + 1) % VOCAB
    assert len(set(lengths[1:])) > 2
    assert written(model, [4], sum(lengths), **settings)[1] == lengths


@pytest.mark.parametrize("kind", HEAD_KINDS)
@pytest.mark.parametrize("merge", [False, True])
def test_heads_of_an_adapted_model(kind, merge):
    """LoRA of scope "all": the heads see the adapted model's states, and fit the base's name."""
    heads = random_heads(kind, bare_model().backbone)
    model = make_model("llama", "all", merge_lora=merge)
    kinds = {type(module) for module in model.backbone.model.modules()}
    assert model.backbone.replaced and (RowLora in kinds) != merge
    attached = attach_heads(heads, model.backbone)
    settings = {"drafter": attached, "prune": PruneConfig(kind="budget", keep=6)}
    assert attached.drafter == kind
    oracle = StreamFusedModel(Backbone(target_of("llama", "all")))
    expected = plain(oracle, PROMPT, 20)
    tokens, seen = trees_along(model, settings, PROMPT, 20)
    assert tokens == expected == plain(model, PROMPT, 20) != plain(bare_model(), PROMPT, 20)
    for text, tree in seen:
        assert token_paths(tree) == token_paths(own_tree(attached, oracle, text))


def test_what_does_not_fit_is_refused():
    model = bare_model()
    medusa, other = (make_heads(kind, model.backbone) for kind in HEAD_KINDS)
    for settings, *named in (
        ({"drafter": "streams"}, "streams"),
        ({"drafter": "prompt-lookup", "prune": BUDGET}, "prun"),
        ({"drafter": "lookahead", "prune": BUDGET}, "prun"),
        ({"drafter": medusa, "tree": TreeConfig(kind="full", width=13)}, "2380"),
        (speculator(other, widths=()), "widths"),
    ):
        line = refusal(make_plan, model, **settings)
        assert all(name in line for name in named), line
    for kind, settings, named in (
        (GenerateConfig, {"decoding": "Plain"}, "--decoding Plain"),
        (GenerateConfig, {"drafter": "oracle"}, "--drafter oracle"),
        (LookaheadConfig, {"window": 128, "ngram": 16}, "1996"),
        (SpeculatorTreeConfig, {"widths": (3, 0)}, "widths=0"),
        (SpeculatorTreeConfig, {"size": 8, "candidates": 3}, "size=8 candidates=3"),
    ):
        assert mentions(found_in(refusal(kind, **settings)), *named.split())


def test_the_drafter_follows_from_what_is_loaded():
    model = bare_model()
    heads = make_heads("medusa", model.backbone)
    for target in (model, make_model("llama", "streams")):
        for asked, kind in (
            ({}, "medusa"),
            ({"decoding": "plain"}, None),
            ({"drafter": "prompt-lookup"}, "prompt-lookup"),
        ):
            config = GenerateConfig(**asked)
            assert make_plan(target, config, drafter=heads).kind == kind


def test_a_drafter_is_given_by_name_or_as_it_was_loaded():
    model = bare_model()
    heads = make_heads("medusa", model.backbone)
    draft = DraftModel(make_base(seed=50))
    for given, kind in (
        ("lookahead", "lookahead"),
        (heads, "medusa"),
        ([heads], "medusa"),
        ([draft, heads], "draft-model"),
        (["medusa", draft, heads], "medusa"),
        ([], "prompt-lookup"),
    ):
        assert make_plan(model, drafter=given).kind == kind
    config = GenerateConfig(drafter="draft-model")
    assert make_plan(model, config, drafter=[heads, draft]).kind == "draft-model"


@pytest.mark.parametrize(("given", "named"), [
    (["medusa", "lookahead"], "drafter medusa lookahead"), (7, "drafter 7"),
    ("oak", "--drafter oak"), ("medusa", "--drafter medusa heads"),
])  # fmt: skip
def test_a_drafter_that_is_none_is_refused(given, named):
    line = refusal(make_plan, bare_model(), drafter=given)
    assert mentions(found_in(line), *named.split())


WITH_SETTINGS = {
    "prompt-lookup tokens=3": {"prompt_lookup": PromptLookupConfig(num_draft_tokens=3)},
    "lookahead window=7 guesses=2": {"lookahead": LookaheadConfig(window=7, guesses=2)},
    "draft-model width=2": {"draft": DraftModelConfig(width=2)},
    "mtp tokens=2 hidden=before": {
        "drafter_settings": MtpConfig(num_draft_tokens=2, hidden="before")
    },
    "mlp-speculator widths=4,3": {"speculator_tree": SpeculatorTreeConfig(widths=(4, 3))},
    "streams schedule=fused": {"stream_schedule": "fused"},
    " 'prompt-lookup'  ": {},
}


@pytest.mark.parametrize("text", WITH_SETTINGS)
def test_a_name_with_settings_is_read_as_by_the_option(text):
    name = text.replace("'", "").split()[0]
    wanted = GenerateConfig(drafter=name, **WITH_SETTINGS[text])
    assert split_drafter(GenerateConfig(), text) == (wanted, [])
    assert split_drafter(wanted, [text]) == (wanted, [])  # said twice, alike
    parser = argparse.ArgumentParser()
    add_decoding_options(parser, max_tokens=256)
    assert generate_config(parser.parse_args(["--drafter", text])) == wanted


@pytest.mark.parametrize(("text", "named"), [
    ("prompt-lookup num=3", "num=3 prompt-lookup"),
    ("prompt-lookup tokens=many", "tokens=many"),
    ("prompt-lookup tokens=0", "tokens=0"),
    ("prompt-lookup 'tokens=3", "'tokens=3"),
    ("", "--drafter"),
    ("streams epsilon=0.2", "epsilon"),
])  # fmt: skip
def test_wrong_settings_are_refused_as_by_the_option(text, named):
    parser = argparse.ArgumentParser()
    add_decoding_options(parser, max_tokens=256)
    line = refusal(make_plan, bare_model(), drafter=text)
    assert mentions(found_in(line), *named.split())
    assert line == refusal(lambda: generate_config(parser.parse_args(["--drafter", text])))


@pytest.mark.parametrize(("text", "named"), [
    ("draft-model model=org/small", "model"),
    ("medusa heads=folder", "heads"),
    ("streams head=8bit", "head"),
    ("prompt-lookup tokens=4", "prompt_lookup"),
])  # fmt: skip
def test_settings_that_a_call_cannot_follow_are_refused(text, named):
    config = GenerateConfig(prompt_lookup=PromptLookupConfig(num_draft_tokens=9))
    assert mentions(found_in(refusal(make_plan, bare_model(), config, drafter=text)), named)


def test_settings_behind_a_name_reach_the_draft():
    plan = make_plan(bare_model(), drafter="prompt-lookup tokens=3 size=4", decoding="speculative")
    assert plan.drafters[0].largest.levels == 3


@pytest.mark.parametrize("settings", [{}, {"temp": 1.0, "seed": 2}])
@pytest.mark.parametrize("sizes", [(VOCAB, VOCAB + 5), (VOCAB + 5, VOCAB)])
def test_vocabularies_are_padded_to_sizes_of_their_own(sizes, settings):
    """As Qwen2.5's are: what the other has not is never drafted."""
    model = StreamFusedModel(Backbone(make_base(vocab=sizes[0])))
    draft = DraftModel(make_base(vocab=sizes[1], num_hidden_layers=1))
    draft.target_vocab_size = sizes[0]
    expected = plain(model, PROMPT, 40, **settings)
    wide = {"draft": DraftModelConfig(num_draft_tokens=3, width=min(sizes))}
    tokens, lengths = written(model, PROMPT, 40, drafter=draft, **wide, **settings)
    assert tokens == expected and len(lengths) < 40
    logits = DraftCache(draft).append(mx.array(PROMPT))
    assert logits.shape == (1, sizes[0]) and mx.isfinite(logits).sum().item() == min(sizes)


@pytest.mark.parametrize("stop", range(5))
def test_an_answer_stops_while_a_draft_model_reads_its_prompt(stop, monkeypatch):
    """And leaves its cache fit for the next: the target drafts for itself, and all of it holds."""
    monkeypatch.setattr(draft_model, "PREFILL_STEP_SIZE", 2)
    model = bare_model()
    draft = DraftModel(make_base())
    other = [*PROMPT[:2], 7, 7, 7, 7]
    written(model, PROMPT, 1, drafter=draft)
    of_one_text = draft.cache_bytes
    plan = make_plan(model, decoding="speculative", drafter=draft)
    steps = decode_plan(plan, model, other, model.make_cache())
    assert not any(islice(steps, stop))  # two turns in the target's prompt, two in its own
    del steps, plan
    assert written(model, PROMPT, 9, drafter=draft)[1] == [1, 4, 4]
    # There is a second text if the other answer began to draft.
    assert (draft.cache_bytes > of_one_text > 0) == (stop > 2)


def test_another_vocabulary_is_refused():
    draft = DraftModel(make_base(), "--draft-model x")
    tokenizer = make_tokenizer()
    require_same_vocabulary(draft, make_tokenizer(), tokenizer, VOCAB)
    require_same_vocabulary(draft, tokenizer, tokenizer, VOCAB + 1)
    said = refusal(require_same_vocabulary, draft, tokenizer, tokenizer, VOCAB - 1)
    assert mentions(said, str(VOCAB), str(VOCAB - 1))
    said = refusal(require_same_vocabulary, draft, make_tokenizer(VOCAB + 1), tokenizer, VOCAB)
    assert mentions(said, "1", "'w13'")


SMALL = {"num_hidden_layers": 1}  # What is tested is the drafting.
DISTRIBUTIONS = {"T=1": {"temp": 1.0}, "T=0.7, top-k 10": {"temp": 0.7, "top_k": 10}}


def transition_probs(settings):
    """[V, V] what the target writes after each token, by mlx-lm's model and filters."""
    logits = markov_base(**SMALL)(mx.arange(VOCAB)[:, None])[:, 0]
    config = GenerateConfig(**settings)
    kept = filter_logprobs(log_softmax(logits), config)
    return np.array(mx.softmax(kept / config.temp, axis=-1))


def p_value(texts, probs):
    """Chi-square of the texts' transitions; cells of fewer than 5 expected are put together."""
    torch = pytest.importorskip("torch")
    counts = np.zeros((VOCAB, VOCAB))
    for text in texts:
        np.add.at(counts, (text[:-1], text[1:]), 1)
    assert not counts[probs == 0].any()
    expected = probs * counts.sum(axis=1, keepdims=True)
    rare = expected < 5
    observed, expected = (
        np.column_stack([np.where(rare, 0, found), (found * rare).sum(axis=1)])
        for found in (counts, expected)
    )
    cells = expected > 0
    statistic = ((observed - expected)[cells] ** 2 / expected[cells]).sum()
    freedom = cells.sum() - cells.any(axis=1).sum()
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def sampled_text(name, settings, count, seed=5):
    """`count` tokens, and the target calls that they took."""
    adapter = {"num_msa_layers": 1, **parts_of(name)}
    model = make_model("llama", "streams", base=markov_base(**SMALL), adapter=adapter)
    more = drafter_settings()[name]
    if isinstance(more.get("drafter"), DraftModel):
        more["drafter"] = DraftModel(markov_base(7, **SMALL))
    tokens, lengths = written(model, [1], count, **more, **settings, seed=seed)
    return [1, *tokens], len(lengths)


@lru_cache
def plain_text(distribution, draws, seed):
    model = StreamFusedModel(Backbone(markov_base(**SMALL)))
    settings = DISTRIBUTIONS[distribution]
    return [1, *written(model, [1], draws, decoding="plain", **settings, seed=seed)[0]]


@pytest.mark.parametrize(("name", "distribution", "texts", "draws"), [
    *slow(*((*pair, 1, 600) for pair in zip(DRAFTERS, cycle(DISTRIBUTIONS)))),
    *slow(*((*pair, 20, 400) for pair in product(DRAFTERS, DISTRIBUTIONS)), mark=pytest.mark.long),
])  # fmt: skip
def test_every_drafter_samples_from_the_target(name, distribution, texts, draws):
    """As plain decoding does under the same seed, token for token."""
    for seed in range(texts):
        text, calls = sampled_text(name, DISTRIBUTIONS[distribution], draws, seed)
        assert text == plain_text(distribution, draws, seed) and calls < draws


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize(
    "texts",
    [pytest.param(4, marks=pytest.mark.slow), pytest.param(250, marks=pytest.mark.long)],
)
def test_plain_decoding_samples_from_the_target(distribution, texts):
    found = [plain_text(distribution, 400, seed) for seed in range(texts)]
    p = p_value(found, transition_probs(DISTRIBUTIONS[distribution]))
    print(f"{distribution}: p = {p:.3f}")
    assert p > 1e-3
    assert p_value(found, transition_probs({"temp": 0.5})) < 1e-6  # another temperature is found


@pytest.fixture(scope="module")
def loaded(base):
    return ssmlx.load(str(base), adapter="none", dtype="float32")


@pytest.fixture(scope="module")
def folders(loaded, tmp_path_factory):
    """A folder of random heads by kind."""
    found = {}
    for kind in HEAD_KINDS:
        found[kind] = tmp_path_factory.mktemp("heads") / kind
        found[kind].mkdir()
        save_heads(found[kind], random_heads(kind, loaded[0].backbone))
    return found


@pytest.fixture
def run(base, capsys):
    """Answer a prompt; gives the record, or the line of a refusal."""

    def run(*args, model=base, prompt="w1 w2"):
        ask = ["--model", str(model), "--prompt", prompt, "--jsonl", "--max-tokens", "10"]
        code = generate.main([*ask, *map(str, args)])
        out, err = capsys.readouterr()
        return json.loads(out) if code == 0 else (code, one_line(err, "ssmlx.generate"))

    return run


def test_the_command_takes_every_drafter(run, folders, base, tmp_path):
    expected = run("--decoding", "plain")["tokens"]
    for drafter, *options in (
        ("prompt-lookup",),
        ("lookahead",),
        (f"medusa heads={folders['medusa']}", "--tree", "full", "--tree-width", 2),
        (f"medusa heads={folders['medusa']}", "--tree-size", 9),
        (f"mlp-speculator heads={folders['mlp-speculator']} widths=3,2 candidates=4",),
        (f"mlp-speculator heads={folders['mlp-speculator']} size=7",),
    ):
        record = run("--drafter", drafter, *options)
        assert record["tokens"] == expected and record["draft_model_calls"] == 0
        assert record["target_calls"] <= 10
    always = ("--decoding", "speculative")
    record = run("--drafter", f"draft-model model={base} tokens=2", *always)
    assert record["tokens"] == expected
    assert (record["target_calls"], record["draft_model_calls"]) == (4, 1 + 3 * 2)  # 1 + 3 + 3 + 3
    adapter = write_tiny_adapter(tmp_path / "adapter", base)
    adapted = run("--adapter", adapter, "--decoding", "plain")["tokens"]
    assert adapted != expected
    for kind, folder in folders.items():
        drafter = f"{kind} heads={folder}"
        record = run("--adapter", adapter, "--drafter", drafter, "--prune", "budget")
        assert record["tokens"] == adapted


def test_what_the_command_refuses(run, folders, tmp_path):
    other = write_base(tmp_path / "other", norm=1.5)
    speculators = f"mlp-speculator heads={folders['mlp-speculator']}"
    medusa = f"medusa heads={folders['medusa']}"
    nowhere = str(tmp_path / "nowhere")
    for drafter, more, *named in (
        (medusa, ("--prune", "budget"), "--prune"),
        ("draft-model", (), '--drafter "draft-model model=MODEL"'),
        (f"draft-model model={nowhere}", (), nowhere),
        ("medusa", (), "--drafter", "medusa", "heads=FOLDER"),
        (f"medusa heads={nowhere}", (), nowhere),
        (f"medusa heads={other}", (), "heads_config.json"),
        (f"medusa heads={folders['mlp-speculator']}", (), "--drafter medusa", "mlp-speculator"),
        (f"{speculators} size=0", (), "mlp-speculator", "size=0"),
        (f"{speculators} widths=9,9,9,9", (), "9 x 9 x 9 x 9", "1", "3"),
    ):
        code, line = run("--drafter", drafter, *more)
        assert code == 2 and mentions(line, *map(str, named)), line
    code, line = run("--drafter", speculators, model=other)
    assert code == 2 and mentions(found_in(line), "norm")


def test_two_chats_in_turn_keep_their_draft_models_caches(base, monkeypatch):
    """Each processes what its turn adds alone, though both begin with one system prompt."""
    processed = []
    append = DraftCache.append

    def append_noting(cache, tokens):
        processed.append(tokens.shape[0])
        return append(cache, tokens)

    monkeypatch.setattr(DraftCache, "append", append_noting)
    with ssmlx.Engine(str(base), adapter="none", dtype="float32") as engine:
        vocab_size = engine.model().backbone.vocab_size
        draft = ssmlx.load_draft_model(base, engine.tokenizer, vocab_size, dtype="float32")
        settings = {"system": " ".join(["w9 w8 w7"] * 4), "max_tokens": 6}
        always = {"drafter": draft, "decoding": "speculative"}
        chats = [engine.chat(**settings, **always) for _ in range(2)]
        plain = [engine.chat(**settings, decoding="plain") for _ in range(2)]
        for turn in range(3):
            for number in (0, 1):
                text = " ".join([f"w{20 + number}"] * (20 if turn == 0 else 5))
                processed.clear()
                found = tokens_of(chats[number].reply(text))
                assert found == tokens_of(plain[number].reply(text))
                # The second chat's first turn finds the system prompt in a copy.
                assert (turn, number) == (0, 0) or max(processed) < 20 + 8
                assert turn == 0 or max(processed) < 5 + 12
        assert draft.cache_bytes > 0
        pool = engine.memory_pool
        run_on_mlx_thread(lambda: pool.make_room(pool.limit))  # it counts what nobody uses now
        assert draft.cache_bytes == 0


@pytest.mark.parametrize("kind", ["lookahead", "draft-model", "medusa"])
def test_a_session_reuses_its_caches(base, loaded, folders, kind):
    """The text's, of which those that read it are told, and a draft model's own."""
    model, tokenizer = loaded
    draft = None
    drafter = None
    if kind == "draft-model":
        vocab_size = model.backbone.vocab_size
        drafter = draft = ssmlx.load_draft_model(base, tokenizer, vocab_size, dtype="float32")
    elif kind in HEAD_KINDS:
        drafter = ssmlx.load_heads(folders[kind], model)
    config = GenerateConfig(max_tokens=8, temp=1.0, seed=1, repetition_penalty=1.2)
    bare = ssmlx.ChatSession(model, tokenizer, config)
    always = replace(config, drafter=kind, decoding="speculative")
    session = ssmlx.ChatSession(model, tokenizer, always, drafter=drafter)
    for text in ("w1 w2", "w3", "w4 w5"):
        *_, last = session.reply(text)
        *_, same = bare.reply(text)
        assert session.messages == bare.messages
        assert last.target_calls <= same.target_calls == 8
    assert draft is None or last.target_calls < 8
    assert session.totals.reused_tokens > 0 and math.isfinite(session.compare().speed_up)
    assert session.compare().same_tokens and bare.compare().same_tokens


def test_a_cache_whose_text_is_not_given_is_refused_to_who_reads_it(loaded):
    model, tokenizer = loaded
    cache = model.make_cache()
    run_on_mlx_thread(lambda: prefill(model, [3, 1, 4], cache))
    given = {"cache": cache, "drafter": "lookahead"}
    assert mentions(refusal(stream_generate, model, tokenizer, [1], **given), "context")


@pytest.mark.parametrize("sharded", [False, True])
def test_a_model_that_carries_heads_loads_without_them(base, loaded, tmp_path, sharded):
    folder = shutil.copytree(base, tmp_path / "medusa2")
    assert not may_have_drafting_heads(folder)
    heads = random_heads("medusa", loaded[0].backbone)
    carried = {f"medusa_head.{name}": array for name, array in heads.tensors.items()}
    weights = mx.load(str(base / "model.safetensors"))
    if sharded:
        (folder / "model.safetensors").unlink()
        files = {"model-1-of-2.safetensors": weights, "model-2-of-2.safetensors": carried}
        index = {name: file for file, tensors in files.items() for name in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    else:
        files = {"model.safetensors": weights | carried}
    for file, tensors in files.items():
        mx.save_safetensors(str(folder / file), tensors)
    assert may_have_drafting_heads(folder)
    model, _ = ssmlx.load(str(folder), adapter="none", dtype="float32")
    assert type(model.backbone.model).__module__ == "mlx_lm.models.llama"
    prompt = [9, 30, 21]
    assert plain(model, prompt, 12) == plain(loaded[0], prompt, 12)
