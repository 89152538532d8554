"""Answers that are held to a form: tool calls that have to be made, JSON, expressions, grammars."""

import json
import re
import time
from dataclasses import replace
from enum import Enum
from importlib import import_module
from typing import Annotated, Literal

import pytest

pytest.importorskip("starlette")
pytest.importorskip("pydantic")

import mlx.core as mx
import numpy as np
import real
from mlx_lm.tool_parsers import glm47, json_tools
from pydantic import BaseModel, Field
from real import refusal
from test_server import CHAT, chat, client_of, reply, said
from test_server_protocols import LAST, OFFERED, TOKENIZER, make_tokenizer, told

import ssmlx
from ssmlx.prompt_cache import PromptCache
from ssmlx.server.app import make_app
from ssmlx.server.choices import AnswerParser
from ssmlx.server.grammars import grammar_mask, json_grammar, llguidance_tokenizer
from ssmlx.server.handler import RequestHandler
from ssmlx.server.requests import ChoiceEnd, TextPart, ToolCallPart
from ssmlx.server.schemas import tools_for_parser
from ssmlx.server.tool_grammars import _CALL_FORMATS, tool_call_grammar

ADD = {
    "name": "add",
    "description": "Adds.",
    "parameters": {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "enum": [1, 2]},
            "b": {"type": "boolean"},
            "word": {"type": "string", "maxLength": 5},
        },
        "required": ["b", "word"],
    },
}
NOW = {"name": "now", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": one} for one in (ADD, NOW)]


def drawn(tokenizer, grammar, seed, liked="", most=3000):
    """A text of noise that a grammar holds to its form; of likely characters that are liked."""
    noise = np.random.default_rng(seed)
    constrain = grammar_mask(llguidance_tokenizer(tokenizer), grammar)
    size = len(tokenizer.get_vocab())
    bonus = np.zeros(size, np.float32)
    for one in liked:
        bonus[tokenizer.encode(one, add_special_tokens=False)] = 8
    tokens: list[int] = []
    while len(tokens) < most:
        logits = mx.array(noise.normal(size=size).astype(np.float32) + bonus)[None]
        tokens.append(mx.argmax(constrain(tokens, logits)).item())
        if tokens[-1] in tokenizer.eos_token_ids:
            return tokenizer.decode(tokens[:-1])
    raise AssertionError(f"no end: {tokenizer.decode(tokens)[:500]}")


def fits(arguments):
    """Whether the arguments are of the tool ADD."""
    word = arguments.get("word")
    is_known = {*arguments} <= {"a", "b", "word"} and arguments.get("a", 1) in (1, 2)
    return is_known and type(arguments.get("b")) is bool and isinstance(word, str)


@pytest.mark.parametrize("form", sorted(_CALL_FORMATS))
@pytest.mark.parametrize("has_tokens", [False, True])
def test_a_call_that_has_to_be_made_is_one_in_every_form_that_mlx_lm_reads(form, has_tokens):
    module = import_module(f"mlx_lm.tool_parsers.{form}")
    tokenizer = make_tokenizer(module, thinks=False)
    if has_tokens:  # as models have them
        markers = [one for one in (module.tool_call_start, module.tool_call_end) if one]
        tokenizer._tokenizer.add_special_tokens({"additional_special_tokens": markers})
    offered = TOOLS
    for seed in range(4):
        for names, most in ((("add",), 1), (("now",), 1), (("add", "now"), 3)):
            grammar = tool_call_grammar(tokenizer, offered, names, most)
            text = drawn(tokenizer, grammar, seed, '"<,}\n')
            calls = called(tokenizer, text, offered)
            assert 1 <= len(calls) <= most and {name for name, _ in calls} <= {*names}, text
            assert all(fits(own) if name == "add" else own == {} for name, own in calls), text


def called(tokenizer, text, tools):
    """The calls in a text, which has nothing else; each a name and arguments."""
    parser = AnswerParser(tokenizer, replace(OFFERED, tools=tools))
    calls = []
    for part in parser.split_into_parts(TextPart(text, 1)) + parser.split_into_parts(
        ChoiceEnd("stop", LAST)
    ):
        if isinstance(part, ToolCallPart):
            calls.append((part.name, json.loads(part.text)))
        else:
            assert not getattr(part, "text", "").strip(), (text, part)
    return calls


class Colour(Enum):
    RED = "red"
    BLUE = "light blue"


class Point(BaseModel):
    x: bool
    colour: Colour


class Flat(BaseModel):
    """What agents' tools take: schemas that refer to others, and values that may be null."""

    colour: Colour
    count: int | None
    note: str | None
    kind: Literal["a", "b c"]
    name: Annotated[str, Field(min_length=1, max_length=3)]
    other: Colour | None = None


class Nested(Flat):
    point: Point
    points: Annotated[list[Point], Field(max_length=2)] | None = None


@pytest.mark.parametrize("form", sorted(_CALL_FORMATS))
def test_a_call_has_the_types_that_a_tool_refers_to(form):
    module = import_module(f"mlx_lm.tool_parsers.{form}")
    tokenizer = make_tokenizer(module, thinks=False)
    # mlx-lm's parsers of Gemma's calls end an argument at any brace.
    wanted = Flat if "gemma" in form else Nested
    schema = wanted.model_json_schema()
    for seed in range(4):
        if seed == 2:  # as Anthropic's clients send it
            del schema["properties"]["kind"]["type"], schema["$defs"]["Colour"]["type"]
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        text = drawn(tokenizer, tool_call_grammar(tokenizer, tools, ["f"], 1), seed, '"<,}\n')
        ((_, arguments),) = called(tokenizer, text, tools)
        wanted.model_validate_json(json.dumps(arguments), strict=True)


def test_schemas_that_are_none_or_refer_to_themselves_do_no_harm():
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}, "b": 3}}
    for schema in (
        None, 3, {}, loop, {"properties": 3}, {"properties": {"x": loop, "y": 3}},
        {"$defs": [], "properties": {"x": {"$ref": 3}, "y": {"$ref": "#/$defs/b"}}},
        {"properties": {"x": {"anyOf": [3, {"type": []}, {"$ref": "#/"}]}, "y": {"type": [3]}}},
    ):  # fmt: skip
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        assert [one["function"]["name"] for one in tools_for_parser([tool, tool])] == ["f", "f"]
    assert tools_for_parser(None) is None and tools_for_parser([3]) == [3]
    tools = [{"name": "f", "parameters": {"properties": 3}}]
    glm = make_tokenizer(glm47, thinks=False)
    assert "a JSON schema" in refusal(tool_call_grammar, glm, tools, ["f"], 1)
    many = [str(n) for n in range(5_000)]
    refers = {"$ref": "#/$defs/0"}
    large = {"$defs": {"0": {"enum": many}, **dict.fromkeys(many, refers)}}
    large["properties"] = {one: {"anyOf": [refers] * 9, **dict.fromkeys(many[:9])} for one in many}
    tools = [{"type": "function", "function": {"name": "f", "parameters": large}}]
    started = time.monotonic()
    assert tools_for_parser(tools) and "too large" in refusal(
        tool_call_grammar, glm, tools, ["f"], 1
    )
    assert time.monotonic() - started < 10


def test_json_has_no_white_space_without_end():
    kinds = {
        "name": {"enum": ["x"]},
        "tags": {"type": "array", "items": {"enum": [1]}, "maxItems": 2},
    }
    schema = {"type": "object", "properties": kinds, "required": [*kinds]}
    schema["additionalProperties"] = False
    for seed in range(5):
        text = drawn(TOKENIZER, json_grammar(schema), seed, " \n\t\r", most=200)
        assert json.loads(text)["name"] == "x" and not re.search(r"\s\s|[\n\t\r]", text)


def test_objects_have_no_properties_but_those_that_their_schema_names():
    one, other = ({"type": "object", "properties": {name: {"const": 1}}} for name in "ab")
    array = {"type": "array", "items": other, "maxItems": 1}
    nested = {"type": "object", "properties": {"x": {"$ref": "#/$defs/one"}, "y": array}}
    open_ = {**one, "additionalProperties": {"const": 2}}
    for schema, names in (
        ({**nested, "required": ["x", "y"], "$defs": {"one": one}}, {"x", "y", "a", "b"}),
        ({"anyOf": [one, other]}, {"a", "b"}),
        (open_, None),
    ):
        texts = [drawn(TOKENIZER, json_grammar(schema), seed, '"}', most=2000) for seed in range(8)]
        keys = {*re.findall(r'"([^"]*)": ?[^,}]', "".join(texts))}
        assert keys and (keys <= names if names else not keys <= {"a"}), texts
    both = {"allOf": [{**one, "required": ["a"]}, {**other, "required": ["b"]}]}
    text = drawn(TOKENIZER, json_grammar(both), 0, '"}')
    assert {"a", "b"} <= {*json.loads(text)}, text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model whose tokens are bytes, with a template for tools."""
    folder = tmp_path_factory.mktemp("bytes") / "tiny"
    real.write_base(folder, context=2048, vocab=320)
    own = make_tokenizer(json_tools, thinks=False)._tokenizer
    own.chat_template = (
        "{% if tools %}<tool_call>{{ tools[0].function.name }}{# tool_call.name #}{% endif %}"
        + real.CHAT_TEMPLATE
    )
    own.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (end,) = own.encode("</s>", add_special_tokens=False)
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": end}))
    return folder


@pytest.fixture(scope="module")
def client(folder):
    with ssmlx.Engine(str(folder), dtype="float32") as engine:
        handler = RequestHandler(engine, {"tiny": None}, prompt_caches=[PromptCache()])
        yield client_of(make_app(handler, ssmlx.GenerateConfig(max_tokens=1500)))


SIMPLE = {**ADD["parameters"], "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}}}
SIMPLE["required"] = ["a", "b"]
OPENAI = [
    {"type": "function", "function": {"name": name, "parameters": SIMPLE}} for name in ("f", "g")
]
FLAT = [{"type": "function", "name": name, "parameters": SIMPLE} for name in ("f", "g")]
ANTHROPIC = [{"name": name, "input_schema": SIMPLE} for name in ("f", "g")]


@pytest.mark.parametrize(("choice", "names"), [
    ("required", {"f", "g"}),
    ({"type": "function", "function": {"name": "g"}}, {"g"}),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
        {"type": "function", "function": {"name": "g"}}]}}, {"g"}),
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_chats_call_the_tools_that_they_have_to(client, choice, names, stream):
    openai = pytest.importorskip("openai")
    body = chat("Hi", tools=OPENAI, tool_choice=choice, stream=stream, parallel_tool_calls=False)
    chunks = reply(client, body)
    ends = [one["finish_reason"] for chunk in chunks for one in chunk["choices"]]
    held = [one.get("message") or one["delta"] for chunk in chunks for one in chunk["choices"]]
    (call,) = [call for one in held for call in one.get("tool_calls", ())]
    assert call["function"]["name"] in names and ends[-1] == "tool_calls"
    assert {*json.loads(call["function"]["arguments"])} == {"a", "b"}
    assert openai


def test_messages_and_responses_call_the_tools_that_they_have_to(client):
    asked = {"model": "tiny", "max_tokens": 1500, **chat("Hi"), "tools": ANTHROPIC}
    for choice, names in (({"type": "any", "disable_parallel_tool_use": True}, {"f", "g"}),
                          ({"type": "tool", "name": "g"}, {"g"})):  # fmt: skip
        found = client.post("/v1/messages", json={**asked, "tool_choice": choice}).json()
        (used,) = found["content"]
        assert used["type"] == "tool_use" and used["name"] in names
        assert {*used["input"]} == {"a", "b"} and found["stop_reason"] == "tool_use"
    asked = {"input": "Hi", "tools": FLAT}
    for choice, names in (("required", {"f", "g"}), ({"type": "function", "name": "g"}, {"g"})):
        found = client.post("/v1/responses", json={**asked, "tool_choice": choice}).json()
        assert {one["name"] for one in found["output"]} <= names
        assert all({*json.loads(one["arguments"])} == {"a", "b"} for one in found["output"])


def test_a_choice_that_no_tool_fits_is_refused(client):
    for choice in (
        {"type": "function", "function": {"name": "h"}}, "always", {"type": "tool"}, 3,
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"name": "h"}]}},
    ):  # fmt: skip
        found = client.post(CHAT, json=chat("Hi", tools=OPENAI, tool_choice=choice))
        assert (found.status_code, found.json()["error"]["param"]) == (400, "tool_choice"), choice
    found = client.post(CHAT, json=chat("Hi", tool_choice="required"))
    assert (found.status_code, found.json()["error"]["param"]) == (400, "tool_choice")
    unknown = make_tokenizer(json_tools, thinks=False)
    unknown._tool_parser = lambda text, tools: None
    assert "is not known" in refusal(tool_call_grammar, unknown, TOOLS, ["add"], 1)


@pytest.mark.parametrize(("more", "pattern"), [
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"structured_outputs": {"regex": "[0-9]{3}"}}, "[0-9]{3}"),
    ({"guided_regex": "a{2}"}, "aa"),
    ({"structured_outputs": {"json": {"enum": [1, 2]}}}, "[12]"),
    ({"json_schema": {"type": "boolean"}}, "true|false"),
    ({"grammar": 'root ::= "a" ("b" | "c")'}, "a[bc]"),
    ({"structured_outputs": {"grammar": 'start: "x" "y"'}}, "xy"),
    ({"response_format": {"type": "json_object", "schema": {"const": 7}}}, "7"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 7}}}}, "7"),
])  # fmt: skip
def test_forms_that_vllm_and_llama_cpp_know_are_followed(client, more, pattern):
    found = reply(client, chat("Hi", max_tokens=50, **more))
    assert re.fullmatch(pattern, said(found)), said(found)
    assert found[0]["choices"][0]["finish_reason"] == "stop"
    if "response_format" not in more:
        own = client.post("/v1/messages", json={"max_tokens": 50, **chat("Hi", **more)}).json()
        assert re.fullmatch(pattern, own["content"][0]["text"])


def test_forms_that_cannot_be_followed_are_refused(client):
    for more in (
        {"structured_outputs": {"structural_tag": "x"}}, {"guided_choice": "yes"},
        {"grammar": "root ::= ("}, {"guided_regex": "("}, {"guided_json": "{"},
        {"grammar": 'root ::= "a"', "guided_regex": "a"}, {"structured_outputs": 3},
        {"response_format": {"type": "json_object", "schema": 3}},
    ):  # fmt: skip
        found = client.post(CHAT, json=chat("Hi", **more))
        assert found.status_code == 400, (more, found.text)


def test_a_tokenizer_that_llguidance_cannot_read_is_told(serve):
    """The tiny model's, of words; whole and streamed, and the server answers on."""
    client = client_of(serve())
    form = {"response_format": {"type": "json_object"}}
    for stream in (False, True):
        found = client.post(CHAT, json=chat(stream=stream, **form))
        assert "a tokenizer that llguidance knows" in found.text
        assert found.status_code == 400, found.text
    assert said(reply(client, chat()))


def test_an_answer_that_is_cut_in_its_form_says_so(client):
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "string"}}}
    (chunk,) = reply(client, chat("Hi", max_tokens=3, response_format=form))
    assert chunk["choices"][0]["finish_reason"] == "length"
    own = {"input": "Hi", "max_output_tokens": 3, "text": {"format": form | form["json_schema"]}}
    found = client.post("/v1/responses", json=own).json()
    assert (found["status"], found["incomplete_details"]["reason"]) == (
        "incomplete",
        "max_output_tokens",
    )
    body = {"max_tokens": 3, **chat("Hi", output_config={"format": form | form["json_schema"]})}
    assert client.post("/v1/messages", json=body).json()["stop_reason"] == "max_tokens"


def test_one_call_alone_where_several_are_not_wanted():
    from test_server_protocols import ARGUMENTS, CALL

    own = replace(OFFERED, parallel_calls=False)
    assert told(AnswerParser(TOKENIZER, own), [CALL + CALL])[0] == [(ToolCallPart, ARGUMENTS)]
