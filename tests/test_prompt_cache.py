"""Prompts that are processed once: warm answers are the cold ones, in memory and from disk."""

import random
from functools import lru_cache

import ssmlx  # first: it prefers OpenBLAS

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from tiny import (
    RESIDUAL,
    VOCAB,
    first_tokens,
    make_adapter,
    make_base,
    make_model,
    make_tokenizer,
    slow,
)
from tiny_heads import make_heads

from ssmlx.api import token_steps
from ssmlx.drafters.draft_model import DraftModel
from ssmlx.loading.attach import fuse_streams, swap_adapter
from ssmlx.loading.prompt_files import PromptKey
from ssmlx.model.backbone import Backbone
from ssmlx.model.streams import StreamFusedModel
from ssmlx.prompt_cache import PromptCache
from ssmlx.settings import LookaheadConfig, TreeConfig

LENGTH = 10


@lru_cache(maxsize=4)
def model_of(scope="streams", seed=0):
    return make_model("llama", scope, seed=seed)


@lru_cache(maxsize=1)
def drafters():
    backbone = StreamFusedModel(Backbone(make_base())).backbone
    small = LookaheadConfig(window=3, ngram=3, guesses=3)
    return {
        "plain": {"decoding": "plain"},
        "second-pass": {"drafter": "streams", "stream_schedule": "second-pass"},
        "fused": {"drafter": "streams", "stream_schedule": "fused", "tree": TreeConfig(size=8)},
        "prompt-lookup": {"drafter": "prompt-lookup"},
        "lookahead": {"drafter": "lookahead", "lookahead": small},
        "draft-model": {"draft_model": DraftModel(make_base(seed=50))},
        "medusa": {"heads": make_heads("medusa", backbone)},
        "mlp-speculator": {"heads": make_heads("mlp-speculator", backbone)},
    }


def text(count, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


def cold(model, tokens, **settings):
    return first_tokens(token_steps(model, tokens, model.make_cache(), **settings), LENGTH)[0]


def warm(prompts, model, tokens, **settings):
    """An answer, which is kept with its prompt, and how many of the prompt's tokens were known."""
    cache, known = prompts.take(model, tokens)
    assert cache.offset == known < len(tokens)
    steps = token_steps(model, tokens[known:], cache, context=tokens[:known], **settings)
    answer, _ = first_tokens(steps, LENGTH)
    prompts.put(model, [*tokens, *answer], cache)
    return answer, known


def rows_of(cache):
    return [np.array(rows) for rows in cache.rows(cache.offset)]


# --- In memory ---


@pytest.mark.parametrize("name", drafters())
def test_a_warm_answer_is_the_cold_one_with_every_drafter(name):
    model, prompts, settings = model_of(), PromptCache(), drafters()[name]
    start, other = text(40), text(300, seed=1)
    answer = cold(model, start, decoding="plain")
    cases = {  # a prompt, and how many of its tokens are known by then
        "the first": (start, 0),
        "the second time": (start, 39),
        "longer, with its answer": ([*start, *answer[:-1], 3, 4], 40 + LENGTH - 1),
        "shorter": (start[:17], 16),
        "partly the same": ([*start[:20], *text(30, seed=2)], 20),
        "another": (other, 0),
        "one token": (start[:1], 0),
        "the first again": (start, 39),
    }
    for case, (tokens, expected) in cases.items():
        found, known = warm(prompts, model, tokens, **settings)
        assert found == cold(model, tokens, decoding="plain"), case
        # How far an answer's tokens are in the cache is the drafter's to say.
        assert known == expected or (case.startswith("longer") and known > 40), case


SAMPLED = {"temp": 1.0, "seed": 3, "repetition_penalty": 1.3}


@pytest.mark.parametrize("sampling", [{}, *slow(SAMPLED)])
def test_drafters_take_over_from_each_other(sampling):
    """In an order and its reverse: each grows the same text by an answer of its own."""
    model = model_of()
    for names in (list(drafters()), list(drafters())[::-1]):
        prompts, tokens = PromptCache(), text(30, seed=5)
        for turn, name in enumerate(names):
            answer, known = warm(prompts, model, tokens, **drafters()[name], **sampling)
            assert answer == cold(model, tokens, decoding="plain", **sampling), name
            assert known == 0 if turn == 0 else known >= len(tokens) - 8
            tokens = [*tokens, *answer, 1 + turn]


def test_a_full_context_is_warm_too():
    model, tokenizer, tokens = model_of(), make_tokenizer(), text(505)
    for decoding in ("plain", "streaming", "plain"):
        prompts = PromptCache()
        for known in (0, 504):
            cache, found = prompts.take(model, tokens)
            assert found == known
            settings = {"decoding": decoding, "max_tokens": 100}
            responses = list(
                ssmlx.stream_generate(
                    model,
                    tokenizer,
                    tokens[known:],
                    cache=cache,
                    context=tokens[:known],
                    **settings,
                )
            )
            assert responses[-1].finish_reason == "context"
            assert responses[-1].cached_tokens == known
            prompts.put(model, tokens, cache)


def test_who_takes_a_prompt_changes_it_for_nobody():
    model, prompts, tokens = model_of(), PromptCache(), text(300)
    warm(prompts, model, tokens)
    first, _ = prompts.take(model, tokens)
    before = rows_of(first)
    one, two = ([*tokens[:-1], *text(9, seed)] for seed in (7, 8))
    mixed = []
    for prompt in (one, two):  # both at once, a step each in turns
        cache, known = prompts.take(model, prompt)
        assert known >= len(tokens) - 1
        mixed.append(token_steps(model, prompt[known:], cache, decoding="plain"))
    answers = list(zip(*([next(steps)[0] for steps in mixed] for _ in range(LENGTH)), strict=True))
    assert [list(answer) for answer in answers] == [cold(model, one), cold(model, two)]
    again, _ = prompts.take(model, tokens)
    for rows in (rows_of(first), rows_of(again)):
        assert all(np.array_equal(a, b) for a, b in zip(rows, before, strict=True))


def test_the_longest_unused_goes_first_and_may_still_be_in_use():
    model, length = model_of(), 300
    unit = PromptCache()
    warm(unit, model, text(length))
    prompts = PromptCache(max_bytes=2 * unit.nbytes)
    a, b, c = (text(length, seed) for seed in (1, 2, 3))
    warm(prompts, model, a), warm(prompts, model, b)
    in_use, known = prompts.take(model, b)
    warm(prompts, model, a)  # now b is the longest unused
    warm(prompts, model, c)
    assert len(prompts) == 2 and prompts.nbytes <= prompts.max_bytes
    assert prompts.take(model, a)[1] == prompts.take(model, c)[1] == length - 1
    assert prompts.take(model, b)[1] == 0
    steps = token_steps(model, b[known:], in_use, context=b[:known])
    assert first_tokens(steps, LENGTH)[0] == cold(model, b)
    tiny = PromptCache(max_bytes=unit.nbytes // 2)  # too large for it: nobody else is thrown out
    warm(tiny, model, a[:30])
    warm(tiny, model, b)
    assert tiny.take(model, a[:30])[1] == 29 and tiny.take(model, b)[1] == 0


def test_what_another_extends_is_dropped_and_bytes_are_those_held():
    model, prompts, tokens = model_of(), PromptCache(), text(300)
    warm(prompts, model, tokens[:250])
    warm(prompts, model, tokens)
    warm(prompts, model, tokens[:100])
    assert len(prompts) == 3  # their answers differ
    cache, _ = prompts.take(model, tokens)
    prompts.put(model, tokens[:-1], cache)
    assert len(prompts) == 3  # it is covered
    mx.clear_cache()
    before = mx.get_active_memory()
    held = prompts.nbytes
    del cache
    prompts.close()
    assert prompts.nbytes == len(prompts) == 0
    assert before - mx.get_active_memory() == pytest.approx(held, rel=0.02)


# --- Whose they are ---


def test_prompts_belong_to_weights_and_to_lora_on_every_row():
    backbone = Backbone(make_base())
    base = StreamFusedModel(backbone)
    streams, lora = (make_adapter(backbone, scope, **RESIDUAL) for scope in ("streams", "all"))
    key, other = PromptKey.of(base), make_adapter(backbone, "all", seed=9)
    chat = fuse_streams(backbone, streams, merge_lora=True)
    assert PromptKey.of(chat) == key
    sql = swap_adapter(chat, lora, merge_lora=True)
    merged = PromptKey.of(sql)
    apart = swap_adapter(sql, lora, merge_lora=False)
    assert PromptKey.of(apart) == merged and merged.lora != key.lora
    assert merged.weights == key.weights
    assert PromptKey.of(swap_adapter(apart, other)).lora not in (key.lora, merged.lora)
    twin, changed = (StreamFusedModel(Backbone(make_base(**more))) for more in ({}, {"seed": 4}))
    assert PromptKey.of(twin) == key != PromptKey.of(changed)
    wider = StreamFusedModel(Backbone(make_base(rope_theta=999.0)))
    assert PromptKey.of(wider).weights != key.weights
    half = make_base()
    half.set_dtype(mx.float16)
    assert PromptKey.of(StreamFusedModel(Backbone(half))).dtype == "float16"


def test_models_share_a_cache_and_each_finds_its_own():
    prompts, tokens = PromptCache(), text(30)
    for model in (model_of("all"), model_of("streams"), model_of("all", seed=3)):
        for known in (0, 29):
            answer, found = warm(prompts, model, tokens)
            assert (answer, found) == (cold(model, tokens), known)
    base = StreamFusedModel(Backbone(make_base()))
    answer, known = warm(prompts, base, tokens)  # what `streams` left is the base's own
    assert known == 29 and answer == cold(base, tokens)
