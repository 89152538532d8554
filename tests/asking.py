"""How tests ask the server: bodies, clients of an application, replies; and a handler whose answers
are scripted."""

import asyncio
import json
from dataclasses import replace
from typing import ClassVar

import httpx2 as httpx
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools
from pydantic import TypeAdapter
from starlette.testclient import TestClient
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import ssmlx
from ssmlx.server.app import make_app
from ssmlx.server.choices import AnswerParser
from ssmlx.server.handler import Limits, PrometheusMetrics
from ssmlx.server.requests import AnswerRequest, ChoiceEnd, TextPart, ToolCallPart

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
JSON = {"content-type": "application/json"}


def client_of(app, **more):
    # Not as a context, which would close the engine at its end.
    return TestClient(app, base_url="http://localhost", **more)


def chat(text="w1 w2", **more):
    return {"messages": [{"role": "user", "content": text}], **more}


def events(response):
    assert response.headers["content-type"].startswith("text/event-stream")
    *data, last = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
    assert last == "[DONE]"
    return [json.loads(one) for one in data]


def reply(client, body, path=CHAT, **more):
    """A reply's chunks, the last with its usage; a whole one is one chunk."""
    found = client.post(path, json={"stream_options": {"include_usage": True}, **body}, **more)
    assert found.status_code == 200, found.text
    return events(found) if body.get("stream") else [found.json()]


def said(chunks):
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    held = [one.get("message", one.get("delta", {"content": one.get("text")})) for one in choices]
    return "".join(one.get("content") or "" for one in held)


def cached(chunks):
    return chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]


async def drive(app, body, on_send=lambda message: None, gone=None, more=False, path=CHAT):
    """What an application sends, told as it is sent, which takes so many seconds as `on_send` says;
    its client is gone once `gone` is set, or before there is `more` of its body."""
    gone = gone or asyncio.Event()
    sent = []
    pieces = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": more}]
    if more:
        gone.set()

    async def receive():
        if not pieces:
            await gone.wait()
        return pieces.pop() if pieces else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)
        await asyncio.sleep(on_send(message) or 0)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "scheme": "http",
             "query_string": b"", "root_path": "", "server": ("localhost", 80)}  # fmt: skip
    await asyncio.wait_for(app(scope, receive, send), 30)
    return sent


def ask_all(app, bodies, path=CHAT):
    async def all_of_them():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await asyncio.gather(*(client.post(path, json=one) for one in bodies))

    return asyncio.run(all_of_them())


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

    def with_served_model(self, ask):
        return replace(ask, model="tiny")

    async def count_prompt_tokens(self, ask):
        return 7

    async def answer_parts(self, ask, prompt_cache):
        self.ask = ask
        parser = AnswerParser(TOKENIZER, ask)
        said = [one for text in self.texts for one in parser.parse(TextPart(text, 2))]
        end = ChoiceEnd(self.reason, replace(LAST, stop=self.stop))
        for one in said + (parser.parse(end) if self.reason else []):
            yield one
        if self.reason is None:
            raise RuntimeError("a step")


def pieces(text, size):
    return [text[place : place + size] for place in range(0, len(text), size)]


def clients(app):
    """Those of OpenAI and of Anthropic, of an application."""
    import anthropic
    import openai

    http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    more = {"api_key": "none", "max_retries": 0, "http_client": http}
    first = openai.AsyncOpenAI(base_url="http://localhost/v1", **more)
    return first, anthropic.AsyncAnthropic(base_url="http://localhost", **more)


def posted(handler, route, body):
    async def post():
        transport = httpx.ASGITransport(make_app(handler))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost/v1/") as http:
            return await http.post(route, content=json.dumps(body), headers=JSON)

    return asyncio.run(post())


def typed_events(handler, route, body, kind):
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
    found = [one for text in texts for one in parser.parse(TextPart(text, 1))]
    *found, end = [*found, *parser.parse(ChoiceEnd(reason, LAST))]
    said = []
    for part in found:
        value = json.loads(part.text) if isinstance(part, ToolCallPart) else part.text
        if said and said[-1][0] is type(part) and not isinstance(part, ToolCallPart):
            said[-1] = type(part), said[-1][1] + value
        elif value:
            said.append((type(part), value))
    return said, end.reason
