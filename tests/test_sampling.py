"""What decides on tokens: penalties, filters, noise by place, typical acceptance."""

import math
import random
from dataclasses import replace
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from loops import plain_tokens
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors
from refusals import found_in, mentions, refusal
from tiny import (
    VOCAB,
    assert_close,
    first_tokens,
    make_base,
    make_model,
    make_tokenizer,
    random_tree,
    slow,
    token_steps,
    tree_from_parents,
)

from ssmlx.api import stream_generate, summary_line
from ssmlx.decoding import sampling as decisions
from ssmlx.decoding.accept import accept, accept_typical
from ssmlx.decoding.call import plain_call, verify_tree
from ssmlx.decoding.loop import prefill
from ssmlx.decoding.sampling import (
    GREEDY,
    NUM_CANDIDATES,
    RowPositions,
    Sampling,
    filter_logprobs,
    last_tokens,
    log_softmax,
    row_positions,
    to_gumbel,
    uniform_noise,
)
from ssmlx.drafters.copies import Copies
from ssmlx.drafters.stream_drafter import StreamDrafter
from ssmlx.model.backbone import Backbone
from ssmlx.model.streams import StreamFusedModel
from ssmlx.model.tree import PAD_TOKEN, root_tree
from ssmlx.settings import (
    AcceptanceConfig,
    GenerateConfig,
    PruneConfig,
    SamplingConfig,
    TreeConfig,
)

PROMPT = [3, 1, 4, 1, 5]


@cache
def bare_model():
    return StreamFusedModel(Backbone(make_base()))


@cache
def streams_model():
    return make_model("llama", "streams")


@pytest.mark.parametrize("temp", [0.3, 1.0, 2.0])
def test_what_is_drawn_is_the_best_beside_the_noise_of_its_place(temp):
    """Which is known beforehand, at every place, of some tokens as of all."""
    sampling = Sampling(SamplingConfig(temp=temp, seed=5), VOCAB)
    logits = mx.random.normal((4, VOCAB), key=mx.random.key(1))
    first = mx.array([9])
    depths = mx.array([0, 1, 1, 3])
    some = mx.array([7, 2])
    noise = sampling.noise(first, 4)
    at = RowPositions(first, depths, 4, mx.zeros((4, 0), mx.int32))
    best = mx.argmax(logits + noise[depths], axis=1)
    assert sampling.sample(logits, at).tolist() == best.tolist()
    assert mx.array_equal(sampling.noise(first, 4, some), noise[:, some])
    assert mx.array_equal(sampling.noise(first + 1, 3), noise[1:])
    assert GREEDY.noise(first, 4) is None


def test_every_bit_of_a_seed_counts():
    seeds = (1, 2, 1 + 2**32, 1 + 2**63)
    found = [
        Sampling(SamplingConfig(temp=1.0, seed=seed), VOCAB).noise(mx.array([0]), 1).tolist()
        for seed in seeds
    ]
    assert len({str(noise) for noise in found}) == len(seeds)


@cache
def surest_model(**adapter):
    """Whose logits are the same at every place, and what its streams guess, too."""
    base = make_base(tie_word_embeddings=False)
    base.lm_head = nn.Linear(32, VOCAB)
    base.lm_head.weight = mx.zeros((VOCAB, 32))
    base.lm_head.bias = mx.random.normal((VOCAB,), key=mx.random.key(2))
    return make_model("llama", "streams", base=base, adapter=adapter)


def drawn_by_surest(model=None, **settings):
    """Tokens of a sampled answer, and how many each call brought."""
    model = model or surest_model()
    config = GenerateConfig(temp=1.0, seed=3, tree=TreeConfig(kind="full", width=2), **settings)
    return first_tokens(token_steps(model, PROMPT, model.make_cache(), config), 60)


@pytest.mark.parametrize(
    "adapter", [{}, *slow({"condition_rank": 3})], ids=["streams", "conditional"]
)
@pytest.mark.parametrize("settings", [
    {}, {"stream_schedule": "fused"}, {"prune": PruneConfig(kind="budget", keep=4)},
    {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}, {"repetition_penalty": 1.3},
], ids=str)  # fmt: skip
def test_who_guesses_as_the_target_does_foresees_what_it_draws(adapter, settings, monkeypatch):
    """All of it, if nothing is filtered or pruned: by the noise, and not without it."""
    monkeypatch.setattr(Copies, "learn_and_mix", lambda self, guesses, *_: guesses)
    model = surest_model(**adapter)
    sampling = Sampling(GenerateConfig(temp=1.0, seed=3, **settings), VOCAB)
    expected = plain_tokens(model, PROMPT, 60, sampling)
    tokens, lengths = drawn_by_surest(model, **settings)
    assert tokens == expected
    if set(settings) <= {"stream_schedule"}:
        assert set(lengths[1:-1]) == {1 + model.num_streams}
    monkeypatch.setattr(Sampling, "noise", lambda *_: None)
    tokens, blind = drawn_by_surest(model, **settings)
    assert tokens == expected and len(lengths) < 0.8 * len(blind)


@pytest.mark.parametrize("settings", [{}, {"prune": PruneConfig(kind="budget", keep=4)}], ids=str)
def test_typical_acceptance_guesses_what_is_likely_and_not_what_is_drawn(settings, monkeypatch):
    lossy = {**settings, "acceptance": AcceptanceConfig(kind="typical")}
    expected = drawn_by_surest(**lossy)
    monkeypatch.setattr(Sampling, "noise", lambda *_: None)
    assert drawn_by_surest(**lossy) == expected != drawn_by_surest(**settings)


PENALTIES = (
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 1.4, "repetition_context_size": 3},
    {"presence_penalty": 1.5, "presence_context_size": 4, "frequency_penalty": 0.7},
    {"logit_bias": {3: 4.0, 7: -9.0}},
    {"logit_bias": {2: 2.5}, "repetition_penalty": 2.0, "frequency_penalty": 0.5},
)


def places(recent):
    """Places of rows whose recent tokens are `recent`."""
    rows = len(recent)
    return RowPositions(mx.array([0]), mx.zeros(rows, mx.int32), 1, mx.array(recent, mx.int32))


@pytest.mark.parametrize("settings", PENALTIES)
def test_penalties_are_mlx_lms(settings):
    """Row by row what mlx-lm's processors make of the same text."""
    rng = np.random.default_rng(0)
    draw = random.Random(0)
    sampling = Sampling(SamplingConfig(**settings), VOCAB)
    processors = make_logits_processors(**settings)
    texts = [[draw.randrange(VOCAB) for _ in range(length)] for length in (1, 2, 5, 30)]
    logits = mx.array(rng.normal(0, 3, (len(texts), VOCAB)), mx.float32)
    recent = mx.stack([last_tokens(text, sampling.context_size) for text in texts])
    found = sampling.apply_bias_and_penalties(logits, places(recent.tolist()))
    for row, text in enumerate(texts):
        expected = mx.array(logits[row : row + 1])
        for processor in processors:
            expected = processor(mx.array(text), expected)
        assert_close(found[row], expected[0])


@pytest.mark.parametrize("settings", PENALTIES)
def test_penalised_speculative_plain_and_mlx_lm_agree(settings):
    base = make_base()
    processors = make_logits_processors(**settings)
    answer = mlx_lm.stream_generate(
        base, make_tokenizer(), PROMPT, max_tokens=24, logits_processors=processors
    )
    expected = [response.token for response in answer]
    plain = bare_model()
    for model, more in (
        (plain, {"decoding": "plain"}),
        (streams_model(), {"tree": TreeConfig(kind="full", width=3)}),
        (plain, {"drafter": "prompt-lookup"}),
        (plain, {"drafter": "lookahead"}),
    ):
        config = GenerateConfig(**settings, **more)
        steps = token_steps(model, PROMPT, model.make_cache(), config)
        assert first_tokens(steps, 24)[0] == expected, more


def test_a_node_sees_the_text_and_its_own_path():
    rng = random.Random(3)
    tree = random_tree(rng, 12, 5)
    text = [8, 6, 7]
    depths = tree.depths.tolist()
    paths = tree.paths.tolist()
    tokens = tree.tokens.tolist()
    for size in (0, 1, 2, 4, 9):
        found = row_positions(tree, mx.array([3]), last_tokens(text, size))
        assert found.recent.shape == (12, size)
        for node, row in enumerate(found.recent.tolist()):
            whole = [PAD_TOKEN] * size + text
            whole += [tokens[n] for n in paths[node][: depths[node] + 1]]
            assert row == (whole[-size:] if size else [])


@pytest.mark.parametrize("settings", [
    {"temp": 1.0}, {"temp": 0.5, "top_k": 3}, {"temp": 1.3, "top_p": 0.6},
    {"temp": 1.0, "min_p": 0.2},
])  # fmt: skip
def test_draws_follow_mlx_lms_distribution(settings):
    """The share of each token among draws at many places, against mlx-lm's own sampler."""
    logits = mx.array(np.random.default_rng(1).normal(0, 1.5, (1, VOCAB)), mx.float32)
    sampling = Sampling(SamplingConfig(**settings, seed=4), VOCAB)
    rows = 4000
    spread = RowPositions(mx.array([0]), mx.arange(rows), rows, mx.zeros((rows, 0), mx.int32))
    ours = sampling.sample(mx.broadcast_to(logits, (rows, VOCAB)), spread)
    mx.random.seed(0)
    sampler = mlx_lm.sample_utils.make_sampler(**settings)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    theirs = sampler(mx.broadcast_to(logprobs, (rows, VOCAB)))
    shares = [np.bincount(np.array(a), minlength=VOCAB) / rows for a in (ours, theirs)]
    exact = np.exp(np.array(sampling.logprobs(logits, places([[]])))[0])
    assert exact.sum() == pytest.approx(1, abs=1e-5)
    for share in shares:
        assert np.abs(share - exact).max() < 4 * 0.5 / rows**0.5
        assert not share[exact == 0].any()


def some_logits(kind, rows=8, size=3000):
    """[rows, size] logits, of peaked rows and flat ones."""
    rng = np.random.default_rng(2)
    drawn = rng.normal(0, 1, (rows, size))
    sharp = np.geomspace(0.01, 9, rows)[:, None]
    if kind == "zipf":
        drawn = -np.log(1 + drawn.argsort(axis=1))
        sharp = np.linspace(0.8, 4, rows)[:, None]
    if kind == "ruled out":
        drawn[:, ::2] = -np.inf
    logits = mx.array(drawn * sharp, mx.float32)
    return logits.astype(mx.bfloat16) if kind == "ties" else logits


@pytest.mark.parametrize("kind", ["normal", "zipf", "ties", "ruled out"])
@pytest.mark.parametrize("settings", [
    {"top_p": 0.9}, {"top_p": 0.3}, {"top_p": 1e-6}, {"min_p": 0.1}, {"top_k": 40},
    {"top_p": 0.8, "top_k": 20}, {"top_p": 0.95, "min_p": 0.01, "top_k": 200},
])  # fmt: skip
def test_filters_keep_mlx_lms_tokens(settings, kind):
    """Both where all tokens are looked at, and where the likeliest tell."""
    logits = some_logits(kind)
    rows, size = logits.shape
    logprobs = log_softmax(logits.astype(mx.float32))
    theirs = logprobs
    config = SamplingConfig(**settings, temp=0.7, seed=3)
    if config.top_p:
        theirs = apply_top_p(theirs, config.top_p)
    if config.min_p:
        theirs = apply_min_p(theirs, config.min_p)
    if config.top_k:
        theirs = apply_top_k(theirs, config.top_k)
    ours = filter_logprobs(logprobs, config)
    assert np.array_equal(ours, theirs)
    sampling = Sampling(config, size)
    spread = RowPositions(mx.array([7]), mx.arange(rows), rows, mx.zeros((rows, 0), mx.int32))
    tokens = sampling.sample(logits, spread)
    expected = mx.argmax(sampling.add_gumbel_noise(theirs / config.temp, spread), axis=-1)
    is_open = tokens < 0
    assert np.array_equal(mx.where(is_open, 0, tokens), mx.where(is_open, 0, expected))
    assert sampling.may_leave_unresolved or not is_open.any()
    counts = (theirs > -math.inf).sum(axis=1)
    assert np.array_equal(is_open, (counts >= NUM_CANDIDATES) & sampling.may_leave_unresolved)
    for row in range(rows):
        assert sampling.resolve_row(tokens, logits, spread, mx.array([row]))[row] == expected[row]


@pytest.mark.parametrize("settings", [{"top_p": 0.9}, {"min_p": 0.05, "repetition_penalty": 1.3}])
@pytest.mark.parametrize("drafter", ["streams", "prompt-lookup", "lookahead"])
def test_rows_that_are_left_open_change_no_text(settings, drafter, monkeypatch):
    config = GenerateConfig(**settings, temp=1.0, seed=5)
    model = streams_model()
    expected = plain_tokens(model, PROMPT, 24, Sampling(config, VOCAB))
    monkeypatch.setattr(decisions, "NUM_CANDIDATES", 2)
    for more in ({"decoding": "plain"}, {"drafter": drafter, "decoding": "speculative"}):
        steps = token_steps(model, PROMPT, model.make_cache(), replace(config, **more))
        assert first_tokens(steps, 24)[0] == expected


@pytest.mark.parametrize("num_layers", [1, 3], ids=["top layer", "all layers"])
def test_streams_draft_the_same_behind_a_plain_call_as_behind_a_bare_root(num_layers):
    """Where every layer has streams they are inserted before the first, on embeddings."""
    model = make_model("llama", "streams", adapter={"num_msa_layers": num_layers})
    assert model.insertion_layer == model.num_layers - num_layers
    root = mx.array([5], mx.int32)
    drafted = []
    for is_plain in (True, False):
        cache = model.make_cache()
        prefill(model, PROMPT, cache)
        call = (
            plain_call(model, root, last_tokens((), 0), cache)
            if is_plain
            else verify_tree(model, root_tree(root), cache)
        )
        assert call.is_plain == is_plain and len(call.read_tokens()) == 1
        drafter = StreamDrafter(model, TreeConfig(size=6), model.num_streams)
        drafted.append(drafter.propose(call.verified, drafter.largest).tokens.tolist())
    assert drafted[0] == drafted[1]


def test_noise_belongs_to_seed_and_place():
    def noise(seed, first, count, size=VOCAB):
        return to_gumbel(uniform_noise(mx.array(seed, mx.uint32), first + mx.arange(count), size))

    whole = noise(7, 100, 6)
    assert np.array_equal(whole[2:4], noise(7, 102, 2))
    assert not np.allclose(whole[0], whole[1])
    assert not np.allclose(whole, noise(8, 100, 6))
    assert not np.allclose(whole[1:], noise(8, 100, 5))
    many = np.array(noise(0, 0, 500, 100))
    assert abs(many.mean() - 0.5772) < 0.02 and abs(many.std() - 1.2825) < 0.02
    assert abs(np.corrcoef(many[:-1].ravel(), many[1:].ravel())[0, 1]) < 0.02


def test_without_a_seed_mlx_decides():
    model = bare_model()

    def sampled(config):
        return first_tokens(token_steps(model, PROMPT, model.make_cache(), config), 20)[0]

    config = GenerateConfig(temp=1.0)
    mx.random.seed(1)
    first = sampled(config)
    second = sampled(config)
    mx.random.seed(1)
    assert first == sampled(config) != second
    # One text continued in two pieces is the text continued in one: noise belongs to places.
    seeded = GenerateConfig(temp=1.0, seed=2)
    whole = sampled(seeded)
    again = token_steps(model, PROMPT + whole[:8], model.make_cache(), seeded)
    assert first_tokens(again, 12)[0] == whole[8:]


def test_typical_acceptance_is_medusas_rule():
    config = AcceptanceConfig(kind="typical", epsilon=0.2, delta=0.5)
    probs = np.array([[0.6, 0.3, 0.1, 0.0], [0.25] * 4, [0.9, 0.1, 0.0, 0.0], [0.25] * 4])
    with np.errstate(divide="ignore"):
        logprobs = mx.array(np.log(probs), mx.float32)
    # Bounds: exp(-H) is 0.407 and 0.25 for the first two; halved, 0.2 (epsilon) and 0.125.
    target = mx.array([2, 3, 1, 0])
    tree = tree_from_parents([9, 1, 0, 3], [0, 0, 0, 1])
    found = accept_typical(tree, target, logprobs, config)
    assert found.path.tolist() == [0, 1, 3]  # the deepest path, though 0 is likelier than 1
    assert found.new_tokens.tolist() == [1, 3, 0]
    assert found.num_accepted.item() == 2
    assert accept(tree, target).num_accepted.item() == 0  # where exact acceptance takes nothing
    flat = tree_from_parents([9, 1, 0, 2], [0, 0, 0, 0])
    found = accept_typical(flat, target, logprobs, config)
    assert found.new_tokens.tolist() == [0, 1]  # the likeliest of equally deep ones
    unlikely = tree_from_parents([9, 2, PAD_TOKEN], [0, 0, 0])
    found = accept_typical(unlikely, target[:3], logprobs[:3], config)
    assert (found.num_accepted.item(), found.correction.item()) == (0, 2)


def test_typical_acceptance_says_that_it_is_lossy():
    model = streams_model()
    lossy = AcceptanceConfig(kind="typical", epsilon=0.01, delta=0.05)
    calls = {}
    for acceptance in (AcceptanceConfig(), lossy):
        config = GenerateConfig(temp=1.0, seed=1, max_tokens=40, acceptance=acceptance)
        *_, last = stream_generate(model, make_tokenizer(), PROMPT, config)
        calls[acceptance.kind] = last.target_calls
        assert summary_line(last).startswith("LOSSY") == last.lossy == (acceptance is lossy)
    assert calls["typical"] < calls["exact"]
    line = refusal(GenerateConfig, temp=0, acceptance=lossy)
    given = (model, make_tokenizer(), PROMPT, GenerateConfig(acceptance=lossy))
    for one in (line, refusal(stream_generate, *given)):
        assert mentions(found_in(one), "acceptance=typical")


def test_a_bias_of_an_unknown_token():
    line = refusal(Sampling, SamplingConfig(logit_bias={13: 1.0}), VOCAB)
    assert mentions(line, "--logit-bias", "13", str(VOCAB))
