"""Messages, responses, tool calls, reasoning and JSON, as the typed clients read them."""

import asyncio
import json
import time
from dataclasses import replace
from itertools import pairwise
from time import process_time

import pytest

pytest.importorskip("starlette")
anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")

import mlx.core as mx
import numpy as np
from anthropic.types import Message, RawMessageStreamEvent
from asking import (
    ARGUMENTS,
    CALL,
    LAST,
    MESSAGE,
    OFFERED,
    THOUGHT,
    TOKENIZER,
    TOOL,
    USER,
    Scripted,
    clients,
    collected,
    make_tokenizer,
    pieces,
    posted,
    told,
    typed_events,
)
from mlx_lm.tool_parsers import mistral
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from refusals import refusal

import ssmlx
from ssmlx.decoding.step import DraftCounts
from ssmlx.server.app import make_app
from ssmlx.server.choices import AnswerParser
from ssmlx.server.grammars import (
    GrammarMask,
    compiled_matcher,
    json_grammar,
    llguidance_tokenizer,
)
from ssmlx.server.handler import Limits, RequestHandler
from ssmlx.server.requests import ChoiceEnd, ReasoningPart, TextPart, ToolCallPart
from ssmlx.server.typed_blocks import Turns


def test_markers_are_found_wherever_a_text_is_split():
    text = f"{THOUGHT}I add. <tool{CALL}\n{CALL}\n< done"
    calls = [(ToolCallPart, ARGUMENTS)] * 2
    wanted = [(ReasoningPart, "Hm, <b>."), (TextPart, "I add. <tool"), *calls, (TextPart, "< done")]
    for size in range(1, len(text) + 1):
        found = told(AnswerParser(TOKENIZER, OFFERED), pieces(text, size))
        assert found == (wanted, "tool_calls"), size


@pytest.mark.parametrize(("text", "reason", "wanted"), [
    *(
        (text, "stop", [(TextPart, text)])
        for text in (
            '<tool_call>{"name": "add"</tool_call> so',
            "<tool_call>[1, 2]</tool_call>",
            CALL.replace("1", "NaN"),
        )
    ),
    (CALL[:-12], "stop", [(ToolCallPart, ARGUMENTS)]),
    (CALL[:-12], "length", [(ToolCallPart, ARGUMENTS)]),
    (CALL[:-14], "length", [(TextPart, CALL[:-14])]),
    ("so <tool_c", "length", [(TextPart, "so <tool_c")]),
    ("<think>Hm", "length", [(ReasoningPart, "Hm")]),
])  # fmt: skip
def test_what_is_no_call_is_text(text, reason, wanted):
    calls = any(kind is ToolCallPart for kind, _ in wanted)
    for size in (1, 5, 100):
        found = told(AnswerParser(TOKENIZER, OFFERED), pieces(text, size), reason)
        assert found == (wanted, "tool_calls" if calls and reason == "stop" else reason)


def test_text_before_a_call_is_told_at_once_and_every_token_once():
    parser = AnswerParser(TOKENIZER, OFFERED)
    assert parser.parse(TextPart("I add", 3)) == [TextPart("I add", 3)]
    assert parser.parse(TextPart(" <to", 2)) == [TextPart(" ", 2)]
    assert parser.parse(TextPart("o many", 2)) == [TextPart("<too many", 2)]
    (call,) = parser.parse(TextPart(CALL, 9))
    assert call.name == "add" and len(parser.parse(ChoiceEnd("stop", LAST))) == 1


def test_an_accepted_draft_counts_though_the_answer_ends_inside_it():
    drafts = {"streams": DraftCounts(2, drafted=9, accepted=5), "other": DraftCounts(1, 3, 1)}
    last = replace(LAST, generation_tokens=7, target_calls=4, drafted_tokens=12, drafts=drafts)
    timings = ChoiceEnd("stop", last).timings
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (12, 6)


def test_every_api_reports_the_tokens_of_reasoning():
    parser = AnswerParser(TOKENIZER, OFFERED)
    for text, tokens in (("<think>Hm", 3), (", so", 2), ("</think>I add.", 4), (CALL, 9)):
        parser.parse(TextPart(text, tokens))
    assert parser.parse(ChoiceEnd("length", LAST))[-1].reasoning_tokens == 5
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
        (TextPart, CALL)
    ], "none are offered"
    opened = AnswerParser(TOKENIZER, replace(OFFERED, begins="thought"))
    assert told(opened, ["Hm</thi", "nk>So"])[0] == [(ReasoningPart, "Hm"), (TextPart, "So")]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_messages(size):
    scripted = Scripted(f"{THOUGHT}I add.{CALL}{CALL}", size)
    tools = [{"name": "add", "input_schema": {"type": "object"}}]
    found = typed_events(scripted, "messages", {**MESSAGE, "tools": tools}, RawMessageStreamEvent)
    order = [one for one, after in pairwise([*(one.type for one in found), ""]) if one != after]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert order == ["message_start", *block * 4, "message_delta", "message_stop"]
    whole = Message.model_validate(posted(scripted, "messages", {**MESSAGE, "tools": tools}).json())
    stream = clients(make_app(scripted))[1].messages.stream(**MESSAGE, tools=tools)
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
    client = clients(make_app(scripted))[1]
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
        def with_served_model(self, ask):
            roles.append([turn["role"] for turn in ask.question])
            return super().with_served_model(ask)

    @anthropic.beta_async_tool
    async def add(a: int, b: str) -> str:
        """Adds."""
        return "3"

    async def run():
        beta = clients(make_app(Recorded(CALL)))[1].beta.messages
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
    found = typed_events(scripted, "responses", body, ResponseStreamEvent)
    assert [one.sequence_number for one in found] == [*range(len(found))]
    whole = Response.model_validate(posted(scripted, "responses", body).json())
    client = clients(make_app(scripted))[0]
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
    asyncio.run(clients(make_app(scripted))[0].responses.create(model="tiny", input=items, **more))
    question = scripted.ask.question
    assert [turn["role"] for turn in question] == ["system", "user", "assistant", "tool"]
    assert question[0]["content"] == "Be brief.\n\nAdd."
    assert scripted.ask.grammar == json_grammar({"type": "object"})
    assert scripted.ask.config.max_tokens == 5


OBJECT = {"type": "object"}
ADD = {"type": "function", "name": "add", "parameters": OBJECT}
SCHEMA = {"name": "add", "input_schema": OBJECT}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
PATCH = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}
OTHERS = ("web_search", "local_shell", "file_search", "code_interpreter", "image_generation", "mcp",
          "computer_use_preview", "tool_search", "some_later_one")  # fmt: skip


def offered_and_left_out(route, body):
    """Names of the tools that are offered, and the header's words; the reply is no error."""
    scripted = Scripted()
    found = posted(scripted, route, body)
    assert found.status_code == 200, found.text
    tools = scripted.ask.tools or []
    names = [one.get("function", one)["name"] for one in tools]
    told = found.headers.get("x-ignored-fields", "")
    return names, told.split(", ") if told else [], scripted.ask.question


def test_tools_that_the_client_does_not_run_are_left_out_and_told():
    others = [{"type": kind} for kind in OTHERS]
    wanted = [f"tools[{n}] ({kind})" for n, kind in enumerate(OTHERS, 1)]
    names, told, _ = offered_and_left_out(
        "responses", {"input": "a", "tools": [ADD, *others, PATCH]}
    )
    assert (names, told) == (["add"], [*wanted, f"tools[{1 + len(OTHERS)}] (custom)"])
    body = {**MESSAGE, "tools": [SEARCH, SCHEMA, {"type": "bash_20250124", "name": "bash"}]}
    wanted = ["tools[0] (web_search_20250305)", "tools[2] (bash_20250124)"]
    assert offered_and_left_out("messages", body)[:2] == (["add"], wanted)
    chat = {"type": "function", "function": TOOL}
    custom = {"type": "custom", "custom": {"name": "patch"}}
    body = {**MESSAGE, "tools": [custom, chat]}
    found = offered_and_left_out("chat/completions", body)
    assert found[:2] == (["add"], ["tools[0] (custom)"])
    for route, tools in (
        ("responses", others), ("messages", [SEARCH]), ("chat/completions", [custom]),
    ):  # fmt: skip
        body = {**MESSAGE, "input": "a", "tools": tools}
        body.pop("messages" if route == "responses" else "input")
        assert offered_and_left_out(route, body)[0] == [], "without any, none are offered"


@pytest.mark.parametrize("size", [1, 1000])
def test_functions_of_a_namespace_are_called_by_their_names(size):
    """As Codex sends its MCP servers, and reads calls of them."""
    inner = [ADD, {"type": "custom", "name": "exec"}]
    tools = [
        {**ADD, "name": "shell"},
        {"type": "namespace", "name": "mcp__sums", "description": "Sums.", "tools": inner},
        {"type": "namespace", "name": "functions", "tools": [{**ADD, "name": "wait"}]},
    ]
    scripted = Scripted(CALL.replace('"add"', '"mcp__sums__add"'), size)
    body = {"input": "a", "tools": tools}
    found = posted(scripted, "responses", body)
    assert found.headers["x-ignored-fields"] == "tools[1].tools[1] (custom)"
    names = [one["function"]["name"] for one in scripted.ask.tools]
    assert names == ["shell", "mcp__sums__add", "wait"]
    (call,) = Response.model_validate(found.json()).output
    assert (call.name, call.namespace, json.loads(call.arguments)) == (
        "add",
        "mcp__sums",
        ARGUMENTS,
    )
    last = typed_events(scripted, "responses", body, ResponseStreamEvent)[-1].response
    assert last.output[0].namespace == "mcp__sums"
    call = {"type": "function_call", "call_id": "c", "name": "add", "namespace": "mcp__sums"}
    result = {"type": "function_call_output", "call_id": "c", "output": "3"}
    again = {**body, "input": [*USER, {**call, "arguments": ""}, result]}
    again["tool_choice"] = {"type": "function", "name": "add", "namespace": "mcp__sums"}
    asked = posted(scripted, "responses", again)
    assert asked.status_code == 200, asked.text
    made = scripted.ask.question[1]["tool_calls"][0]["function"]
    assert made == {"name": "mcp__sums__add", "arguments": {}}
    assert scripted.ask.forced_tools == ("mcp__sums__add",)


def test_tools_that_items_bring_are_offered():
    loaded = {"type": "namespace", "name": "sums", "tools": [ADD]}
    items = [
        {"type": "additional_tools", "tools": [{**ADD, "name": "exec"}, PATCH]}, *USER,
        {"type": "tool_search_call", "call_id": "s", "arguments": {"query": "sums"}},
        {"type": "tool_search_output", "call_id": "s", "tools": [loaded]},
    ]  # fmt: skip
    names, told, question = offered_and_left_out("responses", {"input": items})
    assert names == ["exec", "sums__add"] and question == USER
    assert told == ["input[2] (tool_search_call)", "input[0].tools[1] (custom)"]


def test_items_of_other_tools_become_calls_or_are_left_out_and_told():
    items = [
        *USER,
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}], "content": None},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** x"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done"},
        {"type": "local_shell_call", "call_id": "c2", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "c2", "output": '{"output": "a"}'},
        {"type": "shell_call", "call_id": "c3", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "c3", "output": [{"stdout": "a"}]},
        {"type": "mcp_call", "id": "m", "name": "roll", "arguments": "{}", "output": "4"},
        {"type": "function_call", "call_id": "c4", "name": "see", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c4", "output": [
            {"type": "input_text", "text": "It: "}, {"type": "input_image", "image_url": "data:,"},
        ]},
        *({"type": kind, "id": "x"} for kind in (
            "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call",
            "computer_call", "mcp_list_tools", "mcp_approval_request", "compaction",
            "item_reference", "some_later_one",
        )),
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
    ]  # fmt: skip
    _, told, question = offered_and_left_out("responses", {"input": items})
    left = [f"input[{n}] ({one['type']})" for n, one in enumerate(items) if n > 10]
    assert told == ["input[10].output[1] (input_image)", *left]
    calls = [one["tool_calls"][0]["function"] for one in question if "tool_calls" in one]
    assert calls == [
        {"name": "apply_patch", "arguments": {"input": "*** x"}},
        {"name": "local_shell", "arguments": {"command": ["ls"]}},
        {"name": "shell", "arguments": {"commands": ["ls"]}},
        {"name": "roll", "arguments": {}},
        {"name": "see", "arguments": {}},
    ]
    results = [one["content"] for one in question if one["role"] == "tool"]
    image = "It: (an image, which was left out)"
    assert results == ["Done", '{"output": "a"}', '{"stdout": "a"}', "4", image]
    assert question[1]["reasoning_content"] == "Hm"


def test_thoughts_in_a_row_are_one_and_an_item_without_a_type_is_a_message():
    items = [
        *USER,
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "So"}], "summary": []},
        {"type": None, "role": "assistant", "content": "Yes."},
        {"role": "user", "content": "And?"},
    ]
    _, told, question = offered_and_left_out("responses", {"input": items})
    assert question[1] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm\n\nSo"}
    assert question[2] == {"role": "user", "content": "And?"} and told == []
    blocks = [{"type": "thinking", "thinking": one} for one in ("Hm", [{"text": "So"}])]
    blocks.append({"type": "text", "text": "Yes."})
    messages = [*USER, {"role": "assistant", "content": blocks}, *USER]
    found = offered_and_left_out("messages", {**MESSAGE, "messages": messages})[2]
    assert found[1] == question[1]


def test_many_blocks_take_as_long_as_they_are():
    begun = process_time()
    turns = Turns()
    for _ in range(60_000):
        turns.add_block("user", {"type": "text", "text": "x" * 100}, "input")
    (turn,) = turns.joined()
    assert len(turn["content"]) == 60_000 * 102 - 2
    assert process_time() - begun < 20, "each text is copied for every other one"


def test_blocks_of_anthropics_own_tools_are_used_or_left_out_and_told():
    text = {"type": "text", "text": "Well."}
    used = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    called = {"type": "mcp_tool_use", "id": "m", "name": "roll", "server_name": "d", "input": None}
    rolled = {"type": "mcp_tool_result", "tool_use_id": "m", "content": [text]}
    plain = {"type": "text", "media_type": "text/plain", "data": "A tale."}
    document = {"type": "document", "title": "Tale", "source": plain}
    result = {"type": "search_result", "title": "T", "source": "u", "content": [text]}
    messages = [
        {"role": "user", "content": [document, result, USER[0] | {"type": "text", "text": "So?"}]},
        {"role": "assistant", "content": [used, found, called, rolled, text]},
        *USER,
    ]
    _, told, question = offered_and_left_out("messages", {**MESSAGE, "messages": messages})
    assert told == [
        "messages[1].content[0] (server_tool_use)",
        "messages[1].content[1] (web_search_tool_result)",
    ]
    assert question[0]["content"] == "Tale\nA tale.\n\nT\nu\nWell.\n\nSo?"
    assert [turn["role"] for turn in question] == ["user", "assistant", "tool", "assistant", "user"]


def test_what_an_assistant_declined_is_its_text():
    part = {"type": "refusal", "refusal": "No."}
    items = [*USER, {"role": "assistant", "content": [part]}, *USER]
    assert offered_and_left_out("responses", {"input": items})[2][1]["content"] == "No."


def test_an_answer_that_fails_on_its_way_is_the_clients_own_error():
    client, other = clients(make_app(Scripted(reason=None)))
    with pytest.raises(anthropic.APIStatusError):
        asyncio.run(collected(other.messages.stream(**MESSAGE)))
    with pytest.raises(openai.APIError):
        asyncio.run(collected(client.responses.stream(model="tiny", input="a")))


def test_a_response_that_fails_on_its_way_is_a_failed_response():
    """For clients, such as Codex, that wait for the event of it; others raise the error before."""
    found = posted(Scripted("I add.", reason=None), "responses", {"input": "a", "stream": True})
    lines = [json.loads(one[6:]) for one in found.text.split("\n") if one[:6] == "data: "]
    assert [one["sequence_number"] for one in lines] == [*range(len(lines))]
    typed = [TypeAdapter(ResponseStreamEvent).validate_python(one) for one in lines]
    assert [one.type for one in typed[-2:]] == ["error", "response.failed"]
    failed = typed[-1].response
    assert (failed.status, failed.error.code) == ("failed", "server_error")
    assert failed.error.message
    assert [one.status for one in failed.output] == ["incomplete"]


def test_a_request_has_one_deadline():
    """What it takes to read counts, too."""

    class Slow(Scripted):
        def with_served_model(self, ask):
            time.sleep(0.5)
            return super().with_served_model(ask)

        async def answer_parts(self, ask, prompt_cache):
            left.append(ask.deadline - asyncio.get_running_loop().time())
            async for part in super().answer_parts(ask, prompt_cache):
                yield part

    left = []
    assert posted(Slow(), "chat/completions", MESSAGE).status_code == 200
    assert 0 < left[0] <= Limits().time - 0.5


def test_a_schema_is_followed_whatever_the_logits():
    numbers = {"type": "array", "items": {"type": "integer"}, "maxItems": 2}
    schema = {
        "type": "object", "additionalProperties": False, "required": ["name", "tags"],
        "properties": {"name": {"enum": ["é", "b"]}, "tags": numbers},
    }  # fmt: skip
    noise = np.random.default_rng(0)
    for _ in range(5):
        matcher = compiled_matcher(llguidance_tokenizer(TOKENIZER), json_grammar(schema))
        constrain = GrammarMask(matcher)
        tokens = []
        while not tokens or tokens[-1] not in TOKENIZER.eos_token_ids:
            logits = mx.array(noise.normal(size=(1, 300)).astype(np.float32))
            masked = constrain(tokens, logits)
            assert mx.array_equal(constrain(tokens, logits), masked), "asked again, it is the same"
            tokens.append(mx.argmax(masked).item())
        found = json.loads(TOKENIZER.decode(tokens[:-1]))
        assert found["name"] in ("é", "b") and all(type(one) is int for one in found["tags"])
    for bad in ({"type": "foo"}, {"$ref": "#/none"}, {"type": "string", "pattern": "("}):
        given = (llguidance_tokenizer(TOKENIZER), json_grammar(bad))
        assert "llguidance" in refusal(compiled_matcher, *given)


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


@pytest.mark.real
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
