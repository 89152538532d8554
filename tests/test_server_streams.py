"""What a stream says before its first token, and how it fails once it has begun."""

import asyncio
import re
import time

import pytest

pytest.importorskip("starlette")
anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")

from asking import CHAT, COMPLETIONS, chat, client_of, clients, drive, reply, said
from forwards import watch_engine
from real import words

import ssmlx
from ssmlx.prompt_cache import PromptCache
from ssmlx.server.app import make_app
from ssmlx.server.handler import Limits, RequestHandler

LONG = words(100)
TURNS = [{"role": "user", "content": LONG}]
ASKED = {
    CHAT: {"messages": TURNS},
    COMPLETIONS: {"prompt": LONG},
    "/v1/messages": {"messages": TURNS},
    "/v1/responses": {"input": LONG},
}
COMMENT = re.compile(rb": keepalive (\d+)/(\d+)\n\n")
PING = b'event: ping\ndata: {"type": "ping"}\n\n'


@pytest.fixture
def app(engine):
    """Its streams are silent for 10 ms at most; prompts are read in pieces of 16 tokens."""
    limits = Limits(silence=0.01)
    handler = RequestHandler(engine, {"tiny": None}, prompt_caches=[PromptCache()], limits=limits)
    return make_app(handler, ssmlx.GenerateConfig(max_tokens=4, prefill_step_size=16))


@pytest.fixture
def forwards(engine, monkeypatch):
    """Forward calls, of which pieces of prompts take 50 ms each."""
    forwards = watch_engine(monkeypatch, engine)
    forwards.before = lambda forward: time.sleep(0.05 if forward.tokens > 1 else 0)
    return forwards


@pytest.mark.parametrize("path", ASKED)
def test_a_stream_has_headers_at_once_and_is_never_silent(app, forwards, path):
    before = []
    body = {**ASKED[path], "stream": True}
    start, *told = asyncio.run(drive(app, body, lambda _: before.append(len(forwards)), path=path))
    assert start["type"] == "http.response.start" and before[0] <= 1 < len(forwards)
    assert (b"content-type", b"text/event-stream; charset=utf-8") in start["headers"]
    bodies = [one["body"] for one in told]
    signs = [one for one in bodies if one == PING or COMMENT.fullmatch(one)]
    assert len(signs) > len(forwards.pieces) > 4
    if path == "/v1/messages":
        assert bodies[0].startswith(b"event: message_start\n") and {*signs} == {PING}
        return
    counts = [tuple(map(int, COMMENT.fullmatch(one).groups())) for one in signs]
    assert counts == sorted(counts) and counts[-1][1] >= 99 and 0 < counts[-1][0] <= counts[-1][1]
    if path == "/v1/responses":
        assert bodies[0].startswith(b"event: response.created\n")


async def read_chat(client, _):
    stream = await client.chat.completions.create(model="tiny", messages=TURNS, stream=True)
    return "".join([one.choices[0].delta.content or "" async for one in stream])


async def read_completion(client, _):
    stream = await client.completions.create(model="tiny", prompt=LONG, stream=True)
    return "".join([one.choices[0].text async for one in stream])


async def read_response(client, _):
    async with client.responses.stream(model="tiny", input=LONG) as stream:
        found = [one async for one in stream]
    return found[-1].response.output_text


async def read_message(_, client):
    async with client.messages.stream(model="tiny", max_tokens=4, messages=TURNS) as stream:
        return "".join([one async for one in stream.text_stream])


READERS = (read_chat, read_completion, read_response, read_message)


def test_the_clients_read_over_signs_of_life(app, forwards):
    said_in = [asyncio.run(read(*clients(app))) for read in READERS]
    text, completion, response, message = said_in
    assert text == response == message and len(text.split()) == len(completion.split()) == 4
    assert len(forwards.pieces) > 8


def test_an_error_after_the_headers_is_an_event_and_the_clients_own(app, forwards):
    def fail(_):
        raise RuntimeError("a secret")

    forwards.before = fail
    for path, body in ASKED.items():
        start, *told = asyncio.run(drive(app, {**body, "stream": True}, path=path))
        text = b"".join(one["body"] for one in told).decode()
        assert start["status"] == 200 and "event: error\n" in text and "secret" not in text
    for read in READERS:
        with pytest.raises((openai.APIError, anthropic.APIStatusError)):
            asyncio.run(read(*clients(app)))


@pytest.mark.parametrize("path", ASKED)
def test_no_proxy_keeps_events_back(app, path):
    for stream in (True, False):
        start, *_ = asyncio.run(drive(app, {**ASKED[path], "stream": stream}, path=path))
        assert ((b"x-accel-buffering", b"no") in start["headers"]) == stream


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_being_written_at_the_time_limit_ends_by_its_length(engine, monkeypatch, stream):
    forwards = watch_engine(monkeypatch, engine)
    forwards.before = lambda _: time.sleep(0.05)
    limits = Limits(time=1.0)
    handler = RequestHandler(engine, {"tiny": None}, prompt_caches=[PromptCache()], limits=limits)
    client = client_of(make_app(handler, ssmlx.GenerateConfig(max_tokens=200, decoding="plain")))
    chunks = reply(client, {**chat("w1"), "n": 2, "stream": stream})
    ends = [one["finish_reason"] for chunk in chunks for one in chunk["choices"]]
    assert [end for end in ends if end] == ["length"] * 2
    assert 0 < chunks[-1]["usage"]["completion_tokens"] < 60 and said(chunks)
    response = client.post("/v1/responses", json={"input": "w1"}).json()
    assert response["status"] == "incomplete"
