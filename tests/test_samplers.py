"""A caller's sampler and logits processors: followed token by token, as mlx-lm follows them."""

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from real import answer
from refusals import found_in, mentions, refusal
from tiny import VOCAB, make_base, make_model, make_tokenizer

import ssmlx
from ssmlx.generation import samplers

PROMPT = [3, 1, 4, 1, 5]
LENGTH = 20


def second_likeliest(logprobs):
    return mx.argsort(logprobs, axis=-1)[:, -2]


def not_the_newest(tokens, logits):
    return mx.where(mx.arange(logits.shape[-1]) == tokens[-1], -mx.inf, logits)


def only_after_so_many(tokens, logits):
    return mx.where(mx.arange(logits.shape[-1]) == tokens.size % VOCAB, logits + 30, logits)


ASKED = {
    "sampler": {"sampler": second_likeliest},
    "greedy": {"sampler": make_sampler(temp=0.0)},
    "processor": {"logits_processors": [not_the_newest]},
    "in order": {"logits_processors": [only_after_so_many, not_the_newest]},
    "penalties": {"logits_processors": make_logits_processors({3: 4.0}, 1.7)},
    "both": {"sampler": second_likeliest, "logits_processors": [not_the_newest]},
}


@pytest.fixture(scope="module")
def model():
    return make_model("llama", "streams")  # whose answers are the base's


@pytest.mark.parametrize("case", ASKED)
def test_a_callers_functions_choose_what_they_choose_in_mlx_lm(model, case):
    tokenizer = make_tokenizer()
    given = mlx_lm.stream_generate(make_base(), tokenizer, PROMPT, max_tokens=LENGTH, **ASKED[case])
    expected = [one.token for one in given]
    found, last = answer(model, tokenizer, PROMPT, max_tokens=LENGTH, **ASKED[case])
    assert found == expected
    assert (last.target_calls, last.drafted_tokens) == (LENGTH, 0)


def test_a_later_turn_goes_on_from_its_cache(model):
    tokenizer = make_tokenizer()
    asked = {"max_tokens": 6, "logits_processors": [only_after_so_many], "temp": 0}
    whole, _ = answer(model, tokenizer, PROMPT, **asked)
    cache = model.make_cache()
    first, _ = answer(model, tokenizer, PROMPT, **{**asked, "max_tokens": 2}, cache=cache)
    known = [*PROMPT, *first][: cache.offset]
    more = {"cache": cache, "context": known}
    later, _ = answer(model, tokenizer, first[-1:], **{**asked, "max_tokens": 4}, **more)
    assert first + later == whole
    said = refusal(answer, model, tokenizer, [1], cache=cache, sampler=second_likeliest)
    assert mentions(said, "context")


def test_chance_is_drawn_from_the_callers_random_state(model):
    answers = []
    for seed in (1, 2, 1):
        mx.random.seed(seed)
        asked = {"max_tokens": LENGTH, "sampler": make_sampler(temp=1.5)}
        answers.append(answer(model, make_tokenizer(), PROMPT, **asked)[0])
    assert answers[0] == answers[2] != answers[1]


def test_processors_come_before_settings_and_a_sampler_in_their_place(model):
    tokenizer = make_tokenizer()
    asked = {"temp": 0.9, "seed": 4, "max_tokens": LENGTH}
    plain, _ = answer(model, tokenizer, PROMPT, **asked)
    untouched = [lambda tokens, logits: logits]
    assert answer(model, tokenizer, PROMPT, logits_processors=untouched, **asked)[0] == plain
    for name, value in {"temp": 0.9, "seed": 4, "logprobs": 2, "logit_bias": {1: 2.0}}.items():
        more = {"sampler": second_likeliest, name: value}
        said = refusal(ssmlx.stream_generate, model, tokenizer, PROMPT, **more)
        assert mentions(found_in(said), name, "sampler")


def test_that_nothing_drafts_is_said_once(model, caplog):
    samplers._log_once.cache_clear()
    with caplog.at_level("INFO", logger="ssmlx"):
        for _ in range(2):
            asked = {"max_tokens": 2, "sampler": second_likeliest}
            ssmlx.generate(model, make_tokenizer(), PROMPT, **asked)
    (line,) = [one.getMessage() for one in caplog.records if "sampler" in one.getMessage()]
    assert mentions(line, "sampler", "logits_processors")


def test_an_error_of_a_callers_function_is_its_own(model):
    tokenizer = make_tokenizer()

    def broken(tokens, logits):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        answer(model, tokenizer, PROMPT, logits_processors=[broken])
    said = refusal(answer, model, tokenizer, PROMPT, sampler=lambda logprobs: logprobs[0])
    assert mentions(found_in(said), "sampler", str(VOCAB))
