"""How the target decides: mlx-lm's processors and filters, noise by place, typical acceptance."""

from __future__ import annotations

import random
import shlex
from argparse import Namespace

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors
from tiny import (
    VOCAB,
    first_tokens,
    make_base,
    make_model,
    make_tokenizer,
    random_tree,
    tree_from_parents,
)

from ssmlx.api import stream_generate, summary, token_steps
from ssmlx.commands import chat, generate
from ssmlx.commands.options import generate_config
from ssmlx.decoding.accept import accept, accept_typical
from ssmlx.decoding.loop import plain_decode
from ssmlx.decoding.sampling import (
    Places,
    Sampling,
    count_tokens,
    gumbel_noise,
    last_tokens,
    places_of,
)
from ssmlx.errors import InputError
from ssmlx.model.backbone import Backbone
from ssmlx.model.streams import StreamFusedModel
from ssmlx.model.tree import PAD_TOKEN
from ssmlx.settings import AcceptanceConfig, GenerateConfig, SamplingConfig, TreeConfig

PROMPT = [3, 1, 4, 1, 5]
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
    return Places(mx.array([0]), mx.zeros(rows, mx.int32), 1, mx.array(recent, mx.int32))


# --- Penalties and bias ---


@pytest.mark.parametrize("settings", PENALTIES)
def test_penalties_are_mlx_lms(settings):
    """Row by row what mlx-lm's processors make of the same text."""
    rng, draw = np.random.default_rng(0), random.Random(0)
    sampling = Sampling(SamplingConfig(**settings), VOCAB)
    processors = make_logits_processors(**settings)
    texts = [[draw.randrange(VOCAB) for _ in range(length)] for length in (1, 2, 5, 30)]
    logits = mx.array(rng.normal(0, 3, (len(texts), VOCAB)), mx.float32)
    recent = mx.stack([last_tokens(text, sampling.context_size) for text in texts])
    found = sampling.process(logits, places(recent.tolist()))
    for row, text in enumerate(texts):
        expected = mx.array(logits[row : row + 1])
        for processor in processors:
            expected = processor(mx.array(text), expected)
        assert np.allclose(found[row], expected[0], atol=1e-5), text


@pytest.mark.parametrize("settings", PENALTIES)
def test_penalised_streaming_plain_and_mlx_lm_agree(settings):
    base = make_base()
    processors = make_logits_processors(**settings)
    answer = mlx_lm.stream_generate(
        base, make_tokenizer(), PROMPT, max_tokens=24, logits_processors=processors
    )
    expected = [response.token for response in answer]
    streams = make_model("llama", "streams")
    plain = StreamFusedModel(Backbone(make_base()))
    for model, more in (
        (plain, {}),
        (streams, {"tree": TreeConfig(kind="full", width=3)}),
        (plain, {"drafter": "prompt-lookup"}),
        (plain, {"drafter": "lookahead"}),
    ):
        config = GenerateConfig(**settings, **more)
        steps = token_steps(model, PROMPT, model.make_cache(), config)
        assert first_tokens(steps, 24)[0] == expected, more


def test_a_node_sees_the_text_and_its_own_path():
    rng = random.Random(3)
    tree = random_tree(rng, 12, 5)
    text, depths, paths = [8, 6, 7], tree.depths.tolist(), tree.paths.tolist()
    tokens = tree.tokens.tolist()
    for size in (0, 1, 2, 4, 9):
        found = places_of(tree, mx.array([3]), last_tokens(text, size))
        assert found.recent.shape == (12, size)
        for node, row in enumerate(found.recent.tolist()):
            whole = [PAD_TOKEN] * size + text
            whole += [tokens[n] for n in paths[node][: depths[node] + 1]]
            assert row == (whole[-size:] if size else [])


def test_counting_tokens():
    recent = mx.array([[PAD_TOKEN, 2, 2, 0], [1, 1, 1, PAD_TOKEN]])
    assert count_tokens(recent, 3).tolist() == [[1, 0, 2], [0, 3, 0]]


# --- Filters and noise ---


@pytest.mark.parametrize(
    "settings",
    [
        {"temp": 1.0},
        {"temp": 0.5, "top_k": 3},
        {"temp": 1.3, "top_p": 0.6},
        {"temp": 1.0, "min_p": 0.2},
    ],
)
def test_draws_follow_mlx_lms_distribution(settings):
    """The share of each token among draws at many places, against mlx-lm's own sampler."""
    logits = mx.array(np.random.default_rng(1).normal(0, 1.5, (1, VOCAB)), mx.float32)
    sampling = Sampling(SamplingConfig(**settings, seed=4), VOCAB)
    rows = 4000
    spread = Places(mx.array([0]), mx.arange(rows), rows, mx.zeros((rows, 0), mx.int32))
    ours = sampling.choose(mx.broadcast_to(logits, (rows, VOCAB)), spread)
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


def test_noise_belongs_to_seed_and_place():
    def noise(seed, first, count, size=VOCAB):
        return gumbel_noise(seed, mx.array([first]), count, size)

    whole = noise(7, 100, 6)
    assert np.array_equal(whole[2:4], noise(7, 102, 2))
    assert not np.allclose(whole[0], whole[1])
    assert not np.allclose(whole, noise(8, 100, 6))
    assert not np.allclose(whole[1:], noise(8, 100, 5))
    many = np.array(noise(0, 0, 500, 100))
    assert abs(many.mean() - 0.5772) < 0.02 and abs(many.std() - 1.2825) < 0.02
    assert abs(np.corrcoef(many[:-1].ravel(), many[1:].ravel())[0, 1]) < 0.02


def test_without_a_seed_mlx_decides():
    model = StreamFusedModel(Backbone(make_base()))

    def sampled(config):
        return first_tokens(token_steps(model, PROMPT, model.make_cache(), config), 20)[0]

    config = GenerateConfig(temp=1.0)
    mx.random.seed(1)
    first, second = sampled(config), sampled(config)
    mx.random.seed(1)
    assert first == sampled(config) != second
    # One text continued in two pieces is the text continued in one: noise belongs to places.
    seeded = GenerateConfig(temp=1.0, seed=2)
    whole = sampled(seeded)
    again = token_steps(model, PROMPT + whole[:8], model.make_cache(), seeded)
    assert first_tokens(again, 12)[0] == whole[8:]


def test_samplers_of_mlx_lm_still_work():
    model = StreamFusedModel(Backbone(make_base()))
    sampler = mlx_lm.sample_utils.make_sampler(temp=0.8, top_k=4)
    tokens, _ = first_tokens(plain_decode(model, PROMPT, model.make_cache(), sampler=sampler), 9)
    assert len(tokens) == 9


# --- Typical acceptance ---


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
    model = make_model("llama", "streams")
    lossy = AcceptanceConfig(kind="typical", epsilon=0.01, delta=0.05)
    calls = {}
    for acceptance in (AcceptanceConfig(), lossy):
        config = GenerateConfig(temp=1.0, seed=1, max_tokens=40, acceptance=acceptance)
        *_, last = stream_generate(model, make_tokenizer(), PROMPT, config)
        calls[acceptance.kind] = last.target_calls
        assert summary(last).startswith("LOSSY") == last.lossy == (acceptance is lossy)
    assert calls["typical"] < calls["exact"]
    with pytest.raises(InputError, match="greedy decoding has no use for"):
        GenerateConfig(acceptance=lossy)


# --- Settings and options ---


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temp": -1.0}, "--temp -1.0"),
        ({"top_p": 1.5}, "--top-p 1.5"),
        ({"min_p": float("nan")}, "--min-p nan"),
        ({"top_k": -1}, "--top-k -1"),
        ({"seed": -1}, "--seed -1"),
        ({"repetition_penalty": 0.0}, "--penalty repetition=0.0"),
        ({"repetition_context_size": 0}, "--penalty context=0"),
        ({"frequency_penalty": float("inf")}, "--penalty frequency=inf"),
        ({"logit_bias": {-1: 1.0}}, "--logit-bias -1=1.0"),
    ],
)
def test_settings_out_of_range(settings, said):
    with pytest.raises(InputError, match=said):
        SamplingConfig(**settings)


def test_a_bias_of_an_unknown_token():
    with pytest.raises(InputError, match="--logit-bias of token 13; expected ids below"):
        Sampling(SamplingConfig(logit_bias={13: 1.0}), VOCAB)


IDLE = (
    ("--seed 1", "--temp above 0"),
    ("--top-k 5", "--temp above 0"),
    ("--top-p 0.5 --temp 0", "--temp above 0"),
    ("--penalty context=9", "repetition=X, presence=X or frequency=X in it"),
    ("--drafter 'streams epsilon=0.1' --temp 1", "acceptance=typical beside it"),
    ("--drafter lookahead --tree full", "--drafter streams or medusa"),
    ("--drafter 'draft-model model=x' --tree-size 4", "--drafter streams or medusa"),
    ("--drafter lookahead --num-streams 1", "--drafter streams"),
    (
        "--drafter lookahead --prune budget",
        "--drafter streams or prompt-lookup or draft-model or medusa or mlp-speculator",
    ),
    ("--decoding plain --drafter lookahead", "streaming decoding"),
)


@pytest.mark.parametrize(("options", "needs"), IDLE)
@pytest.mark.parametrize("command", [generate, chat])
def test_an_option_that_could_change_nothing_is_refused(command, options, needs):
    ask = ["--prompt", "w1"] if command is generate else []
    args = command.parse_args([*ask, *shlex.split(options)])
    with pytest.raises(InputError, match="would do nothing here") as caught:
        generate_config(args)
    assert caught.value.expected == needs


MANY_OPTIONS = """
    --drafter "prompt-lookup tokens=5 ngram=4 size=9 acceptance=typical delta=0.2"
    --temp 0.7 --top-k 10 --top-p 0.9 --min-p 0.05 --seed 3 --logit-bias 5=-2 --logit-bias 6=1.5
    --penalty "repetition=1.1 context=30" --penalty presence=0.5
"""


def test_options_become_settings():
    config = generate_config(chat.parse_args(shlex.split(MANY_OPTIONS)))
    assert (config.drafter, config.acceptance.kind, config.acceptance.delta) == (
        "prompt-lookup", "typical", 0.2,
    )  # fmt: skip
    lookup = config.prompt_lookup
    assert (lookup.num_draft_tokens, lookup.ngram, lookup.size) == (5, 4, 9)
    assert config.logit_bias == {5: -2.0, 6: 1.5}
    assert (config.temp, config.top_k, config.top_p, config.min_p) == (0.7, 10, 0.9, 0.05)
    assert (config.seed, config.repetition_penalty, config.context_size) == (3, 1.1, 30)
    assert (config.presence_penalty, config.presence_context_size) == (0.5, 20)
    lookahead = generate_config(chat.parse_args(["--drafter", "lookahead ngram=3"]))
    assert (lookahead.lookahead.ngram, lookahead.lookahead.window) == (3, 5)


def test_a_command_need_not_have_every_option():
    args = Namespace(
        decoding="streaming", max_tokens=9, temp=0.0, seed=None, num_streams=None, tree=None,
        tree_width=None, tree_size=4, prune=None, prune_to=None,
    )  # fmt: skip
    assert generate_config(args).tree.size == 4
