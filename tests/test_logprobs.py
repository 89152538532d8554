"""Log probabilities: the model's own, for every token, however it came about."""

import json
import math
from itertools import cycle

import mlx.core as mx
import numpy as np
import pytest
from device_log import READ, watched
from drafter_cases import DRAFTERS, drafter_settings, streams_model
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors
from tiny import VOCAB, assert_close, make_base, make_tokenizer

from ssmlx.api import answer_record, stream_generate
from ssmlx.model.backbone import Backbone
from ssmlx.model.streams import StreamFusedModel
from ssmlx.settings import AcceptanceConfig

PROMPT = [3, 1, 4, 1, 5]
LENGTH = 18
BIASED = {"logit_bias": {3: 2.0, 7: -math.inf}, "repetition_penalty": 1.3, "presence_penalty": 0.4}
SAMPLING = {
    "greedy": {},
    "sampled": {"temp": 0.8, "top_k": 6, "seed": 1},
    "penalised": {"temp": 1.2, "top_p": 0.9, "seed": 3, **BIASED},
}


def answer(model, prompt=PROMPT, tokenizer=None, **settings):
    """The segments of an answer."""
    settings = {"max_tokens": LENGTH, "logprobs": 3, **settings}
    return list(stream_generate(model, tokenizer or make_tokenizer(), prompt, **settings))


def told(segments):
    """The tokens, their log probabilities, the likeliest tokens and theirs."""
    for one in segments:
        assert [entry.token for entry in one.logprobs] == list(one.tokens)
    entries = [entry for one in segments for entry in one.logprobs]
    tokens = [entry.token for entry in entries]
    top = [[token for token, _ in entry.top] for entry in entries]
    likeliest = [[logprob for _, logprob in entry.top] for entry in entries]
    return tokens, [entry.logprob for entry in entries], top, likeliest


def theirs(tokens, **settings):
    """mlx-lm's log probabilities [T, V] along an answer, which its sampler is made to say."""
    processors = make_logits_processors(**settings)
    forced = iter(tokens)
    steps = generate_step(
        mx.array(PROMPT),
        make_base(),
        max_tokens=len(tokens),
        logits_processors=processors,
        sampler=lambda _: mx.array([next(forced, 0)]),
    )
    return np.stack([np.array(logprobs) for _, logprobs in steps])


@pytest.mark.parametrize("settings", [{}, {"temp": 1.2, "top_p": 0.8, "seed": 3, **BIASED}])
def test_they_are_mlx_lms(settings):
    model = StreamFusedModel(Backbone(make_base()))
    tokens, logprobs, top, likeliest = told(answer(model, logprobs=100, **settings))
    names = ("logit_bias", "repetition_penalty", "presence_penalty")
    expected = theirs(tokens, **{name: settings[name] for name in names if name in settings})
    assert_close(logprobs, expected[range(LENGTH), tokens])
    for row, ids, found in zip(expected, top, likeliest, strict=True):
        assert sorted(ids) == [i for i in range(VOCAB) if row[i] > -np.inf]
        assert found == sorted(found, reverse=True)
        assert_close(found, row[ids])


@pytest.mark.parametrize(("name", "sampling"), [*zip(DRAFTERS, cycle(SAMPLING))])
def test_every_drafter_tells_what_plain_decoding_tells(name, sampling):
    model = streams_model()
    settings = SAMPLING[sampling]
    plain = told(answer(model, decoding="plain", **settings))
    segments = answer(model, **settings, **drafter_settings()[name])
    tokens, logprobs, top, likeliest = told(segments)
    assert (tokens, top) == (plain[0], plain[2])
    assert_close(logprobs, plain[1])
    assert_close(likeliest, plain[3])
    if name == "streams":
        assert max(len(one.tokens) for one in segments) > 1, "a run was accepted"


def test_typical_acceptance_tells_them_of_what_it_takes():
    """Of tokens that the target would not have written, too: against the text itself."""
    model = streams_model()
    lossy = AcceptanceConfig(kind="typical", epsilon=0.01, delta=0.05)
    segments = answer(model, temp=1.0, seed=1, acceptance=lossy, max_tokens=30)
    assert max(len(one.tokens) for one in segments) > 2
    tokens, logprobs, *_ = told(segments)
    whole = mx.array([*PROMPT, *tokens])
    rows = model.backbone.append(whole, model.make_cache()).logits
    rows = np.array(rows - mx.logsumexp(rows, axis=-1, keepdims=True))[len(PROMPT) - 1 : -1]
    assert_close(logprobs, rows[range(len(tokens)), tokens])


@pytest.mark.parametrize("cut", [{"max_tokens": 5}, {"stop": "w"}, {"end": 2}])
def test_an_answer_that_is_cut_tells_them_of_its_tokens_alone(cut):
    model = streams_model()
    end = cut.pop("end", None)
    free, *_ = told(answer(model))
    tokenizer = make_tokenizer(eos=None if end is None else free[end])
    if "stop" in cut:
        cut = {"stop": make_tokenizer().decode(free[3:5])}
    for decoding in ("plain", "speculative"):
        tokens, logprobs, *_ = told(answer(model, tokenizer=tokenizer, decoding=decoding, **cut))
        assert tokens == free[: len(tokens)] and len(logprobs) == len(tokens) < LENGTH


@pytest.mark.parametrize("decoding", ["plain", "speculative"])
def test_nothing_is_told_or_read_unless_asked(decoding):
    """They are another read of each call, however many are asked for."""
    model = streams_model()
    for asked, reads in ((None, 1), (0, 2), (4, 2)):
        answer(model, logprobs=asked, decoding=decoding)  # constants are computed once
        with watched() as device:
            segments = answer(model, logprobs=asked, decoding=decoding)
        assert device.events.count(READ) == reads * len(segments)
        assert all((one.logprobs is None) == (asked is None) for one in segments)
        assert ("logprobs" in answer_record({"prompt": "w1"}, segments)) == (asked is not None)
    assert all(not entry.top for one in answer(model, logprobs=0) for entry in one.logprobs)


def test_a_record_holds_them_as_json():
    segments = answer(streams_model(), logprobs=2, **BIASED)
    found = json.loads(json.dumps(answer_record({"prompt": "w1"}, segments), allow_nan=False))
    assert [one["token"] for one in found["logprobs"]] == found["tokens"]
    assert all(len(one["top"]) == 2 for one in found["logprobs"])
