"""The fields of requests: route by field by value, in tables that one handler answers.

Where a route follows a field, a bad value is refused, with the field or the place in it as `param`.
Elsewhere the field is refused by its name, changes nothing, or is named in a header as ignored.
"""

import json
import re
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("starlette")

from asking import JSON, MESSAGE, TOOL, USER, Scripted, chat, client_of, posted
from real import words
from refusals import mentions

import ssmlx
from ssmlx.server import completions, fields, messages
from ssmlx.server.app import APIS
from ssmlx.server.fields import REFUSED, WITHOUT_EFFECT, Fields

ROUTES = {
    "chat/completions": {"messages": USER},
    "completions": {"prompt": "a"},
    "messages": MESSAGE,
    "messages/count_tokens": {"messages": USER},
    "responses": {"input": "a"},
}
"""Each with the least that a request needs."""


def listed_fields(route):
    """The fields that the server's README lists for a route."""
    page = Path(fields.__file__).with_name("README.md").read_text()
    table = page.partition("| fields | routes |\n|---|---|\n")[2].partition("\n\n")[0]
    found = set()
    for row in table.splitlines():
        names, routes = row.strip("| ").split(" | ")
        wanted, _, others = routes.partition(" but ")
        if route in routes.split(", ") or (wanted == "all" and route != others):
            found |= {*re.findall("`(.+?)`", names)}
    return found


FOLLOWED = {route: listed_fields(route.removesuffix("/count_tokens")) for route in ROUTES}
XML = {"type": "xml"}
FIELDS = {
    "add_generation_prompt": [3],
    "background": [True, 3],
    "chat_template_kwargs": [3],
    "continue_final_message": [3, True],  # the last turn is the user's
    "conversation": ["c"],
    "echo": ["yes"],
    "frequency_context_size": ["x"],
    "frequency_penalty": ["x"],
    "grammar": [3],
    "guided_choice": [3],
    "guided_grammar": [3],
    "guided_json": [3],
    "guided_regex": [3],
    "ignore_eos": [3],
    "input": [[], 3],
    "instructions": [3],
    "json_schema": [3],
    "logit_bias": [{"x": 1}, {"8": "x"}, {"8": 101}],
    "logprobs": ["x"],
    "max_completion_tokens": [-1],
    "max_output_tokens": ["many"],
    "max_tokens": [1.5],
    "messages": [[], 3],
    "metadata": [
        {"a": 1},
        {"a": "b" * 513},
        {"a" * 65: "b"},
        dict.fromkeys("abcdefghijklmnopq", ""),
    ],
    "min_p": [2],
    "model": [7],
    "n": [0, 17],
    "output_config": [3],
    "output_format": [XML],
    "parallel_tool_calls": [3],
    "prediction": [1],
    "presence_context_size": ["x"],
    "presence_penalty": ["x"],
    "previous_response_id": ["resp_1"],
    "prompt": [7, {"id": "p"}],
    "reasoning": [3],
    "reasoning_effort": [3],
    "repetition_context_size": ["x"],
    "repetition_penalty": [0],
    "response_format": [XML],
    "seed": [True],
    "stop": [[1], "", ["x" * 5000]],
    "stop_sequences": [[3]],
    "stream": ["yes"],
    "stream_options": [3],
    "structured_outputs": [3],
    "suffix": ["w2"],
    "system": [3],
    "temp": ["hot"],
    "temperature": ["hot", -1],
    "text": [3],
    "thinking": [3],
    "thread": [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}],
    "tool_choice": ["required", {"type": "any"}, 3],  # no tools are offered
    "tools": [3],
    "top_k": [-1],
    "top_logprobs": [],  # which counts beside logprobs alone, see `PLACES`
    "top_p": [2],
    # followed nowhere, and refused by their names; or ignored
    "bad_words": [["w1"]],
    "best_of": [2],
    "functions": [[{"name": "f"}]],
    "mcp_servers": [[{"url": "x"}]],
    "min_tokens": [5],
    "mirostat": [2],
    "skip_special_tokens": [False],
    "stop_token_ids": [[3]],
    "typical_p": [0.5],
    "use_beam_search": [True],
    "cache_control": [{"type": "ephemeral"}],
    "temprature": [1],
    "user": ["me"],
}
"""Values that a route which follows the field cannot follow."""


def refusal_of(handler, route, body):
    """The error of a request, which is in one line, and the same for a stream."""
    whole, streamed = (posted(handler, route, {**body, "stream": one}) for one in (False, True))
    error = whole.json()["error"]
    assert whole.status_code == streamed.status_code == 400, whole.text
    assert error == streamed.json()["error"] and error["type"] == "invalid_request_error"
    assert "\n" not in error["message"] and "--" not in error["message"], "a command's option"
    return error


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_is_followed_refused_or_told_as_ignored(field):
    for route, value in product(ROUTES, FIELDS[field]):
        followed = field in FOLLOWED[route]
        body = {**ROUTES[route], field: value}
        if (followed or field in REFUSED) and field != "stream":
            error = refusal_of(Scripted(), route, body)
            assert error["param"] == field and mentions(error["message"], field), route
            continue
        found = posted(Scripted(), route, body)
        assert found.status_code == (400 if followed else 200), found.text
        ignored = not followed and field not in WITHOUT_EFFECT
        assert found.headers.get("x-ignored-fields") == (field if ignored else None), route


def test_every_field_that_is_followed_is_in_the_table():
    assert set.union(*FOLLOWED.values()) <= FIELDS.keys()


@pytest.mark.parametrize("route", ROUTES)
def test_what_asks_for_nothing_passes_and_all_that_is_ignored_is_told(route):
    nothing = {"stop_token_ids": [], "min_tokens": 0, "mirostat": None, "best_of": 1}
    found = posted(Scripted(), route, {**ROUTES[route], **nothing, "temprature": 1, "a\r\nb": 2})
    assert found.status_code == 200, found.text
    assert found.headers["x-ignored-fields"] == "temprature, a??b"


@pytest.mark.parametrize("route", ["messages", "responses"])
def test_a_field_of_another_api_asks_for_nothing(route):
    more = {"logprobs": True, "top_logprobs": 30, "n": 99, "echo": None}
    ask = APIS[f"/v1/{route}"][0]({**ROUTES[route], **more}, ssmlx.GenerateConfig())
    assert (ask.config.logprobs, ask.choices) == (None, 1)


# --- places inside of a field ---

OBJECT = {"type": "object"}
ADD = {"type": "function", "name": "add", "parameters": OBJECT}
SCHEMA = {"name": "add", "input_schema": OBJECT}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
PATCH = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}
CUSTOM = {"type": "custom", "custom": {"name": "patch"}}
OPENAI = {"type": "function", "function": TOOL}
LOW = {"reasoning": {"effort": "low"}}
BOTH = {"continue_final_message": True, "add_generation_prompt": True}
FORMS = {"output_config": {"format": {"type": "json_object"}}, "output_format": {"type": "text"}}


def turn(*parts, role="user"):
    return [{"role": role, "content": [*parts]}]


IMAGE, TEXT = {"type": "image", "source": {}}, {"type": "text", "text": "See"}
CALL = {"type": "function_call", "call_id": "c", "name": "add"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}
PLACES = {
    "chat/completions": [
        ({"messages": ["w1"]}, "messages[0]"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs", "99", "20"),
        ({"tools": [3]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [OPENAI, CUSTOM], "tool_choice": CUSTOM}, "tool_choice"),
        ({"messages": [*USER, *turn(TEXT, role="assistant")], **BOTH}, "continue_final_message"),
    ],
    "completions": [
        ({"prompt": ["w1"] * 300}, "prompt", "256"),
        ({"prompt": ["w1"] * 100, "n": 4}, "n", "256"),
        ({"logprobs": True}, "logprobs"),
    ],
    "messages": [
        ({"messages": turn(IMAGE)}, "messages[0].content[0]", "image"),
        ({"messages": turn(TEXT, IMAGE)}, "messages[0].content[1]", "image"),
        ({"messages": [*USER, *turn(TEXT, IMAGE)]}, "messages[1].content[1]", "image"),
        ({"messages": turn({"type": "document", "source": {"type": "base64"}})},
         "messages[0].content[0]", "document"),
        ({"messages": turn({"type": "tool_result"})}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "None"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "7"),
        ({"messages": turn({"type": "tool_use", "id": "c", "name": "add", "input": [1]},
                           role="assistant")}, "messages[0].content[0].input", "[1]"),
        *(({"messages": turn({"type": kind, "text": "a"})}, "messages[0].content[0].type")
          for kind in (3, ["message"], {"a": 1}, True)),
        ({"system": [{"type": "image"}]}, "system[0]", "image"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [SCHEMA, SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}},
         "tool_choice"),
        ({"output_config": {"format": XML}}, "output_config.format"),
        (FORMS, "output_format"),
        ({"max_tokens": 0}, "max_tokens", "0"),
    ],
    "responses": [
        ({"input": ["w1"]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input"),
        ({"input": [*USER, *turn({"type": "input_text", "text": "See"},
                                 {"type": "input_image", "image_url": "data:,"})]},
         "input[1].content[1]", "image"),
        ({"input": turn({"type": "input_audio"})}, "input[0].content[0]", "audio"),
        ({"input": turn({"type": "input_file"})}, "input[0].content[0]", "file"),
        ({"input": [{"role": "usr", "content": "a"}]}, "input[0].role", "'usr'"),
        ({"input": [{"role": "user", "content": None}]}, "input[0].content", "null"),
        ({"input": [{**CALL, "arguments": "[1]"}]}, "input[0].arguments", '"[1]"'),
        ({"input": [OUTPUT]}, "input[0]", "'c'"),
        ({"input": [{**OUTPUT, "call_id": []}]}, "input[0]"),
        *(({"input": [{"type": kind, "text": "a"}]}, "input[0].type")
          for kind in (3, ["message"], {"a": 1}, True)),
        ({"text": {"format": XML}}, "text.format"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
        ({**LOW, "reasoning_effort": "high"}, "reasoning_effort", "reasoning.effort"),
        ({"tools": [{"parameters": {}, "name": 3}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": 3}]}, "tools[0].tools"),
        *(({"tools": [ADD, tool], "tool_choice": choice}, "tool_choice") for tool, choice in (
            ({"type": "web_search"}, {"type": "web_search"}),
            (PATCH, {"type": "custom", "name": "apply_patch"}),
            (PATCH, {"type": "function", "name": "apply_patch"}),
        )),
    ],
}  # fmt: skip
"""Fields of a request, the place in them that cannot be followed, and what else is named."""


@pytest.mark.parametrize("route", PLACES)
def test_what_cannot_be_followed_is_refused_with_its_place(route):
    for more, place, *named in PLACES[route]:
        error = refusal_of(Scripted(), route, {**ROUTES[route], **more})
        assert error["param"] == place and mentions(error["message"], *named), more


def test_threads_are_refused_as_anthropics_clients_understand():
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    for route in ("messages", "messages/count_tokens"):
        body = {**ROUTES[route], "thread": FIELDS["thread"][0]}
        assert refusal_of(Scripted(), route, body)["details"] == details


# --- what a model cannot take ---


@pytest.fixture
def client(serve):
    return client_of(serve())


LONG = words(400)
OF_MODELS = {
    "chat/completions": [(chat(LONG), "> 256"), (chat(" "), "prompt"),
                         (chat("\ud800"), r"'\ud800'"),
                         (chat("w1", logit_bias={"999": 1}), "999"),
                         (chat("w1", prediction={"content": "\ud800"}), r"'\ud800'")],
    "completions": [({"prompt": LONG}, "> 256"), ({"prompt": ["w1", ""]}, "prompt"),
                    ({"prompt": [99999]}, "99999"), ({"prompt": [[8], 8]}, "prompt"),
                    ({}, "prompt"), ({"prompt": "w1", "logit_bias": {"999": 1}}, "999")],
    "messages": [({**chat(LONG), "max_tokens": 9}, "> 256"), (chat(" "), "prompt")],
    "messages/count_tokens": [(chat(" "), "prompt")],
    "responses": [({"input": LONG}, "> 256"), ({"input": " "}, "prompt")],
}  # fmt: skip


@pytest.mark.parametrize("route", OF_MODELS)
def test_what_a_model_cannot_take_is_refused(client, route):
    for body, named in OF_MODELS[route]:
        for stream in (False, True):
            content = json.dumps({"model": "tiny", **body, "stream": stream})
            found = client.post(f"/v1/{route}", content=content, headers=JSON)
            error = found.json()["error"]
            assert (found.status_code, error["type"]) == (400, "invalid_request_error"), body
            assert "\n" not in error["message"]
            assert body.get("prompt") == [[8], 8] or named in error["message"]
            if named == "> 256":
                assert error["code"] == "context_length_exceeded"
                assert "prompt is too long: 40" in error["message"], "Anthropic's words"
                assert "maximum context length" in error["message"], "OpenAI's words"


def test_a_model_that_is_not_served_is_not_found(client):
    for route, body in ROUTES.items():
        found = client.post(f"/v1/{route}", json={**body, "model": "../secret"})
        error = found.json()["error"]
        assert (found.status_code, error["code"]) == (404, "model_not_found")
        assert mentions(error["message"], "tiny", "tiny:own")


# --- fields that are read are those that are followed ---

SOME = {"stop": ["a"], "reasoning_effort": "none", "n": 2, "tool_choice": "none", "seed": -1}


@pytest.mark.parametrize(("path", "more"), [
    *((path, more) for path in APIS for more in ({}, SOME)),
    ("/v1/chat/completions", {"logprobs": True}),
    ("/v1/completions", {"logprobs": 1, "max_tokens": 0, "echo": True}),
])  # fmt: skip
def test_a_route_reads_the_fields_that_readme_lists_whatever_their_values(path, more):
    read, write = APIS[path]
    route = path.removeprefix("/v1/")
    body = Fields({**ROUTES[route], **more})
    write(read(body, ssmlx.GenerateConfig()))
    assert body.followed == FOLLOWED[route]


def test_what_every_route_follows_is_neither_refused_nor_without_effect():
    followed = set.intersection(*FOLLOWED.values())
    assert "temperature" in followed and not followed & (REFUSED.keys() | WITHOUT_EFFECT)


def test_a_completion_follows_a_response_format_and_does_not_call_it_ignored():
    body = Fields({"prompt": "w1", "response_format": {"type": "json_object"}})
    assert completions.read_completion(body, ssmlx.GenerateConfig()).grammar
    assert body.ignored() == []


def test_what_two_fields_say_of_thinking_or_of_a_form_is_joined():
    def template_args(route, **body):
        return APIS[f"/v1/{route}"][0](
            {**ROUTES[route], **body}, ssmlx.GenerateConfig()
        ).template_args

    given = {"chat_template_kwargs": {"language": "de"}}
    for kind, on in (("enabled", True), ("disabled", False)):
        found = template_args("messages", thinking={"type": kind}, **given)
        assert found == {"enable_thinking": on, "language": "de"}
    own = {"chat_template_kwargs": {"enable_thinking": True}}
    for more in ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}):
        assert template_args("messages", **more, **own) == {"enable_thinking": True}
    for more in (LOW, {"reasoning_effort": "low"}, {**LOW, "reasoning_effort": "low"}):
        assert template_args("responses", **more) == {"reasoning_effort": "low"}
    form = {"type": "json_object"}
    same = {"messages": USER, "output_config": {"format": form}, "output_format": form}
    assert messages.read_message(same, ssmlx.GenerateConfig()).grammar
