"""The server: what each route answers, who may ask, and what is left when a request ends early."""

import asyncio
import gc
import json
from dataclasses import replace
from itertools import count
from weakref import ref

import pytest

pytest.importorskip("starlette")

from asking import CHAT, COMPLETIONS, JSON, ask_all, cached, chat, client_of, drive, reply, said
from forwards import watch_engine
from real import words, write_tiny_adapter
from refusals import exits, mentions
from served import wait_until
from starlette.exceptions import HTTPException
from tiny import cost_shared_calls

import ssmlx
from ssmlx.commands import caches as files
from ssmlx.prompt_cache import PromptCache
from ssmlx.server import __main__ as command
from ssmlx.server.app import make_app
from ssmlx.server.concurrency import AnswerSlots, RequestSlots
from ssmlx.server.handler import Limits, PrometheusMetrics, RequestHandler
from ssmlx.settings import PromptLookupConfig

LENGTH = 8


@pytest.fixture
def client(serve):
    return client_of(serve())


@pytest.mark.parametrize("name", ["tiny", "tiny:own"])
@pytest.mark.parametrize("streams", [(False, True), (True, False)])
def test_whole_or_streamed_cold_or_warm_it_is_what_generate_says(
    client, base, adapter, name, streams
):
    own = "none" if name == "tiny" else adapter
    model, tokenizer = ssmlx.load(str(base), adapter=own, dtype="float32")
    prompt = ssmlx.prompt_tokens("w1 w2 w3", model, tokenizer)
    wanted = ssmlx.generate(model, tokenizer, prompt, max_tokens=LENGTH)
    for number, stream in enumerate([*streams, *streams]):
        found = reply(client, chat("w1 w2 w3", model=name, stream=stream))
        assert said(found) == wanted and found[0]["model"] == name
        assert found[-1]["usage"]["completion_tokens"] == LENGTH
        assert (cached(found) > 0) == (number > 0)
        timings = found[-1]["timings"]
        # The last call may have brought more than the answer has room for.
        assert timings["draft_n_accepted"] >= LENGTH - timings["target_calls"]
        assert timings["draft_n"] >= timings["draft_n_accepted"]
    brought = [chunk["ssmlx"]["tokens"] for chunk in found if "ssmlx" in chunk]
    assert sum(brought) == (LENGTH if stream else 0)


def test_text_completions(client):
    body = {"prompt": "w1 w2", "n": 2, "temperature": 1, "seed": 3, "logprobs": 2}
    first, second = reply(client, body, COMPLETIONS)[0]["choices"]
    assert first["text"] != second["text"] and (first["index"], second["index"]) == (0, 1)
    assert len(first["logprobs"]["tokens"]) == LENGTH
    assert "".join(first["logprobs"]["tokens"]) == first["text"]
    *again, _ = reply(client, {**body, "stream": True}, COMPLETIONS)
    own = [chunk for chunk in again if chunk["choices"][0]["index"] == 1]
    assert said(own) == second["text"], "a seed gives the same text"
    bodies = ({"prompt": [8, 9]}, {"prompt": ["w1 w2"], "max_tokens": 99})  # no more than LENGTH
    assert len({said(reply(client, one, COMPLETIONS)) for one in bodies}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_inside_an_accepted_run_ends_an_answer(serve, stream):
    client = client_of(serve(ssmlx.GenerateConfig(max_tokens=LENGTH, deterministic=True)))
    text = said(reply(client, chat()))
    whole = text.split()
    prediction = {"type": "content", "content": text}
    body = chat(stop=[" " + whole[4]], logprobs=True, stream=stream)
    for more in ({}, {"prediction": prediction}):
        found = reply(client, {**body, **more})
        assert said(found).split() == whole[:4]
        assert found[-1]["usage"]["completion_tokens"] == 5
        ends = [choice["finish_reason"] for chunk in found for choice in chunk["choices"]]
        assert ends[-1] == "stop"
    assert found[-1]["timings"]["target_calls"] < 5


def test_an_adapters_own_end_has_no_logprob_as_it_has_no_text(engine, base, adapter, tmp_path):
    answer = engine.stream(chat()["messages"], adapter=str(adapter), max_tokens=4)
    (*_, end) = (token for segment in answer for token in segment.tokens)
    own = write_tiny_adapter(tmp_path / "own", base, end_token_ids=(end,))
    handler = RequestHandler(engine, {"tiny": str(own)}, prompt_caches=[PromptCache()])
    asked = chat(logprobs=True, max_tokens=9)
    (choice,) = reply(client_of(make_app(handler, ssmlx.GenerateConfig())), asked)[0]["choices"]
    told = "".join(one["token"] for one in choice["logprobs"]["content"])
    assert (choice["finish_reason"], told.strip()) == ("stop", choice["message"]["content"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_prediction_is_accepted_as_far_as_it_is_right(serve, stream):
    client = client_of(serve(ssmlx.GenerateConfig(max_tokens=LENGTH, deterministic=True)))
    plain = said(reply(client, chat()))
    prediction = {"type": "content", "content": f"{plain} w1 w2"}
    found = reply(client, chat(prediction=prediction, stream=stream))
    details = found[-1]["usage"]["completion_tokens_details"]
    assert said(found) == plain and details.pop("reasoning_tokens") == 0
    # Each call brings a token of its own, the prompt's nothing else; two more than the answer may
    # have are not looked at.
    right = details["accepted_prediction_tokens"]
    assert 3 <= right <= LENGTH - 2
    assert details["rejected_prediction_tokens"] == LENGTH - right


@pytest.mark.parametrize("shape", [{}, {"decoding": "speculative"}])
def test_a_prediction_is_drafted_as_the_servers_drafter_says(engine, serve, shape, monkeypatch):
    """By its settings, and counted, also where prompt lookup was asked for by name."""
    lookup = PromptLookupConfig(num_draft_tokens=3, ngram=2)
    own = {"drafter": "prompt-lookup", "prompt_lookup": lookup, "deterministic": True}
    client = client_of(serve(ssmlx.GenerateConfig(max_tokens=LENGTH, **own, **shape)))
    seen = []
    stream = engine.stream

    def spy(tokens, config, **more):
        seen.append(config)
        return stream(tokens, config, **more)

    monkeypatch.setattr(engine, "stream", spy)
    plain = said(reply(client, chat()))
    (*_, found) = reply(client, chat(prediction={"type": "content", "content": f"{plain} w1 w2"}))
    assert said([found]) == plain
    before, config = seen
    assert before.prompt_lookup == lookup
    assert replace(config.prompt_lookup, reference=()) == lookup
    assert len(config.prompt_lookup.reference) == LENGTH, "as many as the answer may have"
    details = found["usage"]["completion_tokens_details"]
    right = details["accepted_prediction_tokens"]
    assert 3 <= right <= LENGTH - 2
    assert details["rejected_prediction_tokens"] == LENGTH - right


def test_addresses_that_are_not_there(client):
    for path in ("/v1/embeddings", "/v1/audio/speech", "/v1/images/generations", "/api/chat"):
        found = client.post(path, json={})
        error = found.json()["error"]
        assert (found.status_code, error["type"]) == (404, "not_found_error")
        assert error["code"] == "unknown_url" and error["param"] is None
        assert mentions(error["message"], path, CHAT, "/v1/messages", "/v1/models")
    for path in ("/chat/completions", "/v1/v1/chat/completions"):
        told = client.post(path, json={}).json()["error"]["message"]
        assert told.endswith(CHAT), "a base URL without its /v1, or with two"
    found = client.get(CHAT)
    assert found.status_code == 405 and found.headers["allow"] == "POST"
    assert mentions(found.json()["error"]["message"], CHAT, "GET", "POST")
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["tiny", "tiny:own"]


def test_a_request_is_a_line_in_the_log(engine, caplog):
    handler = RequestHandler(engine, {"tiny": None}, prompt_caches=[PromptCache()])
    client = client_of(make_app(handler, logs_requests=True), raise_server_exceptions=False)
    secret = "w1 w2 w3"
    with caplog.at_level("INFO", logger="ssmlx"):
        for stream in (False, True):
            reply(client, chat(secret, n=2, max_tokens=3, stream=stream))
        client.post("/v1/a%0Ab", json={})
        client.get("/v1/models?key=secret")
        client.get("/health"), client.get("/metrics")
        asyncio.run(drive(client.app, chat(), more=True))
        handler.reader.read_prompts = None
        client.post(CHAT, json=chat())
    whole, streamed, unknown, models, gone, failed = [one.getMessage() for one in caplog.records]
    num_prompt = len(engine.tokenizer.encode(f"user: {secret} | model:"))
    for line in (whole, streamed):
        assert mentions(line, "POST", CHAT, "200", str(2 * num_prompt), "6") and secret not in line
    assert mentions(unknown, "404") and "\n" not in unknown
    assert mentions(models, "GET", "/v1/models", "200") and "secret" not in models
    assert mentions(gone, CHAT, "499") and mentions(failed, CHAT, "500")
    caplog.clear()
    with caplog.at_level("INFO", logger="ssmlx"):
        client_of(make_app(handler)).get("/v1/models")
    assert not caplog.records


def test_a_closed_server_says_so_and_holds_no_weights(base):
    engine = ssmlx.Engine(str(base), dtype="float32")
    handler = RequestHandler(engine, {"tiny": None})
    client = client_of(make_app(handler, ssmlx.GenerateConfig()))
    weights = ref(engine.model())
    reply(client, chat(max_tokens=2))
    handler.close()
    for path in (CHAT, "/v1/messages", "/v1/messages/count_tokens"):
        assert client.post(path, json=chat(max_tokens=2)).status_code == 503
    frames = []
    for _ in range(3):
        with pytest.raises(HTTPException) as caught:
            handler.reader.check_open()
        frames.append(len(caught.traceback))
    assert len(set(frames)) == 1, "an error that is shared keeps the frames of all who raised it"
    del engine
    gc.collect()
    assert weights() is None


def test_the_developer_is_the_system_as_in_other_apis(client):
    turns = [{"role": role, "content": "w3 w4"} for role in ("developer", "user")]
    others = [{**turns[0], "role": "system"}, turns[1]]
    found, expected = (said(reply(client, {"messages": one})) for one in (turns, others))
    assert found == expected


def test_pages_of_other_places_cannot_ask(client):
    body = json.dumps(chat())
    rebound = {"host": "evil.example:8080", "origin": "http://evil.example:8080", **JSON}
    for headers, status in (
        (JSON, 200),
        (rebound, 403),
        ({**JSON, "host": "evil.example"}, 403),
        ({**JSON, "origin": "http://evil.example"}, 403),
        ({**JSON, "origin": "null"}, 403),
        ({**JSON, "origin": "http://localhost.evil.example"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({**JSON, "origin": "http://127.0.0.1:3000"}, 200),
    ):
        found = client.post(CHAT, content=body, headers=headers)
        assert found.status_code == status, headers
        shared = found.headers.get("access-control-allow-origin")
        assert shared == (headers.get("origin") if status == 200 else None)
    ask = {"access-control-request-method": "POST", "origin": "http://evil.example"}
    assert client.options(CHAT, headers=ask).status_code == 400
    assert client.options(CHAT, headers={**ask, "origin": "http://localhost"}).status_code == 200


def test_keys_are_needed_and_keep_prompts_apart(serve):
    keys = [b"first-key", b"other-key"]
    prompt_caches = [PromptCache(), PromptCache()]
    client = client_of(serve(keys=keys, prompt_caches=prompt_caches))
    assert client.get("/health").status_code == client.get("/").status_code == 200
    for wrong in ("", "Bearer first", "Bearer ", "Basic first-key", "Bearer first-key\xe9"):
        raw = {"authorization": wrong.encode("latin-1")}
        assert client.post(CHAT, json=chat(), headers=raw).status_code == 401
        assert client.get("/metrics", headers=raw).status_code == 401
    both = ({"authorization": "Bearer first-key"}, {"x-api-key": "other-key"}) * 2
    known = [cached(reply(client, chat(), headers=headers)) for headers in both]
    assert known[:2] == [0, 0] and min(known[2:]) > 0
    assert "w1" not in client.get("/metrics", headers=both[0]).text


def test_prompts_on_disk_outlive_the_server_and_stay_apart(serve, tmp_path):
    keys = [b"first-key", b"other-key"]

    def known(body, prompt_caches):
        client = client_of(serve(keys=keys, prompt_caches=prompt_caches))
        return [cached(reply(client, body, headers={"x-api-key": key})) for key in keys]

    prompt_caches = command.make_prompt_caches(tmp_path, keys)
    assert known(chat(words(9)), prompt_caches) == [0, 0]
    prompt_caches[0].flush()
    again = known(chat(words(9)), command.make_prompt_caches(tmp_path, keys))
    assert again[0] > 9 and again[1] == 0
    assert files.main(["purge", str(tmp_path), "--yes"]) == 0 and not [
        *tmp_path.rglob("*.safetensors")
    ]


def test_whoever_leaves_leaves_nothing_behind(serve, engine, monkeypatch):
    """In the body, the prompt, in decoding and the queue: one answer may be open at a time."""
    config = ssmlx.GenerateConfig(max_tokens=10_000, prefill_step_size=1)
    app = serve(config, limits=Limits(open=1))
    forwards = watch_engine(monkeypatch, engine)
    long = chat(words(150), stream=True)

    async def in_the_prompt():
        gone = asyncio.Event()
        leave = asyncio.get_running_loop().call_soon_threadsafe
        forwards.before = lambda _: leave(gone.set) if len(forwards) == 3 else None
        (start,) = await drive(app, long, gone=gone)
        forwards.before = lambda _: None
        assert start["type"] == "http.response.start" and len(forwards) < 100

    async def in_decoding_and_in_the_queue():
        held = asyncio.Event()
        left = asyncio.Event()
        waits = asyncio.Event()
        numbers = count()
        told = lambda _: next(numbers) == 3 and held.set()  # noqa: E731
        first = asyncio.create_task(drive(app, long, told, left))
        await held.wait()
        second = asyncio.create_task(drive(app, chat(), gone=waits))
        await asyncio.sleep(0.05)
        assert not second.done()
        waits.set()
        assert await second == []
        left.set()
        assert len(await first) < 150

    async def in_the_body():
        (start, _) = await drive(app, chat(), more=True)
        assert start["status"] == 499, "it reads nothing, and is not counted as refused"

    for leave in (in_the_prompt, in_decoding_and_in_the_queue, in_the_body):
        asyncio.run(leave())
        assert wait_until(lambda: engine.memory_pool.running == 0)
        client = client_of(app)
        assert client.post(CHAT, json=chat(max_tokens=3)).status_code == 200
        told = client.get("/metrics").text
        assert "ssmlx_open 0.0" in told and "ssmlx_waiting 0.0" in told
        assert "ssmlx_refused_total{" not in told


def test_a_failing_step_ends_its_own_request_alone(serve, engine, monkeypatch):
    forwards = watch_engine(monkeypatch, engine)

    def fail_once(_):
        if len(forwards) == 6:
            raise RuntimeError("a secret")

    app = serve(ssmlx.GenerateConfig(max_tokens=LENGTH, decoding="plain"), limits=Limits(open=1))

    async def both():
        asked = ({**chat(), "stream": True}, chat())
        return await asyncio.gather(*(drive(app, one) for one in asked))

    forwards.before = fail_once
    failed, fine = asyncio.run(both())
    told = b"".join(one.get("body", b"") for one in failed).decode()
    assert told.count("data: ") > 2 and '"api_error"' in told and "secret" not in told
    assert fine[0]["status"] == 200
    client = client_of(app, raise_server_exceptions=False)
    del forwards[:]
    assert [client.post(CHAT, json=chat()).status_code for _ in range(2)] == [500, 200]


@pytest.mark.parametrize("deterministic", [False, True])
def test_answers_that_have_to_be_the_same_share_no_calls(serve, engine, monkeypatch, deterministic):
    forwards = watch_engine(monkeypatch, engine)
    cost_shared_calls(monkeypatch, lambda rows: 0.01)
    app = serve(ssmlx.GenerateConfig(max_tokens=LENGTH, deterministic=deterministic))
    found = ask_all(app, [chat()] * 2)
    assert [one.status_code for one in found] == [200] * 2
    assert (forwards.num_shared == 0) == deterministic


def test_twelve_at_once_say_what_each_says_alone(serve):
    bodies = [chat(f"w{n % 3}", model=("tiny", "tiny:own")[n % 2]) for n in range(12)]
    alone = {json.dumps(one): said([ask_all(serve(), [one])[0].json()]) for one in bodies}
    found = ask_all(serve(limits=Limits(open=4)), bodies)
    assert [said([one.json()]) for one in found] == [alone[json.dumps(one)] for one in bodies]


def test_too_much_is_refused(serve):
    config = ssmlx.GenerateConfig(max_tokens=100)
    found = ask_all(serve(config, limits=Limits(open=1, waiting=2)), [chat()] * 8)
    assert sorted(one.status_code for one in found) == [200] * 3 + [503] * 5
    refused = [one for one in found if one.status_code == 503]
    assert all("retry-after" in one.headers for one in refused)
    assert {one.json()["error"]["type"] for one in refused} == {"overloaded_error"}
    found = ask_all(serve(config, limits=Limits(open=1, wait=0.05)), [chat()] * 3)
    assert sorted(one.status_code for one in found)[0::2] == [200, 503]
    for limits, status, kind in (
        (Limits(time=0.001), 504, "timeout_error"),
        (Limits(body=99), 413, "request_too_large"),
    ):
        (found,) = ask_all(serve(config, limits=limits), [chat(words(50))])
        assert (found.status_code, found.json()["error"]["type"]) == (status, kind)
        assert (found.headers.get("x-should-retry") == "false") == (status == 504)


def test_a_request_that_ends_before_its_first_answer_keeps_no_slot():
    async def free_after(num_answers):
        slots = AnswerSlots(1, PrometheusMetrics().open)
        await slots.take()
        request = RequestSlots(slots, asyncio.get_running_loop().time() + 60)
        for _ in range(num_answers):
            async with request.hold():
                assert slots.num_free == 0
        request.close()
        return slots.num_free

    assert [asyncio.run(free_after(count)) for count in range(3)] == [1, 1, 1]


def test_the_command_refuses_what_it_cannot_do(tmp_path, base, capsys):
    keys = tmp_path / "keys"
    keys.write_text("one\n\n two \none\n")
    keys.chmod(0o644)
    line = exits(capsys, command.main, "--model", base, "--api-keys", keys)
    assert mentions(line, str(keys), "600")
    keys.chmod(0o600)
    assert command.read_private_api_keys(keys) == [b"one", b"two"]
    twice = ("--port", 0, "--adapter", base, "--adapter", base)
    assert mentions(exits(capsys, command.main, "--model", base, *twice), base.name)
    with command.listen_at("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        line = exits(capsys, command.main, "--model", base, "--port", port)
    assert mentions(line, str(port))


REAL = [
    ("smol", "chat", "Name three primary colours."),
    ("smol:sql", "sql", "who won in 1998?\nCREATE TABLE winners (name VARCHAR, year VARCHAR)"),
]


@pytest.mark.slow
@pytest.mark.real
def test_the_real_model_answers_as_generate_does():
    num_accepted = 0
    with ssmlx.Engine("smollm2-135m", dtype="float32") as engine:
        client = client_of(make_app(RequestHandler(engine, {"smol": None, "smol:sql": "sql"})))
        for name, adapter, text in REAL:
            model = engine.model(adapter)
            prompt = ssmlx.prompt_tokens(text, model, engine.tokenizer)
            wanted = ssmlx.generate(model, engine.tokenizer, prompt, max_tokens=24)
            for stream in (True, False, True):
                found = reply(client, chat(text, model=name, max_tokens=24, stream=stream))
                assert said(found) == wanted
                num_accepted += found[-1]["timings"]["draft_n_accepted"]
    # Not in each: a busy machine may find that drafting does not pay for one of them.
    assert num_accepted > 0
