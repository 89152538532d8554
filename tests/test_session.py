"""Chats of many turns: the cache that is kept, and what may go wrong."""

import json
from dataclasses import replace

import mlx.core as mx
import pytest
from forwards import watch_forwards
from real import answer, tokens_of, words
from refusals import found_in, line_of, mentions, refusal
from tiny import busy_mlx_thread

import ssmlx
from ssmlx.errors import ContextLengthError, InputError
from ssmlx.generation.divergence import compare_logits, find_divergence
from ssmlx.mlx_thread import run_on_mlx_thread
from ssmlx.prompts import chat_tokens, encode_prompt, prompt_tokens

LENGTH = 12


@pytest.fixture
def make_session(loaded):
    def make_session(decoding="speculative", system=None):
        config = ssmlx.GenerateConfig(decoding=decoding, max_tokens=LENGTH)
        return ssmlx.ChatSession(*loaded, config, system=system)

    return make_session


def expected(session):
    """Plain decoding's answer to the last message, by a model that starts from nothing."""
    last = max(i for i, m in enumerate(session.messages) if m["role"] == "user")
    prompt = chat_tokens(session.tokenizer, session.messages[: last + 1])
    model = session.model
    tokenizer = session.tokenizer
    return answer(model, tokenizer, prompt, decoding="plain", max_tokens=LENGTH)[0]


@pytest.mark.parametrize("decoding", ["speculative", "plain"])
def test_turns_reuse_the_cache_and_answer_as_if_they_did_not(
    make_session, loaded, monkeypatch, decoding
):
    session = make_session(decoding)
    reused = []
    for text in ("w1 w2", words(9, 20), "w5"):
        before = session.totals.reused_tokens
        tokens = tokens_of(session.reply(text))
        reused.append(session.totals.reused_tokens - before)
        assert tokens == expected(session)
        assert session.messages[-1] == {
            "role": "assistant",
            "content": session.tokenizer.decode(tokens),
        }
    # user: w1 w2 | model:  -> 5 tokens, then the answer but for its last token or so
    assert reused[0] == 0
    assert reused[1] >= 5 + LENGTH - 1
    assert reused[2] >= reused[1] + 9 + LENGTH
    forwards = watch_forwards(monkeypatch, loaded[0])
    turn = list(session.reply("w6 w7"))
    new = turn[-1].prompt_tokens - (session.totals.reused_tokens - sum(reused))
    assert new <= 8  # the end of the last answer, | user: w6 w7 | model:
    assert forwards.pieces[0] == new - 1
    if decoding == "plain":
        assert len(forwards) == 1 + LENGTH + 1, "the last call was launched ahead"
    assert turn[-1].prompt_tokens == len(chat_tokens(session.tokenizer, session.messages[:-1]))
    # What came from the cache took no time.
    assert turn[-1].prompt_tps == pytest.approx(new / turn[-1].prefill_seconds)


def test_progress_tells_only_what_is_processed(make_session):
    session = make_session()
    told = []
    list(session.reply(words(40)))
    list(session.reply("w3", progress=lambda done, total: told.append((done, total))))
    assert told[0][0] == 0 and told[-1][0] == told[-1][1] < 10


@pytest.mark.parametrize("decoding", ["speculative", "plain"])
@pytest.mark.parametrize("segments", [1, 3])
def test_a_reply_closed_halfway_is_kept(make_session, decoding, segments):
    session = make_session(decoding)
    list(session.reply("w1 w2"))
    responses = session.reply("w8")
    heard = [next(responses) for _ in range(segments)]
    responses.close()
    assert session.messages[-1]["content"] == "".join(r.text for r in heard)
    assert session.totals.answers == 2
    assert tokens_of(session.reply("w9")) == expected(session)


@pytest.mark.parametrize("ended", ["cancelled", "dropped"])
def test_what_a_stopped_reply_leaves_is_forgotten_by_reset(make_session, ended):
    session = make_session()
    next(reply := session.reply("w1 w2"))
    with busy_mlx_thread() as pool:
        if ended == "cancelled":
            reply.cancel()
        del reply
        anew = pool.submit(session.reset)
    anew.result(), run_on_mlx_thread(lambda: None)  # behind what the reply leaves
    assert (session.messages, session.context_tokens) == ([], 0)
    assert tokens_of(session.reply("w5")) == expected(session)


def test_of_replies_asked_for_at_once_one_is_opened(make_session):
    session = make_session()
    with busy_mlx_thread() as pool:
        asked = [pool.submit(session.reply, text) for text in ("w1", "w2")]
    assert {type(one.exception()) for one in asked} == {type(None), InputError}
    (opened,) = (one.result() for one in asked if one.exception() is None)
    assert tokens_of(opened) == expected(session) and len(session.messages) == 2


def test_a_session_closed_while_it_is_asked_says_so(make_session):
    session = make_session()
    list(session.reply("w1"))
    with busy_mlx_thread() as pool:
        closing = pool.submit(session.close)
        asked = pool.submit(session.reply, "w2")
    refused = closing.exception() or asked.exception()  # whichever came first
    assert refused is None or line_of(refused) == refusal(session.compare)


def test_an_overflowing_turn_is_taken_back(make_session):
    session = make_session()
    list(session.reply("w1 w2"))
    messages = list(session.messages)
    line = refusal(lambda: list(session.reply(words(300))), kind=ContextLengthError)
    assert mentions(line, "256")
    assert session.messages == messages and session.totals.answers == 1
    assert tokens_of(session.reply("w5")) == expected(session)


def test_a_chat_goes_on_until_the_context_is_full(make_session):
    session = make_session()
    reasons = []
    with pytest.raises(ContextLengthError):
        for turn in range(40):
            reasons.append(list(session.reply(words(9, turn)))[-1].finish_reason)
    assert set(reasons) <= {"length", "context"} and len(reasons) > 8
    session.reset()
    assert tokens_of(session.reply("w1")) == expected(session)


def test_reset_and_system_start_anew(make_session):
    session = make_session()
    first = tokens_of(session.reply("w1 w2"))
    session.reset()
    assert (session.messages, session.context_tokens) == ([], 0)
    assert tokens_of(session.reply("w1 w2")) == first
    session.reset("w30 w31 w32")
    assert session.messages == [{"role": "system", "content": "w30 w31 w32"}]
    told = tokens_of(session.reply("w1 w2"))
    assert told == expected(session) != first
    assert told == tokens_of(make_session(system="w30 w31 w32").reply("w1 w2"))


@pytest.mark.parametrize("system", [None, "w30 w31"])
def test_a_conversation_that_is_given_goes_on_as_if_it_was_typed(make_session, system):
    typed = make_session(system=system)
    for text in ("w1 w2", "w7"):
        list(typed.reply(text))
    given = json.loads(json.dumps(typed.messages))
    model, tokenizer = typed.model, typed.tokenizer
    config = ssmlx.GenerateConfig(max_tokens=LENGTH)
    other = ssmlx.ChatSession(model, tokenizer, config, messages=given)
    assert (other.system, other.messages) == (system, typed.messages) == (system, given)
    anew = make_session(system=system)
    list(anew.reply("w1 w2"))
    held = anew.context_tokens
    anew.reset(system, given[system is not None :])
    assert held - 2 <= anew.context_tokens <= held  # it begins as the one before
    found = tokens_of(typed.reply("w5"))
    assert tokens_of(other.reply("w5")) == tokens_of(anew.reply("w5")) == found
    assert found == expected(other) and len(given) == len(other.messages) - 2


TURN = {"role": "user", "content": "w1"}


@pytest.mark.parametrize(
    ("system", "messages", "named"),
    [
        (None, "w1", "messages"),
        (None, [{"role": "user"}], "messages[0].content"),
        (None, [TURN, {"content": "w1"}], "messages[1].role"),
        (None, [TURN, {"role": "friend", "content": "w1"}], "friend"),
        ("w1", [{"role": "system", "content": "w2"}, TURN], "system"),
        ("\ud800", [], r"'\ud800'"),
        (None, [{"role": "user", "content": "\ud800"}], r"'\ud800'"),
    ],
)
def test_turns_that_cannot_be_taken_leave_the_chat_as_it_is(make_session, system, messages, named):
    session = make_session(system="w8")
    list(session.reply("w1 w2"))
    before = list(session.messages), session.context_tokens
    assert mentions(refusal(session.reset, system, messages), named)
    assert (session.system, session.messages, session.context_tokens) == ("w8", *before)


def test_undo_takes_back_a_message_and_its_answer(make_session):
    session = make_session(system="w8")
    refusal(session.undo)
    first = tokens_of(session.reply("w1"))
    second = tokens_of(session.reply("w2 w3"))
    assert session.undo() == "w2 w3" and len(session.messages) == 3
    assert tokens_of(session.reply("w2 w3")) == second
    half = session.reply("w4")
    next(half)
    refusal(session.undo)  # it is still open
    half.close()
    assert [session.undo(), session.undo(), session.undo()] == ["w4", "w2 w3", "w1"]
    assert [turn["role"] for turn in session.messages] == ["system"]
    refusal(session.undo)
    assert tokens_of(session.reply("w1")) == first


def test_settings_change_between_replies(make_session):
    session = make_session()
    list(session.reply("w1"))
    before = session.config
    refusal(session.configure, replace(before, num_streams=99, decoding=None))
    refusal(session.configure, before, drafter="mtp")
    assert session.config is before
    session.configure(replace(before, max_tokens=3), drafter="prompt-lookup tokens=2")
    assert session.drafter == "prompt-lookup"
    found = tokens_of(session.reply("w2"))
    assert len(found) == 3 and found == expected(session)[:3]
    open_reply = session.reply("w3")
    refusal(session.configure, before)
    open_reply.close()


def test_an_adapters_own_template_asks_every_turn_alone(loaded, monkeypatch):
    """Unless a system says something; another adapter has all turns."""
    model, tokenizer = loaded
    said = "w8 {% for m in messages %}w5 w9 {{ m.content }} w12 {% endfor %}"
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", said)
    own = replace(model.config, prompt_template="w5 w9 {prompt} w12")
    monkeypatch.setattr(model, "config", own)
    session = ssmlx.ChatSession(*loaded, ssmlx.GenerateConfig(max_tokens=3))
    for text in ("w1", "w2", "w1"):
        prompt = prompt_tokens(text, *loaded)
        assert tokens_of(session.reply(text)) == answer(*loaded, prompt, max_tokens=3)[0]
        assert session.context_tokens <= len(prompt) + 3 and session.compare().same_tokens
    assert session.asks_alone and not ssmlx.ChatSession(*loaded, system="w3").asks_alone
    monkeypatch.setattr(model, "config", replace(own, prompt_template=None))
    found = tokens_of(session.reply("w4"))
    turns = {"messages": session.messages[:-1]}
    assert found == answer(*loaded, encode_prompt(turns, *loaded), max_tokens=3)[0]
    assert len(session.messages) == 8 and not session.asks_alone


def test_template_arguments_hold_in_every_turn(loaded, monkeypatch):
    tokenizer = loaded[1]._tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", "{{ note }} " + tokenizer.chat_template)
    config = ssmlx.GenerateConfig(max_tokens=3)
    session = ssmlx.ChatSession(*loaded, config, template_args={"note": "w9 w9"})
    for text in ("w1", "w2"):
        last = list(session.reply(text))[-1]
        asked = chat_tokens(loaded[1], session.messages[:-1], template_args={"note": "w9 w9"})
        assert last.prompt_tokens == len(asked)
    assert session.compare().same_tokens
    session = ssmlx.ChatSession(*loaded, template_args={"note_": 1})
    assert mentions(found_in(refusal(session.reply, "w1")), "note_")


@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_where_answers_part_the_two_tokens_are_weighed(loaded, temp):
    model, _ = loaded
    config = ssmlx.GenerateConfig(max_tokens=6, temp=temp, seed=3, decoding="plain")
    prompt = [3, 4, 5]
    plain = answer(*loaded, prompt, max_tokens=6, temp=temp, seed=3, decoding="plain")[0]
    cache = model.make_cache()
    logits = model.append(mx.array([*prompt, *plain[:2]]), cache).logits[-1]
    likely, other = (int(token) for token in mx.argsort(-logits)[:2])

    def parting(tokens, ends=(0,)):
        return find_divergence(model, prompt, plain, tokens, config, ends)

    assert parting(plain) is None
    swapped = other if plain[2] != other else likely
    found = parting([*plain[:2], swapped, *plain[3:]])
    assert (found.place, found.plain, found.other) == (2, plain[2], swapped)
    assert not found.is_near_tie and found.limit == 0
    if not temp:
        assert found.gap == pytest.approx(float(logits[likely] - logits[other]), rel=1e-4)
    # An answer that has ended chose the likeliest of the tokens that end one.
    ended = parting(plain[:2], ends=(0, swapped))
    assert ended.place == 2 and ended.other in (0, swapped)


def test_rounding_reaches_as_far_as_the_type_is_coarse():
    logits = mx.array([16.0, 15.9, 3.0])
    limits = [
        compare_logits(0, 0, 1, logits, None, dtype).limit
        for dtype in (mx.float32, mx.float16, mx.bfloat16)
    ]
    assert limits == pytest.approx([0, 16 / 256, 16 / 32])
    assert compare_logits(0, 0, 1, logits, None, mx.bfloat16).is_near_tie
    assert not compare_logits(0, 0, 1, logits, None, mx.float16).is_near_tie
    # What was drawn is decided by the noise as well.
    noise = mx.array([[0.0, 0.09, 0.0]])
    assert compare_logits(0, 0, 1, logits, noise, mx.float16).gap == pytest.approx(0.01, abs=1e-4)


@pytest.mark.parametrize("decoding", [None, "plain", "speculative"])
def test_compare_answers_in_turns_beside_the_chat(make_session, decoding):
    session = make_session(decoding)
    refusal(session.compare)  # nothing was said yet
    list(session.reply("w1 w2"))
    held = session.context_tokens
    messages = list(session.messages)
    result = session.compare()
    low, high = result.interval
    assert result.same_tokens and low <= result.speed_up <= high and len(result.ratios) == 4
    assert result.plain.target_calls == LENGTH >= result.speculative.target_calls
    assert (session.context_tokens, session.messages) == (held, messages)
