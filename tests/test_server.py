"""The server: what each route answers, who may ask, and what is left when a request ends early."""

import pytest

pytest.importorskip("starlette")

from starlette.testclient import TestClient

import ssmlx
from ssmlx.server.answering import Answering
from ssmlx.server.app import make_app

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def answering(base, adapter):
    return Answering(ssmlx.Engine(str(base), dtype="float32"), "tiny", {"sql": str(adapter)})


@pytest.fixture
def client(answering):
    # Not as a context: the engine stays open for the next test.
    config = ssmlx.GenerateConfig(max_tokens=20)
    return TestClient(make_app(answering, config), base_url="http://localhost")


def test_a_chat_is_answered_whole_and_streamed(client):
    body = {"messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 5}
    whole = client.post(CHAT, json=body).json()["choices"][0]
    assert whole["finish_reason"] == "length"
    streamed = client.post(CHAT, json={**body, "stream": True}).text
    assert streamed.endswith("data: [DONE]\n\n") and streamed.count("data: ") == 7
