"""Drafts by the heads for multi-token prediction that Qwen3-Next and Qwen3.5 ship with."""

import json
import logging
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache, partial
from importlib import import_module
from itertools import cycle, islice, product, zip_longest

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from loops import speculative_steps
from mlx.utils import tree_flatten
from real import tokens_of
from refusals import exit_code, found_in, mentions, refusal
from tiny import assert_close, first_tokens, make_base, mlx_lm_tokens, slow
from tiny_classes import PROMPT, SIZES
from tiny_mtp import (
    MODELS,
    base_of,
    config_of,
    head_tensors,
    model_of,
    published,
    write_head,
    write_target,
)

import ssmlx
from ssmlx.decoding.draft_shape import DraftShape
from ssmlx.decoding.loop import prefill
from ssmlx.decoding.sampling import RankedTokens, Sampling
from ssmlx.decoding.step import DraftTotals
from ssmlx.drafters.mtp import MtpDrafter, MtpHead, PairCache, load_mtp
from ssmlx.drafters.mtp_head import MtpModule
from ssmlx.generation.plan import decode_plan, make_plan
from ssmlx.loading.load import load_base
from ssmlx.mlx_thread import run_on_mlx_thread
from ssmlx.model.backbone import Backbone
from ssmlx.model.streams import StreamFusedModel
from ssmlx.policy.acceptance import AcceptancePrior
from ssmlx.policy.controller import Controller
from ssmlx.policy.costs import CostTable
from ssmlx.policy.offers import LevelsOffer
from ssmlx.prompt_cache import PromptCache
from ssmlx.prompts import chat_tokens
from ssmlx.settings import GenerateConfig, MtpConfig

VOCAB = SIZES["vocab_size"]
WIDTH = SIZES["hidden_size"]
SAMPLED = {"temp": 1.0, "top_p": 0.9, "seed": 3}
NAMES = ["qwen3_5_moe", *slow(*(name for name in MODELS if name != "qwen3_5_moe"))]
TOKENS = 3


def new_head(name):
    """A head that has seen no text."""
    model = model_of(name)
    module = MtpModule(model.backbone.args, type(model.backbone.layers[0]))
    module.load_weights(list(head_tensors(name).items()))
    return MtpHead(module, model.backbone)


head_of = lru_cache(maxsize=4)(new_head)


@lru_cache(maxsize=4)
def copying_parts(name):
    """A model whose next token depends on the last alone, and a module that is always right.

    Its layers add nothing. With all norms' weights larger by one, the head is always wrong: the
    final norm's are -0.5, so that the logits change their sign.
    """

    def silence(tensors):
        ends = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
        return {n: mx.zeros_like(one) if n.endswith(ends) else one for n, one in tensors.items()}

    base = deepcopy(base_of(name))
    base.load_weights(list(silence(dict(tree_flatten(base.parameters()))).items()))
    getattr(base, "language_model", base).model.norm.weight = mx.full(WIDTH, -0.5)
    model = StreamFusedModel(Backbone(base))
    tensors = silence(head_tensors(name))
    tensors["fc.weight"] = mx.concatenate([mx.eye(WIDTH), mx.zeros((WIDTH, WIDTH))], axis=1)
    tensors["pre_fc_norm_embedding.weight"] = mx.ones(WIDTH)
    tensors["norm.weight"] = mx.full(WIDTH, -0.5)
    module = MtpModule(model.backbone.args, type(model.backbone.layers[0]))
    module.load_weights(list(tensors.items()))
    return model, module


def copying_model(name):
    model, module = copying_parts(name)
    return model, MtpHead(module, model.backbone)


class Reader:
    """Takes the pairs that are kept of a text from a head, to look at them."""

    def pairs_of(self, head, text):
        return head.claim_idle_or_new_cache(text, self)


def decoded(model, count=40, prompt=PROMPT, cache=None, context=(), **settings):
    """Tokens of an answer, and how many each call brought."""
    plan = make_plan(model, **settings)
    cache = cache or model.make_cache()
    return first_tokens(decode_plan(plan, model, prompt, cache, context=context), count)


# --- The same tokens as plain decoding ---


@pytest.mark.parametrize(("name", "count", "settings"), [
    (NAMES[0], 40, {}), (NAMES[0], 40, SAMPLED),
    *slow(*product([name for name in MODELS if name != NAMES[0]], [40], [{}, SAMPLED])),
    *slow((NAMES[0], 300, {}), ("qwen3_next", 300, SAMPLED)),
], ids=str)  # fmt: skip
def test_tokens_are_plain_decodings(name, count, settings):
    model = model_of(name)
    expected, _ = decoded(model, count, decoding="plain", **settings)
    if not settings:
        assert expected == mlx_lm_tokens(base_of(name), PROMPT, count)
    for decoding in ("speculative", None):
        found, _ = decoded(model, count, drafter=head_of(name), decoding=decoding, **settings)
        assert found == expected


@pytest.mark.parametrize("name", NAMES)
def test_penalties_of_a_draft_see_the_tokens_drafted_before(name):
    """The head guesses as the model would without penalties, and so with them, at every level."""
    model, head = copying_model(name)
    always = {"decoding": "speculative", "drafter": ["mtp", head]}
    settings = {"repetition_penalty": 5.0, "frequency_penalty": 1.0}
    expected, _ = decoded(model, 24, decoding="plain", **settings)
    found, calls = decoded(model, 24, **always, **settings)
    assert found == expected and len(set(expected[:4])) == 4
    assert set(calls[1:-1]) == {1 + TOKENS}


class Scripted(Sampling):
    """Ranks tokens so that of each chain as many are right as a script says, over and over."""

    def __init__(self, text, script):
        super().__init__(GenerateConfig(), VOCAB)
        self.text = text
        self.script = cycle(script)
        self.logits = []
        self.places = []

    def rank_tokens(self, logits, positions, count):
        first = positions.first.item()
        if not self.places or first != self.places[-1] + 1 or self.left == 0:
            self.right = next(self.script)
            self.left = TOKENS
        self.left -= 1
        level = TOKENS - 1 - self.left
        self.logits.append(logits[0])
        self.places.append(first)
        token = self.text[first + 1]
        ranked = mx.array([[token if level < self.right else (token + 1) % VOCAB]])
        return RankedTokens(ranked, mx.array(False))


def true_hidden_states(name, tokens):
    """[1, T, D] what enters the final norm of mlx-lm's model, of a whole text."""
    base = base_of(name)
    inner = getattr(base, "language_model", base).model
    norm = inner.norm
    try:
        inner.norm = nn.Identity()
        return inner(mx.array([tokens]))
    finally:
        inner.norm = norm


def reference_steps(name, text, root, drafted, hidden, weights):
    """Hidden states and logits of each draft step, by vLLM's equations on transformers' layer.

    Without a cache: every step runs all pairs of the text, and those of drafted tokens behind.
    """
    torch = pytest.importorskip("torch")
    layer, norm_class, rotary, eps = torch_layer(name, weights)

    def to_torch(array):
        return torch.tensor(np.array(array))

    def norm(path):
        made = norm_class(WIDTH, eps=eps)
        made.weight.data = to_torch(weights[path]) - 1
        return made

    def target_norm(rows):
        made = norm_class(WIDTH, eps=eps)
        made.weight.data = to_torch(model_of(name).backbone.final_norm.weight) - 1
        return made(rows)

    base = base_of(name)
    outer = getattr(base, "language_model", base)
    embedding = to_torch(outer.model.embed_tokens.weight)
    head = to_torch(outer.lm_head.weight)
    states = to_torch(true_hidden_states(name, text[:root])[0])
    rows = target_norm(states) if hidden == "after" else states
    tokens = list(text[1 : root + 1])
    found = []
    with torch.no_grad():
        for level in range(TOKENS):
            embedded = norm("pre_fc_norm_embedding.weight")(embedding[tokens])
            both = torch.cat([embedded, norm("pre_fc_norm_hidden.weight")(rows)], dim=-1)
            x = (both @ to_torch(weights["fc.weight"]).T)[None]
            size = x.shape[1]
            mask = torch.full((size, size), float("-inf")).triu(1)[None, None]
            places = torch.arange(size)[None]
            out = layer(x, position_embeddings=rotary(x, places), attention_mask=mask)
            last = out[0, -1:]
            normed = norm("norm.weight")(last)
            found.append((last[0].numpy(), (normed @ head.T)[0].numpy()))
            rows = torch.cat([rows, normed if hidden == "after" else last])
            tokens.append(drafted[level])
    return found


def torch_layer(name, weights):
    """transformers' decoder layer with full attention, its norm, its rotary embedding, epsilon."""
    torch = pytest.importorskip("torch")
    kind, _ = MODELS[name]
    config = config_of(name)
    family = {
        "qwen3_next": ("Qwen3NextConfig", "Qwen3Next", "Qwen3NextRotaryEmbedding"),
        "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5", "Qwen3_5TextRotaryEmbedding"),
        "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5Moe", "Qwen3_5MoeTextRotaryEmbedding"),
    }[kind]
    where = f"transformers.models.{kind}."
    settings = import_module(where + f"configuration_{kind}")
    modeling = import_module(where + f"modeling_{kind}")
    args = model_of(name).backbone.args
    rope = {"rope_type": "default", "rope_theta": args.rope_theta}
    rope["partial_rotary_factor"] = args.partial_rotary_factor
    if kind != "qwen3_next":
        rope["mrope_section"] = [1, 1, 0]
    made = getattr(settings, family[0])(
        **{n: config[n] for n in config if n not in ("model_type", "rope_scaling", "rope_theta")},
        rope_parameters=rope,
        layer_types=["full_attention"] * SIZES["num_hidden_layers"],
    )
    made._attn_implementation = "eager"
    layer = getattr(modeling, family[1] + "DecoderLayer")(made, 1).eval()
    state = {}
    for path, tensor in published(weights, fused=True, prefix="").items():
        if path.startswith("layers.0."):
            state[path.removeprefix("layers.0.")] = torch.tensor(np.array(tensor))
    layer.load_state_dict(state)
    rotary = getattr(modeling, family[2])(made)
    return layer, getattr(modeling, family[1] + "RMSNorm"), rotary, config["rms_norm_eps"]


@pytest.mark.parametrize("hidden", ["after", *slow("before")])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("step_size", [4, *slow(64)])
def test_each_draft_step_is_that_of_another_implementation(name, hidden, step_size, monkeypatch):
    """Over rounds with rejections: the head's hidden states, and its logits."""
    pytest.importorskip("torch")
    model = model_of(name)
    expected, _ = decoded(model, 60, decoding="plain")
    text = [*PROMPT, *expected]
    sampling = Scripted(text, [0, 3, 1, 2, 0, 0, 3, 3, 2])
    drafter = MtpDrafter(model.backbone, head_of(name), MtpConfig(hidden=hidden), sampling)
    outs = []
    real = MtpModule.run_pairs

    def noted(self, *given):
        outs.append(real(self, *given))
        return outs[-1]

    monkeypatch.setattr(MtpModule, "run_pairs", noted)
    proposed = []
    propose = drafter.propose

    def proposing(verified, shape):
        outs.clear()
        tree = propose(verified, shape)
        states = [out[0, -1] for out in outs[-TOKENS:]]
        logits = sampling.logits[-TOKENS:]
        proposed.append((verified.root_position.item(), tree.tokens.tolist(), states, logits))
        return tree

    monkeypatch.setattr(drafter, "propose", proposing)
    steps = speculative_steps(model, PROMPT, [drafter], prefill_step_size=step_size)
    tokens, lengths = first_tokens(steps, 40)
    assert tokens == expected[:40] and {1, 2, 3, 4} == set(lengths)
    weights = head_tensors(name)
    for root, drafted, states, logits in proposed[:12]:
        wanted = reference_steps(name, text, root, drafted[1:], hidden, weights)
        for found, (state, row) in zip(zip(states, logits, strict=True), wanted, strict=True):
            assert_close(found[0], state, 1e-4)
            assert_close(found[1], row, 1e-4)
    assert drafter.draft_model_calls >= TOKENS * len(proposed)


# --- Files ---


@pytest.mark.parametrize("fused", [False, *slow(True)])
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("prefix", ["mtp.", *slow("", "language_model.mtp.")])
def test_heads_are_read_from_files_of_all_kinds(tmp_path, prefix, raw, fused):
    """Norms less one or not, experts joined or not; the head that was written is the one read."""
    name = "qwen3_5_moe"
    tensors = head_tensors(name)
    stored = published(tensors, raw=raw, fused=fused, prefix=prefix)
    copies = {"embed_tokens.weight": mx.zeros((2, 2))} if not prefix else {}
    folder = write_head(name, tmp_path / "head", {**stored, **copies})
    head = load_mtp(model_of(name), folder)
    found = dict(tree_flatten(head.module_for("auto").parameters()))
    assert {path: one.shape for path, one in found.items()} == {
        path: one.shape for path, one in tensors.items()
    }
    for path, one in found.items():
        assert_close(one, tensors[path], 1e-6)
    assert head.module_for("auto") is head.module_for("auto")
    assert head.nbytes == 4 * head.num_parameters and head.cache_bytes == 0
    wrong = head.module_for("shifted" if raw else "raw")
    assert not mx.allclose(wrong.norm.weight, tensors["norm.weight"])
    assert wrong.fc.weight is head.module_for("auto").fc.weight


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_that_still_holds_its_head_drafts_with_it(tmp_path, name):
    """Converted ones of Qwen3-Next too, whose names mlx-lm does not know."""
    folder = write_target(name, tmp_path / "model", published(head_tensors(name), raw=False))
    model = StreamFusedModel(load_base(folder, "float32")[0])
    head = load_mtp(model)
    expected, _ = decoded(model_of(name), decoding="plain")
    assert decoded(model, decoding="plain")[0] == expected
    assert decoded(model, drafter=head, decoding="speculative")[0] == expected
    for path, one in tree_flatten(head.module_for("auto").parameters()):
        assert_close(one, head_tensors(name)[path], 1e-6)


@pytest.mark.slow
def test_a_quantised_target_gets_a_quantised_head(tmp_path):
    name = "qwen3_5_moe"
    base = deepcopy(base_of(name))

    def packing(path, layer):
        if not hasattr(layer, "to_quantized") or layer.weight.shape[-1] % 32:
            return False
        return {"group_size": 32, "bits": 8 if path.endswith("mlp.gate") else 4}

    nn.quantize(base, class_predicate=packing)
    model = StreamFusedModel(Backbone(base))
    folder = write_head(name, tmp_path / "head", published(head_tensors(name)))
    head = load_mtp(model, folder)
    module = head.module_for("auto")
    assert module.fc.bits == module.layers[0].self_attn.q_proj.bits == 4
    assert module.layers[0].mlp.gate.bits == 8
    assert module.layers[0].mlp.switch_mlp.up_proj.bits == 4
    assert not hasattr(module.layers[0].mlp.switch_mlp.down_proj, "bits")  # of 16 columns
    for settings in ({}, SAMPLED):
        expected, _ = decoded(model, decoding="plain", **settings)
        tokens, _ = decoded(model, drafter=head, decoding="speculative", **settings)
        assert tokens == expected
    # The same stored in four bits, for a target that is not quantised.
    stored = write_head(name, tmp_path / "packed", dict(tree_flatten(module.parameters())))
    again = load_mtp(model_of(name), stored)
    packed = again.module_for("auto")
    assert packed.fc.bits == 4 and packed.layers[0].mlp.gate.bits == 8
    assert mx.array_equal(packed.fc.weight, module.fc.weight)
    expected, _ = decoded(model_of(name), decoding="plain")
    assert decoded(model_of(name), drafter=again, decoding="speculative")[0] == expected


@pytest.mark.slow
def test_a_head_that_nothing_is_accepted_of_is_logged(caplog):
    """Once an answer; a head whose drafts are accepted is not."""
    name = "qwen3_5_moe"
    model = model_of(name)
    expected, _ = decoded(model, 120, decoding="plain")
    with caplog.at_level(logging.WARNING, "ssmlx"):
        for script, times in (([0], 1), ([0, 0, 0, 1], 0)):
            caplog.clear()
            sampling = Scripted([*PROMPT, *expected], script)
            drafter = MtpDrafter(model.backbone, head_of(name), MtpConfig(), sampling)
            steps = speculative_steps(model, PROMPT, [drafter])
            assert first_tokens(steps, 80)[0] == expected[:80]
            assert len(caplog.records) == times
            assert all(mentions(line, "hidden=before", "norms") for line in caplog.messages)


@pytest.mark.slow
def test_the_wrong_norms_are_logged(caplog, tmp_path):
    """A head whose drafts are all accepted, until its norms are taken for the other kind."""
    name = "qwen3_5_moe"
    model, head = copying_model(name)
    expected, _ = decoded(model, 90, decoding="plain")
    with caplog.at_level(logging.WARNING, "ssmlx"):
        tokens, lengths = decoded(model, 90, drafter=head, decoding="speculative")
        assert tokens == expected and max(lengths) == 1 + TOKENS and not caplog.records
        wrong = MtpConfig(norms="raw")
        tokens, lengths = decoded(
            model, 90, drafter=head, decoding="speculative", drafter_settings=wrong
        )
    assert tokens == expected and max(lengths) == 1
    (line,) = caplog.messages
    assert mentions(line, "66", "norms=raw|shifted") and "\n" not in line


def test_a_controller_drafts_by_the_head_and_the_text():
    model = model_of("qwen3_5_moe")
    head = head_of("qwen3_5_moe")
    for given in ({"drafter": ["mtp", head]}, {"drafter": head}):
        plan = make_plan(model, **given)
        assert [one.largest.drafter for one in plan.drafters] == ["mtp", "prompt-lookup"]
        assert not plan.needs_context_tokens
    offer = plan.drafters[0].offer()
    assert [shape.nodes for shape in offer.shapes] == [2, 3, 4]


@pytest.mark.parametrize(("cost", "drafts"), [(0.05, True), *slow((1.2, False))])
def test_a_controller_drafts_where_it_pays(cost, drafts):
    """By a head that is always right and one that is always wrong, at two costs of a row."""
    model, right = copying_model("qwen3_5_moe")
    expected, _ = decoded(model, 120, decoding="plain")
    for settings, is_right in ((MtpConfig(), True), (MtpConfig(norms="raw"), False)):
        plan = make_plan(model, drafter=right, drafter_settings=settings, context=len(PROMPT))
        table = CostTable()
        for nodes in (2, 3, 4):
            for _ in range(8):
                table.learn(("mtp", nodes), 0, 1 + cost * (nodes - 1))
        source = plan.drafters[0]
        controller = Controller(table, AcceptancePrior(), [source], reads_seconds=False)
        totals = DraftTotals()
        plan = replace(plan, drafters=[source], controller=controller)
        steps = decode_plan(plan, model, PROMPT, model.make_cache())
        tokens, lengths = first_tokens(steps, 120, totals)
        assert tokens == expected
        lost = sum(cost * (one.nodes - one.calls) for one in totals.drafts.values())
        if drafts and is_right:
            assert len(lengths) < 45
        else:
            assert lost < 4 and len(lengths) > 110


def test_each_level_has_an_acceptance_ratio():
    offer = LevelsOffer(DraftShape("mtp", 4, 3))
    ratios = {"mtp level 1": 0.9, "mtp level 2": 0.5, "mtp level 3": 0.1}

    def ratio_of(name, first):
        return ratios[name]

    expected = [offer.expected_accepted(shape, ratio_of) for shape in offer.shapes]
    assert expected == pytest.approx([0.9, 0.9 + 0.45, 0.9 + 0.45 + 0.045])
    counts = list(offer.acceptance_counts(offer.shapes[-1], 1))
    assert [(one.name, one.accepted, one.offered) for one in counts] == [
        ("mtp level 1", 1.0, 1.0),
        ("mtp level 2", 0.0, 1.0),
    ]
    assert len(list(offer.acceptance_counts(offer.shapes[-1], 3))) == 3
    assert offer.after_tokens(2, ratio_of) == (1.0, offer)


# --- Texts that go on, and several at once ---


@pytest.mark.parametrize("kept", [*slow(4), 20])
def test_a_text_goes_on_warm_as_it_would_cold(kept):
    """On a cached beginning: of the same text, whose pairs are there, and of another, without."""
    name = "qwen3_5_moe"
    model, head = copying_model(name)
    expected, _ = decoded(model, 40, decoding="plain")
    text = [*PROMPT, *expected]
    for first_prompt in (PROMPT, [5, 5, 5]):
        decoded(model, 10, first_prompt, drafter=head, decoding="speculative")
        of_one_text = head.cache_bytes
        head.drop_idle()
        decoded(model, 10, first_prompt, drafter=head, decoding="speculative")
        for _ in range(2):
            cache = model.make_cache()
            prefill(model, text[:kept], cache)
            context = {"cache": cache, "context": text[:kept]}
            rest = text[kept : len(PROMPT)]
            tokens, lengths = decoded(
                model, 30, rest, drafter=head, decoding="speculative", **context
            )
            assert tokens == expected[:30] and {*lengths[1:]} == {1 + TOKENS}
    assert 0 < head.cache_bytes <= 3 * of_one_text
    head.drop_idle()
    assert head.cache_bytes == 0


@pytest.mark.slow
def test_pairs_stay_as_far_as_the_text_is_the_same():
    """A next answer's hidden states and rows are those of one that began anew."""
    name = "qwen3_5_moe"
    model = model_of(name)
    head, cold = new_head(name), new_head(name)
    expected, _ = decoded(model, 30, decoding="plain")
    text = [*PROMPT, *expected]
    asked = {"drafter": head, "decoding": "speculative"}
    decoded(model, 20, **asked)
    cache = model.make_cache()
    prefill(model, text[:25], cache)
    decoded(model, 5, text[25:28], cache, text[:25], **asked)
    warm = Reader().pairs_of(head, text)
    assert warm.places == [*range(len(warm.places))] and len(warm.places) >= 27
    decoded(model, 5, text[:28], drafter=cold, decoding="speculative")
    fresh = Reader().pairs_of(cold, text)
    for found, wanted in zip(warm.state, fresh.state, strict=True):
        assert_close(found[..., :27, :], wanted[..., :27, :], 1e-4)
    # Another token at place 10: the pairs before it stay.
    other = [*text[:10], (text[10] + 1) % VOCAB, *text[11:20]]
    fresh.set_text(other[:11])
    assert fresh.places == [*range(9)] and fresh.text == other[:11]
    fresh.set_text([-1, -1, -1])
    assert fresh.places == []


def test_unknown_context_drafts_too():
    """Tokens that a cache holds and nobody gave."""
    model, head = copying_model("qwen3_5_moe")
    expected, _ = decoded(model, 30, decoding="plain")
    for _ in range(2):
        cache = model.make_cache()
        prefill(model, PROMPT[:9], cache)
        tokens, lengths = decoded(
            model, 20, PROMPT[9:], cache, drafter=head, decoding="speculative"
        )
        assert tokens == expected[:20] and {*lengths[1:]} == {1 + TOKENS}


@pytest.mark.parametrize("stop", [2, *slow(0, 1, 3)])
def test_an_answer_that_is_given_up_leaves_the_head_fit(stop):
    model, head = copying_model("qwen3_5_moe")
    expected, _ = decoded(model, 30, decoding="plain")
    for settings in ({"prefill_step_size": 4}, {}):
        plan = make_plan(model, drafter=head, decoding="speculative", **settings)
        steps = decode_plan(plan, model, PROMPT, model.make_cache())
        list(islice(steps, stop))
        del steps, plan
        tokens, lengths = decoded(model, 30, drafter=head, decoding="speculative")
        assert tokens == expected and {*lengths[1:]} == {1 + TOKENS}


@pytest.mark.slow
def test_a_long_stretch_without_drafts_is_processed_meanwhile(monkeypatch):
    """A controller that drafts seldom: pairs do not pile up, and the next draft knows them all."""
    model, head = copying_model("qwen3_5_moe")
    expected, _ = decoded(model, 130, decoding="plain")

    class Seldom:
        def __init__(self, largest):
            self.largest = largest
            self.calls = 0

        def next(self, *, is_read=False):
            return self.largest if self.calls % 50 == 49 else None

        def record(self, call):
            self.calls += 1

    rows = []
    run_pairs = MtpModule.run_pairs

    def noted(module, embedded, *given):
        rows.append(embedded.shape[1])
        return run_pairs(module, embedded, *given)

    monkeypatch.setattr(MtpModule, "run_pairs", noted)
    drafter = MtpDrafter(model.backbone, head, MtpConfig(), Sampling(GenerateConfig(), VOCAB))
    steps = speculative_steps(model, PROMPT, [drafter], controller=Seldom(drafter.largest))
    tokens, lengths = first_tokens(steps, 120)
    assert tokens == expected[:120] and lengths.count(1 + TOKENS) == 2
    assert max(rows) < 40  # the stretches have 50 tokens
    steps.close()
    del steps, drafter
    places = Reader().pairs_of(head, [*PROMPT, *expected]).places
    assert places == [*range(len(places))] and len(places) > 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Qwen3.5 with a tokenizer, and its head, which is raw."""
    path = tmp_path_factory.mktemp("mtp") / "model"
    tensors = published(head_tensors("qwen3_5_moe"), raw=False)
    return write_target("qwen3_5_moe", path, tensors)


@pytest.mark.slow
def test_two_chats_at_once_share_a_head(folder):
    model, tokenizer = ssmlx.load(str(folder), dtype="float32")
    head = load_mtp(model)
    questions = ("w3 w4", "w5 w6 w7", "w3 w4 w3 w4")

    def talk(config, *loaded):
        first, second = (
            ssmlx.ChatSession(model, tokenizer, config, drafter=list(loaded)) for _ in range(2)
        )
        return [tokens_of(one.reply(text)) for text in questions for one in (first, second, second)]

    expected = talk(GenerateConfig(decoding="plain", max_tokens=9))
    always = GenerateConfig(decoding="speculative", max_tokens=9)
    for config in (always, GenerateConfig(max_tokens=9)):
        assert talk(config, head) == expected


@pytest.mark.parametrize("drafting", [{"decoding": "speculative"}, *slow({})])
def test_an_engines_answers_in_turns_are_those_of_each_alone(folder, drafting):
    questions = [PROMPT, [5, 6, 5, 6, 5], "w1 w2"]
    with ssmlx.Engine(str(folder), dtype="float32") as engine:
        head = load_mtp(engine.model())
        alone = {"max_tokens": 24, "decoding": "plain", "deterministic": True}
        expected = [tokens_of(engine.stream(question, **alone)) for question in questions]
        answers = [engine.stream(one, max_tokens=24, drafter=head, **drafting) for one in questions]
        heard = [[] for _ in questions]
        for turn in range(24):
            for said, one in zip(heard, answers, strict=True):
                said += (token for part in islice(one, 1) for token in part.tokens)
            if turn == 2:
                answers[1].close()
        assert heard[0] == expected[0] and heard[2] == expected[2]
        assert heard[1] == expected[1][: len(heard[1])]


@pytest.mark.parametrize("system", [*slow(None), "w9 w8 w7 w9 w8 w7 w9 w8 w7 w9 w8"])
def test_two_chats_in_turn_find_their_pairs_again(tmp_path, system):
    """Also behind a system prompt that both begin with, whose pairs the second one copies."""
    tensors = published(head_tensors("qwen3_next"), raw=False)
    folder = write_target("qwen3_next", tmp_path / "model", tensors)
    questions = [" ".join([f"w{number}"] * 9) for number in (20, 21, 22)]
    with ssmlx.Engine(str(folder), dtype="float32", prompt_cache=PromptCache(0)) as engine:
        head = load_mtp(engine.model())
        settings = {"system": system, "max_tokens": 12}
        drafting = {"drafter": head, "decoding": "speculative"}
        chats = [engine.chat(**settings, **drafting) for _ in range(2)]
        plain = [engine.chat(**settings, decoding="plain") for _ in range(2)]
        places = [[], []]
        for turn in range(3):
            for number in (0, 1):
                text = questions[number + turn - 1]
                found = tokens_of(chats[number].reply(text))
                assert found == tokens_of(plain[number].reply(text))
                prompt = chat_tokens(engine.tokenizer, chats[number].messages[:-1])
                newest = run_on_mlx_thread(partial(Reader().pairs_of, head, prompt))
                assert newest.text[: len(prompt)] == prompt
                assert newest.places[: len(places[number])] == places[number]
                places[number] = list(newest.places)
        assert all(places), "there were pairs to find again"
        assert head.cache_bytes > 0
        pool = engine.memory_pool
        run_on_mlx_thread(lambda: pool.make_room(pool.limit))  # it counts what nobody uses now
        assert head.cache_bytes == 0


def head_trained_on(model, texts):
    """A head that has learned what stands two tokens on in `texts`, of pairs that see all before.

    On the MLX thread.
    """
    backbone = model.backbone
    tap = len(backbone.layers)
    module = MtpModule(backbone.args, type(backbone.layers[0]))
    module.load_weights(list(head_tensors("qwen3_5_moe").items()))
    batches = []
    for text in texts:
        taps = backbone.append(mx.array(text), model.make_cache(), [tap]).taps
        hidden = backbone.final_norm(taps[tap])[:, :-2]
        embedded = backbone.token_embeddings(mx.array([text[1:-1]]))
        batches.append((embedded, hidden, mx.array([text[2:]])))
    mx.eval(batches)

    def loss(module):
        found = mx.array(0.0)
        for embedded, hidden, targets in batches:
            rows = PairCache().writer_at(0)
            out = module.run_pairs(embedded, hidden, rows)
            logits = backbone.lm_head(module.norm(out))
            found += nn.losses.cross_entropy(logits, targets, reduction="mean")
        return found

    optimizer = optim.Adam(1e-2)
    step = nn.value_and_grad(module, loss)
    for _ in range(40):
        optimizer.update(module, step(module)[1])
        mx.eval(module.parameters())
    return MtpHead(module, backbone)


def test_an_engine_shows_the_head_its_prompts(folder):
    """Calls bring as many tokens as in `stream_generate`, in one answer and in two at once."""
    prompts = [[11, 3, 4, 11, 3, 9, 2, 2], [5, 6, 5, 9, 6, 5, 7, 8, 5, 6] * 3]
    settings = {"max_tokens": 40, "prefill_step_size": 4}
    drafting = {"decoding": "speculative", **settings}

    def by_call(segments):
        return [one.tokens for one in segments if one is not None]

    with ssmlx.Engine(str(folder), dtype="float32") as engine:
        model, tokenizer = engine.model(), engine.tokenizer
        stream = partial(ssmlx.stream_generate, model, tokenizer)
        plain = [tokens_of(stream(one, decoding="plain", **settings)) for one in prompts]
        texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, plain, strict=True)]
        head = run_on_mlx_thread(lambda: head_trained_on(model, texts))
        streams = [list(stream(one, drafter=head, **drafting)) for one in prompts]
        assert [tokens_of(one) for one in streams] == plain
        expected = [by_call(one) for one in streams]
        assert all(max(map(len, calls)) > 2 for calls in expected), "some drafts are accepted"
        ask = partial(engine.stream, drafter=head, **drafting)
        # The second time, the prompt cache holds the prompt, and the head's its pairs.
        for prompt, calls in zip(prompts, expected, strict=True):
            kept = PromptCache()
            for _ in range(2):
                assert by_call(ask(prompt, prompt_cache=kept)) == calls
        head.drop_idle()
        kept = PromptCache()
        for _ in range(2):
            answers = [ask(prompt, prompt_cache=kept) for prompt in prompts]
            columns = zip(*zip_longest(*answers), strict=True)
            assert [by_call(one) for one in columns] == expected


def test_a_prompt_that_is_given_up_leaves_the_head_idle(folder):
    with ssmlx.Engine(str(folder), dtype="float32") as engine:
        head = load_mtp(engine.model())
        settings = {"drafter": head, "decoding": "speculative", "prefill_step_size": 4}
        for place in (0, 12, 48):
            answer = engine.stream(
                [5, 6, 7, 8] * 15,
                prompt_cache=PromptCache(),
                progress=lambda done, total: answer.cancel() if done >= place else None,  # noqa: B023
                **settings,
            )
            assert not list(answer)
            assert (head.cache_bytes > 0) == (place > 40), "pairs are processed by the dozen"
            head.drop_idle()
            assert head.cache_bytes == 0


def test_an_answer_with_a_mask_starts_no_head(folder):
    with ssmlx.Engine(str(folder), dtype="float32") as engine:
        head = load_mtp(engine.model())
        settings = {"drafter": head, "decoding": "speculative", "max_tokens": 4}
        assert tokens_of(engine.stream(PROMPT, mask=lambda _, logits: logits, **settings))
        assert head.cache_bytes == 0


def test_generate_drafts_by_the_head_of_the_model_and_of_a_folder(folder, tmp_path, capsys):
    from ssmlx.commands import generate

    beside = write_head("qwen3_5_moe", tmp_path / "head", published(head_tensors("qwen3_5_moe")))
    options = ["--model", str(folder), "--prompt", "w3 w4", "--max-tokens", "9"]
    said = []
    for drafting in (
        ["--decoding", "plain"],
        ["--drafter", "mtp"],
        ["--drafter", f"mtp model={beside} tokens=2 hidden=before norms=raw"],
        ["--drafter", "mtp", "--decoding", "speculative"],
    ):
        assert exit_code(generate.main, *options, *drafting) == 0
        said.append(capsys.readouterr().out)
    assert len(set(said)) == 1 and said[0].strip()


# --- What is refused, in a line ---


def changed(tensors, **changes):
    """Tensors of which some are changed: to another, or to None for none."""
    wanted = {**tensors, **{name.replace("__", "."): one for name, one in changes.items()}}
    return {name: one for name, one in wanted.items() if one is not None}


@pytest.mark.parametrize(("change", "settings", "named"), [
    ({"mtp__fc__weight": None}, {}, ("fc.weight", "20")),
    ({"mtp__fc__weight": mx.zeros((WIDTH, WIDTH))}, {}, ("fc.weight",)),
    ({"mtp__norm__weight": mx.full(WIDTH, mx.nan)}, {}, ("norm.weight",)),
    ({"mtp__fc__weight": mx.zeros((32, 64), mx.int8)}, {}, ("fc.weight",)),
    ({"mtp__eh_proj__weight": mx.zeros(3)}, {}, ("eh_proj.weight",)),
    ({"mtp__layers__1__input_layernorm__weight": mx.zeros(WIDTH)}, {},
     ("layers.1.input_layernorm.weight",)),
    ({"mtp__fc__weight": mx.array(1.0)}, {}, ("fc.weight", "[]")),
    ({"mtp__layers__0__mlp__gate_proj__weight": mx.array(1.0)}, {},
     ("layers.0.mlp.gate_proj.weight", "[]")),
    ({}, {"hidden_size": 64}, ("hidden_size", "64", "32")),
    ({}, {"vocab_size": 99}, ("vocab_size", "99", "64")),
    ({}, {"text_config": {"head_dim": 4}}, ("head_dim", "4", "8")),
    ({}, {"model_type": "qwen3_next"}, ("qwen3_next", "qwen3_5")),
    ({}, {"hidden_size": 2**30}, ("hidden_size", str(2**30))),
    ({}, {"model_file": "x.py"}, ()),
    ({"mtp__layers__0__mlp__experts__0__up_proj__weight": None}, {}, ("1, 2, 3",)),
])  # fmt: skip
def test_what_does_not_fit_is_refused(tmp_path, change, settings, named):
    name = "qwen3_5_moe"
    tensors = changed(published(head_tensors(name)), **change)
    beside = write_head(name, tmp_path / "head", tensors, **settings)
    line = refusal(load_mtp, model_of(name), beside)
    assert mentions(line.replace(str(beside), ""), *named)


def test_half_a_download_is_refused(tmp_path):
    name = "qwen3_5_moe"
    whole = write_head(name, tmp_path / "head", published(head_tensors(name)))
    index = whole / "model.safetensors.index.json"
    names = {"mtp.fc.weight": "model.safetensors", "mtp.norm.weight": "model-00002.safetensors"}
    index.write_text(json.dumps({"weight_map": names}))
    assert "model-00002.safetensors" in refusal(load_mtp, model_of(name), whole)
    index.write_text(json.dumps({"weight_map": {"mtp.fc.weight": "../model.safetensors"}}))
    assert str(whole) in refusal(load_mtp, model_of(name), whole)
    index.unlink()
    data = (whole / "model.safetensors").read_bytes()
    (whole / "model.safetensors").write_bytes(data[: len(data) // 2])
    assert str(whole) in refusal(load_mtp, model_of(name), whole)


def test_a_folder_without_a_head_is_refused(tmp_path):
    name = "qwen3_5_moe"
    folder = write_target(name, tmp_path / "model")
    model = StreamFusedModel(load_base(folder, "float32")[0])
    assert mentions(refusal(load_mtp, model), str(folder), "mtp.*")
    assert mentions(refusal(load_mtp, model, folder), str(folder))
    assert not mentions(refusal(load_mtp, model_of(name)), "mtp.*")  # it has no folder
    line = refusal(make_plan, model, drafter="mtp")
    assert mentions(found_in(line), "--drafter mtp") and mentions(line, "model=MODEL")


def test_a_head_of_experts_is_refused_beside_a_dense_model(tmp_path):
    tensors = published(head_tensors("qwen3_5_moe"))
    settings = {"num_experts": None, "model_type": "qwen3_5"}
    beside = write_head("qwen3_5_moe", tmp_path / "head", tensors, **settings)
    assert "experts" in found_in(refusal(load_mtp, model_of("qwen3_5"), beside))


def test_other_models_are_refused(tmp_path):
    name = "qwen3_5_moe"
    beside = write_head(name, tmp_path / "head", published(head_tensors(name)))
    llama = StreamFusedModel(Backbone(make_base("llama")))
    assert mentions(refusal(load_mtp, llama, beside), "Qwen3-Next", "Qwen3.5")
    line = refusal(make_plan, llama, drafter=head_of(name), decoding="speculative")
    assert mentions(found_in(line), "32", "64")


def test_where_last_hidden_states_cannot_be_had_says_why(monkeypatch):
    model = model_of("qwen3_5_moe")
    reason = "SOME REASON"
    without = replace(model.backbone.capabilities, last_hidden=reason)
    monkeypatch.setattr(Backbone, "capabilities", without)
    assert reason in found_in(refusal(load_mtp, model, "x"))


@pytest.mark.parametrize("settings", [{"num_draft_tokens": 0}, {"hidden": "x"}, {"norms": "x"}])
def test_settings_are_checked(settings):
    assert mentions(found_in(refusal(MtpConfig, **settings)), "--drafter", "mtp")
