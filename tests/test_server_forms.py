"""Answers that are held to a form: tool calls that have to be made, JSON, expressions, grammars."""

import asyncio
import json
import re
import time
from collections import Counter
from dataclasses import replace

import pytest

pytest.importorskip("starlette")
pytest.importorskip("pydantic")

import mlx.core as mx
import real
from asking import (
    CHAT,
    OFFERED,
    TOKENIZER,
    chat,
    client_of,
    drive,
    make_tokenizer,
    reply,
    said,
    told,
)
from byte_tokenizers import drawn
from byte_tokenizers import make_tokenizer as make_byte_tokenizer
from mlx_lm.tool_parsers import glm47, json_tools
from refusals import refusal
from served import scripted_stream

import ssmlx
from ssmlx.formats.answer_grammars import tool_call_grammar
from ssmlx.prompt_cache import PromptCache
from ssmlx.server.app import make_app
from ssmlx.server.choices import AnswerParser
from ssmlx.server.grammars import json_grammar
from ssmlx.server.handler import RequestHandler
from ssmlx.server.requests import ToolCallPart

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


def test_schemas_that_are_none_are_refused_and_large_ones_in_time():
    tools = [{"name": "f", "parameters": {"properties": 3}}]
    glm = make_tokenizer(glm47, thinks=False)
    assert "JSON schema" in refusal(tool_call_grammar, glm, tools, ["f"], 1)
    many = [str(n) for n in range(5_000)]
    refers = {"$ref": "#/$defs/0"}
    large = {"$defs": {"0": {"enum": many}, **dict.fromkeys(many, refers)}}
    large["properties"] = {one: {"anyOf": [refers] * 9, **dict.fromkeys(many[:9])} for one in many}
    tools = [{"type": "function", "function": {"name": "f", "parameters": large}}]
    started = time.process_time()
    refusal(tool_call_grammar, glm, tools, ["f"], 1)
    assert time.process_time() - started < 10


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


def test_a_client_that_leaves_in_a_tool_call_leaves_nothing_behind(client, monkeypatch):
    call = '<tool_call>{"name": "f", "arguments": {"a": "%s"}}</tool_call>' % ("x" * 100_000)
    answers = [f"Let me see. {call}", "Yes."]
    monkeypatch.setattr(ssmlx.Engine, "stream", scripted_stream(answers))
    told = []
    gone = asyncio.Event()

    def hear(message):
        told.append(message.get("body", b"").decode())
        if "ee. " in "".join(told):
            gone.set()

    def gauges():
        metrics = client.get("/metrics").text
        found = re.findall(r'(?m)^ssmlx_(open|waiting|tokens_total{kind="calls"}) (.*)', metrics)
        return Counter({name: float(number) for name, number in found})

    before = gauges()
    asyncio.run(drive(client.app, chat("Hi", tools=OPENAI, stream=True), hear, gone))
    assert gone.is_set() and "xx" not in "".join(told)
    assert said(reply(client, chat("Hi"))) == "Yes."
    after = gauges()
    assert after["open"] == after["waiting"] == 0
    assert after - before == {'tokens_total{kind="calls"}': 1}, "of the second alone"


def test_a_choice_that_no_tool_fits_is_refused(client):
    for choice in (
        {"type": "function", "function": {"name": "h"}}, "always", {"type": "tool"}, 3,
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"name": "h"}]}},
    ):  # fmt: skip
        found = client.post(CHAT, json=chat("Hi", tools=OPENAI, tool_choice=choice))
        assert (found.status_code, found.json()["error"]["param"]) == (400, "tool_choice"), choice
    found = client.post(CHAT, json=chat("Hi", tool_choice="required"))
    assert (found.status_code, found.json()["error"]["param"]) == (400, "tool_choice")


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
        assert found.status_code == 400 and "llguidance" in found.text
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
    from asking import ARGUMENTS, CALL

    own = replace(OFFERED, parallel_calls=False)
    assert told(AnswerParser(TOKENIZER, own), [CALL + CALL])[0] == [(ToolCallPart, ARGUMENTS)]


def serve_bytes(folder, template, tokens, text=None):
    """A client of a server for a random model of bytes; with `text` every answer is that."""
    real.write_base(folder, context=2048, vocab=320)
    own = make_byte_tokenizer(tokens=tokens)._tokenizer
    own.chat_template = template
    own.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (end,) = own.encode("</s>", add_special_tokens=False)
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": end}))
    engine = ssmlx.Engine(str(folder), dtype="float32")
    handler = RequestHandler(engine, {"tiny": None}, prompt_caches=[PromptCache()])
    if text is not None:
        ids = [*engine.tokenizer.encode(text, add_special_tokens=False), end]

        def scripted(tokens, logits):
            wanted = ids[min(len(tokens), len(ids) - 1)]
            return mx.where(mx.arange(logits.shape[-1]) == wanted, logits, -mx.inf)

        handler.reader.make_mask_or_none = lambda ask: scripted
    return client_of(make_app(handler, ssmlx.GenerateConfig(max_tokens=200)))


TURNS = (
    "{% for t in tools or [] %}{{ t|tojson }}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
OPEN = TURNS + "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"


@pytest.mark.parametrize("tokens", [("<think>", "</think>"), ()])
def test_a_form_is_written_after_a_thought_that_the_prompt_opens(tmp_path, tokens):
    template = OPEN + "{# <think> </think> <tool_call> tool_call.name #}"
    client = serve_bytes(tmp_path / "tiny", template, tokens)
    (chunk,) = reply(client, chat("Hi", structured_outputs={"choice": ["yes", "no"]}))
    message = chunk["choices"][0]["message"]
    assert message["content"] in ("yes", "no") and len(message["reasoning_content"]) > 20
    assert chunk["choices"][0]["finish_reason"] == "stop"
    used = chunk["usage"]
    assert 100 < used["completion_tokens_details"]["reasoning_tokens"] < used["completion_tokens"]
    one = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    form = {"tools": [one], "tool_choice": "required", "parallel_tool_calls": False}
    chunks = reply(client, chat("Hi", stream=True, max_tokens=900, **form))
    deltas = [one["delta"] for chunk in chunks for one in chunk["choices"]]
    assert any("reasoning_content" in one for one in deltas)


HARMONY_TURNS = (
    "{% for m in messages %}{% if m.role == 'assistant' and '<|channel|>' in m.content %}"
    "{{ raise_exception('channel tags') }}{% endif %}<|start|>{{ m.role }}<|message|>"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
HARMONY_MARKS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"]
SAID = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Red."


def test_an_answer_in_channels_is_text_and_reasoning_and_goes_on(tmp_path):
    client = serve_bytes(tmp_path / "tiny", HARMONY_TURNS, HARMONY_MARKS, SAID)
    (chunk,) = reply(client, chat("Hi"))
    message = chunk["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Red.", "Hm.")
    turns = [{"role": "user", "content": "Hi"}, message, {"role": "user", "content": "And?"}]
    chunks = reply(client, {"messages": turns, "stream": True})
    assert said(chunks) == "Red."


def test_a_chat_in_channels_keeps_the_text_alone(tmp_path):
    folder = tmp_path / "tiny"
    serve_bytes(folder, HARMONY_TURNS, HARMONY_MARKS)
    model, tokenizer = ssmlx.load(str(folder), dtype="float32")
    ends = {tokenizer.decode([one]) for one in tokenizer.eos_token_ids}
    assert {"<|call|>", "<|return|>", "</s>"} == ends
    session = ssmlx.ChatSession(model, tokenizer, ssmlx.GenerateConfig(max_tokens=8))
    for _ in session.reply("Hi"):
        pass
    assert session.begins == "message" and session.messages[-1]["role"] == "assistant"
    for _ in session.reply("And?"):
        pass
    assert len(session.messages) == 4


def test_a_model_of_an_unknown_form_says_so_where_tools_are_offered(tmp_path, client):
    unknown = serve_bytes(tmp_path / "tiny", TURNS, (), "[f(a=1)]")
    asked = chat("Hi", tools=OPENAI)
    found = unknown.post(CHAT, json=asked)
    assert found.headers["x-tool-calls"] == "unknown form"
    assert found.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"
    assert "x-tool-calls" not in unknown.post(CHAT, json=chat("Hi")).headers
    assert (
        "x-tool-calls" not in client.post(CHAT, json=chat("Hi", max_tokens=1, tools=OPENAI)).headers
    )
