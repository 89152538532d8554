"""Messages, responses, tool calls, reasoning and JSON, as the typed clients read them."""

import asyncio
import json
from contextlib import aclosing
from itertools import pairwise

import pytest

pytest.importorskip("starlette")
anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")

import httpx2 as httpx
import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools, mistral
from real import refusal
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import ssmlx
from ssmlx.server import grammar
from ssmlx.server.answering import Answering, Limits, sorted_parts
from ssmlx.server.app import make_app
from ssmlx.server.asks import End, Reasoning, Text, ToolCall, Usage
from ssmlx.server.metrics import Metrics
from ssmlx.server.parsing import Parser

TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "é"}}</tool_call>'
THOUGHT = "<think>Hm, <b>.</think>\n\n"
ARGUMENTS = {"a": 1, "b": "é"}


def make_tokenizer(parser=json_tools, *, thinks=True):
    """Tokens are bytes; it has the markers of a model that thinks and calls tools."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=own, eos_token="</s>")
    if thinks:
        fast.add_tokens(["<think>", "</think>"], special_tokens=True)
    start, end = parser.tool_call_start, parser.tool_call_end
    call = parser.parse_tool_call
    return TokenizerWrapper(fast, tool_call_start=start, tool_call_end=end, tool_parser=call)


TOKENIZER = make_tokenizer()


class Scripted:
    """In the place of `Answering`: every answer is the same text, some characters at a time."""

    limits, models = Limits(), {"tiny": None}

    def __init__(self, text="", size=3, reason="stop", stop=None):
        self.metrics = Metrics()
        self.text, self.size, self.reason, self.stop = text, size, reason, stop

    def model_name(self, ask):
        return "tiny"

    def prepared(self, ask, name):
        self.ask = ask
        return [1] * 7, ask.config

    async def parts(self, ask, user=0):
        self.ask = ask
        async with aclosing(sorted_parts(ask, TOKENIZER, [1], self._told())) as parts:
            async for part in parts:
                yield part

    async def _told(self):
        for piece in pieces(self.text, self.size):
            yield Text(piece, 2)
        yield End(self.reason, Usage(7, 20, 4), self.stop, {"draft_n": 5})


def pieces(text, size):
    return [text[place : place + size] for place in range(0, len(text), size)]


def clients(answering):
    http = httpx.AsyncClient(transport=httpx.ASGITransport(make_app(answering)))
    more = {"base_url": "http://localhost/v1", "api_key": "none", "max_retries": 0}
    own = {**more, "base_url": "http://localhost"}
    return openai.AsyncOpenAI(http_client=http, **more), anthropic.AsyncAnthropic(
        http_client=http, **own
    )


def user(text="What is 1 + 2?"):
    return [{"role": "user", "content": text}]


def told(parser, texts, reason="stop"):
    """Parts, neighbours of one kind joined, and why the answer ended."""
    found = [one for text in texts for one in parser.read(Text(text, 1))]
    *found, end = [*found, *parser.read(End(reason, Usage(1, 1)))]
    said = []
    for part in found:
        value = json.loads(part.arguments) if isinstance(part, ToolCall) else part.text
        if said and said[-1][0] is type(part) and not isinstance(part, ToolCall):
            said[-1] = type(part), said[-1][1] + value
        elif value:
            said.append((type(part), value))
    return said, end.reason


def test_markers_are_found_wherever_a_text_is_split():
    text = f"{THOUGHT}I add. <tool{CALL}\n{CALL}\n< done"
    wanted = [
        (Reasoning, "Hm, <b>."), (Text, "I add. <tool"), (ToolCall, ARGUMENTS),
        (ToolCall, ARGUMENTS), (Text, "< done"),
    ]  # fmt: skip
    for size in range(1, len(text) + 1):
        parser = Parser(TOKENIZER, [TOOL])
        assert told(parser, pieces(text, size)) == (wanted, "tool_calls"), size


@pytest.mark.parametrize(("text", "reason", "wanted"), [
    ('<tool_call>{"name": "add", "argum</tool_call> so', "stop",
     [(Text, '{"name": "add", "argumso')]),
    ("<tool_call>[1, 2]</tool_call>", "stop", [(Text, "[1, 2]")]),
    ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "stop",
     [(Text, '{"name": "add", "arguments": {"a": NaN}}')]),
    (CALL[:-12], "stop", [(ToolCall, ARGUMENTS)]),
    (CALL[:-12], "length", [(Text, CALL[11:-12])]),
    ("so <tool_c", "length", [(Text, "so <tool_c")]),
    ("<think>Hm", "length", [(Reasoning, "Hm")]),
])  # fmt: skip
def test_what_is_no_call_is_text(text, reason, wanted):
    for size in (1, 5, 100):
        found = told(Parser(TOKENIZER, [TOOL]), pieces(text, size), reason)
        calls = any(kind is ToolCall for kind, _ in wanted)
        assert found == (wanted, "tool_calls" if calls else reason)


def test_text_before_a_call_is_told_at_once_and_every_token_once():
    parser = Parser(TOKENIZER, [TOOL])
    assert parser.read(Text("I add", 3)) == [Text("I add", 3)]
    assert parser.read(Text(" <to", 2)) == [Text(" ", 2)]
    assert parser.read(Text("o many", 2)) == [Text("<too many", 2)]
    assert parser.read(Text(CALL, 9))[0].name == "add"
    (end,) = parser.read(End("stop", Usage(1, 1)))
    assert end.reason == "tool_calls"


def test_other_models_markers():
    text = '[TOOL_CALLS]add[ARGS]{"a": 1}add[ARGS]{"a": 2}'
    own = make_tokenizer(mistral, thinks=False)
    wanted = [(ToolCall, {"a": 1}), (ToolCall, {"a": 2})]
    assert told(Parser(own, [TOOL]), pieces(text, 4)) == (wanted, "tool_calls")
    assert told(Parser(TOKENIZER, None), [CALL])[0] == [(Text, CALL[11:-12])], "none are offered"
    prompt = TOKENIZER.encode("Hello <think>\n")
    found, _ = told(Parser(TOKENIZER, None, prompt), ["Hm", "</thi", "nk>Hello"])
    assert found == [(Reasoning, "Hm"), (Text, "Hello")], "the template began to think"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_messages(size):
    scripted = Scripted(f"{THOUGHT}I add.{CALL}{CALL}", size)
    _, client = clients(scripted)
    tool = {"name": "add", "input_schema": {"type": "object"}}
    asked = {"model": "tiny", "max_tokens": 50, "messages": user(), "tools": [tool]}

    async def run():
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            kinds = [event.type async for event in stream]
            return whole, kinds, await stream.get_final_message()

    whole, kinds, final = asyncio.run(run())
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert final.content[0].thinking == "Hm, <b>." and final.content[1].text == "I add."
    assert final.content[2].input == ARGUMENTS and final.stop_reason == "tool_use"
    drop = {"content": {"__all__": {"id"}}, "id": True, "timings": True}
    assert whole.model_dump(exclude=drop) == final.model_dump(exclude=drop)
    assert final.usage.input_tokens == 3 and final.usage.cache_read_input_tokens == 4
    assert final.usage.output_tokens == 20
    order = [kind for kind in kinds if kind.startswith(("message", "content_block"))]
    brief = [one for one, next in pairwise([*order, ""]) if one != next]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert brief == ["message_start", *block * 4, "message_delta", "message_stop"]


def test_turns_of_messages():
    scripted = Scripted("Yes.", stop="\n", reason="stop")
    _, client = clients(scripted)
    call = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "text", "text": "3"}],
    }
    thought = {"type": "thinking", "thinking": "Hm", "signature": "none"}
    text = {"type": "text", "text": "Is it?"}
    more = {
        "system": [{"type": "text", "text": "Be brief."}], "stop_sequences": ["\n"],
        "thinking": {"type": "disabled"}, "tool_choice": {"type": "none"},
        "tools": [{"name": "add", "input_schema": {}}],
        "extra_body": {"temperature": 0.5, "top_k": 3},
    }  # fmt: skip
    turns = [*user(), {"role": "assistant", "content": [thought, text, call]},
             {"role": "user", "content": [result, text]}]  # fmt: skip
    reply = asyncio.run(client.messages.create(model="tiny", max_tokens=9, messages=turns, **more))
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "\n")
    ask = scripted.ask
    function = {"name": "add", "arguments": {"a": 1}}
    assert ask.question == [
        {"role": "system", "content": "Be brief."},
        *user(),
        {"role": "assistant", "content": "Is it?", "reasoning_content": "Hm",
         "tool_calls": [{"id": "t1", "type": "function", "function": function}]},
        {"role": "tool", "content": "3", "tool_call_id": "t1", "name": "add"},
        {"role": "user", "content": "Is it?"},
    ]  # fmt: skip
    assert ask.tools is None and ask.template_args == {"enable_thinking": False}
    config = ask.config
    assert (config.max_tokens, config.temp, config.top_k, config.stop) == (9, 0.5, 3, ("\n",))
    count = client.messages.count_tokens(model="tiny", messages=user())
    assert asyncio.run(count).input_tokens == 7


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_responses(size, reason):
    text = f"{THOUGHT}I add.{CALL}" + ("" if reason == "stop" else "And then")
    scripted = Scripted(text, size, reason)
    client, _ = clients(scripted)
    tools = [{"type": "function", **TOOL, "strict": False}, {"type": "web_search"}]
    asked = {"model": "tiny", "input": user()[0]["content"], "instructions": "Be brief."}
    asked["tools"] = tools

    async def run():
        whole = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            return whole, [event async for event in stream]

    whole, events = asyncio.run(run())
    assert [event.sequence_number for event in events] == [*range(len(events))]
    last = events[-1].response
    wanted = ["reasoning", "message", "function_call", "message"]
    assert [one.type for one in last.output] == wanted[: 3 if reason == "stop" else 4]
    thought, message, call = last.output[:3]
    assert thought.content[0].text == "Hm, <b>." and message.content[0].text == "I add."
    assert json.loads(call.arguments) == ARGUMENTS and call.name == "add"
    state = "completed" if reason == "stop" else "incomplete"
    assert last.status == whole.status == state and last.output[-1].status == state
    assert events[-1].type == f"response.{state}"
    assert last.usage.output_tokens_details.reasoning_tokens > 0
    drop = {"id": True, "output": {"__all__": {"id", "call_id"}}, "created_at": True}
    plain = json.loads(whole.model_dump_json(exclude=drop))
    assert plain["usage"] == json.loads(last.model_dump_json())["usage"]
    assert whole.output_text == message.content[0].text + ("And then" if reason != "stop" else "")
    streamed = [one.delta for one in events if one.type == "response.output_text.delta"]
    assert "".join(streamed) == whole.output_text
    assert [one["function"]["name"] for one in scripted.ask.tools] == ["add"]
    assert scripted.ask.question == [{"role": "system", "content": "Be brief."}, *user()]


def test_turns_of_responses():
    scripted = Scripted("3")
    client, _ = clients(scripted)
    items = [
        {"role": "developer", "content": "Add."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]},
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
    ]
    form = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}
    more = {"text": form, "reasoning": {"effort": "none"}, "max_output_tokens": 5, "store": False}
    asyncio.run(
        client.responses.create(model="tiny", instructions="Be brief.", input=items, **more)
    )
    ask = scripted.ask
    assert [turn["role"] for turn in ask.question] == ["system", "user", "assistant", "tool"]
    assert ask.question[0]["content"] == "Be brief.\n\nAdd."
    assert ask.schema == {"type": "object"} and ask.config.max_tokens == 5


MESSAGE = {"model": "tiny", "max_tokens": 5, "messages": user()}


@pytest.mark.parametrize(("route", "body"), [
    ("messages", {**MESSAGE, "messages": [{"role": "assistant", "content": "It is"}]}),
    ("messages", {**MESSAGE, "messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    ("messages", {**MESSAGE, "messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}),
    ("messages", {**MESSAGE, "tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ("messages", {**MESSAGE, "tool_choice": {"type": "any"}}),
    ("messages", {**MESSAGE, "system": 3}),
    ("responses", {"input": []}),
    ("responses", {"input": "a", "previous_response_id": "resp_1"}),
    ("responses", {"input": [{"type": "item_reference", "id": "x"}]}),
    ("responses", {"input": [{"type": "function_call_output", "call_id": [], "output": "x"}]}),
    ("responses", {"input": "a", "text": {"format": {"type": "grammar"}}}),
    ("responses", {"input": "a", "tools": [{"type": "function"}]}),
    ("chat/completions", {**MESSAGE, "tool_choice": "required"}),
])  # fmt: skip
def test_what_cannot_be_followed_is_refused_in_a_line(route, body):
    async def post():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(Scripted()))) as http:
            return await http.post(f"http://localhost/v1/{route}", json=body)

    reply = asyncio.run(post())
    told = reply.json()
    assert reply.status_code == 400 and told["error"]["type"] == "invalid_request_error"
    assert "; expected " in told["error"]["message"]
    assert route != "messages" or told["type"] == "error"


class Broken(Scripted):
    async def _told(self):
        yield Text("Hello", 1)
        raise RuntimeError("a step")


def test_an_answer_that_fails_on_its_way_is_the_clients_own_error():
    client, other = clients(Broken())
    asked = {"model": "tiny", "max_tokens": 5, "messages": user()}

    async def read(manager):
        async with manager as stream:
            return [event async for event in stream]

    with pytest.raises(anthropic.APIStatusError, match="the answer failed"):
        asyncio.run(read(other.messages.stream(**asked)))
    with pytest.raises(openai.APIError, match="the answer failed"):
        asyncio.run(read(client.responses.stream(model="tiny", input="a")))


def test_a_schema_is_followed_whatever_the_logits():
    schema = {
        "type": "object", "additionalProperties": False, "required": ["name", "tags"],
        "properties": {"name": {"enum": ["é", "b"]},
                       "tags": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
    }  # fmt: skip
    noise = np.random.default_rng(0)
    for _ in range(5):
        constrain, tokens = grammar.processor(TOKENIZER, schema), []
        while not tokens or tokens[-1] not in TOKENIZER.eos_token_ids:
            logits = mx.array(noise.normal(size=(1, 300)).astype(np.float32))
            masked = constrain(tokens, logits)
            assert mx.array_equal(constrain(tokens, logits), masked), "asked again, it is the same"
            tokens.append(mx.argmax(masked).item())
        found = json.loads(TOKENIZER.decode(tokens[:-1]))
        assert found["name"] in ("é", "b") and all(type(one) is int for one in found["tags"])
    for bad in ({"type": "foo"}, {"$ref": "#/none"}, {"type": "string", "pattern": "("}):
        assert "expected one that llguidance knows" in refusal(grammar.processor, TOKENIZER, bad)


@pytest.fixture
def real(base):
    with ssmlx.Engine(str(base), dtype="float32") as engine:
        yield Answering(engine, "tiny")


def test_a_model_says_the_same_by_every_route(real):
    client, other = clients(real)
    asked = {"model": "tiny", "messages": user("w1 w2"), "max_tokens": 8}

    async def run():
        chat = await client.chat.completions.create(**asked)
        message = await other.messages.create(**asked)
        count = await other.messages.count_tokens(model="tiny", messages=user("w1 w2"))
        response = await client.responses.create(model="tiny", input="w1 w2", max_output_tokens=8)
        return chat, message, count, response

    chat, message, count, response = asyncio.run(run())
    said = chat.choices[0].message.content
    assert said and message.content[0].text == said and response.output_text == said
    used = message.usage
    assert count.input_tokens == chat.usage.prompt_tokens == response.usage.input_tokens
    assert count.input_tokens == used.input_tokens + used.cache_read_input_tokens
    assert message.stop_reason == "max_tokens" and response.status == "incomplete"
