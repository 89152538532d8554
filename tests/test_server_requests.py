"""What a request may ask for, field by field: followed, refused by name, or told as ignored."""

import json
import time

import pytest

pytest.importorskip("starlette")

from asking import CHAT, JSON, chat, client_of, reply, said
from real import words

import ssmlx
from ssmlx.prompt_cache import PromptCache
from ssmlx.server import __main__ as command
from ssmlx.server.app import LOCAL, make_app
from ssmlx.server.handler import Limits, RequestHandler
from ssmlx.server.tool_choice import read_tool_choice

LENGTH = 8


@pytest.fixture
def serve(engine):
    """A client of an application with the tiny model as `tiny`."""

    def make(config=None, **more):
        handler = RequestHandler(engine, {"tiny": None}, prompt_caches=[PromptCache()], **more)
        config = config or ssmlx.GenerateConfig(max_tokens=LENGTH)
        return client_of(make_app(handler, config))

    return make


@pytest.fixture
def client(serve):
    return serve()


def error_of(client, path, body, status=400):
    found = client.post(f"/v1/{path}", json={"model": "tiny", **body})
    assert found.status_code == status, found.text
    return found.json()["error"]


TURNS = [{"role": "user", "content": "w1"}]


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


def test_an_ignored_end_lets_an_answer_run_to_its_limit(client):
    asked = chat(logit_bias={"2": 100}, max_tokens=4)
    for more, wanted in (({}, "stop"), ({"ignore_eos": True}, "length")):
        (choice,) = reply(client, {**asked, **more})[0]["choices"]
        assert choice["finish_reason"] == wanted


def written(client, prompt):
    return said(reply(client, {"prompt": prompt}, "/v1/completions"))


PREFILLED = [*TURNS, {"role": "assistant", "content": "w2 w3"}]


@pytest.mark.parametrize(("more", "prompt"), [
    ({}, "user: w1 | model: w2 w3"),
    ({"continue_final_message": True, "add_generation_prompt": False}, "user: w1 | model: w2 w3"),
    ({"continue_final_message": True}, "user: w1 | model: w2 w3"),
    ({"continue_final_message": False}, "user: w1 | model: w2 w3 | model: "),
    ({"add_generation_prompt": True}, "user: w1 | model: w2 w3 | model: "),
])  # fmt: skip
def test_a_last_turn_of_the_assistants_is_continued_unless_a_field_says_no(client, more, prompt):
    wanted = written(client, prompt)
    if not prompt.endswith("w3"):  # else together they are one text
        wanted = wanted.lstrip(" ")
    assert said(reply(client, {"messages": PREFILLED, **more})) == wanted
    message = {"model": "tiny", "max_tokens": LENGTH, "messages": PREFILLED, **more}
    found = client.post("/v1/messages", json=message).json()
    assert found["content"][0]["text"] == wanted
    found = client.post("/v1/responses", json={"input": PREFILLED, **more}).json()
    assert found["output"][0]["content"][0]["text"] == wanted


def test_no_turn_is_opened_where_a_field_says_so(client):
    found = said(reply(client, chat("w1", add_generation_prompt=False)))
    assert found == written(client, "user: w1 | ").lstrip(" ")


def test_tools_of_a_model_without_a_place_for_them_are_refused_and_calls_are_written(client):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    error = error_of(client, "chat/completions", chat(tools=tools))
    assert error["param"] == "tools" and error["message"]
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    history = [*TURNS, {"role": "assistant", "content": None, "tool_calls": [call]},
               {"role": "tool", "tool_call_id": "c", "content": "3"}]  # fmt: skip
    text = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    wanted = written(client, f"user: w1 | model: {text} | tool: 3 | model: ").lstrip(" ")
    assert said(reply(client, {"messages": history})) == wanted


def test_any_model_answers_to_any_name_and_says_which(serve):
    assert (
        error_of(serve(), "chat/completions", chat(model="gpt-4o"), 404)["code"]
        == "model_not_found"
    )
    found = reply(serve(any_model=True), chat(model="gpt-4o"))
    assert found[0]["model"] == "tiny"


def test_models(client):
    listed = client.get("/v1/models").json()
    assert [one["id"] for one in listed["data"]] == ["tiny"] == [listed["first_id"]]
    assert client.get("/v1/models/tiny").json() == listed["data"][0]
    assert listed["data"][0]["max_input_tokens"] == 256
    found = client.get("/v1/models/org/other")
    assert found.status_code == 404 and found.json()["error"]["code"] == "model_not_found"


def test_a_response_repeats_its_metadata(client):
    metadata = dict.fromkeys("abcdefghijklmnop", "x" * 512)
    body = {"input": "w1", "metadata": metadata}
    assert client.post("/v1/responses", json=body).json()["metadata"] == metadata


def nested(levels):
    return '{"input": "w1", "own": ' + "[" * (levels - 1) + "]" * (levels - 1) + "}"


@pytest.mark.parametrize("body", [
    '{"input": "w1", "metadata": {"a": NaN}}', '{"input": "w1", "tool_choice": {"a": -Infinity}}',
    '{"input": "w1", "own": 1e999}', '{"input": "w1"', "[]", '"w1"', "", "\xff", nested(101),
    nested(900), nested(100_000), '{"input": ' + "9" * 5000 + "}",
])  # fmt: skip
def test_a_body_that_is_no_json_object_or_too_deep_is_refused(client, body):
    found = client.post("/v1/responses", content=body.encode("latin-1"), headers=JSON)
    error = found.json()["error"]
    assert (found.status_code, error["type"]) == (400, "invalid_request_error")
    assert "\n" not in error["message"]


def test_a_body_may_be_deep(client):
    found = client.post("/v1/responses", content=nested(100), headers=JSON)
    assert found.status_code == 200, found.text


@pytest.mark.parametrize("coding", ["gzip", "zstd", "br"])
def test_a_compressed_body_is_refused_by_its_coding(client, coding):
    own = {"content-encoding": coding, **JSON}
    found = client.post(CHAT, content=json.dumps(chat()), headers=own)
    assert found.status_code == 415 and coding in found.json()["error"]["message"]
    own = {"content-encoding": "identity", **JSON}
    assert client.post(CHAT, content=json.dumps(chat()), headers=own).status_code == 200


def test_tens_of_thousands_of_tools_are_chosen_from_in_proportion():
    tools = [{"type": "function", "function": {"name": f"f{n}"}} for n in range(20_000)]
    allowed = {"mode": "required", "tools": tools}
    body = {"tools": tools, "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    started = time.process_time()
    assert len(read_tool_choice(body).forced) == 20_000
    assert time.process_time() - started < 2


def test_health_is_told_under_any_name(client):
    for host in ("10.0.0.7:8080", "probe.example", ""):
        assert client.get("/health", headers={"host": host}).status_code == 200
        assert client.get("/v1/models", headers={"host": host}).status_code == 403


def test_pages_of_allowed_hosts_and_origins_may_use_the_server(engine):
    handler = RequestHandler(engine, {"tiny": None}, prompt_caches=[PromptCache()])
    hosts = [*LOCAL, "box.example", "app://obsidian.md"]
    client = client_of(make_app(handler, ssmlx.GenerateConfig(max_tokens=2), hosts))
    ask = {"access-control-request-method": "POST"}
    for origin, is_allowed in (
        ("tauri://localhost", True), ("http://localhost:3000", True), ("app://obsidian.md", True),
        ("https://box.example:8443", True), ("https://obsidian.md", False), ("null", False),
        ("https://box.example.evil.example", False), ("app://obsidian.md.evil.example", False),
    ):  # fmt: skip
        found = client.post(CHAT, json=chat(), headers={"origin": origin})
        assert found.status_code == (200 if is_allowed else 403), origin
        shared = found.headers.get("access-control-allow-origin")
        assert shared == (origin if is_allowed else None)
        found = client.options(CHAT, headers={"origin": origin, **ask})
        assert found.status_code == (200 if is_allowed else 400), origin
    for host, status in (("box.example:1", 200), ("obsidian.md", 403)):
        assert client.get("/v1/models", headers={"host": host}).status_code == status


@pytest.mark.parametrize(("names", "is_told"), [((), True), (("192.168.1.5",), False)])
def test_a_server_on_all_addresses_says_under_which_names_it_answers(capsys, names, is_told):
    with command.listen_at("0.0.0.0", 0) as own:
        command.print_address(own, ["tiny"], False, bool(names))
    told = capsys.readouterr().out
    assert ("--allow-host" in told) == is_told and "--api-keys" in told
