"""Every answer against the types of the installed clients: each field is known and has its type,
and none is missing but those that `ABSENT` names."""

import json

import pytest

pytest.importorskip("starlette")
anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")

from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from asking import CALL, MESSAGE, THOUGHT, TOOL, Scripted, posted
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

OWN = {
    "timings", "ssmlx", "reasoning_content", "store",
    # one object for the clients of both APIs
    "object", "type", "owned_by", "created", "created_at", "display_name", "shutdown_date",
    "deprecated_at", "retires_at", "lifecycle", "line", "capabilities", "max_model_len",
    "max_input_tokens", "max_tokens",
    "message", "param", "code", "details",
}  # fmt: skip
"""Fields that no client has a type for, or that are another API's."""
ABSENT = {
    # of services that are not here
    "moderation", "audio", "function_call", "conversation", "image", "input_transformations",
    "prompt", "prompt_cache_diagnostics", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "tool_usage", "access_programs", "safety_identifier", "user",
    "audio_tokens", "image_tokens", "text_tokens", "cache_write_tokens_details", "request_id",
    "obfuscation", "metadata", "agent", "caller", "namespace", "async_", "phase",
    # of a delta, which has what is new; of a message, where there is none
    "content", "refusal", "role", "tool_calls", "usage", "logprobs", "id", "type", "name",
    "finish_reason", "verbosity", "mode", "context", "generate_summary", "description",
    "cache_write_tokens", "input_tokens", "defer_loading", "allowed_callers", "output_schema",
}  # fmt: skip


def check_whole(value):
    """Each field is of the type's, and the type's are there."""
    if isinstance(value, list):
        for one in value:
            check_whole(one)
    if isinstance(value, BaseModel):
        kind = type(value)
        strange = {*(value.model_extra or ())} - OWN
        assert not strange, f"{kind.__name__} has {strange}"
        missing = {*kind.model_fields} - value.model_fields_set - ABSENT
        assert not missing, f"{kind.__name__} lacks {missing}"
        for name in kind.model_fields:
            check_whole(getattr(value, name))


def check(kind, data):
    check_whole(TypeAdapter(kind).validate_json(json.dumps(data), strict=True))


OPENAI_TOOL = {"type": "function", "function": TOOL}
TEXT = f"{THOUGHT}I add.{CALL}"
ROUTES = [
    ("chat/completions", {**MESSAGE, "tools": [OPENAI_TOOL]}, ChatCompletion, ChatCompletionChunk),
    ("completions", {"prompt": "a"}, Completion, Completion),
    ("messages", {**MESSAGE, "tools": [{"name": "add", "input_schema": {"type": "object"}}]},
     Message, RawMessageStreamEvent),
    ("responses", {"input": "a", "tools": [{"type": "function", **TOOL}], "metadata": {"a": "b"}},
     Response, ResponseStreamEvent),
]  # fmt: skip


@pytest.mark.parametrize(("route", "body", "kind", "event"), ROUTES)
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_every_answer_is_what_the_clients_types_say(route, body, kind, event, reason):
    scripted = Scripted(TEXT, 5, reason)
    check(kind, posted(scripted, route, body).json())
    options = {} if kind in (Message, Response) else {"stream_options": {"include_usage": True}}
    lines = posted(scripted, route, {**body, "stream": True, **options}).text.split("\n")
    told = [one[6:] for one in lines if one.startswith("data: {")]
    for one in map(json.loads, told):
        if kind is Completion:  # whose type knows no chunks: OpenAI's have null before the last
            for choice in one["choices"]:
                choice["finish_reason"] = choice["finish_reason"] or "stop"
        check(event, one)
    if options:
        *others, last = map(json.loads, told)
        assert all(one["usage"] is None for one in others) and last["usage"]["total_tokens"] == 27


def test_what_else_is_answered_is_what_the_clients_types_say():
    from asking import client_of

    from ssmlx.server.app import make_app

    client = client_of(make_app(Scripted()))
    for path in ("/v1/models/tiny", "/v1/models"):
        found = client.get(path).json()
        one = found["data"][0] if path == "/v1/models" else found
        check(Model, one)
        check(ModelInfo, one)
    check(MessageTokensCount, client.post("/v1/messages/count_tokens", json=MESSAGE).json())
    error = client.post("/v1/messages", json={**MESSAGE, "system": 3})
    check(ErrorResponse, error.json())


def test_an_answer_says_how_many_tokens_a_call_brought():
    timings = posted(Scripted(), "chat/completions", MESSAGE).json()["timings"]
    assert timings["tokens_per_call"] == 20 / 4
