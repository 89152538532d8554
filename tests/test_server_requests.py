"""What a request may ask for, field by field: followed, refused by name, or told as ignored."""

import json
import time
from collections.abc import Mapping

import pytest

pytest.importorskip("starlette")

from real import words
from refusals import mentions
from test_server import CHAT, JSON, chat, client_of, reply, said

import ssmlx
from ssmlx.prompt_cache import PromptCache
from ssmlx.server import __main__ as command
from ssmlx.server import completions, messages
from ssmlx.server.app import APIS, LOCAL, make_app
from ssmlx.server.fields import FOLLOWED, check_fields_and_list_ignored
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
        assert error["param"] == name and mentions(error["message"], name), error


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


def test_known_fields_are_followed_or_refused_by_name_and_others_are_told(client):
    for path, body in (
        ("chat/completions", chat()),
        ("completions", {"prompt": "w1"}),
        ("messages", {**chat(), "max_tokens": LENGTH}),
        ("messages/count_tokens", chat()),
        ("responses", {"input": "w1"}),
    ):
        for name, value in (
            ("stop_token_ids", [3]), ("min_tokens", 5), ("mirostat", 2), ("bad_words", ["w1"]),
            ("best_of", 2), ("use_beam_search", True), ("mcp_servers", [{"url": "x"}]),
            ("functions", [{"name": "f"}]), ("typical_p", 0.5), ("skip_special_tokens", False),
        ):  # fmt: skip
            error = error_of(client, path, {**body, name: value})
            assert error["param"] == name and mentions(error["message"], name)
        asks_nothing = {"stop_token_ids": [], "min_tokens": 0, "mirostat": None, "best_of": 1}
        no_effect = {"user": "me", "metadata": {"a": "b"}, "cache_control": {"type": "ephemeral"}}
        found = client.post(f"/v1/{path}", json={**body, **asks_nothing, **no_effect})
        assert found.status_code == 200 and "x-ignored-fields" not in found.headers, found.text
        found = client.post(f"/v1/{path}", json={**body, "temprature": 1, "a\r\nb": 2})
        assert found.status_code == 200
        assert found.headers["x-ignored-fields"] == "temprature, a??b"


class Recorded(Mapping):
    """A request's body that records the names of the fields that are read."""

    def __init__(self, body):
        self._body = body
        self.read = set()

    def __getitem__(self, name):
        self.read.add(name)
        return self._body[name]

    def __iter__(self):
        raise AssertionError("all fields are read, whatever they are called")

    def __len__(self):
        return len(self._body)


BODIES = {
    "/v1/chat/completions": {"messages": TURNS, "logprobs": True},
    "/v1/completions": {"prompt": "w1"},
    "/v1/messages": {"messages": TURNS, "max_tokens": 4},
    "/v1/responses": {"input": "w1"},
}


@pytest.mark.parametrize("path", APIS)
def test_the_fields_that_are_read_are_those_that_are_followed(path):
    read, write = APIS[path]
    body = Recorded(BODIES[path])
    write(read(body, ssmlx.GenerateConfig()))
    assert body.read == FOLLOWED[path]


def test_a_token_count_follows_the_fields_of_the_message_that_it_reads():
    assert FOLLOWED["/v1/messages/count_tokens"] == FOLLOWED["/v1/messages"]


@pytest.mark.parametrize("path", ["messages", "responses"])
@pytest.mark.parametrize("value", [1, True])
def test_a_field_of_another_api_is_ignored_by_its_name(client, path, value):
    more = {"logprobs": value, "top_logprobs": 30, "n": 99, "echo": None}
    body = {"input": "w1"} if path == "responses" else {"messages": TURNS, "max_tokens": 4}
    found = client.post(f"/v1/{path}", json={**body, **more})
    assert found.status_code == 200, found.text
    assert found.headers["x-ignored-fields"] == "logprobs, top_logprobs, n"
    ask = APIS[f"/v1/{path}"][0]({**body, **more}, ssmlx.GenerateConfig())
    assert (ask.config.logprobs, ask.choices) == (None, 1)


def test_a_completion_follows_a_response_format_and_does_not_call_it_ignored():
    body = {"prompt": "w1", "response_format": {"type": "json_object"}}
    assert check_fields_and_list_ignored("/v1/completions", body) == []
    assert completions.read_completion(body, ssmlx.GenerateConfig()).grammar


def test_what_two_fields_say_of_thinking_is_joined_or_refused(client):
    def template_args(path, **body):
        return APIS[path][0]({**BODIES[path], **body}, ssmlx.GenerateConfig()).template_args

    given = {"chat_template_kwargs": {"language": "de"}}
    for kind, on in (("enabled", True), ("disabled", False)):
        found = template_args("/v1/messages", thinking={"type": kind}, **given)
        assert found == {"enable_thinking": on, "language": "de"}
    own = {"chat_template_kwargs": {"enable_thinking": True}}
    for more in ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}):
        assert template_args("/v1/messages", **more, **own) == {"enable_thinking": True}
    low = {"reasoning": {"effort": "low"}}
    for more in (low, {"reasoning_effort": "low"}, {**low, "reasoning_effort": "low"}):
        assert template_args("/v1/responses", **more) == {"reasoning_effort": "low"}
    error = error_of(client, "responses", {"input": "w1", **low, "reasoning_effort": "high"})
    assert error["param"] == "reasoning_effort"
    assert mentions(error["message"], "reasoning.effort")
    form = {"type": "json_object"}
    both = {"output_config": {"format": form}, "output_format": {"type": "text"}}
    error = error_of(client, "messages", {"messages": TURNS, "max_tokens": 4, **both})
    assert error["param"] == "output_format"
    same = {"output_config": {"format": form}, "output_format": form}
    assert messages.read_message({"messages": TURNS, **same}, ssmlx.GenerateConfig()).grammar


def test_an_ignored_end_lets_an_answer_run_to_its_limit(client):
    asked = chat(logit_bias={"2": 100}, max_tokens=4)
    for more, wanted in (({}, "stop"), ({"ignore_eos": True}, "length")):
        (choice,) = reply(client, {**asked, **more})[0]["choices"]
        assert choice["finish_reason"] == wanted


def test_threads_are_refused_as_anthropics_clients_understand(client):
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        for path in ("messages", "messages/count_tokens"):
            error = error_of(client, path, {"max_tokens": 4, "messages": TURNS, "thread": thread})
            assert error["details"] == details and error["type"] == "invalid_request_error"


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


def test_fields_of_turns_that_contradict_each_other_are_refused(client):
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert (
        "add_generation_prompt"
        in error_of(client, "chat/completions", {"messages": PREFILLED, **both})["message"]
    )
    error = error_of(client, "chat/completions", chat(continue_final_message=True))
    assert error["param"] == "continue_final_message"
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


XML = {"type": "xml"}


@pytest.mark.parametrize(("path", "body", "param"), [
    ("completions", {"prompt": 7}, "prompt"),
    ("completions", {}, "prompt"),
    ("completions", {"prompt": "w1", "suffix": "w2"}, "suffix"),
    ("completions", {"prompt": ["w1"] * 300}, "prompt"),
    ("completions", {"prompt": ["w1"] * 100, "n": 4}, "n"),
    ("completions", {"prompt": "w1", "stream_options": 3}, "stream_options"),
    ("responses", {"input": "w1", "previous_response_id": "resp_1"}, "previous_response_id"),
    ("responses", {"input": "w1", "conversation": "c"}, "conversation"),
    ("responses", {"input": "w1", "prompt": {"id": "p"}}, "prompt"),
    ("responses", {"input": "w1", "background": True}, "background"),
    ("responses", {"input": "w1", "reasoning": {"effort": 3}}, "reasoning.effort"),
    ("responses", {"input": "w1", "reasoning_effort": 3}, "reasoning_effort"),
    ("responses", {"input": "w1", "text": {"format": XML}}, "text.format"),
    ("responses", {"input": "w1", "metadata": {"a": 1}}, "metadata"),
    ("responses", {"input": "w1", "metadata": {"a": "b" * 513}}, "metadata"),
    ("responses", {"input": "w1", "metadata": {"a" * 65: "b"}}, "metadata"),
    ("responses", {"input": "w1", "metadata": dict.fromkeys("abcdefghijklmnopq", "")}, "metadata"),
    ("messages", {"messages": TURNS, "output_config": {"format": XML}}, "output_config.format"),
    ("messages", {"messages": TURNS, "output_format": XML}, "output_format"),
])  # fmt: skip
def test_what_is_wrong_is_named(client, path, body, param):
    assert error_of(client, path, body)["param"] == param


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
        command._print_warnings_address_and_example(own, ["tiny"], False, bool(names))
    told = capsys.readouterr().out
    assert ("--allow-host" in told) == is_told and "--api-keys" in told
