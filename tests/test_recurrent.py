"""Chains of drafted tokens on models with recurrent layers, and on others that are called whole."""

import json
import random
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from itertools import cycle, islice, pairwise

import mlx.core as mx
import mlx.nn as nn
import pytest
from controlled import answer as controlled
from loops import speculative_steps
from mlx.utils import tree_unflatten
from mlx_lm.models.cache import ArraysCache, RotatingKVCache
from mlx_lm.utils import load_model
from real import tokens_of, write_tokenizer
from refusals import as_shown, found_in, mentions, refusal
from tiny import (
    assert_close,
    first_tokens,
    mlx_lm_tokens,
    random_tree,
    slow,
)
from tiny_classes import DRAFTED, OWN, PROMPT, SIZES, VOCAB, chain_of, random_weights, write_model
from tiny_heads import HEAD_KINDS, LEVELS, make_heads, random_heads
from tiny_lora import mlx_lm_lora

import ssmlx
from ssmlx.decoding.call import plain_call, verify
from ssmlx.decoding.draft_shape import DraftShape
from ssmlx.decoding.drafter import Needs
from ssmlx.decoding.loop import prefill
from ssmlx.decoding.sampling import Sampling, last_tokens
from ssmlx.decoding.step import DraftTotals
from ssmlx.drafters.draft_model import DraftModel
from ssmlx.drafters.head_drafter import HeadDrafter
from ssmlx.drafters.heads import attach_heads
from ssmlx.drafters.lookup import EARLIER_ANSWERS, NAME
from ssmlx.drafters.text_index import EarlierAnswers
from ssmlx.generation.plan import decode_plan, make_plan
from ssmlx.model.backbone import Backbone
from ssmlx.model.state_cache import flatten_caches
from ssmlx.model.streams import StreamFusedModel
from ssmlx.model.tree import chain_tree
from ssmlx.prompt_cache import PromptCache
from ssmlx.prompts import chat_tokens
from ssmlx.settings import GenerateConfig, PromptLookupConfig

FIRST = ["qwen3_next", "qwen3_5", "lfm2", "falcon_h1", "gear"]
RECURRENT = [
    *FIRST, "qwen3_5_moe", "lfm2_moe", "lfm2-vl", "kimi_linear", "kimi_k3", "olmo_hybrid",
    "bailing_moe_v3", "bailing_hybrid", "bailing_moe_linear", "granitemoehybrid", "mamba2",
    "nemotron_h", "plamo2",
]  # fmt: skip
# Called whole for other reasons; some have windows, or several caches in a layer.
WHOLE = ["gemma4_text", "gemma3n", "deepseek_v32", "gpt2", "afm7"]
SOME = [*FIRST, *slow(*(name for name in (*RECURRENT, *WHOLE) if name not in FIRST))]
ONE = ["lfm2", *slow(*(name for name in (*RECURRENT, *WHOLE) if name != "lfm2"))]
# No recurrence or convolution that is known gives all that their layers keep.
PLAIN = ["jamba", "mamba", "rwkv7", "recurrent_gemma", "baichuan_m1", "longcat_flash_ngram"]
SAMPLED = {"temp": 1.0, "top_p": 0.9, "seed": 3}
# Accepted tokens of chains of four: each of the nine pairs of none, some and all.
ORDERS = [0, 0, 2, 2, 4, 4, 0, 4, 2, 0]


@lru_cache(maxsize=4)
def make_base(name):
    module = import_module(f"mlx_lm.models.{name}")
    config = {**SIZES, "model_type": name, **OWN.get(name, {})}
    model = module.Model(module.ModelArgs.from_dict(deepcopy(config)))
    model.update(tree_unflatten(list(random_weights(model).items())))
    mx.eval(model.parameters())
    return model


@lru_cache(maxsize=4)
def make_model(name):
    return StreamFusedModel(Backbone(make_base(name)))


def decoded(model, count=40, prompt=PROMPT, cache=None, context=(), **settings):
    """Tokens of an answer, and how many each call brought."""
    plan = make_plan(model, **settings)
    cache = cache or model.make_cache()
    return first_tokens(decode_plan(plan, model, prompt, cache, context=context), count)


class Scripted:
    """Drafts chains of which so many tokens are right as the script says, over and over."""

    largest = DraftShape("scripted", 1 + DRAFTED, DRAFTED)
    num_parameters = draft_model_calls = cache_bytes = 0

    def __init__(self, answer, *, host_tokens=True):
        self.needs = Needs(host_tokens=host_tokens)
        self._answer = answer
        self._script = cycle(ORDERS)
        self._root = 0  # its place in the answer

    def start(self, tokens): ...

    def follow(self, tokens, position, taps=None): ...

    def propose(self, verified, shape):
        right = next(self._script)
        chain = chain_of(self._answer, self._root, right)
        self._root += right + 1
        return chain


def caches_of(cache):
    """mlx-lm's caches by layer, as the model would be given them now, without rejected tokens."""
    given = []

    def look(tokens, cache):
        given.extend(flatten_caches(cache))
        return tokens

    cache.append(look, mx.zeros(0, mx.int32))
    return given


def held(cache):
    """What each layer keeps: states, and the rows that attention still sees, in order."""
    found = []
    for one in caches_of(cache):
        if type(one) is ArraysCache:
            found += one.cache
            continue
        for rows in (one.keys, one.values):
            if type(one) is RotatingKVCache:
                rows = one._temporal_order(rows)[..., -min(one.offset, one.max_size) :, :]
            found.append(mx.contiguous(rows[..., : one.offset, :]))
    mx.eval(found)
    return found


@pytest.mark.parametrize("name", SOME)
def test_behind_every_call_the_state_is_plain_decodings(name, monkeypatch):
    """None, some and all of a chain accepted in every order, and then no module runs again."""
    assert len(set(pairwise(ORDERS))) == 9
    model = make_model(name)
    answer, _ = decoded(model, 60, decoding="plain")
    text = [*PROMPT, *answer]
    plain = model.make_cache()
    prefill(model, PROMPT[:-1], plain)
    expected = {}
    for token in text[len(PROMPT) - 1 : -DRAFTED]:
        model.append(mx.array([token]), plain)
        expected[plain.offset] = held(plain)
    ran = []
    real = nn.Linear.__call__

    def noted(self, x):
        ran.append(x.shape)
        return real(self, x)

    monkeypatch.setattr(nn.Linear, "__call__", noted)
    cache = model.make_cache()
    prefill(model, PROMPT[:-1], cache)
    for right in ORDERS:
        root = cache.offset
        call = verify(model, chain_of(text, root, right), cache)
        assert call.read_tokens() == text[root + 1 : root + right + 2]
        ran.clear()
        cache.commit_accepted(right + 1)
        for found, wanted in zip(held(cache), expected[cache.offset], strict=True):
            assert_close(found, wanted, 1e-4)
        assert not ran
    rest = text[cache.offset :]
    more, _ = decoded(model, 8, rest[:1], cache, text[: cache.offset], decoding="plain")
    assert more == rest[1:9]


GREEDY_OR_NOT = ({}, SAMPLED)
EVERY = [*RECURRENT, *WHOLE]


@pytest.mark.parametrize(("name", "settings", "host_tokens", "count"), [
    *((name, settings, True, 40) for name, settings in zip(FIRST, cycle(GREEDY_OR_NOT))),
    ("lfm2", SAMPLED, False, 40),
    *slow(*(
        (name, settings, not settings, 40)
        for name, settings in zip((n for n in EVERY if n not in FIRST), cycle(GREEDY_OR_NOT))
    )),
    *slow(*(
        (name, settings, bool(settings), 300) for name, settings in zip(EVERY, cycle(GREEDY_OR_NOT))
    ), mark=pytest.mark.long),
], ids=str)  # fmt: skip
def test_tokens_are_plain_decodings_and_no_row_is_fed_twice(
    name, settings, host_tokens, count, monkeypatch
):
    base = make_base(name)
    model = make_model(name)
    expected, _ = decoded(model, count + DRAFTED, decoding="plain", **settings)
    if not settings:
        assert expected == mlx_lm_tokens(base, PROMPT, count + DRAFTED)
    rows = []
    real = type(base).__call__

    def noted(self, tokens, *others, **more):
        rows.append(tokens.shape[1])
        return real(self, tokens, *others, **more)

    monkeypatch.setattr(type(base), "__call__", noted)
    totals = DraftTotals()
    steps = speculative_steps(
        model,
        PROMPT,
        [Scripted(expected, host_tokens=host_tokens)],
        sampler=Sampling(GenerateConfig(**settings), VOCAB),
    )
    tokens, lengths = first_tokens(steps, count, totals)
    assert tokens == expected[:count]
    script = cycle(ORDERS)
    assert lengths == [1, *(1 + next(script) for _ in lengths[1:])]
    assert rows[: 1 + len(lengths)] == [len(PROMPT) - 1, 1, *[1 + DRAFTED] * (len(lengths) - 1)]
    assert totals.drafts["scripted"].accepted == sum(lengths) - len(lengths)


class Follower(Scripted):
    """Keeps what enters the final norm at each place of the text."""

    def __init__(self, answer, layer):
        super().__init__(answer)
        self.needs = Needs(host_tokens=True, taps=(layer,))
        self._layer = layer
        self.rows = {}  # by the place of the token behind

    def follow(self, tokens, position, taps=None):
        assert taps[self._layer].shape[:2] == (1, len(tokens))
        self.rows.update(
            zip(range(position, position + len(tokens)), taps[self._layer][0], strict=True)
        )


@pytest.mark.parametrize(("name", "cached"), [
    *zip(FIRST, cycle((5, 0))),
    *slow(*zip((name for name in EVERY if name not in FIRST), cycle((5, 0)))),
])  # fmt: skip
def test_followers_are_given_what_enters_the_final_norm(name, cached):
    """Of prompts in pieces, of a cached beginning not, and of calls that accept more and less."""
    model = make_model(name)
    backbone = model.backbone
    if not backbone.capabilities.has("last_hidden"):
        line = refusal(model.append, mx.array([1]), model.make_cache(), [len(backbone.layers)])
        assert as_shown(backbone.capabilities.last_hidden) in line
        return
    expected, _ = decoded(model, 40 + DRAFTED, decoding="plain")
    text = [*PROMPT, *expected]
    follower = Follower(expected, len(backbone.layers))
    cache = model.make_cache()
    prefill(model, text[:cached], cache)
    steps = speculative_steps(
        model,
        PROMPT[cached:],
        [follower],
        cache,
        context=text[:cached],
        prefill_step_size=4,
    )
    tokens, _ = first_tokens(steps, 40)
    assert tokens == expected[:40]
    places = [*follower.rows]
    assert places == list(range(cached + 1, cached + 1 + len(places))) and len(places) > 50
    states = mx.stack([*follower.rows.values()])
    logits = make_base(name)(mx.array([text]))[0, cached : cached + len(places)]
    assert_close(backbone.lm_head(backbone.final_norm(states)), logits, 1e-3)


def test_other_taps_of_a_model_called_whole_are_refused():
    model = make_model("qwen3_next")
    for layers in ((0,), (2, 4)):
        line = refusal(model.append, mx.array([1]), model.make_cache(), layers)
        assert mentions(line, "layers")


@pytest.mark.parametrize("name", ONE)
def test_calls_of_a_model_called_whole_leave_no_hidden_states(name):
    """A drafter that asks for them is told so; it never gets logits in their place."""
    model = make_model(name)
    cache = model.make_cache()
    tail = last_tokens((), 0)
    plain = plain_call(model, mx.array(PROMPT[:1], mx.int32), tail, cache)
    chain = verify(model, chain_tree(mx.array(PROMPT[1:4], mx.int32)), cache)
    assert model.append(mx.array([1]), model.make_cache()).last_hidden is None
    for call in (plain, chain):
        with pytest.raises(ValueError):
            call.verified.last_hidden  # noqa: B018
        assert call.verified.insertion_hidden is None and call.verified.stream_hidden is None


@pytest.mark.parametrize("name", ONE)
def test_what_is_no_chain_is_verified_as_one(name):
    """Trees whose nodes have several children: most is rejected, and the tokens stay."""
    model = make_model(name)
    expected, _ = decoded(model, 24, decoding="plain")
    rng = random.Random(1)

    class Trees(Scripted):
        def propose(self, verified, shape):
            tree = random_tree(rng, 6, VOCAB)
            tree.tokens[:1] = verified.root
            return tree

    assert first_tokens(speculative_steps(model, PROMPT, [Trees(expected)]), 24)[0] == expected


@pytest.mark.parametrize("name", ONE)
def test_an_answer_may_end_in_the_middle_and_go_on(name):
    """With a call on drafted tokens under way, whose rows nobody has counted."""
    model = make_model(name)
    expected, _ = decoded(model, 40, decoding="plain")
    for calls in (1, 2, 4, 6):
        cache = model.make_cache()
        steps = speculative_steps(model, PROMPT, [Scripted(expected)], cache)
        tokens = [token for step in islice(filter(None, steps), calls) for token in step.tokens]
        steps.close()
        text = [*PROMPT, *tokens]
        assert cache.offset == len(text) - 1 == cache.longest_keepable(cache.offset)
        more, _ = decoded(model, 8, text[-1:], cache, text[:-1], decoding="plain")
        assert [*tokens, *more] == expected[: len(tokens) + 8]


@pytest.mark.parametrize("name", ONE)
def test_a_text_may_go_back_to_any_place_of_its_last_chain(name):
    model = make_model(name)
    answer, _ = decoded(model, 40, decoding="plain")
    text = [*PROMPT, *answer]
    first = len(PROMPT) - 1
    for kept in range(first, first + DRAFTED + 2):
        cache = model.make_cache()
        prefill(model, PROMPT[:-1], cache)
        chain = chain_of(text, first, DRAFTED)
        assert len(verify(model, chain, cache).read_tokens()) == 1 + DRAFTED
        cache.commit_accepted(1 + DRAFTED)
        assert cache.longest_keepable(kept) == kept
        cache.keep_first(kept)
        rest = text[kept:]
        more, _ = decoded(model, 8, rest[:1], cache, text[:kept], decoding="plain")
        assert more == rest[1:9]
    assert cache.longest_keepable(first) in (0, first)  # not behind it, where there are states
    cache.keep_first(cache.longest_keepable(first))
    assert (
        decoded(model, 8, text[cache.offset : len(PROMPT)], cache, text[: cache.offset])[0]
        == (answer[:8])
    )


def test_a_text_may_go_back_to_what_was_marked():
    model = make_model("qwen3_next")
    cache = model.make_cache()
    text = [*PROMPT, *decoded(model, 12, decoding="plain")[0]]
    marked = {}
    for token in text[:-1]:
        model.append(mx.array([token]), cache)
        if cache.offset in (8, 20):
            assert cache.mark()
            marked[cache.offset] = held(cache)
    assert [cache.longest_keepable(n) for n in (5, 8, 19, 22, 32)] == [0, 8, 8, 20, 32]
    assert cache.nbytes > model.make_cache().nbytes
    with pytest.raises(ValueError, match="19"):
        cache.keep_first(19)
    for place in (20, 8):
        cache.keep_first(place)
        for found, wanted in zip(held(cache), marked[place], strict=True):
            assert_close(found, wanted, 1e-6)
    assert cache.longest_keepable(20) == cache.offset == 8
    # The other mark is of a text that is gone.
    prefill(model, text[20:8:-1] * 2, cache)
    assert cache.longest_keepable(20) == 8
    cache.keep_first(8)
    rest = text[8 : len(PROMPT)]
    assert decoded(model, 8, rest, cache, text[:8])[0] == text[len(PROMPT) : len(PROMPT) + 8]


@pytest.mark.parametrize(("name", "settings"), [
    ("lfm2", {}),
    *slow(*zip((name for name in EVERY if name != "lfm2"), cycle(GREEDY_OR_NOT))),
], ids=str)  # fmt: skip
def test_the_text_and_a_draft_model_draft_chains(name, settings):
    model = make_model(name)
    expected, _ = decoded(model, 40, decoding="plain", **settings)
    foretold = PromptLookupConfig(reference=tuple(expected[:20]), num_draft_tokens=5)
    asked = {"decoding": "speculative", **settings}
    tokens, lengths = decoded(model, drafter="prompt-lookup", prompt_lookup=foretold, **asked)
    assert tokens == expected and max(lengths) == 6
    for kind, calls in ((name, {4}), ("qwen3_next", {1, 2, 3, 4})):
        draft = DraftModel(make_base(kind))
        tokens, lengths = decoded(model, drafter=draft, **asked)
        assert tokens == expected and {*lengths[1:]} <= calls


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [*zip(EVERY, cycle(HEAD_KINDS))])
def test_drafting_heads_draft_chains(name, kind):
    model = make_model(name)
    if model.backbone.capabilities.last_hidden is not None:
        heads = make_heads(kind, model.backbone)
        line = refusal(make_plan, model, drafter=heads, decoding="speculative")
        assert as_shown(model.backbone.capabilities.last_hidden) in line
        return
    expected, _ = decoded(model, 40, decoding="plain")
    plan = make_plan(model, drafter=make_heads(kind, model.backbone), decoding="speculative")
    (drafter,) = plan.drafters
    totals = DraftTotals()
    steps = decode_plan(plan, model, PROMPT, model.make_cache())
    assert first_tokens(steps, 40, totals)[0] == expected
    assert drafter.largest.levels == LEVELS and drafter.largest.nodes == 1 + LEVELS
    assert totals.drafted_tokens >= 20 * LEVELS


@pytest.mark.parametrize("name", ONE)
def test_drafting_heads_read_the_last_accepted_rows_hidden_state(name, monkeypatch):
    """Heads that are the LM head itself guess the token that was decided last, over and over."""
    model = make_model(name)
    if model.backbone.capabilities.last_hidden is not None:
        pytest.skip("such heads are refused, as the test above holds")
    heads = random_heads("medusa", model.backbone)
    tensors = {key: mx.zeros_like(array) for key, array in heads.tensors.items()}
    head_rows = model.backbone.head_weights(mx.arange(VOCAB))
    tensors |= {f"{level}.1.weight": head_rows for level in range(LEVELS)}
    loaded = attach_heads(replace(heads, tensors=tensors), model.backbone)
    proposed = []
    propose = HeadDrafter.propose

    def spied(*arguments):
        proposed.append(propose(*arguments))
        return proposed[-1]

    monkeypatch.setattr(HeadDrafter, "propose", spied)
    expected, _ = decoded(model, 30, decoding="plain")
    tokens, _ = decoded(model, 30, drafter=loaded, decoding="speculative")
    assert tokens == expected
    for tree in proposed:
        assert set(tree.tokens.tolist()) == {tree.tokens[0].item()}
    roots = [tree.tokens[0].item() for tree in proposed]
    assert len(set(roots)) > 2 and roots[0] == expected[0]

    # Behind a chain of which some tokens, and all, are accepted.
    (drafter,) = make_plan(model, drafter=loaded, decoding="speculative").drafters
    text = [*PROMPT, *expected]
    for right in (2, DRAFTED):
        cache = model.make_cache()
        prefill(model, PROMPT[:-1], cache)
        chain = chain_of(text, len(PROMPT) - 1, right)
        taps = (len(model.backbone.layers),)
        call = verify(model, chain, cache, taps=taps)
        tree = propose(drafter, call.verified, drafter.largest)
        assert set(tree.tokens.tolist()) == {expected[right]}, "the token behind the accepted ones"


def test_a_draft_model_takes_over_what_its_cache_has():
    """Two answers of one text, the second of which parts from it."""
    model = make_model("lfm2")
    draft = DraftModel(make_base("lfm2"))
    asked = {"decoding": "speculative", "drafter": draft}
    first, _ = decoded(model, 20, **asked)
    for prompt in ([*PROMPT, *first[:9], 5], [*PROMPT, *first[:9], 5, 8, 8], PROMPT[:7]):
        expected, _ = decoded(model, 20, prompt, decoding="plain")
        tokens, lengths = decoded(model, 20, prompt, **asked)
        assert tokens == expected and {*lengths[1:]} == {4}
    assert 0 < draft.cache_bytes < draft.nbytes


@pytest.mark.parametrize("name", ONE)
def test_by_default_a_controller_drafts_by_the_text(name):
    model = make_model(name)
    plan = make_plan(model)
    assert [one.largest.drafter for one in plan.drafters] == [NAME]
    expected, _ = decoded(model, 60, decoding="plain")
    assert decoded(model, 60)[0] == expected
    earlier = EarlierAnswers()
    earlier.add(PROMPT, expected)
    plan = make_plan(model, earlier=earlier)
    assert [one.largest.drafter for one in plan.drafters] == [NAME, EARLIER_ANSWERS]
    tokens, lengths, drafts = controlled(model, 60, prompt=PROMPT, earlier=earlier)
    assert tokens == expected
    assert drafts[EARLIER_ANSWERS].accepted > 20 and len(lengths) < 30
    tokens, lengths, drafts = controlled(model, 60, prompt=PROMPT, earlier=earlier, row_cost=9.0)
    assert tokens == expected and len(lengths) == 60 and not drafts


@pytest.mark.parametrize(
    ("settings", "drafter"),
    [({"drafter": "lookahead"}, "lookahead"), ({"decoding": "speculative"}, "streams")],
    ids=["lookahead", "streams"],
)
def test_what_proposes_trees_says_why_not(settings, drafter):
    model = make_model("qwen3_next")
    line = refusal(make_plan, model, **settings)
    assert mentions(found_in(line), drafter) and mentions(line, "--drafter prompt-lookup")
    assert as_shown(model.backbone.capabilities.trees) in line


@pytest.mark.parametrize("name", [*PLAIN[:1], *slow(*PLAIN[1:])])
def test_what_cannot_be_run_again_decodes_plainly(name):
    model = make_model(name)
    reason = model.backbone.capabilities.chains
    assert reason and "\n" not in reason
    plan = make_plan(model)
    assert not plan.drafters
    assert decoded(model, 12)[0] == mlx_lm_tokens(make_base(name), PROMPT, 12)
    line = refusal(make_plan, model, drafter="prompt-lookup")
    assert as_shown(model.backbone.capabilities.chains) in line


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Qwen3-Next with a tokenizer."""
    folder = write_model("qwen3_next", tmp_path_factory.mktemp("models") / "next")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def lora(folder, tmp_path_factory):
    return mlx_lm_lora(tmp_path_factory.mktemp("lora") / "lora", load_model(folder)[0])


def test_a_chat_goes_on_warm_as_it_would_cold(folder, lora):
    """Answers that end in the middle of a chain, or behind one; and adapters that are swapped."""
    turns = (("w3 w4", None), ("w5 w6 w7", lora), ("w3 w4", lora), ("w3 w4 w3 w4", None))

    def talk(config):
        model, tokenizer = ssmlx.load(str(folder), dtype="float32")
        session = ssmlx.ChatSession(model, tokenizer, config)
        said = []
        adapter = None
        for text, wanted in turns:
            if wanted != adapter:
                session.swap_adapter(wanted)
                adapter = wanted
            said.append(tokens_of(session.reply(text)))
        return said, session.totals.reused_tokens

    expected, _ = talk(GenerateConfig(decoding="plain", max_tokens=7))
    assert len({*map(tuple, expected)}) == len(turns)
    reference = tuple(token for answer in expected for token in [*answer, 1, 2, 3])
    asked = GenerateConfig(max_tokens=7, prompt_lookup=PromptLookupConfig(reference=reference))
    always = replace(asked, decoding="speculative", drafter="prompt-lookup")
    for config in (always, asked):
        said, reused = talk(config)
        assert said == expected and reused > 0


THINKING = (
    "{% for m in messages %}{{ m.role }}: "
    "{{ m.content.split()[-2:] | join(' ') if m.role == 'assistant' else m.content }} | "
    "{% endfor %}{% if add_generation_prompt %}model: w30 w31{% endif %}"
)
"""A template that opens answers with a thought, and shows of earlier answers their end alone."""


@pytest.mark.parametrize("kind", ["alone", "in an engine", *slow("deterministic", "drafts")])
def test_a_chat_whose_template_drops_thoughts_goes_on_behind_its_last_prompt(folder, kind):
    settings = {
        "deterministic": {"deterministic": True},
        "drafts": {"decoding": "speculative", "drafter": "prompt-lookup"},
    }.get(kind, {})
    turns = [" ".join([f"w{number}"] * 12) for number in (3, 4, 5, 6)]
    with ssmlx.Engine(str(folder), dtype="float32") as engine:
        model, tokenizer = engine.model(), engine.tokenizer
        tokenizer._tokenizer.chat_template = THINKING
        config = GenerateConfig(max_tokens=7, prefill_step_size=5, **settings)
        in_engine = kind == "in an engine"
        chat = engine.chat(config) if in_engine else ssmlx.ChatSession(model, tokenizer, config)
        expected_reuse = 0
        for number, text in enumerate(turns):
            before = chat.totals.reused_tokens
            reply = chat.reply(text)
            found = tokens_of(islice(reply, 1 if number == 1 else None))
            reply.close()  # the second is given up behind its first call
            assert chat.totals.reused_tokens - before == expected_reuse
            prompt = chat_tokens(tokenizer, chat.messages[:-1])
            plain = GenerateConfig(max_tokens=7, decoding="plain")
            expected = tokens_of(ssmlx.stream_generate(model, tokenizer, prompt, plain))
            assert found == expected[: len(found) if number == 1 else 7]
            asked = chat_tokens(tokenizer, chat.messages[:-1], add_generation_prompt=False)
            expected_reuse = len(asked)


def conversation(texts, answers):
    """The turns up to the last of `texts`, with the answers before it."""
    turns = []
    for number, text in enumerate(texts):
        turns.append({"role": "user", "content": text})
        if number < len(texts) - 1:
            turns.append({"role": "assistant", "content": answers[number]})
    return turns


def given_up_in_prompt(engine, question, config):
    """An answer that is cancelled when ten or more tokens of its prompt are processed."""
    answer = engine.stream(
        question, config, progress=lambda done, total: answer.cancel() if done >= 10 else None
    )
    return answer


ASKED = [" ".join([f"w{number}"] * 12) for number in (3, 4, 5, 6)]


@pytest.mark.parametrize(
    "kind", ["turns", "windows", *slow("two chats", "drafts", "sampled", "choices", "masks")]
)
def test_an_engine_goes_on_where_a_template_opened_the_answer(folder, kind, tmp_path):
    """Of turns and of a text; one answer is given up in the middle, one in its prompt."""
    settings = {
        "drafts": {"decoding": "speculative", "drafter": "prompt-lookup"},
        "sampled": SAMPLED,
    }.get(kind, {})
    config = GenerateConfig(max_tokens=7, prefill_step_size=5, **settings)
    if kind == "windows":
        folder = write_model("gemma3n", tmp_path / "gemma3n")
        write_tokenizer(folder)
    mask = (lambda tokens, logits: logits) if kind == "masks" else None
    chats = {0: ASKED, 30: [text.replace("w", "w1") for text in ASKED]}
    with ssmlx.Engine(str(folder), dtype="float32") as engine:
        tokenizer = engine.tokenizer
        tokenizer._tokenizer.chat_template = THINKING
        said = {chat: [] for chat in chats}
        for number, _ in enumerate(ASKED):
            for chat, texts in chats.items() if kind == "two chats" else [(0, ASKED)]:
                turns = conversation(texts[: number + 1], said[chat])
                question = turns if number else turns[0]["content"]
                before = 0
                if number:
                    asked = conversation(texts[:number], said[chat])
                    before = len(chat_tokens(tokenizer, asked, add_generation_prompt=False))
                if number == 2:
                    assert not list(given_up_in_prompt(engine, question, config))
                    before += 10
                shares = kind == "choices"
                found = list(engine.stream(question, config, mask=mask, shares_prompt=shares))
                assert found[0].cached_tokens == before
                prompt = chat_tokens(tokenizer, turns)
                if shares:
                    opened = len(chat_tokens(tokenizer, turns, add_generation_prompt=False))
                    other = list(engine.stream(prompt, config))
                    assert other[0].cached_tokens == opened
                    assert tokens_of(other) == tokens_of(found)
                given_up = engine.stream(question, config)
                next(given_up)
                given_up.close()
                plain = replace(config, decoding="plain", drafter=None)
                expected = ssmlx.stream_generate(engine.model(), tokenizer, prompt, plain)
                assert tokens_of(found) == tokens_of(expected)
                said[chat].append("".join(one.text for one in found))


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    """A Qwen3-Next whose template is `THINKING`."""
    folder = write_model("qwen3_next", tmp_path_factory.mktemp("models") / "thinking")
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(THINKING)
    return folder


@contextmanager
def client_of_server(thinking, folder, kind):
    """An HTTP client of a server of `thinking`, in this process or in one of its own."""
    httpx = pytest.importorskip("httpx2")
    if kind == "a process":
        from served import serving

        with serving(folder, "--model", thinking, "--max-tokens", 7) as served:
            yield httpx.Client(base_url=served.url, timeout=60)
        return
    pytest.importorskip("starlette")
    from starlette.testclient import TestClient

    from ssmlx.server.app import make_app
    from ssmlx.server.handler import RequestHandler

    with ssmlx.Engine(str(thinking), dtype="float32") as engine:
        app = make_app(
            RequestHandler(engine, {"tiny": None}, prompt_caches=[PromptCache()]),
            GenerateConfig(max_tokens=7),
        )
        yield TestClient(app, base_url="http://localhost")


@pytest.mark.parametrize("kind", ["one answer", *slow("choices", "streamed", "a process")])
def test_a_server_goes_on_where_a_template_opened_the_answer(thinking, tmp_path, kind):
    model, tokenizer = ssmlx.load(str(thinking), dtype="float32")
    choices = 2 if kind == "choices" else 1
    answers = []
    expected_reuse = 0
    with client_of_server(thinking, tmp_path, kind) as client:
        for number, _ in enumerate(ASKED):
            turns = conversation(ASKED[: number + 1], answers)
            body = {"messages": turns, "n": choices, "temperature": 0, "stream": kind == "streamed"}
            body["stream_options"] = {"include_usage": True}
            found = client.post("/v1/chat/completions", json=body)
            chunks = chunks_of(found)
            usage = chunks[-1]["usage"]
            prompt = chat_tokens(tokenizer, turns)
            asked = len(chat_tokens(tokenizer, turns, add_generation_prompt=False))
            wanted = ssmlx.generate(model, tokenizer, prompt, max_tokens=7, decoding="plain")
            assert texts_of(chunks, choices) == [wanted] * choices
            # Of several choices the first one's is told.
            assert usage["prompt_tokens_details"]["cached_tokens"] == expected_reuse
            answers.append(wanted)
            expected_reuse = asked


def chunks_of(response):
    """A reply's chunks, the last with its usage; a whole one is one chunk."""
    assert response.status_code == 200, response.text
    if not response.headers["content-type"].startswith("text/event-stream"):
        return [response.json()]
    data = [line[6:] for line in response.text.split("\n") if line.startswith("data: {")]
    return [json.loads(one) for one in data]


def texts_of(chunks, choices):
    """The text of each choice."""
    texts = [""] * choices
    for chunk in chunks:
        for choice in chunk["choices"]:
            said = choice.get("message", choice.get("delta"))
            texts[choice["index"]] += said.get("content") or ""
    return texts


@pytest.mark.parametrize("drafting", [{}, {"decoding": "speculative", "drafter": "prompt-lookup"}])
def test_an_engines_answers_in_turns_are_those_of_each_alone(folder, drafting):
    """One of which is cancelled in the middle."""
    questions = [PROMPT, [5, 6, 5, 6, 5], "w1 w2"]
    with ssmlx.Engine(str(folder), dtype="float32") as engine:
        alone = {"max_tokens": 24, "decoding": "plain", "deterministic": True}
        expected = [tokens_of(engine.stream(question, **alone)) for question in questions]
        for _ in range(2):
            drafts = [
                {**drafting, "prompt_lookup": PromptLookupConfig(reference=tuple(tokens))}
                for tokens in expected
            ]
            pairs = zip(questions, drafts, strict=True)
            open_answers = [engine.stream(one, max_tokens=24, **draft) for one, draft in pairs]
            heard = [[] for _ in questions]
            for turn in range(24):
                for said, answer in zip(heard, open_answers, strict=True):
                    said += (token for one in islice(answer, 1) for token in one.tokens)
                if turn == 2:
                    open_answers[1].close()
            assert heard[0] == expected[0] and heard[2] == expected[2]
            assert 0 < len(heard[1]) <= 24 and heard[1] == expected[1][: len(heard[1])]


@pytest.mark.parametrize("name", SOME)
def test_a_fork_of_a_cache_goes_on_by_itself(name):
    """Of the text's end, of a place within the last chain, and of a mark where there is one."""
    model = make_model(name)
    text = [*PROMPT, *decoded(model, 40, decoding="plain")[0]]
    cache = model.make_cache()
    prefill(model, text[:8], cache)
    cache.mark()
    prefill(model, text[8:20], cache)
    root = 20
    call = verify(model, chain_of(text, root, 2), cache)
    mx.eval(call.arrays_to_read())
    cache.commit_accepted(3)
    marked = 8 if cache.longest_keepable(8) == 8 else 0
    forks = {place: cache.fork(place) for place in (23, 22, *([8] if marked else []))}
    with pytest.raises(ValueError, match="24"):
        cache.fork(24)

    def goes_on(one):
        place = one.offset
        found, _ = decoded(model, 12, text[place : max(place + 1, len(PROMPT))], one, text[:place])
        begin = max(place + 1, len(PROMPT))
        assert found == text[begin : begin + 12][: len(found)]

    # In both orders: a fork before the cache that it was made of, and behind it.
    goes_on(forks[23])
    goes_on(cache)
    for place in (22, *([8] if marked else [])):
        assert forks[place].offset == place
        goes_on(forks[place])


@pytest.mark.parametrize("kind", ["sampled", *slow("greedy")])
def test_a_prompt_cache_of_a_recurrent_model_gives_what_a_cold_one_does(folder, kind):
    settings = {"max_tokens": 12, **(SAMPLED if kind == "sampled" else {})}
    first = list(PROMPT)
    with ssmlx.Engine(str(folder), dtype="float32") as engine:
        answer = tokens_of(engine.stream(first, **settings))
        second = [*first, *answer, *PROMPT[:5]]
        _, known = engine.prompt_cache.take(engine.model(), second)
        assert known >= len(first) + len(answer) - 1, "all of the turn before"
        warm = tokens_of(engine.stream(second, **settings))
        again = tokens_of(engine.stream(first, **settings))  # the shorter text, behind the longer
        branch = [*first, *PROMPT[:3]]  # another text behind the same prompt
        branched = tokens_of(engine.stream(branch, **settings))
        assert engine.prompt_cache.take(engine.model(), branch)[1] >= len(first) - 1
    assert again == answer
    for prompt, found in ((second, warm), (branch, branched)):
        with ssmlx.Engine(str(folder), dtype="float32") as cold:
            assert tokens_of(cold.stream(prompt, **settings)) == found
