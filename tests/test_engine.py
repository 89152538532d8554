"""Engines and answers: any thread, any order, interrupted anywhere, and always the same tokens."""

import asyncio
import gc
import json
import random
import subprocess
import sys
import threading
import time
from array import array
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from weakref import ref

import mlx.core as mx
import numpy as np
import pytest
from forwards import watch_engine
from real import ROOT, VOCAB, answer, tokens_of, words, write_base, write_tiny_adapter
from refusals import found_in, mentions, refusal
from tiny import busy_mlx_thread, make_model, make_tokenizer, token_steps

import ssmlx
from ssmlx.errors import ContextLengthError
from ssmlx.loading import names as naming
from ssmlx.mlx_thread import run_on_mlx_thread

LENGTH = 12
PROMPT = [1, 5, 2, 7]
ADAPTERS = ("streams", "all", "none")


@pytest.fixture(scope="module")
def shared_engine(base, folders):
    with ssmlx.Engine(str(base), (folders["streams"],), dtype="float32") as engine:
        yield engine


@pytest.fixture
def engine(shared_engine):
    """One that knows no prompts."""
    shared_engine.prompt_cache.close()
    return shared_engine


def ask(engine, folders, adapter, question="w1 w2", **settings):
    return engine.stream(question, adapter=folders[adapter], **{"max_tokens": LENGTH, **settings})


def test_a_question_is_put_under_the_adapters_template(base, engine, folders):
    model, tokenizer = ssmlx.load(str(base), adapter=folders["all"], dtype="float32")
    prompt = ssmlx.prompt_tokens("w1 w2", model, tokenizer)
    expected, _ = answer(model, tokenizer, prompt, max_tokens=LENGTH)
    for question in ("w1 w2", prompt):  # the second time from the prompt cache
        segments = list(ask(engine, folders, "all", question))
        assert tokens_of(segments) == expected
    assert segments[-1].cached_tokens == len(prompt) - 1


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_scored_text_has_the_logprobs_that_it_was_written_with(engine, folders, adapter):
    heard = list(ask(engine, folders, adapter, PROMPT, logprobs=2))
    written = [one for segment in heard for one in segment.logprobs]
    text = [*PROMPT, *tokens_of(heard)]
    (scored,) = engine.score(text, adapter=folders[adapter], top=2)
    assert len(scored.logprobs) == len(text) - 1
    for found, wanted in zip(scored.logprobs[len(PROMPT) - 1 :], written, strict=True):
        assert found.token == wanted.token and found.logprob == pytest.approx(
            wanted.logprob, abs=1e-4
        )
        assert [token for token, _ in found.top] == [token for token, _ in wanted.top]
    refusal(engine.score, PROMPT * 100, kind=ContextLengthError)


def test_a_deterministic_answer_starts_from_nothing(engine, folders):
    """A prompt that another answer left would be processed in other pieces."""
    prompt = [PROMPT[0]] * 9
    for sure, known in ((True, 0), (True, 0), (False, len(prompt) - 1), (True, 0)):
        *_, last = ask(engine, folders, "streams", prompt, deterministic=sure)
        assert last.cached_tokens == known
    chat = engine.chat(deterministic=True, max_tokens=3, adapter=folders["streams"])
    first, second = (list(chat.reply(text))[-1] for text in ("w1 w2", "w3"))
    assert first.cached_tokens == 0 < second.cached_tokens, "its own turns are its own"
    assert list(engine.chat(deterministic=True, max_tokens=3).reply("w1 w2"))[-1].cached_tokens == 0


def expected_answers(engine, folders, questions):
    """Each question's answer alone, from nothing."""
    return {
        (adapter, text): tokens_of(ask(engine, folders, adapter, text, deterministic=True))
        for adapter in ADAPTERS
        for text in questions
    }


@pytest.fixture(scope="module")
def expected(shared_engine, folders):
    return expected_answers(shared_engine, folders, [words(3, i) for i in range(4)])


def asked_at_random(expected, seed, count):
    """`count` of the questions, and after which segment to cancel each, if at all."""
    chance = random.Random(seed)
    return [
        (chance.choice(list(expected)), chance.choice([None, None, 0, 1, 3])) for _ in range(count)
    ]


def differs(heard, whole, stop_at):
    """Whether an answer is not what it would be alone, as far as it was read."""
    found = tokens_of(heard)
    return found != (whole if stop_at is None else whole[: len(found)])


def ask_at_random(engine, folders, expected, seed, count):
    """Ask `count` of the questions; cancel some, somewhere. Those whose tokens differ."""
    wrong = []
    for (adapter, text), stop_at in asked_at_random(expected, seed, count):
        heard = []
        with ask(engine, folders, adapter, text) as segments:
            for number, segment in enumerate(segments):
                heard.append(segment)
                if number == stop_at:
                    segments.cancel()
        if differs(heard, expected[adapter, text], stop_at):
            wrong.append((adapter, text, stop_at))
    return wrong


async def ask_in_a_task(engine, folders, expected, seed, count):
    """The same from an event loop."""
    wrong = []
    for (adapter, text), stop_at in asked_at_random(expected, seed, count):
        heard = []
        async with ask(engine, folders, adapter, text) as segments:
            async for segment in segments:
                heard.append(segment)
                if len(heard) - 1 == stop_at:
                    segments.cancel()
        if differs(heard, expected[adapter, text], stop_at):
            wrong.append((adapter, text, stop_at))
    return wrong


def test_an_answer_holds_nothing_after_its_block(engine, folders):
    has_begun = threading.Event()

    async def read_one():
        async with ask(engine, folders, "streams", max_tokens=60) as segments:
            await anext(segments)
            assert engine.memory_pool.running > 0
            thread.submit(run_on_mlx_thread, lambda: has_begun.set() or time.sleep(0.2))
            has_begun.wait()
        return engine.memory_pool.running

    with ThreadPoolExecutor(1) as thread:
        assert asyncio.run(read_one()) == 0


def test_threads_hear_what_each_would_hear_alone(engine, folders, expected):
    with ThreadPoolExecutor(8) as pool:
        asked = [
            pool.submit(ask_at_random, engine, folders, expected, seed, 4) for seed in range(8)
        ]
        assert [wrong for one in asked for wrong in one.result(60)] == []


def test_so_do_tasks_of_an_event_loop(engine, folders, expected):
    async def all_of_them():
        tasks = (ask_in_a_task(engine, folders, expected, seed, 2) for seed in range(8))
        return [wrong for one in await asyncio.gather(*tasks) for wrong in one]

    for _ in range(2):  # two loops, one after the other
        assert asyncio.run(all_of_them()) == []


@pytest.mark.parametrize("decoding", ["plain", "speculative"])
def test_two_threads_share_a_model_without_an_engine(decoding):
    model = make_model(scope="streams")
    tokenizer = make_tokenizer()
    prompts = [[1, 2, 3 + index] for index in range(6)]
    settings = {"decoding": decoding, "max_tokens": LENGTH}
    alone = [answer(model, tokenizer, prompt, **settings)[0] for prompt in prompts]

    def ask(prompt):
        return answer(model, tokenizer, prompt, **settings)[0]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, prompts)) == alone


def on_a_thread(task):
    """The result of a task on a thread that is gone when it is there."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(task).result(30)


@pytest.mark.parametrize("decoding", ["plain", "speculative"])
def test_an_answer_is_read_on_by_other_threads(decoding):
    model = make_model()
    tokenizer = make_tokenizer()
    settings = {"decoding": decoding, "max_tokens": LENGTH}
    expected, _ = answer(model, tokenizer, PROMPT, **settings)
    segments = on_a_thread(lambda: ssmlx.stream_generate(model, tokenizer, PROMPT, **settings))
    heard = [next(segments), on_a_thread(lambda: next(segments)), next(segments)]
    heard += on_a_thread(lambda: list(segments))
    assert tokens_of(heard) == expected

    async def hop():
        segments = ssmlx.stream_generate(model, tokenizer, PROMPT, **settings)
        first = next(segments), await asyncio.to_thread(next, segments)
        return [*first, *[segment async for segment in segments]]

    assert tokens_of(asyncio.run(hop())) == expected


def test_a_thread_that_dies_half_way_leaves_the_model_as_it_was():
    model = make_model()
    tokenizer = make_tokenizer()
    expected, _ = answer(model, tokenizer, PROMPT, max_tokens=LENGTH)

    def abandon():
        cache = model.make_cache()
        steps = token_steps(model, PROMPT, cache)
        next(steps), next(steps)

    on_a_thread(abandon)
    on_a_thread(lambda: next(ssmlx.stream_generate(model, tokenizer, PROMPT)))
    assert answer(model, tokenizer, PROMPT, max_tokens=LENGTH)[0] == expected
    assert on_a_thread(lambda: answer(model, tokenizer, PROMPT, max_tokens=LENGTH)[0]) == expected


def test_a_seed_is_drawn_from_the_callers_random_state():
    model = make_model()
    tokenizer = make_tokenizer()
    texts = []
    for seed in (1, 2, 1):
        mx.random.seed(seed)
        texts.append(answer(model, tokenizer, PROMPT, temp=1.0, max_tokens=20)[0])
    assert texts[0] == texts[2] != texts[1]


def test_answers_take_turns(engine, folders):
    order = []

    async def hear(name):
        async for segment in ask(engine, folders, "none", decoding="plain"):
            order.append((name, segment.generation_tokens))

    async def both():
        await asyncio.gather(hear("a"), hear("b"))

    asyncio.run(both())
    # Neither is ever more than two calls ahead.
    ahead = [
        sum(name == "a" for name, _ in order[:count]) * 2 - count for count in range(2 * LENGTH)
    ]
    assert len(order) == 2 * LENGTH and max(map(abs, ahead)) <= 2


def test_a_short_question_does_not_wait_for_a_long_prompt(engine, folders):
    turns = []
    pause = [1.0]  # after each piece, so that the long prompt takes long on any machine
    long = ask(
        engine,
        folders,
        "none",
        [1, 2] * 90,
        prefill_step_size=8,
        progress=lambda done, total: turns.append(done) or time.sleep(pause[0]),
    )
    with ThreadPoolExecutor(1) as pool:
        heard = pool.submit(list, long)
        while not turns:
            time.sleep(0.001)
        first = next(ask(engine, folders, "all"))
        assert first.tokens and not heard.done() and turns[-1] < 179
        pause[0] = 0.0
        assert len(tokens_of(heard.result(30))) == LENGTH
    # The other answer may have processed pieces of this one's prompt.
    assert turns == sorted(turns) and (turns[0], turns[-1]) == (0, 179)


def test_nothing_is_computed_that_nobody_asks_for(engine, folders, monkeypatch):
    forwards = watch_engine(monkeypatch, engine)
    segments = ask(engine, folders, "streams", max_tokens=200, decoding="speculative")
    run_on_mlx_thread(lambda: None)
    assert not forwards
    next(segments)
    for _ in range(3):
        next(segments)
        made = len(forwards)
        run_on_mlx_thread(lambda: None)  # after all that was begun
        assert len(forwards) == made
    time.sleep(0.05)
    assert len(forwards) == made <= 2 + 4, "of the prompt, of each segment, and one ahead"


def test_an_answer_keeps_none_of_the_segments_that_were_read(engine):
    model = engine.model()
    earlier = ssmlx.EarlierAnswers()
    settings = {"max_tokens": LENGTH, "decoding": "plain"}
    for opened in (
        ssmlx.stream_generate(model, engine.tokenizer, PROMPT, **settings),
        ssmlx.stream_generate(model, engine.tokenizer, PROMPT, earlier=earlier, **settings),
        engine.stream(PROMPT, **settings),
        engine.chat(**settings).reply("w1 w2"),
    ):
        read = [ref(next(opened)) for _ in range(LENGTH - 2)]
        gc.collect()
        assert [one() is None for one in read[:-1]] == [True] * (LENGTH - 3)
        assert len(tokens_of(opened)) == 2
    assert len(earlier.index.tokens) == 1 + len(PROMPT) + LENGTH


def test_an_answer_has_one_reader_at_a_time(engine, folders):
    segments = ask(engine, folders, "none")

    async def two_readers():
        return await asyncio.gather(anext(segments), anext(segments), return_exceptions=True)

    first, second = asyncio.run(two_readers())
    assert first.tokens and isinstance(second, Exception)
    assert len(tokens_of([first, *segments])) == LENGTH


@pytest.mark.parametrize("decoding", ["plain", "speculative"])
def test_a_cancelled_prompt_ends_the_answer(engine, folders, decoding):
    told = []

    def progress(done, total):
        told.append(done)
        if done >= 16:
            segments.cancel()

    segments = ask(
        engine,
        folders,
        "streams",
        [1, 2] * 60,
        prefill_step_size=8,
        decoding=decoding,
        progress=progress,
    )
    assert list(segments) == [] and segments.is_over
    assert told[-1] <= 24
    assert list(segments) == []  # and stays over
    assert len(tokens_of(ask(engine, folders, "streams"))) == LENGTH


def test_cancelling_twice_and_before_the_start_and_after_the_end(engine, folders):
    segments = ask(engine, folders, "none")
    segments.cancel(), segments.cancel()
    assert list(segments) == []
    segments = ask(engine, folders, "none")
    assert len(tokens_of(segments)) == LENGTH and segments.is_over
    segments.close(), segments.cancel()


@pytest.mark.parametrize("read", [0, 1, 3])
def test_a_chat_goes_on_right_after_a_cancelled_reply(engine, read):
    chat = engine.chat(max_tokens=LENGTH)
    reply = chat.reply("w1 w2")
    heard = [next(reply) for _ in range(read)]
    reply.cancel()
    assert tokens_of(chat.reply("w3"))
    said = [turn["content"] for turn in chat.messages if turn["role"] == "assistant"]
    assert said[:-1] == (["".join(segment.text for segment in heard)] if read else [])


def test_a_turn_whose_prompt_is_cancelled_does_not_count(engine):
    chat = engine.chat(max_tokens=LENGTH, prefill_step_size=4)
    reply = chat.reply(words(40), progress=lambda done, total: reply.cancel() if done else None)
    assert list(reply) == [] and chat.messages == []
    assert 0 < chat.context_tokens < 40  # what was processed is of use to the next turn
    assert tokens_of(chat.reply("w3")) and len(chat.messages) == 2


def test_an_answer_that_nobody_holds_is_cancelled(engine):
    chat = engine.chat(max_tokens=LENGTH)
    next(chat.reply("w1 w2"))
    gc.collect()
    assert tokens_of(chat.reply("w3"))
    assert len(chat.messages) == 4


def test_a_task_that_is_cancelled_or_late_loses_nothing(engine, folders):
    expected = tokens_of(ask(engine, folders, "all"))

    async def impatient():
        segments = ask(engine, folders, "all")
        heard = []
        while not segments.is_over:
            try:
                heard.append(await asyncio.wait_for(anext(segments), 1e-4))
            except TimeoutError:
                continue
            except StopAsyncIteration:
                break
        return heard + [segment async for segment in segments]

    assert tokens_of(asyncio.run(impatient())) == expected


def test_an_error_ends_its_answer_and_no_other(engine, folders, monkeypatch):
    expected = tokens_of(ask(engine, folders, "streams"))
    well = ask(engine, folders, "none", decoding="plain")
    # By itself, as others would have it decode plainly beside them.
    ill = ask(engine, folders, "streams", decoding="speculative", deterministic=True)
    heard = [next(well), next(ill)]
    forwards = watch_engine(monkeypatch, engine)
    forwards.before = lambda forward: 1 / 0 if forward.tokens > 1 else None  # a draft is verified
    with pytest.raises(ZeroDivisionError):
        list(ill)
    assert ill.is_over and list(ill) == []
    assert len(tokens_of([heard[0], *well])) == LENGTH
    monkeypatch.undo()
    assert tokens_of(ask(engine, folders, "streams")) == expected


def test_a_callback_that_raises_ends_reading_alone(engine, folders):
    segments = ask(engine, folders, "none", progress=lambda done, total: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(segments)
    assert len(tokens_of(ask(engine, folders, "none"))) == LENGTH


def test_a_chat_has_one_reply_at_a_time(engine):
    chat = engine.chat(max_tokens=LENGTH)
    segments = chat.reply("w1 w2")
    next(segments)
    for action in (lambda: chat.reply("w3"), chat.reset, lambda: chat.swap_adapter(None)):
        refusal(action)
    heard = tokens_of(segments)
    assert len(chat.messages) == 2 and heard
    assert tokens_of(chat.reply("w3")) and len(chat.messages) == 4


def test_chats_with_several_adapters_go_on_at_once(engine, folders):
    def talk(adapter, together):
        chat = engine.chat(adapter=folders[adapter], max_tokens=LENGTH)
        together.wait()
        return [tokens_of(chat.reply(text)) for text in ("w1 w2", "w3", "w4 w5")]

    alone = [talk(adapter, threading.Barrier(1)) for adapter in ADAPTERS]
    together = threading.Barrier(3)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda one: talk(one, together), ADAPTERS)) == alone


def test_a_chat_swaps_adapters_on_the_one_base(base, engine, folders):
    chat = engine.chat(max_tokens=LENGTH)
    before = tokens_of(chat.reply("w1 w2"))
    chat.swap_adapter(folders["all"])
    assert tokens_of(chat.reply("w3"))
    assert chat.model is engine.model(folders["all"])
    chat.swap_adapter(None)
    assert chat.model is engine.model("none")
    chat.reset()
    chat.swap_adapter(folders["streams"])
    assert tokens_of(chat.reply("w1 w2")) == before


def test_a_closed_engine_and_its_chats_answer_no_more(base, folders):
    engine = ssmlx.Engine(str(base), (folders["streams"],), dtype="float32")
    chat = engine.chat()
    half = ask(engine, folders, "none")
    next(half)
    engine.close(), engine.close()
    assert half.is_over and list(half) == []
    refusal(ask, engine, folders, "none")
    refusal(chat.reply, "w1")
    for name in ("drafter", "memory"):
        refusal(getattr, chat, name)


def test_an_answer_that_is_asked_for_while_an_engine_closes_is_over(base, folders):
    engine = ssmlx.Engine(str(base), dtype="float32")
    with busy_mlx_thread() as pool:
        asked = pool.submit(ask, engine, folders, "none")
        time.sleep(0.1)  # it waits for the thread that runs MLX
        closing = pool.submit(engine.close)
    assert list(asked.result()) == [] and closing.result() is None


def test_closing_frees_the_memory(base, folders):
    held = []
    for _ in range(3):
        engine = ssmlx.Engine(str(base), tuple(folders.values()), dtype="float32")
        chat = engine.chat()
        answer = ask(engine, folders, "all")
        reply = chat.reply("w1 w2")
        next(reply), next(answer)
        open_bytes = mx.get_active_memory()
        engine.close()  # though engine, chat and answers are still held
        held.append(mx.get_active_memory())
        assert mx.get_cache_memory() == 0
    # Other tests' arrays are there before, and after.
    assert held[-1] <= held[0] < open_bytes


_LOADS = """
import ctypes, json, sys, ssmlx, mlx.core as mx
for number in range(int(sys.argv[1])):
    with ssmlx.Engine("smollm2-135m", ("chat", "sql"), offline=True) as engine:
        list(engine.stream("Hello", max_tokens=4)), next(engine.chat(adapter="sql").reply("Hello"))
        opened = mx.get_active_memory()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1])
    print(json.dumps([opened, mx.get_active_memory(), resident]), flush=True)
"""


@pytest.mark.long
@pytest.mark.real
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_twenty_loads_of_the_real_model_leave_nothing():
    command = [sys.executable, "-c", _LOADS, "20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 20 and all(closed < 2**20 < opened for opened, closed, _ in rows)
    # Of what it was given back, the C library keeps pages that are not wholly free.
    assert max(row[2] for row in rows[10:]) < 1.1 * max(row[2] for row in rows[:10])


def test_a_whole_text_is_what_the_segments_have(engine, folders):
    asked = {"adapter": folders["all"], "max_tokens": 6}
    text = "".join(segment.text for segment in engine.stream(words(3), **asked))
    assert engine.generate(words(3), **asked) == text
    turns = [{"role": "user", "content": words(3)}]
    config = ssmlx.GenerateConfig(max_tokens=6)
    assert engine.generate(turns, config, adapter=folders["all"]) == text
    assert mentions(refusal(engine.generate, words(3), max_kv_size=9), "max_kv_size")


def test_a_conversation_is_taken_out_and_gone_on_with(base, engine):
    """As JSON, and by another engine."""
    chat = engine.chat(system="w9", max_tokens=4)
    list(chat.reply(words(3)))
    kept = json.loads(json.dumps(chat.messages))
    expected = tokens_of(chat.reply(words(2, 5)))
    with ssmlx.Engine(str(base), dtype="float32") as other:
        again = other.chat(messages=kept, max_tokens=4)
        assert tokens_of(again.reply(words(2, 5))) == expected
        assert again.messages == chat.messages and again.system == "w9"
        said = refusal(other.chat, messages=kept, system="w8")
        assert mentions(found_in(said), "system", "messages")
        assert "messages" in refusal(other.chat, messages=["w1"])


def test_what_an_engine_refuses_is_one_line(base, engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert mentions(refusal(engine.stream, "w1", adapter="nothing"), "nothing")
    other = write_tiny_adapter(tmp_path / "other", write_base(tmp_path / "base", norm=1.5))
    assert mentions(refusal(engine.stream, "w1", adapter=other), "norm")
    assert mentions(refusal(engine.stream, " "), "prompt")
    assert mentions(refusal(ssmlx.Engine, "nothing-like-it"), "'nothing-like-it'")
    assert tokens_of(engine.stream("w1", max_tokens=3))


NO_PROMPTS = (
    None, 5, b"w1", bytearray(b"w1"), memoryview(b"w1"), np.bytes_(b"w1"), Path("w1"),
    {1, 2}, frozenset([1]), {1: 2}, {"role": "user", "content": "w1"}, iter([1]), (n for n in [1]),
    [1.5], [1, True], [None], ["a"], [b"a"], [[1]], [[1], [2]], [1, [2]],
    np.array([1.0]), np.array([True]), np.array([[1]]), np.array(1), np.array(["a"]),
    mx.array([1.0]), mx.array([True]), mx.array([[1]]), mx.array(1),
)  # fmt: skip


@pytest.mark.parametrize("wrong", NO_PROMPTS, ids=map(str, range(len(NO_PROMPTS))))
def test_a_prompt_is_a_text_or_token_ids_everywhere(wrong, base, engine):
    """Of bytes, the numbers were taken for token ids."""
    model, tokenizer = engine.model("none"), engine.tokenizer
    of_model = (model, tokenizer)
    for ask in (
        lambda: engine.stream(wrong),
        lambda: engine.score(wrong),
        lambda: ssmlx.stream_generate(*of_model, wrong),
        lambda: ssmlx.generate(*of_model, wrong),
        lambda: ssmlx.stream_generate(*of_model, [1], context=wrong),
    ):
        assert mentions(refusal(ask), "token ids")
    for ask in (
        lambda: ssmlx.prompt_tokens(wrong, *of_model),
        lambda: ssmlx.prompt_tokens(wrong, *of_model, "raw"),
        lambda: engine.chat(adapter="none").reply(wrong),
        lambda: engine.chat(adapter="none").reset(wrong if wrong is not None else b""),
    ):
        assert mentions(refusal(ask), "text")


class Text(str):
    """A text of a class of the user's own."""


def test_rows_of_whole_numbers_are_token_ids(engine):
    model, tokenizer = engine.model("none"), engine.tokenizer
    wanted = tokens_of(ssmlx.stream_generate(model, tokenizer, [8, 9, 10], max_tokens=4))
    ids = np.array([8, 9, 10])
    for given in (
        (8, 9, 10), range(8, 11), deque([8, 9, 10]), array("q", [8, 9, 10]), list(ids),
        ids, ids.astype(np.uint8), mx.array(ids), [mx.array(8), np.int64(9), 10],
        "w1 w2 w3", Text("w1 w2 w3"), np.str_("w1 w2 w3"),
    ):  # fmt: skip
        found = ssmlx.stream_generate(model, tokenizer, given, max_tokens=4)
        assert tokens_of(found) == wanted, given
    for unknown in (-1, VOCAB, 10**30):
        for ask in (engine.stream, engine.score):
            assert mentions(found_in(refusal(ask, [1, unknown])), str(unknown))


def test_the_default_adapter_is_the_bundled_chat_where_it_belongs(base, tmp_path, monkeypatch):
    monkeypatch.setattr(naming, "ADAPTERS_FOLDERS", (tmp_path,))
    with ssmlx.Engine(str(base)) as engine:
        assert engine.model().num_streams == 0
    write_tiny_adapter(tmp_path / "chat", base, scope="streams")
    with ssmlx.Engine(str(base)) as engine:
        assert engine.model().num_streams > 0 and engine.model() is engine.model("chat")


def test_an_engines_adapter_is_the_one_that_answers_have(base, folders):
    for given, wanted in (
        ({"adapter": folders["all"]}, "all"),
        ({"adapter": folders["all"], "adapters": [folders["streams"]]}, "all"),
        ({"adapter": "none", "adapters": [folders["streams"]]}, "none"),
        ({"adapters": [folders["streams"], folders["all"]]}, "streams"),
    ):
        with ssmlx.Engine(str(base), dtype="float32", **given) as engine:
            assert engine.default_adapter == folders[wanted]
            assert engine.model() is engine.model(folders[wanted])
            named = {*given.get("adapters", ()), given.get("adapter", "none"), "none"}
            assert set(engine.adapters) == named
    with pytest.raises(TypeError, match="drafter"):
        ssmlx.Engine(str(base), drafter="streams")


def test_an_adapter_is_loaded_once_however_it_is_spelled(base, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(naming, "ADAPTERS_FOLDERS", (tmp_path / "bundled",))
    bundled = write_tiny_adapter(tmp_path / "bundled" / "chat", base, scope="streams")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    with ssmlx.Engine(str(base), dtype="float32") as engine:
        chat = engine.model("chat")
        assert engine.model(bundled) is engine.model() is chat
        mine = write_tiny_adapter(here / "chat", base, template="w5 {prompt} w6")
        spellings = (Path("chat"), "./chat", str(mine), mine, here / ".." / "here" / "chat")
        (own,) = {engine.model(one) for one in spellings}
        assert own is not chat is engine.model("chat")
        assert engine.adapters == ["none", "chat", "chat"]
        for one in ("own", Path("none"), Path("auto")):
            assert mentions(found_in(refusal(engine.model, one)), str(one))


def test_threads_that_ask_at_once_get_one_model(base, folders, tmp_path, monkeypatch):
    """Also of "auto", and of nothing once the engine is closed."""
    monkeypatch.setattr(naming, "ADAPTERS_FOLDERS", (tmp_path,))
    write_tiny_adapter(tmp_path / "chat", base, scope="streams")
    with ssmlx.Engine(str(base), dtype="float32") as engine, ThreadPoolExecutor(8) as pool:
        asked = [*("auto", "chat", None) * 4, *(folders["all"],) * 12]
        *found, name = pool.map(
            lambda one: engine.model(one) if one != "name" else engine.default_adapter,
            [*asked, "name"],
        )
        assert name == "chat" and len({*found[:12]}) == len({*found[12:]}) == 1
        assert engine.adapters[0] == "none"
        assert sorted(engine.adapters[1:]) == sorted(["chat", str(folders["all"])])
        closing = pool.submit(engine.close)
        for future in [pool.submit(engine.model, "none") for _ in range(8)]:
            error = future.exception()
            assert error is None or isinstance(error, ssmlx.InputError)
        closing.result()
        refusal(engine.model, "none")


def test_a_fused_folders_own_streams_are_the_default_and_no_adapter(base, tmp_path):
    from real import fuse

    with ssmlx.Engine(str(fuse(base, tmp_path / "fused")), dtype="float32") as engine:
        assert engine.model() is engine.model("auto") and engine.model().num_streams > 0
        assert engine.model("none").num_streams == 0
        assert (engine.default_adapter, engine.adapters) == (None, ["none"])
        assert mentions(found_in(refusal(engine.model, "own")), "own")
    assert engine.is_closed and engine.adapters == []
    for ask in (engine.model, partial(engine.model, "none"), lambda: engine.default_adapter):
        refusal(ask)


FORKS = """
import os, signal, sys
from contextlib import closing
sys.path.insert(0, {tests!r})
import ssmlx
from tiny import make_model, make_tokenizer

model, tokenizer = make_model(), make_tokenizer()
opened = ssmlx.stream_generate(model, tokenizer, [1, 2, 3], max_tokens=9)
session = ssmlx.ChatSession(model, tokenizer)
prompts = ssmlx.PromptCache(folder={folder!r})
ssmlx.generate(model, tokenizer, [1, 2], max_tokens=3)
first = next(opened)


def forked(task):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    signal.alarm(20)
    task()
    sys.exit(0)


def is_refused(ask, *given):
    try:
        ask(*given)
    except ssmlx.InputError as error:
        return "spawn" in str(error)  # which is what to do


def asks():
    refused = [
        is_refused(ssmlx.generate, model, tokenizer, [1]),
        is_refused(next, opened),
        is_refused(session.reset),
        is_refused(ssmlx.load, {base!r}),
    ]
    sys.exit(sum(refused))


def leaves():
    with opened, closing(session), prompts:
        pass


codes = [forked(lambda: sys.exit(forked(lambda: None))), forked(leaves), forked(asks)]
print(*codes, len(first.tokens) + sum(len(one.tokens) for one in opened))
left = ssmlx.stream_generate(model, tokenizer, [1, 2, 3])
print(len(next(left).tokens))
"""


def test_a_forked_process_is_refused_an_answer_and_all_end_with_answers_open(
    request, base, tmp_path
):
    tests = str(request.path.parent)
    code = FORKS.format(tests=tests, folder=str(tmp_path), base=str(base))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 0 4 9\n1\n", "")


BEFORE = """
import os, sys
sys.path.insert(0, {tests!r})
import ssmlx, ssmlx.engine
from tiny import make_model, make_tokenizer

pid = os.fork()
answer = ssmlx.generate(make_model(), make_tokenizer(), [1, 2], max_tokens=3)
os.write(1, (answer + "\\n").encode())  # in one piece, as both write at once
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if pid else 0)
"""


@pytest.mark.slow
def test_processes_that_part_before_a_model_is_loaded_answer_both(request):
    code = BEFORE.format(tests=str(request.path.parent))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert first == second


def test_a_task_on_the_mlx_thread_may_answer():
    model = make_model()
    tokenizer = make_tokenizer()
    expected, _ = answer(model, tokenizer, PROMPT, max_tokens=LENGTH)
    found = run_on_mlx_thread(lambda: answer(model, tokenizer, PROMPT, max_tokens=LENGTH)[0])
    assert found == expected


BUNDLED = ("chat", "sql", "e2e")
QUESTIONS = (
    "Name three primary colours.",
    "How many heads of the departments are older than 56 ?",
    "name[The Vaults], eatType[pub], priceRange[more than £30], area[riverside]",
    "What is a monsoon?",
)


@pytest.mark.real
@pytest.mark.long
def test_eight_threads_on_smollm2():
    """8 threads of 25 answers and three adapters, a third of them cancelled somewhere."""
    prompts = ssmlx.PromptCache(max_bytes=64 * 2**20)
    with ssmlx.Engine(prompt_cache=prompts, dtype="float32") as engine:
        folders = dict(zip(ADAPTERS, BUNDLED, strict=True))
        expected = expected_answers(engine, folders, QUESTIONS)
        held = []

        def from_a_thread(seed):
            return ask_at_random(engine, folders, expected, seed, 25)

        async def from_tasks():
            tasks = (ask_in_a_task(engine, folders, expected, seed, 25) for seed in range(8))
            return await asyncio.gather(*tasks)

        with ThreadPoolExecutor(8) as pool:
            for wrong in (pool.map(from_a_thread, range(8)), asyncio.run(from_tasks())):
                assert [one for each in wrong for one in each] == []
                held.append(run_on_mlx_thread(mx.get_active_memory))
    assert held[1] - held[0] < 16 * 2**20  # what the prompt cache holds more or less of


def test_what_an_engine_answered_before_is_drafted_from(engine):
    """In its own session alone: another prompt cache is another user's."""
    question = [5, 6, 7, 8, 9, 10]
    mine, others = ssmlx.PromptCache(), ssmlx.PromptCache()

    def said():
        settings = {"max_tokens": 40, "temp": 1.0, "seed": 4, "adapter": "none"}
        return tokens_of(list(engine.stream(question, prompt_cache=mine, **settings)))

    def earlier(kept):
        return kept.answers(engine.model("none")).index.tokens

    first = said()
    assert earlier(mine)[-len(first) :] == first and not earlier(others)
    assert said() == first
    assert len(earlier(mine)) == 2 * (1 + len(question) + len(first))
    assert not earlier(others)
