"""What a request may ask for, field by field: followed, refused by name, or told as ignored."""

import json

import pytest

pytest.importorskip("starlette")

from real import words
from test_server import CHAT, JSON, chat, client_of

import ssmlx
from ssmlx.prompt_cache import PromptCache
from ssmlx.server.answering import Answering, Limits
from ssmlx.server.app import make_app

LENGTH = 8


@pytest.fixture(scope="module")
def engine(base):
    with ssmlx.Engine(str(base), dtype="float32") as engine:
        yield engine


@pytest.fixture
def serve(engine):
    """A client of an application with the tiny model as `tiny`."""

    def make(config=None, **more):
        answering = Answering(engine, {"tiny": None}, prompts=[PromptCache()], **more)
        config = config or ssmlx.GenerateConfig(max_tokens=LENGTH)
        return client_of(make_app(answering, config))

    return make


@pytest.fixture
def client(serve):
    return serve()


def error_of(client, path, body, status=400):
    found = client.post(f"/v1/{path}", json={"model": "tiny", **body})
    assert found.status_code == status, found.text
    return found.json()["error"]


TURNS = [{"role": "user", "content": "w1"}]


def test_a_context_that_is_too_long_has_the_code_and_words_that_clients_look_for(client):
    long = words(400)
    for path, body in (
        ("chat/completions", chat(long)),
        ("completions", {"prompt": long}),
        ("messages", {**chat(long), "max_tokens": 9}),
        ("responses", {"input": long}),
    ):
        error = error_of(client, path, body)
        assert error["code"] == "context_length_exceeded", path
        assert "prompt is too long: 40" in error["message"], "Anthropic's words"
        assert "maximum context length" in error["message"], "OpenAI's words"


def test_each_api_names_its_own_field(client):
    for path, name, value in (
        ("chat/completions", "max_completion_tokens", -1),
        ("chat/completions", "response_format", {"type": "xml"}),
        ("messages", "stop_sequences", [3]),
        ("messages", "max_tokens", 0),
        ("responses", "max_output_tokens", "many"),
        ("responses", "top_p", 7),
    ):
        error = error_of(client, path, {"messages": TURNS, "input": "w1", name: value})
        assert error["param"] == name and error["message"].startswith(f"{name} is "), error


def test_a_body_that_is_too_large_is_refused_as_all_else_is(serve):
    client = serve(limits=Limits(body=1000))
    data = json.dumps(chat(words(2000)))
    told = client.post(CHAT, content=data, headers=JSON)
    in_pieces = client.post(
        CHAT, content=iter([data[:900].encode(), data[900:].encode()]), headers=JSON
    )
    for found in (told, in_pieces):
        assert (found.status_code, found.headers["content-type"]) == (413, "application/json")
        assert found.json()["error"]["type"] == "request_too_large"
