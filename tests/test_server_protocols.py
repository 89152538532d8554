"""Messages, responses, tool calls, reasoning and JSON, as the typed clients read them."""

import asyncio
import json
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

import pytest

pytest.importorskip("starlette")
anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")

import httpx2 as httpx
import mlx.core as mx
import numpy as np
from anthropic.types import Message, RawMessageStreamEvent
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools, mistral
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from real import refusal
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import ssmlx
from ssmlx.server.app import make_app
from ssmlx.server.choices import AnswerParser
from ssmlx.server.grammars import grammar_mask, json_grammar, llguidance_tokenizer
from ssmlx.server.handler import Limits, PrometheusMetrics, RequestHandler
from ssmlx.server.requests import AnswerRequest, ChoiceEnd, ReasoningPart, TextPart, ToolCallPart

TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
ARGUMENTS = {"a": 1, "b": "é"}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "é"}}</tool_call>'
INNER = CALL[11:-12]
THOUGHT = "<think>Hm, <b>.</think>\n\n"
USER = [{"role": "user", "content": "What is 1 + 2?"}]
MESSAGE = {"model": "tiny", "max_tokens": 9, "messages": USER}


def make_tokenizer(parser, *, thinks):
    """Tokens are bytes; it has the markers of a model that calls tools, and maybe thinks."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    own.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=own, eos_token="</s>")
    fast.add_tokens(["<think>", "</think>"] if thinks else [], special_tokens=True)
    start = parser.tool_call_start
    end = parser.tool_call_end
    call = parser.parse_tool_call
    return TokenizerWrapper(fast, tool_call_start=start, tool_call_end=end, tool_parser=call)


TOKENIZER = make_tokenizer(json_tools, thinks=True)
OFFERED = AnswerRequest(question="", config=ssmlx.GenerateConfig(), tools=[TOOL])
COUNTS = {"prompt_tokens": 7, "generation_tokens": 20, "target_calls": 4, "cached_tokens": 4}
COUNTS |= {"prefill_seconds": 1, "decode_seconds": 1, "peak_memory": 0}
LAST = ssmlx.GenerationResponse(text="", tokens=(), finish_reason="stop", **COUNTS)


class Scripted:
    """In the place of a `RequestHandler`: every answer is the same text, some characters at a time,
    and fails at its end without a reason to end."""

    limits = Limits()
    models: ClassVar = {"tiny": None}
    prompt_caches = (None,)
    context_length = None
    has_unknown_calls = False

    def __init__(self, text="Yes.", size=3, reason="stop", stop=None):
        self.metrics = PrometheusMetrics()
        self.texts = pieces(text, size)
        self.reason = reason
        self.stop = stop
        self.reader = self  # in the place of a `PromptReader`

    def with_served_model_or_404(self, ask):
        return replace(ask, model="tiny")

    def first_prompt_and_seeded_config(self, ask):
        return [1] * 7, ask.config

    async def merged_parts_of_choices(self, ask, prompt_cache):
        self.ask = ask
        parser = AnswerParser(TOKENIZER, ask)
        said = [one for text in self.texts for one in parser.split_into_parts(TextPart(text, 2))]
        end = ChoiceEnd(self.reason, replace(LAST, stop=self.stop))
        for one in said + (parser.split_into_parts(end) if self.reason else []):
            yield one
        if self.reason is None:
            raise RuntimeError("a step")


def pieces(text, size):
    return [text[place : place + size] for place in range(0, len(text), size)]


def clients(handler):
    http = httpx.AsyncClient(transport=httpx.ASGITransport(make_app(handler)))
    more = {"api_key": "none", "max_retries": 0, "http_client": http}
    first = openai.AsyncOpenAI(base_url="http://localhost/v1", **more)
    return first, anthropic.AsyncAnthropic(base_url="http://localhost", **more)


def posted(handler, route, body):
    async def post():
        transport = httpx.ASGITransport(make_app(handler))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost/v1/") as http:
            return await http.post(route, json=body)

    return asyncio.run(post())


def events(handler, route, body, kind):
    """The events of a reply, which are what the client's types say; and their names."""
    lines = posted(handler, route, {**body, "stream": True}).text.split("\n")
    found = [TypeAdapter(kind).validate_json(one[6:]) for one in lines if one[:6] == "data: "]
    assert [one.type for one in found] == [one[7:] for one in lines if one[:7] == "event: "]
    return found


async def collected(manager):
    async with manager as stream:
        return [event async for event in stream]


def told(parser, texts, reason="stop"):
    """Parts, neighbours of one kind joined, and why the answer ended."""
    found = [one for text in texts for one in parser.split_into_parts(TextPart(text, 1))]
    *found, end = [*found, *parser.split_into_parts(ChoiceEnd(reason, LAST))]
    said = []
    for part in found:
        value = json.loads(part.text) if isinstance(part, ToolCallPart) else part.text
        if said and said[-1][0] is type(part) and not isinstance(part, ToolCallPart):
            said[-1] = type(part), said[-1][1] + value
        elif value:
            said.append((type(part), value))
    return said, end.reason


def test_markers_are_found_wherever_a_text_is_split():
    text = f"{THOUGHT}I add. <tool{CALL}\n{CALL}\n< done"
    calls = [(ToolCallPart, ARGUMENTS)] * 2
    wanted = [(ReasoningPart, "Hm, <b>."), (TextPart, "I add. <tool"), *calls, (TextPart, "< done")]
    for size in range(1, len(text) + 1):
        found = told(AnswerParser(TOKENIZER, OFFERED), pieces(text, size))
        assert found == (wanted, "tool_calls"), size


@pytest.mark.parametrize(("text", "reason", "wanted"), [
    ('<tool_call>{"name": "add"</tool_call> so', "stop", [(TextPart, '{"name": "add"so')]),
    ("<tool_call>[1, 2]</tool_call>", "stop", [(TextPart, "[1, 2]")]),
    (CALL.replace("1", "NaN"), "stop", [(TextPart, INNER.replace("1", "NaN"))]),
    (CALL[:-12], "stop", [(ToolCallPart, ARGUMENTS)]),
    (CALL[:-12], "length", [(TextPart, INNER)]),
    ("so <tool_c", "length", [(TextPart, "so <tool_c")]),
    ("<think>Hm", "length", [(ReasoningPart, "Hm")]),
])  # fmt: skip
def test_what_is_no_call_is_text(text, reason, wanted):
    calls = any(kind is ToolCallPart for kind, _ in wanted)
    for size in (1, 5, 100):
        found = told(AnswerParser(TOKENIZER, OFFERED), pieces(text, size), reason)
        assert found == (wanted, "tool_calls" if calls else reason)


def test_text_before_a_call_is_told_at_once_and_every_token_once():
    parser = AnswerParser(TOKENIZER, OFFERED)
    assert parser.split_into_parts(TextPart("I add", 3)) == [TextPart("I add", 3)]
    assert parser.split_into_parts(TextPart(" <to", 2)) == [TextPart(" ", 2)]
    assert parser.split_into_parts(TextPart("o many", 2)) == [TextPart("<too many", 2)]
    (call,) = parser.split_into_parts(TextPart(CALL, 9))
    assert call.name == "add" and len(parser.split_into_parts(ChoiceEnd("stop", LAST))) == 1


def test_every_api_reports_the_tokens_of_reasoning():
    parser = AnswerParser(TOKENIZER, OFFERED)
    for text, tokens in (("<think>Hm", 3), (", so", 2), ("</think>I add.", 4), (CALL, 9)):
        parser.split_into_parts(TextPart(text, tokens))
    assert parser.split_into_parts(ChoiceEnd("length", LAST))[-1].reasoning_tokens == 5
    scripted = Scripted(f"{THOUGHT}I add.", 1000)
    chat = {"messages": USER}
    for route, body, output, details, name in (
        ("chat/completions", chat, "completion_tokens", "completion_tokens_details", "reasoning"),
        ("messages", chat, "output_tokens", "output_tokens_details", "thinking"),
        ("responses", {"input": "1 + 2?"}, "output_tokens", "output_tokens_details", "reasoning"),
    ):
        usage = posted(scripted, route, body).json()["usage"]
        assert usage[output] == 20 and usage[details][f"{name}_tokens"] == 2, route


def test_other_models_markers():
    own = make_tokenizer(mistral, thinks=False)
    text = '[TOOL_CALLS]add[ARGS]{"a": 1}add[ARGS]{"a": 2}'
    wanted = [(ToolCallPart, {"a": 1}), (ToolCallPart, {"a": 2})]
    assert told(AnswerParser(own, OFFERED), pieces(text, 4)) == (wanted, "tool_calls")
    assert told(AnswerParser(TOKENIZER, replace(OFFERED, tools=None)), [CALL])[0] == [
        (TextPart, INNER)
    ], "none are offered"
    opened = AnswerParser(TOKENIZER, OFFERED, TOKENIZER.encode("Hello <think>\n"))
    assert told(opened, ["Hm</thi", "nk>So"])[0] == [(ReasoningPart, "Hm"), (TextPart, "So")]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_messages(size):
    scripted = Scripted(f"{THOUGHT}I add.{CALL}{CALL}", size)
    tools = [{"name": "add", "input_schema": {"type": "object"}}]
    found = events(scripted, "messages", {**MESSAGE, "tools": tools}, RawMessageStreamEvent)
    order = [one for one, after in pairwise([*(one.type for one in found), ""]) if one != after]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert order == ["message_start", *block * 4, "message_delta", "message_stop"]
    whole = Message.model_validate(posted(scripted, "messages", {**MESSAGE, "tools": tools}).json())
    stream = clients(scripted)[1].messages.stream(**MESSAGE, tools=tools)
    final = asyncio.run(collected(stream))[-1].message
    for one in (whole, final):
        assert [part.type for part in one.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert (one.content[0].thinking, one.content[1].text) == ("Hm, <b>.", "I add.")
        assert one.content[2].input == ARGUMENTS and one.stop_reason == "tool_use"
        assert (one.usage.input_tokens, one.usage.cache_read_input_tokens) == (3, 4)
        assert one.usage.output_tokens == 20
    chat = posted(scripted, "chat/completions", {**MESSAGE, "tools": [TOOL]}).json()["choices"][0]
    assert len(chat["message"]["tool_calls"]) == 2


def test_turns_of_messages():
    scripted = Scripted(stop="\n")
    text = {"type": "text", "text": "Is it?"}
    client = clients(scripted)[1]
    call = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{**text, "text": "3"}]}
    thought = {"type": "thinking", "thinking": "Hm", "signature": "none"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    asked = {
        "model": "tiny", "max_tokens": 9, "stop_sequences": ["\n"],
        "system": [{**text, "text": "Be brief."}], "thinking": {"type": "disabled"},
        "tools": [{"name": "add", "input_schema": {}}], "tool_choice": {"type": "none"},
        "messages": [*USER, {"role": "assistant", "content": [thought, hidden, text, call]},
                     {"role": "user", "content": [result, text]}],
        "extra_body": {"temperature": 0.5, "top_k": 3},
    }  # fmt: skip
    reply = asyncio.run(client.messages.create(**asked))
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "\n")
    function = {"name": "add", "arguments": {"a": 1}}
    assert scripted.ask.question == [
        {"role": "system", "content": "Be brief."},
        *USER,
        {
            "role": "assistant",
            "content": "Is it?",
            "reasoning_content": "Hm",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "3", "tool_call_id": "t1", "name": "add"},
        {"role": "user", "content": "Is it?"},
    ]
    assert scripted.ask.tools is None and not scripted.ask.template_args["enable_thinking"]
    config = scripted.ask.config
    assert (config.max_tokens, config.temp, config.top_k, config.stop) == (9, 0.5, 3, ("\n",))
    counted = asyncio.run(client.messages.count_tokens(model="tiny", messages=USER))
    assert counted.input_tokens == 7


def test_anthropics_tool_runner_sends_the_whole_conversation_without_threads():
    class Recorded(Scripted):
        def with_served_model_or_404(self, ask):
            roles.append([turn["role"] for turn in ask.question])
            return super().with_served_model_or_404(ask)

    @anthropic.beta_async_tool
    async def add(a: int, b: str) -> str:
        """Adds."""
        return "3"

    async def run():
        beta = clients(Recorded(CALL))[1].beta.messages
        runner = beta.tool_runner(**MESSAGE, tools=[add], max_iterations=2)
        return [message.stop_reason async for message in runner]

    roles = []
    assert asyncio.run(run()) == ["tool_use"] * 2
    assert roles == [["user"], ["user", "assistant", "tool"]]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_responses(size, reason):
    rest, state = ("", "completed") if reason == "stop" else ("And then", "incomplete")
    scripted = Scripted(f"{THOUGHT}I add.{CALL}{rest}", size, reason)
    tools = [{"type": "function", **TOOL, "strict": False}]
    body = {"input": USER[0]["content"], "instructions": "Be brief.", "tools": tools}
    found = events(scripted, "responses", body, ResponseStreamEvent)
    assert [one.sequence_number for one in found] == [*range(len(found))]
    whole = Response.model_validate(posted(scripted, "responses", body).json())
    client = clients(scripted)[0]
    stream = client.responses.stream(model="tiny", **body)
    typed = asyncio.run(collected(stream))[-1].response
    for one in (found[-1].response, whole, typed):
        thought, message, call, *others = one.output
        assert thought.content[0].text == "Hm, <b>." and message.content[0].text == "I add."
        assert json.loads(call.arguments) == ARGUMENTS and call.name == "add"
        assert len(others) == bool(rest) and one.status == one.output[-1].status == state
        assert one.output_text == "I add." + rest
        assert one.usage.output_tokens_details.reasoning_tokens > 0
    said = [one.delta for one in found if one.type == "response.output_text.delta"]
    assert "".join(said) == whole.output_text and found[-1].type == f"response.{state}"
    assert [one["function"]["name"] for one in scripted.ask.tools] == ["add"]


def test_turns_of_responses():
    scripted = Scripted()
    items = [
        {"role": "developer", "content": "Add."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]},
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
    ]
    form = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}
    more = {"text": form, "instructions": "Be brief.", "max_output_tokens": 5, "store": False}
    asyncio.run(clients(scripted)[0].responses.create(model="tiny", input=items, **more))
    question = scripted.ask.question
    assert [turn["role"] for turn in question] == ["system", "user", "assistant", "tool"]
    assert question[0]["content"] == "Be brief.\n\nAdd."
    assert scripted.ask.grammar == json_grammar({"type": "object"})
    assert scripted.ask.config.max_tokens == 5


@pytest.mark.parametrize(("route", "body"), [
    ("messages", {**MESSAGE, "tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ("responses", {"input": "a", "tools": [{"type": "web_search"}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}),
    ("messages", {**MESSAGE, "tools": [{"input_schema": {}}]}),
    ("messages", {**MESSAGE, "tool_choice": {"type": "any"}}),
    ("messages", {**MESSAGE, "system": 3}),
    ("responses", {"input": []}),
    ("responses", {"input": "a", "previous_response_id": "resp_1"}),
    ("responses", {"input": [{"type": "item_reference", "id": "x"}]}),
    ("responses", {"input": [{"type": "function_call_output", "call_id": [], "output": "x"}]}),
    ("responses", {"input": "a", "text": {"format": {"type": "grammar"}}}),
    ("responses", {"input": "a", "tools": [{"parameters": {}, "name": 3}]}),
    ("responses", {"input": "a", "tools": [{"type": "custom", "name": "apply_patch"}]}),
    ("chat/completions", {**MESSAGE, "tool_choice": "required"}),
    ("chat/completions", {**MESSAGE, "tools": [{"type": "web_search"}]}),
])  # fmt: skip
def test_what_cannot_be_followed_is_refused_in_a_line(route, body):
    reply = posted(Scripted(), route, body)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["type"] == "invalid_request_error"
    assert "; expected " in error["message"]


def test_an_answer_that_fails_on_its_way_is_the_clients_own_error():
    client, other = clients(Scripted(reason=None))
    with pytest.raises(anthropic.APIStatusError, match="the answer failed"):
        asyncio.run(collected(other.messages.stream(**MESSAGE)))
    with pytest.raises(openai.APIError, match="the answer failed"):
        asyncio.run(collected(client.responses.stream(model="tiny", input="a")))


def test_a_schema_is_followed_whatever_the_logits():
    numbers = {"type": "array", "items": {"type": "integer"}, "maxItems": 2}
    schema = {
        "type": "object", "additionalProperties": False, "required": ["name", "tags"],
        "properties": {"name": {"enum": ["é", "b"]}, "tags": numbers},
    }  # fmt: skip
    noise = np.random.default_rng(0)
    for _ in range(5):
        constrain = grammar_mask(llguidance_tokenizer(TOKENIZER), json_grammar(schema))
        tokens = []
        while not tokens or tokens[-1] not in TOKENIZER.eos_token_ids:
            logits = mx.array(noise.normal(size=(1, 300)).astype(np.float32))
            masked = constrain(tokens, logits)
            assert mx.array_equal(constrain(tokens, logits), masked), "asked again, it is the same"
            tokens.append(mx.argmax(masked).item())
        found = json.loads(TOKENIZER.decode(tokens[:-1]))
        assert found["name"] in ("é", "b") and all(type(one) is int for one in found["tags"])
    for bad in ({"type": "foo"}, {"$ref": "#/none"}, {"type": "string", "pattern": "("}):
        assert "expected one that llguidance knows" in refusal(
            grammar_mask, llguidance_tokenizer(TOKENIZER), json_grammar(bad)
        )


def test_a_model_says_the_same_by_every_route(base, tmp_path):
    turns = [{"role": "user", "content": "w1 w2"}]
    asked = {"model": "tiny", "messages": turns, "max_tokens": 8}
    with ssmlx.Engine(str(base), dtype="float32") as engine:
        tiny = RequestHandler(engine, {"tiny": None}, [ssmlx.PromptCache(folder=tmp_path)])
        chat = posted(tiny, "chat/completions", asked).json()
        message = posted(tiny, "messages", {**asked, "thinking": {"type": "disabled"}}).json()
        count = posted(tiny, "messages/count_tokens", {"messages": turns}).json()["input_tokens"]
        body = {"input": turns, "max_output_tokens": 8}
        response = Response.model_validate(posted(tiny, "responses", body).json())
        tiny.close()
    assert any(tmp_path.rglob("*.safetensors")), "prompts were kept"
    said = chat["choices"][0]["message"]["content"]
    used = message["usage"]
    assert said and message["content"][0]["text"] == response.output_text == said
    assert count == chat["usage"]["prompt_tokens"] == response.usage.input_tokens
    assert count == used["input_tokens"] + used["cache_read_input_tokens"]
    assert message["stop_reason"] == "max_tokens" and response.status == "incomplete"


@pytest.mark.slow
def test_smollm2_keeps_to_a_schema_by_every_route():
    prompt = "Describe a person."
    numbers = {"type": "array", "items": {"type": "integer"}, "maxItems": 2}
    schema = {"type": "object", "properties": {"ages": numbers}, "required": ["ages"]}
    form = {"type": "json_schema", "name": "n", "schema": {**schema, "additionalProperties": False}}
    turns = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 200}
    chat = {"type": "json_schema", "json_schema": form}
    with ssmlx.Engine("smollm2-135m") as engine:
        own = RequestHandler(engine, {"smollm2": None})
        first = posted(own, "chat/completions", {**turns, "response_format": chat}).json()
        second = posted(own, "messages", {**turns, "output_config": {"format": form}}).json()
        third = posted(own, "responses", {"input": prompt, "text": {"format": form}}).json()
        said = first["choices"][0]["message"]["content"]
    assert [*json.loads(said)] == ["ages"] and first["choices"][0]["finish_reason"] == "stop"
    assert second["content"][0]["text"] == third["output"][0]["content"][0]["text"] == said
