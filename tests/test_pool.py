"""One bound for what running answers hold and what is kept: what goes first, and who is refused."""

import gc
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import ssmlx  # first: it prefers OpenBLAS

import mlx.core as mx  # isort: skip
import pytest
from forwards import watch_engine
from real import tokens_of, words, write_base, write_tiny_adapter
from refusals import line_of, mentions, refusal
from tiny import busy_mlx_thread, cost_shared_calls, make_base, make_model

from ssmlx.decoding.loop import prefill
from ssmlx.drafters.draft_model import DraftModel
from ssmlx.errors import InputError, NoRoomError
from ssmlx.generation import pool as pools
from ssmlx.generation.memory import cache_size_of
from ssmlx.generation.pool import Holding, MemoryPool, default_limit
from ssmlx.mlx_thread import run_on_mlx_thread

GIB = 2**30
PLAIN = {"decoding": "plain"}
STEP = 256  # tokens by which caches grow


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Texts of it may have 4,096 tokens."""
    return write_base(tmp_path_factory.mktemp("roomy") / "base", context=4096)


@pytest.fixture(scope="module")
def streams(base):
    return str(write_tiny_adapter(base.parent / "streams", base, scope="streams"))


@pytest.fixture(scope="module")
def unbounded(base, streams):
    with ssmlx.Engine(str(base), (streams,), dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def text_bytes(unbounded):
    """Bytes of the keys and values of so many tokens, without scratch rows."""
    return run_on_mlx_thread(lambda: cache_size_of(unbounded.model())).of


@pytest.fixture
def make_engine(base, streams):
    """Makes an engine of so many bytes."""
    with ExitStack() as stack:

        def make(num_bytes, **more):
            memory = num_bytes / GIB
            engine = ssmlx.Engine(str(base), (streams,), dtype="float32", memory_gb=memory, **more)
            return stack.enter_context(engine)

        yield make


@pytest.fixture(scope="module")
def small(base, streams):
    with ssmlx.Engine(str(base), (streams,), dtype="float32") as engine:
        yield engine


@pytest.fixture
def bounded(small):
    """Gives an engine so many bytes, with nothing kept; the same one each time."""

    def bound(num_bytes):
        small.prompt_cache.close()
        small.memory_pool.limit = num_bytes
        return small

    return bound


def prompt(count, first=0):
    return [8 + (first + 7 * n) % 50 for n in range(count)]


def num_free(engine):
    """Bytes that one more answer may hold, by the error of one that is far too large."""
    with pytest.raises(NoRoomError) as caught:
        engine.stream(prompt(4000), **PLAIN)
    return caught.value.free


@pytest.mark.parametrize("gib", [0, -1.0, float("nan"), float("inf")])
def test_memory_that_none_can_have_is_refused(base, gib):
    assert mentions(refusal(ssmlx.Engine, str(base), memory_gb=gib), "memory")


def test_the_default_is_a_share_of_what_the_machine_has_beside_weights(monkeypatch, tmp_path):
    whole = pools.usable_memory()
    used = mx.get_active_memory()
    assert default_limit() == pytest.approx((whole - used) * 2 / 3, rel=0.01)
    container = tmp_path / "memory.max"
    monkeypatch.setattr(pools, "CGROUP_LIMIT", container)
    for said, least in (("max\n", whole), (f"{2**30}\n", 2**30)):
        container.write_text(said)
        assert pools.usable_memory() == least
    container.write_text(f"{used // 2}\n")
    assert default_limit() == 2**28
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    told = {"max_recommended_working_set_size": 7 * 2**30}
    monkeypatch.setattr(mx, "device_info", lambda *_: told)
    assert pools.usable_memory() == 7 * 2**30


def test_what_a_text_takes_is_known_before_anything_is_computed():
    model = make_model()
    size = run_on_mlx_thread(lambda: cache_size_of(model))
    cache = model.make_cache()

    def filled():
        model.backbone.append(mx.array(prompt(300)), cache)
        mx.eval(cache.state)
        return cache.nbytes

    assert run_on_mlx_thread(filled) == size.of(300) == size.of(2 * STEP) == 2 * size.of(1)


def test_the_longest_unused_goes_first_and_no_more_than_has_to(bounded, text_bytes):
    engine = bounded(text_bytes(4 * STEP) + 100_000)
    texts = [prompt(150, first) for first in range(4)]
    for one in (*texts[:3], texts[0], texts[3]):
        list(engine.stream(one, max_tokens=2, **PLAIN))
    assert len(engine.prompt_cache) == 4
    list(engine.stream(prompt(150, 9), max_tokens=2, **PLAIN))
    known = [engine.prompt_cache.take(engine.model(), one)[1] for one in texts]
    assert known == [149, 0, 149, 149], "the first was used again"


def test_kept_prompts_go_before_an_answer_is_refused(bounded, text_bytes):
    engine = bounded(text_bytes(5 * STEP) + 100_000)
    pool = engine.memory_pool
    for first in range(4):
        list(engine.stream(prompt(150, first), max_tokens=2, **PLAIN))
    *_, last = engine.stream(prompt(400, 9), max_tokens=2, **PLAIN)
    assert last.finish_reason == "length"
    assert pool.running == 0 < pool.kept == engine.prompt_cache.nbytes <= pool.limit
    # One that needs everything gets everything.
    room = (pool.limit - 100_000) // text_bytes(STEP) * STEP - 70
    assert tokens_of(engine.stream(prompt(room, 5), max_tokens=2, **PLAIN))
    before = pool.kept
    with pytest.raises(NoRoomError) as caught:
        engine.stream(prompt(room + STEP, 5), max_tokens=2, **PLAIN)
    assert pool.kept == before > 0 == pool.running, "nothing went in vain"
    assert mentions(line_of(caught.value), "--memory") and isinstance(caught.value, InputError)
    assert caught.value.wanted > caught.value.limit == pool.limit


def test_who_asks_beside_others_is_refused_while_they_run(bounded, text_bytes, unbounded):
    engine = bounded(text_bytes(3 * STEP) + 100_000)
    expected = tokens_of(unbounded.stream(prompt(300, 1), max_tokens=20, **PLAIN))
    first = engine.stream(prompt(300, 1), max_tokens=20, **PLAIN)
    heard = [next(first)]
    for ask in (
        lambda: engine.stream(prompt(300, 2), max_tokens=20, **PLAIN),
        lambda: engine.score(prompt(300, 3)),
        lambda: engine.chat(max_tokens=4, **PLAIN).reply(words(300)),
    ):
        with pytest.raises(NoRoomError) as caught:
            ask()
        assert caught.value.wanted <= caught.value.limit, "it may be asked again"
    small = engine.stream(prompt(5), max_tokens=3, **PLAIN)
    assert len(tokens_of(small)) == 3
    heard += first
    assert tokens_of(heard) == expected
    assert tokens_of(engine.stream(prompt(300, 2), max_tokens=20, **PLAIN))
    (scored,) = engine.score(prompt(300, 3))
    assert len(scored.logprobs) == 299 and engine.memory_pool.running == 0


def test_a_claim_that_was_refused_is_refused_again(unbounded, text_bytes):
    model = unbounded.model()
    pool = MemoryPool(text_bytes(STEP) + 50_000)
    holding = Holding(pool, model.make_cache(), cache_size_of(model))
    pool.add_running(holding, 100)
    before = holding.count_bytes()
    for _ in range(2):
        with pytest.raises(NoRoomError):
            holding.claim(3 * STEP)
    assert holding.count_bytes() == before


def test_an_answer_that_outgrows_the_memory_ends_with_the_error(bounded, text_bytes, unbounded):
    """There is room for a piece of a cache, which it fills before its end."""
    settings = {"max_tokens": 120, **PLAIN}
    expected = tokens_of(unbounded.stream(prompt(160), **settings))
    engine = bounded(text_bytes(STEP) + 50_000)
    heard = []
    with pytest.raises(NoRoomError):
        for segment in engine.stream(prompt(160), **settings):
            heard.append(segment)
    found = tokens_of(heard)
    assert 20 < len(found) < STEP - 160 and found == expected[: len(found)]
    assert engine.memory_pool.running == 0
    again = tokens_of(engine.stream(prompt(160), max_tokens=5, **PLAIN))
    assert again == expected[:5]


@pytest.mark.parametrize("how", ["unread", "begun", "cancelled", "failed"])
def test_an_answer_that_is_given_up_leaves_its_memory(bounded, text_bytes, how, monkeypatch):
    engine = bounded(text_bytes(2 * STEP) + 100_000)
    forwards = watch_engine(monkeypatch, engine)
    forwards.before = lambda forward: 1 / 0 if how == "failed" else None
    for _ in range(2):
        answer = engine.stream(prompt(300), max_tokens=9, **PLAIN)
        assert engine.memory_pool.running >= text_bytes(300)
        if how == "begun":
            next(answer)
        elif how == "cancelled":
            answer.close()
        elif how == "failed":
            with pytest.raises(ZeroDivisionError):
                list(answer)
        del answer
        gc.collect()
        run_on_mlx_thread(lambda: None)  # after what it leaves
        assert engine.memory_pool.running == 0


def test_chats_between_replies_give_their_memory_to_others(bounded, text_bytes, unbounded):
    texts = [words(150), words(20, 3), words(30, 5)]
    settings = {"max_tokens": 6, "adapter": "none", **PLAIN}

    def heard(engine, others=()):
        chat = engine.chat(**settings)
        found = []
        for text in texts:
            found.append(tokens_of(chat.reply(text)))
            for other in others:
                list(engine.stream(other, max_tokens=2, **PLAIN))
        return found, chat

    expected, _ = heard(unbounded)
    engine = bounded(text_bytes(2 * STEP) + 150_000)
    found, chat = heard(engine, [prompt(300, 4)])
    assert found == expected and chat.context_tokens == 0, "it was let go"
    found, chat = heard(engine)
    assert found == expected and chat.context_tokens > 200
    held = engine.memory_pool.kept
    own = chat.cached[1].nbytes
    chat.reset()
    assert engine.memory_pool.kept == held - own < held
    list(chat.reply(texts[0]))
    held = engine.memory_pool.kept
    del chat
    gc.collect()
    assert engine.memory_pool.kept == held - own, "nobody has it any more"
    chats = [engine.chat(**settings) for _ in range(5)]
    for one in chats:
        list(one.reply(texts[0]))
    assert engine.memory_pool.kept <= engine.memory_pool.limit


def test_earlier_answers_are_kept_and_go_as_prompts_do(bounded, text_bytes):
    engine = bounded(text_bytes(4 * STEP))
    pool = engine.memory_pool
    settings = {"adapter": "none", "max_tokens": 4}
    answers = run_on_mlx_thread(lambda: engine.prompt_cache.answers(engine.model("none")))
    for first in range(12):
        list(engine.stream(prompt(5, first), **settings))
        assert pool.kept == engine.prompt_cache.nbytes
    assert answers.nbytes > 10_000 and len(engine.prompt_cache) == 12
    list(engine.stream(prompt(890), decoding="plain", **settings))
    assert pool.kept == engine.prompt_cache.nbytes <= pool.limit
    assert len(engine.prompt_cache) < 12, "the oldest are gone"
    expected = tokens_of(engine.stream(prompt(5, 1), deterministic=True, **settings))
    answers.free_memory()
    assert answers.nbytes == 0
    assert tokens_of(engine.stream(prompt(5, 1), **settings)) == expected


def test_a_closed_engine_leaves_a_given_prompt_cache_to_its_owner(
    make_engine, text_bytes, tmp_path
):
    mine, other = (ssmlx.PromptCache(folder=tmp_path / name) for name in ("mine", "other"))
    limit = text_bytes(4 * STEP) + 100_000
    first = make_engine(limit, prompt_cache=mine)
    list(first.stream(prompt(150), max_tokens=2, **PLAIN))
    list(first.stream(prompt(150), max_tokens=2, prompt_cache=other, **PLAIN))
    held = mine.nbytes
    assert first.memory_pool.kept == held + other.nbytes
    second = make_engine(limit, prompt_cache=mine)
    assert second.memory_pool.kept == 0, "it counts in the first"
    first.close(), first.close()
    assert first.memory_pool.kept == 0 and (len(mine), mine.nbytes) == (1, held)
    assert all(len([*(tmp_path / name).glob("*.safetensors")]) == 1 for name in ("mine", "other"))
    assert second.memory_pool.kept == held
    *_, last = second.stream(prompt(150), max_tokens=2, **PLAIN)
    assert last.cached_tokens == 149
    list(second.stream(prompt(800, 3), max_tokens=2, **PLAIN))
    assert len(mine) == 1, "the other had to go"
    assert mine.take(second.model("none"), prompt(150))[1] == 149, "to its file"
    second.close()
    third = make_engine(limit)
    list(third.stream(prompt(150), max_tokens=2, prompt_cache=mine, **PLAIN))
    assert third.memory_pool.kept == mine.nbytes > 0
    third.close()
    assert len(third.prompt_cache) == 0 < len(mine), "its own is gone"


def test_an_answer_of_a_closing_engine_counts_nowhere(base):
    mine = ssmlx.PromptCache()
    engine = ssmlx.Engine(str(base), dtype="float32", prompt_cache=ssmlx.PromptCache())
    half = engine.stream(prompt(9), prompt_cache=mine, max_tokens=9, **PLAIN)
    next(half)
    with busy_mlx_thread() as pool:
        asked = pool.submit(engine.stream, prompt(9), prompt_cache=mine, **PLAIN)
        pool.submit(engine.close)
    assert list(half) == [] == list(asked.result())
    assert mine.nbytes > 0 == engine.memory_pool.kept


def test_prompts_that_were_kept_before_count_from_an_engine_on(make_engine, text_bytes, unbounded):
    kept = ssmlx.PromptCache()
    model = unbounded.model()
    cache = model.make_cache()
    run_on_mlx_thread(lambda: prefill(model, prompt(200), cache))
    kept.put(model, prompt(200), cache)
    engine = make_engine(text_bytes(2 * STEP), prompt_cache=kept)
    assert engine.memory_pool.kept >= text_bytes(STEP)
    *_, last = engine.stream(prompt(250, 3), max_tokens=2, **PLAIN)
    assert last.cached_tokens == 0 and engine.memory_pool.kept <= engine.memory_pool.limit
    assert kept.take(engine.model(), prompt(200))[1] == 0, "it had to go"


def test_draft_models_and_indexes_count(bounded, text_bytes):
    draft = DraftModel(make_base(seed=5, vocab_size=64))
    engine = bounded(text_bytes(8 * STEP))
    held = {}
    for name, drafter in {"none": None, "lookup": "prompt-lookup", "draft": draft}.items():
        how = PLAIN if drafter is None else {"drafter": drafter, "decoding": "speculative"}
        with engine.stream(prompt(40), max_tokens=30, adapter="none", **how) as answer:
            for _ in range(3):
                next(answer)
            held[name] = engine.memory_pool.limit - num_free(engine)
    assert held["lookup"] > held["none"] and held["draft"] > held["none"]
    assert draft.cache_bytes > 0, "it waits for a next answer"
    list(engine.stream(prompt(7 * STEP), max_tokens=2, adapter="none", **PLAIN))
    assert draft.cache_bytes == 0, "which needed all"


@pytest.mark.slow
def test_what_is_counted_is_what_is_held(bounded, text_bytes, streams):
    """Eight threads ask at random, with drafts and without: MLX holds no more than the bound."""
    engine = bounded(text_bytes(16 * STEP))
    pool = engine.memory_pool
    asked = [
        (prompt(count, first), adapter)
        for count in (20, 300, 600)
        for first in (1, 2)
        for adapter in (streams, "none")
    ]

    def ask(text, adapter):
        return tokens_of(engine.stream(text, adapter=adapter, max_tokens=20))

    expected = [ask(*one) for one in asked]
    engine.prompt_cache.close()
    gc.collect()
    before = run_on_mlx_thread(mx.get_active_memory)
    most = []

    def ask_some(seed):
        found = {"right": 0, "wrong": 0, "refused": 0}
        for turn in range(4):
            number = (seed * 5 + turn * 7) % len(asked)
            try:
                is_right = ask(*asked[number]) == expected[number]
                found["right" if is_right else "wrong"] += 1
            except NoRoomError:
                found["refused"] += 1
            most.append(run_on_mlx_thread(mx.get_active_memory))
        return found

    with ThreadPoolExecutor(8) as threads:
        found = sum(map(Counter, threads.map(ask_some, range(8))), Counter())
    assert found["wrong"] == 0 and found["right"] > 8, found
    assert pool.running == 0 < pool.kept <= pool.limit
    assert max(most) - before < 1.25 * pool.limit, "activations, and buffers while they grow"
    gc.collect()
    held = run_on_mlx_thread(mx.get_active_memory) - before
    assert held <= 1.05 * pool.kept + 2**18


@pytest.mark.parametrize("fits", [False, True])
def test_long_and_short_texts_share_calls_where_there_is_room(
    bounded, text_bytes, unbounded, monkeypatch, fits
):
    """In shared calls all rows are as long as the longest, which counts."""
    texts = [prompt(500, 3), prompt(5, 1), prompt(5, 2)]
    alone = [tokens_of(unbounded.stream(one, max_tokens=12, **PLAIN)) for one in texts]
    apart = text_bytes(5 * STEP)  # 3 of the long one
    engine = bounded(apart + text_bytes((7 if fits else 1) * STEP))
    forwards = watch_engine(monkeypatch, engine)
    cost_shared_calls(monkeypatch, lambda rows: 0.01)
    answers = [engine.stream(one, max_tokens=12, **PLAIN) for one in texts]
    heard = [[] for _ in texts]
    taken = []
    for _ in range(12):
        for own, answer in zip(heard, answers, strict=True):
            own.append(next(answer))
        taken.append(engine.memory_pool.limit - num_free(engine))
    assert [tokens_of(own) for own in heard] == alone
    assert (max(one.rows for one in forwards) == 3) == fits
    assert (max(taken) > apart + text_bytes(STEP)) == fits, max(taken) / apart


# --- the server ---


@pytest.fixture
def client(bounded, text_bytes):
    pytest.importorskip("starlette")
    from asking import client_of

    from ssmlx.server.app import make_app
    from ssmlx.server.handler import RequestHandler

    engine = bounded(text_bytes(STEP) + 60_000)
    prompts = ssmlx.PromptCache(None)
    handler = RequestHandler(engine, {"tiny": "none"}, [prompts])
    config = ssmlx.GenerateConfig(max_tokens=120, decoding="plain")
    yield client_of(make_app(handler, config))
    prompts.close()


LONG = words(250)
TURNS = [{"role": "user", "content": LONG}]
ASKED = {
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/completions": {"prompt": LONG},
    "/v1/messages": {"messages": TURNS, "max_tokens": 9},
    "/v1/responses": {"input": LONG},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_each_api_has_503_where_there_is_no_room(client, path, stream):
    found = client.post(path, json={**ASKED[path], "stream": stream})
    assert found.status_code == 503 and found.headers["content-type"] == "application/json"
    told = found.json()
    assert told["type"] == "error" and told["error"]["type"] == "api_error"
    assert told["error"]["code"] == "no_room" and told["error"]["message"]
    assert "retry-after" not in found.headers, "it never fits"
    assert found.headers["x-should-retry"] == "false"
    assert client.post(path, json={**ASKED[path], **short(path)}).status_code == 200


def short(path, text="w1", max_tokens=4):
    turns = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
    return {
        "/v1/completions": {"prompt": text, "max_tokens": max_tokens},
        "/v1/responses": {"input": text, "max_output_tokens": max_tokens},
    }.get(path, turns)


@pytest.mark.parametrize("path", ASKED)
def test_an_answer_that_outgrows_the_memory_ends_its_stream_with_an_error(client, path):
    """120 tokens are asked for, and some 40 fit."""
    large = short(path, words(150), 120)
    if path == "/v1/messages":
        found = client.post(path, json=large)
        assert found.status_code == 503 and found.json()["error"]["code"] == "no_room"
    found = client.post(path, json={**large, "stream": True})
    assert found.status_code == 200
    told = dict(one.split("\n") for one in found.text.strip().split("\n\n") if "event: " in one)
    error = json.loads(told["event: error"].removeprefix("data: "))["error"]
    assert error["code"] == "no_room"
    assert ("event: response.failed" in told) == (path == "/v1/responses")
    assert found.text.count("\ndata: ") > 20, "what fitted was told"


def test_one_of_several_choices_has_no_room(client):
    body = {"prompt": words(100), "n": 4, "temperature": 1, "seed": 1, "max_tokens": 60}
    found = client.post("/v1/completions", json=body)
    assert found.status_code == 503 and found.headers["retry-after"] == "1"
    assert client.post("/v1/completions", json={**body, "n": 1}).status_code == 200


def test_the_gauge_tells_what_texts_take(client, text_bytes):
    def gauges():
        told = client.get("/metrics").text.splitlines()
        found = [one.partition("{kind=")[2] for one in told if one.startswith("ssmlx_memory")]
        return {one[1 : one.index('"', 1)]: float(one.split()[-1]) for one in found}

    gc.collect()  # what earlier tests kept
    assert gauges() == {"running": 0, "kept": 0, "limit": text_bytes(STEP) + 60_000}
    for n in range(6):
        asked = {"prompt": words(30, 5 * n), "max_tokens": 3}
        assert client.post("/v1/completions", json=asked).status_code == 200
    told = gauges()
    assert told["running"] == 0 < told["kept"] <= told["limit"]
