"""mlx-lm's families of models: each decodes as mlx-lm itself does, drafting or not."""

import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import tiny
from loops import plain_tokens
from refusals import as_shown, mentions, refusal
from tiny import mlx_lm_tokens, slow, token_steps
from tiny_families import CHAINS, FAMILIES, WINDOW, make_base

from ssmlx.decoding.batch import Batch, Row
from ssmlx.decoding.loop import prefill
from ssmlx.decoding.sampling import GREEDY
from ssmlx.drafters.draft_model import DraftModel
from ssmlx.loading.known_heads import OWN_HEAD_FAMILIES
from ssmlx.model.backbone import Backbone
from ssmlx.model.family import make_caches
from ssmlx.model.streams import StreamFusedModel
from ssmlx.model.tree import root_tree
from ssmlx.settings import GenerateConfig, TreeConfig
from ssmlx.training.data import Example, collate
from ssmlx.training.mlx_model import Layout, TrainedModel

WINDOWED = {
    *re.findall(
        r"\w+", "gemma3_text gemma3 gpt_oss ministral3 mistral3 cohere2 olmo3 exaone4 spark2_5"
    )
}
WHOLE = {  # why they are run by their own call
    **dict.fromkeys(CHAINS, "ArraysCache, which follows"),
    "gemma4": "cannot be run one by one: ",
}
BOTH = (True, False)
HEADS = {
    **dict.fromkeys(("llama", "qwen3", "gemma3_text", "internlm2"), BOTH),
    **dict.fromkeys(("minicpm", "kimi_vl", "kimi_k25"), (False,)),
}
CASES = [(name, tied) for name in FAMILIES for tied in HEADS.get(name, (True,))]
FIRST = [("gemma3_text", True)]
ALIKE = {"internlm2", "bailing_moe", "spark2_5", "kimi_k25"}
"""Families whose parts are those of others, under other names: they are in the tier `long`."""
SOME = [
    *FIRST,
    *slow(*(case for case in CASES if case not in FIRST and case[0] not in ALIKE)),
    *slow(*(case for case in CASES if case[0] in ALIKE), mark=pytest.mark.long),
]
PROMPT = [(7 * i * i + 3 * i) % 60 + 1 for i in range(2 * WINDOW + 5)]
LENGTH = 4 * WINDOW
DRAFTS = [
    {"tree": TreeConfig(kind="full", width=3)},
    {"tree": TreeConfig(size=12)},
    {"tree": TreeConfig(kind="full", width=2), "stream_schedule": "fused"},
    {"decoding": "speculative", "drafter": "prompt-lookup"},
]
SAMPLED = {"temp": 1.0, "top_p": 0.9, "seed": 3}


def decoded(model, prompt=PROMPT, cache=None, context=(), **settings):
    """Tokens of an answer, and how many each call brought."""
    config = GenerateConfig(prefill_step_size=5)
    cache = cache or model.make_cache()
    steps = token_steps(model, prompt, cache, config, context=context, **settings)
    return tiny.first_tokens(steps, LENGTH)


@pytest.mark.parametrize("bits", [None, *slow(4)])
@pytest.mark.parametrize("name, tied", SOME)
def test_decoding_is_mlx_lms(name, tied, bits):
    """Prompt and answer are longer than the windows."""
    base = make_base(name, tied, bits)
    expected = mlx_lm_tokens(base, PROMPT, LENGTH)
    model = tiny.make_model(base=Backbone(base).model, scope="streams")
    assert mlx_lm_tokens(base, PROMPT, 2) == expected[:2]
    assert set(model.backbone.windows) == ({WINDOW, None} if name in WINDOWED else {None})
    assert decoded(model, decoding="plain")[0] == expected
    sampled, _ = decoded(model, decoding="plain", **SAMPLED)
    assert len(set(expected)) > 1 and sampled != expected
    calls = []
    for draft in DRAFTS:
        tokens, lengths = decoded(model, **draft)
        assert tokens == expected
        calls.append(lengths)
    assert decoded(model, **DRAFTS[1], **SAMPLED)[0] == sampled
    assert min(map(len, calls)) < LENGTH
    draft = DraftModel(make_base(name, tied, bits))
    _, lengths = decoded(model, drafter=draft, decoding="speculative")
    assert {*lengths[1:]} == {4}  # the model itself guesses all
    second_pass = {**DRAFTS[2], "stream_schedule": "second-pass"}
    assert decoded(model, **second_pass)[1] == calls[2]


@pytest.mark.parametrize("name, tied", SOME)
def test_a_cache_goes_on_where_texts_part(name, tied):
    base = make_base(name, tied)
    other = [*PROMPT, 9, 8, *PROMPT[:WINDOW]]
    expected = mlx_lm_tokens(base, other, LENGTH)
    model = tiny.make_model(base=base, scope="streams")
    for draft in ({"decoding": "plain"}, DRAFTS[1], DRAFTS[3]):
        cache = model.make_cache()
        decoded(model, cache=cache, **draft)
        fork = cache.fork(len(PROMPT) - 2)
        cache.keep_first(len(PROMPT) - 2)
        known = other[: cache.offset]
        rest = other[cache.offset :]
        for one in (fork, cache):
            assert decoded(model, rest, one, known, **draft)[0] == expected


@pytest.mark.parametrize("name, tied", SOME)
def test_taps_are_what_mlx_lms_layers_are_given(name, tied):
    """In two pieces, the second of which begins in the text."""
    backbone = Backbone(make_base(name, tied))
    base = make_base(name, tied)
    given = []

    def noting(layer):
        kind = type(layer)

        def call(self, x, *others, **named):
            given.append(x)
            return kind.__call__(self, x, *others, **named)

        layer.__class__ = type(kind.__name__, (kind,), {"__call__": call})

    for layer in base.layers:
        noting(layer)
    cache = StreamFusedModel(backbone).make_cache()
    caches = make_caches(base)
    first = mx.array(PROMPT[: WINDOW + 3])
    second = mx.array(PROMPT[WINDOW + 3 :])
    for piece, taps in ((first, [3, 0, 2]), (second, [1]), (second, [])):
        expected = base(piece[None], cache=caches)[0]
        output = backbone.append(piece, cache, taps)
        assert [*output.taps] == taps
        for layer, found in output.taps.items():
            tiny.assert_close(found, given[layer], 1e-4)
        tiny.assert_close(output.logits, expected, 1e-4)
        given.clear()
    assert backbone.append(first, cache).last_hidden.shape == (1, first.size, 32)
    with pytest.raises(ValueError):
        backbone.append(first, cache, [5])
    output = backbone.append(first, cache, [4])  # the final norm's
    assert mx.array_equal(output.taps[4], output.last_hidden)


@pytest.mark.parametrize("bits", [None, *slow(4)])
@pytest.mark.parametrize("name", ["qwen3_next", "gemma4", *slow("qwen3_5", "qwen3_5_moe", "lfm2")])
def test_what_has_states_drafts_chains(name, bits):
    base = make_base(name, bits=bits)
    expected = mlx_lm_tokens(base, PROMPT, LENGTH)
    model = StreamFusedModel(Backbone(base))
    cache = model.make_cache()
    assert decoded(model, cache=cache)[0] == expected and len(set(expected)) > 1
    sampled, _ = decoded(model, decoding="plain", **SAMPLED)
    assert sampled != expected
    draft = DraftModel(make_base(name, bits=bits))
    for settings, tokens in (({}, expected), (SAMPLED, sampled)):
        assert decoded(model, **DRAFTS[3], **settings)[0] == tokens
        found, lengths = decoded(model, drafter=draft, decoding="speculative", **settings)
        assert found == tokens and (bits or {*lengths[1:]} == {4})
    text = [*PROMPT, *expected]
    held = cache.offset
    assert cache.longest_keepable(held) == held >= len(text) - 1 and cache.nbytes > 0
    more = mlx_lm_tokens(base, [*text, 9, 8], LENGTH)
    assert decoded(model, [*text, 9, 8][held:], cache, text[:held])[0] == more
    cache.keep_first(cache.longest_keepable(5))
    assert decoded(model, cache=cache)[0] == expected
    refusal(model.backbone.append, mx.array(PROMPT), model.make_cache(), [0])
    for asked in ({"drafter": "lookahead"}, {"decoding": "speculative"}):
        line = refusal(decoded, model, **asked)
        assert (
            mentions(line, "prompt-lookup") and as_shown(model.backbone.capabilities.trees) in line
        )


@pytest.mark.parametrize("name, tied", [*SOME, *((name, True) for name in CHAINS)])
def test_rows_stand_at_places_of_their_own(name, tied):
    """Texts of other lengths, a single token among them, that join one after the other."""
    model = StreamFusedModel(Backbone(make_base(name, tied)))
    batch = Batch(model)
    rows = []
    for prompt in ([3], PROMPT.copy(), PROMPT[:3]):
        cache = model.make_cache()
        prefill(model, prompt[:-1], cache)
        rows.append(Row(model, GREEDY, cache, prompt))
        batch.add(rows[-1])
        for _ in range(WINDOW):
            batch.step()
    for row in rows:
        prompt = row.text[: -len(row.unread)]
        count = len(row.unread)
        expected = plain_tokens(model, prompt, count)
        assert [step.tokens[0] for step in row.unread] == expected and count >= WINDOW


@pytest.mark.parametrize("name, tied", SOME)
def test_training_sees_what_decoding_sees(name, tied):
    """Streams of a carrier far behind the first window, and a gradient."""
    model = tiny.make_model(base=make_base(name, tied), scope="streams")
    backbone = Backbone(make_base(name, tied))
    own = tiny.make_adapter(backbone, "streams", seed=1, **tiny.RESIDUAL)
    trained = TrainedModel(backbone, own)
    count = len(PROMPT)
    streams = own.config.num_streams
    batch = collate([Example(np.array([*PROMPT, 0]), count)], np.zeros(1, int))
    layout = Layout.of(batch, streams)
    nodes, rows = trained.upper_before_norm(trained.lower(layout), layout)
    cache = model.make_cache()
    root = root_tree(mx.array(PROMPT[-1:]))
    prefill(model, PROMPT[:-1], cache)
    cache.reserve(more_tokens=1, step_rows=1 + streams)
    inserted = model.insert(model.lower(root, cache), streams)
    found = model.upper(inserted, root, cache, streams, starts=mx.zeros(1, mx.int32))
    expected = mx.concatenate([nodes[:, count - 1 : count], rows], axis=1)
    tiny.assert_close(found, expected, 1e-4)
    head = trained.head(uses_draft_head=True)
    norm = trained.backbone.final_norm
    drafted = model.backbone.logits(found, model.draft_head)
    tiny.assert_close(drafted, head(norm(expected[0])), 1e-4)

    def loss(weights):
        trained.bind(weights)
        _, rows = trained.upper_before_norm(trained.lower(layout), layout)
        return head(norm(rows[0])).square().mean()

    gradients = mx.grad(loss)(trained.weights)["stream_embeddings"]
    assert mx.isfinite(gradients).all() and mx.abs(gradients).max() > 0


def table_rows():
    """The cells of the page's table of families, by class and by column."""
    page = (Path(__file__).parents[1] / "ssmlx/model/README.md").read_text()
    columns = re.search(r"^\| class \|.*$", page, re.MULTILINE).group().strip("| ").split(" | ")
    lines = re.findall(r"^\| `\w+` \|.*\|$", page, re.MULTILINE)
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    return {row[0].strip("`"): dict(zip(columns, row, strict=True)) for row in rows}


def test_the_table_has_the_families_that_are_tested():
    rows = table_rows()
    assert rows.keys() == {*FAMILIES, *CHAINS}
    assert {name for name, row in rows.items() if row["windows"] == "past it"} == WINDOWED
    assert {name for name, row in rows.items() if row["MTP"] == "yes"} == {*OWN_HEAD_FAMILIES}
    assert {name for name, row in rows.items() if row["MTP"] == "an assistant"} == {"gemma4"}


@pytest.mark.parametrize(
    "name", ["llama", *CHAINS, *slow(*(one for one in FAMILIES if one != "llama"))]
)
def test_the_table_says_what_a_family_verifies(name):
    """That it does is seen above, in decoding."""
    row = table_rows()[name]
    tied = HEADS.get(name, (True,))[0]
    capabilities = Backbone(make_base(name, tied)).capabilities
    assert (row["trees"], row["chains"]) == ("yes" if name in FAMILIES else "no", "yes")
    assert capabilities.has("trees") == (name in FAMILIES) and capabilities.has("chains")
