"""The server as an ASGI application: routes, access, and responses."""

import asyncio
import base64
import hmac
import json
import logging
import math
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import InputError, require
from ..prompt_cache import PromptCache
from ..settings import GenerateConfig
from . import completions, messages, responses
from .concurrency import READING, BodyBytes
from .connections import SLOWEST
from .fields import Body, Fields
from .handler import RequestHandler
from .refusals import AGAIN, as_http_error, error_object, route_error
from .request_log import LogRequests, note_answer
from .requests import (
    AnswerRequest,
    Begun,
    ChoiceEnd,
    StreamItem,
    Waiting,
)

Result = TypeVar("Result")
# Writes an answer's parts as events, at least one a part; `reply` is then the whole answer.
ResponseWriter = (
    completions.TextCompletionWriter | messages.MessagesWriter | responses.ResponsesWriter
)
# Reads a request's body, by the server's settings for what it does not say.
RequestReader = Callable[[Body, GenerateConfig], AnswerRequest]
# For each route of answers, the function that reads a request and the class that writes them.
APIS: dict[str, tuple[RequestReader, type[ResponseWriter]]] = {
    "/v1/chat/completions": (completions.read_chat, completions.ChatCompletionWriter),
    "/v1/completions": (completions.read_completion, completions.TextCompletionWriter),
    "/v1/messages": (messages.read_message, messages.MessagesWriter),
    "/v1/responses": (responses.read_response, responses.ResponsesWriter),
}
LOCAL = ("localhost", "127.0.0.1", "::1")
_POLICY = (
    "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "style-src 'sha256-{}'; script-src 'sha256-{}'"
)
# The header that names the fields of a request that are ignored: unknown ones, and hints.
IGNORED = "X-Ignored-Fields"
# The header that says that the form of this model's calls is not known.
TOOL_CALLS = "X-Tool-Calls"
_CODINGS = ("gzip", "x-gzip", "deflate", "compress", "br", "zstd")
_READ_ON = 8  # a body of up to so many times the limit is read to its end before it is refused
# Objects and lists inside each other in a body, which is read by recursion.
_DEEPEST = 100
_AT_ONCE = 100  # items of a long list of a reply that are made into JSON at once
# Where a request's scope has its part of `BodyBytes`.
_HELD = "ssmlx.held"
_log = logging.getLogger("ssmlx")


@dataclass(frozen=True)
class Routes:
    """The handlers of all routes, with the checks of host, origin and API key."""

    handler: RequestHandler
    config: GenerateConfig
    hosts: Sequence[str]  # names of this server, and origins of pages that may use it; lower case
    keys: Sequence[bytes]  # empty if requests need none

    async def get_page(self, request: Request) -> Response:
        self._admit(request)
        return _chat_page()

    async def get_health(self, request: Request) -> Response:
        """Answer without a key and under any name, as probes ask."""
        return JSONResponse({"status": "ok"})

    async def get_metrics(self, request: Request) -> Response:
        self._admit(request)
        counts = generate_latest(self.handler.metrics.registry)
        return Response(counts, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def list_models(self, request: Request) -> Response:
        self._admit(request)
        names = [*self.handler.models]
        pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return JSONResponse({"object": "list", "data": [*map(self._model_entry, names)], **pages})

    async def get_model(self, request: Request) -> Response:
        self._admit(request)
        name = request.path_params["name"]
        if name not in self.handler.models:
            raise self.handler.unknown_model_error(name)
        return JSONResponse(self._model_entry(name))

    def _model_entry(self, name: str) -> dict[str, Any]:
        """Return a model's object, as OpenAI's, Anthropic's and vLLM's clients read it."""
        size = self.handler.context_length
        return {
            "id": name,
            "object": "model",
            "type": "model",
            "display_name": name,
            "owned_by": "ssmlx",
            "created": 0,  # when a model was made is not known
            "created_at": "1970-01-01T00:00:00Z",
            "shutdown_date": None,
            "deprecated_at": None,
            "retires_at": None,
            "lifecycle": "active",
            "line": None,
            "capabilities": None,
            "max_model_len": size,
            "max_input_tokens": size,
            "max_tokens": self.config.max_tokens,
        }

    async def answer(self, request: Request) -> Response:
        """Answer with one object or a stream; the answer begins when the response is sent."""
        prompt_cache = self._admit(request)
        read, writer = APIS[request.url.path]
        deadline = self._deadline()
        async with asyncio.timeout_at(deadline):
            ask, headers = await self._read_request(request, read)
        ask = replace(ask, deadline=deadline)
        reply = AnswerResponse(self.handler, ask, writer(ask), prompt_cache)
        reply.headers.update(headers)
        return reply

    async def count_tokens(self, request: Request) -> Response:
        """Answer with the number of tokens of a prompt, as Anthropic's API does."""
        self._admit(request)
        async with asyncio.timeout_at(self._deadline()):
            ask, headers = await self._read_request(request, messages.read_message)
            counting = self.handler.count_prompt_tokens(ask)
            num_tokens = await _unless_client_leaves(request, counting)
        return JSONResponse({"input_tokens": num_tokens}, headers=headers)

    def _deadline(self) -> float:
        """The time by which a request that begins now has to be answered, by the clock of the event
        loop."""
        return asyncio.get_running_loop().time() + self.handler.limits.time

    async def _read_request(
        self, request: Request, read: RequestReader
    ) -> tuple[AnswerRequest, dict[str, str]]:
        """Return a request with the name of a served model, and headers of its response."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HTTPException(415, "the Content-Type is not application/json")
        coding = request.headers.get("content-encoding", "").strip().lower()
        if coding in _CODINGS:
            raise HTTPException(415, f"Content-Encoding {coding} is not supported")
        body = await self._read_body(request)

        def read_checked() -> tuple[AnswerRequest, Sequence[str]]:
            """Return the request, and the names of what is ignored or left out of it."""
            fields = Fields(_parse_json_object(body))
            ask = replace(read(fields, self.config), num_bytes=len(body))
            ignored = fields.ignored()
            return self.handler.with_served_model(ask), [*ignored, *ask.left_out]

        reading = READING.run(len(body), read_checked)
        ask, names = await _unless_client_leaves(request, reading)
        headers = {IGNORED: _header_text(names)} if names else {}
        if ask.tools and self.handler.has_unknown_calls:
            headers[TOOL_CALLS] = "unknown form"
        return ask, headers

    def _admit(self, request: Request) -> PromptCache:
        """Return the prompt cache of the request's API key, or raise HTTPException (401, 403)."""
        headers = request.headers
        # A page of another site cannot use this server, though its name may lead to this machine.
        if not _is_known("//" + headers.get("host", ""), self.hosts):
            raise HTTPException(403, "unknown Host header; add it with --allow-host")
        if "origin" in headers and not _is_known(headers["origin"], self.hosts):
            raise HTTPException(403, "requests from this origin are not allowed")
        if not self.keys or request.url.path == "/":
            return self.handler.prompt_caches[0]
        kind, _, token = headers.get("authorization", "").partition(" ")
        given = headers.get("x-api-key") or (token.strip() if kind.lower() == "bearer" else "")
        # All are compared, so that the time that it takes reveals nothing.
        same = [hmac.compare_digest(key, given.encode("latin-1")) for key in self.keys]
        if not any(same):
            raise HTTPException(401, "missing or invalid API key", {"WWW-Authenticate": "Bearer"})
        return self.handler.prompt_caches[same.index(True)]

    async def _read_body(self, request: Request) -> bytes:
        clock = asyncio.get_running_loop().time
        started = clock()
        wait = self.handler.limits.wait
        reading = asyncio.timeout(wait)

        def allow_more_time(num_bytes: int) -> None:
            reading.reschedule(min(clock(), started + num_bytes / SLOWEST) + wait)

        try:
            async with reading:
                return await self._read_pieces(request, allow_more_time)
        except TimeoutError as error:
            raise HTTPException(408, "timed out reading the request body") from error

    async def _read_pieces(
        self,
        request: Request,
        has_come: Callable[[int], None],  # called with the number of bytes that came so far
    ) -> bytes:
        """Return the bytes of a body, which count in `BodyBytes` until the response is sent."""
        limit = self.handler.limits.body
        held = request.scope[_HELD]
        pieces = []
        size = 0
        has_room = True
        async for piece in request.stream():
            size += len(piece)
            has_come(size)
            has_room = has_room and held.grow_to(size)
            if size <= limit and has_room:
                pieces.append(piece)
            else:
                pieces.clear()
                held.grow_to(0)
                # The rest is read and dropped: a client that still sends does not read the refusal.
                if size > _READ_ON * limit:
                    break
        if size > limit:
            raise HTTPException(413, f"the body has more than {limit} bytes")
        if not has_room:
            detail = "too many large requests in progress; try again later"
            raise HTTPException(503, detail, AGAIN)
        return b"".join(pieces)

    async def error_response(self, request: Request, failure: Exception) -> Response:
        """Turn an exception into an error response, and count it by its status."""
        error = as_http_error(failure)
        if type(error) is HTTPException and error.status_code in (404, 405):
            paths = [one.path_format for one in request.app.routes if isinstance(one, Route)]
            error = route_error(error, request.method, request.url.path, paths)
        status = error.status_code
        self.handler.metrics.refused.labels(status).inc()
        return JSONResponse(error_object(error), status_code=status, headers=error.headers)


def _is_known(address: str, hosts: Sequence[str]) -> bool:
    """Whether a URL, or the name of its host, is one of `hosts`; the port is ignored."""
    with suppress(ValueError):
        return address.lower() in hosts or urlsplit(address).hostname in hosts
    return False


def _parse_json_object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body, parse_constant=_finite, parse_float=_finite)
        is_object = isinstance(value, dict) and _is_shallow(value)
    except (ValueError, RecursionError):
        is_object = False
    found = "the request body is not a JSON object"
    expected = f"one with finite numbers, nested at most {_DEEPEST} levels deep"
    require(is_object, found, expected=expected, do="correct it")
    return dict(value)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def _is_shallow(value: dict[str, Any]) -> bool:
    """Whether at most `_DEEPEST` objects and lists of a JSON value are inside each other."""
    level: list[Any] = [value]
    for _ in range(_DEEPEST):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [one for ones in inner for one in ones if isinstance(one, dict | list)]
        if not level:
            return True
    return False


async def _unless_client_leaves(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`; if the client disconnects, cancel it and raise ClientDisconnect."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.create_task(work)
    leaving = asyncio.create_task(watch())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()


def _header_text(names: Sequence[str]) -> str:
    plain = [re.sub(r"[^\w.() \[\]-]", "?", name[:80], flags=re.ASCII) for name in names[:20]]
    return ", ".join(plain)


class AnswerResponse(StreamingResponse):
    """One JSON object, or a stream of events; cancelled as soon as the client disconnects."""

    def __init__(
        self,
        handler: RequestHandler,
        ask: AnswerRequest,
        writer: ResponseWriter,
        prompt_cache: PromptCache,  # of the client
    ) -> None:
        self._parts = handler.answer_parts(ask, prompt_cache)
        self._writer = writer
        self._stream = ask.stream
        self._is_begun = False
        kind = "text/event-stream" if ask.stream else "application/json"
        headers = {"Cache-Control": "no-cache"}
        if ask.stream:  # without it, nginx holds events back until it has many
            headers["X-Accel-Buffering"] = "no"
        super().__init__((), media_type=kind, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        with suppress(ClientDisconnect):
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        """Send the answer; an error before the first byte is raised, so that it gets a status."""
        try:
            async with aclosing(self._parts):
                async for event in self._writer.events(self._forward_items(send)):
                    if self._stream:
                        await self._send_text(send, _event(*event))
            if not self._stream:
                pieces = _json_in_pieces(self._writer.reply)
                text = await asyncio.to_thread("".join, pieces)
                await self._send_text(send, text)
        except Exception as failure:
            if not self._is_begun:
                raise
            error = as_http_error(failure)
            if error.status_code == 500:
                _log.error("an answer failed", exc_info=failure)
            for event in self._writer.failure(error_object(error)):
                await self._send_text(send, _event(*event))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _forward_items(self, send: Send) -> AsyncIterator[StreamItem]:
        """Yield all items; send a stream's headers once it has begun, then signs of life."""
        async for part in self._parts:
            if self._stream and isinstance(part, Begun | Waiting):
                text = ""
                if self._is_begun and isinstance(part, Waiting):
                    text = self._writer.keep_alive(part)
                await self._send_text(send, text)
            elif isinstance(part, ChoiceEnd):
                note_answer(self._scope, part.last)
            yield part

    async def _send_text(self, send: Send, text: str) -> None:
        """Send text, before the first one the headers; empty text sends at most these."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        body = {"type": "http.response.body", "body": text.encode(), "more_body": True}
        if not self._is_begun:
            await send(start)
        self._is_begun = True
        if text:
            await send(body)


def _event(name: str | None, data: Mapping[str, Any] | str) -> str:
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "") + f"data: {text}\n\n"


def _json_in_pieces(
    value: Any,
    depth: int = 4,  # levels inside of a reply where lists, as of log probabilities, may be long
) -> Iterator[str]:
    """Yield the JSON text of a reply in pieces: Python runs no other thread while it makes one."""
    if depth and value and isinstance(value, dict | list):
        is_object = isinstance(value, dict)
        named = value.items() if isinstance(value, dict) else enumerate(value)
        between = "{" if is_object else "["
        for name, inner in named:
            yield between + (f"{json.dumps(name)}: " if is_object else "")
            yield from _json_in_pieces(inner, depth - 1)
            between = ", "
        yield "}" if is_object else "]"
    elif value and isinstance(value, list):
        for start in range(0, len(value), _AT_ONCE):
            yield (", " if start else "[") + json.dumps(value[start : start + _AT_ONCE])[1:-1]
        yield "]"
    else:
        yield json.dumps(value)


@cache
def _chat_page() -> Response:
    """Return the chat page, with a policy that lets only its own script and style run."""
    page = Path(__file__).with_name("page.html").read_bytes()
    found = re.findall(rb"<(style|script)>(.*?)</\1>", page, re.DOTALL)
    sums = [base64.b64encode(sha256(block).digest()).decode() for _, block in found]
    policy = _POLICY.format(*sums)
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
    return Response(page, headers=headers, media_type="text/html")


async def _no_response(request: Request, failure: Exception) -> Response:
    """Answer a client that has gone, which reads nothing; it is not counted as refused."""
    return Response(status_code=499)


class _PagesOfHosts(CORSMiddleware):
    """Lets pages of known hosts and origins read what is answered to them."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        shown = [IGNORED, TOOL_CALLS]
        super().__init__(app, allow_headers="*", allow_methods="*", expose_headers=shown)
        self._hosts = hosts

    def is_allowed_origin(self, origin: str) -> bool:
        return _is_known(origin, self._hosts)


# As middleware, since a response is sent after its route's function has ended.
class _HoldBodies:
    """Counts a request's body among all, from its first byte to the end of the response."""

    def __init__(self, app: ASGIApp, bodies: BodyBytes) -> None:
        self._app = app
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._bodies.part() as scope[_HELD]:
            await self._app(scope, receive, send)


def make_app(
    handler: RequestHandler,
    config: GenerateConfig | None = None,  # for what a request does not say; bounds `max_tokens`
    # Names by which the server may be addressed and whose pages may use it, from any port (CORS),
    # and whole origins of such pages, such as "app://obsidian.md"; in lower case.
    hosts: Sequence[str] = LOCAL,
    keys: Sequence[bytes] = (),  # in the order of the handler's prompt caches
    *,
    logs_requests: bool = False,
) -> Starlette:
    """Make the ASGI application of the server."""
    routes = Routes(handler, config or GenerateConfig(), hosts, keys)
    failures = (Exception, HTTPException, InputError, TimeoutError)
    handlers: dict[Any, Any] = {kind: routes.error_response for kind in failures}
    app = Starlette(
        routes=[
            Route("/", routes.get_page),
            Route("/health", routes.get_health),
            Route("/metrics", routes.get_metrics),
            Route("/v1/models", routes.list_models),
            Route("/v1/models/{name:path}", routes.get_model),
            Route("/v1/messages/count_tokens", routes.count_tokens, methods=["POST"]),
            *(Route(path, routes.answer, methods=["POST"]) for path in APIS),
        ],
        exception_handlers={**handlers, ClientDisconnect: _no_response},
    )
    app.add_middleware(_HoldBodies, bodies=BodyBytes(handler.limits.bodies))
    app.add_middleware(_PagesOfHosts, hosts=hosts)
    if logs_requests:
        app.add_middleware(LogRequests)
    return app
