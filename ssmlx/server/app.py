"""The server as an ASGI application: routes, access, and responses."""

import asyncio
import base64
import hmac
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
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

from ..errors import ContextLengthError, InputError, NoRoomError, require
from ..json_files import parse_json
from ..prompt_cache import PromptCache
from ..settings import GenerateConfig
from ..turns import TurnError
from . import completions, messages, responses
from .concurrency import READING, BodyBytes
from .fields import check_fields_and_list_ignored
from .handler import RequestHandler
from .request_prompts import AGAIN
from .requests import (
    AnswerRequest,
    Begun,
    Body,
    DetailedHTTPException,
    RequestError,
    StreamItem,
    Waiting,
)

Result = TypeVar("Result")
ResponseWriter = (
    completions.TextCompletionWriter | messages.MessagesWriter | responses.ResponsesWriter
)
"""Writes an answer's parts as events, at least one a part; `reply` is then the whole answer."""
RequestReader = Callable[[Body, GenerateConfig], AnswerRequest]
"""Reads a request's body, by the server's settings for what it does not say."""
APIS: dict[str, tuple[RequestReader, type[ResponseWriter]]] = {
    "/v1/chat/completions": (completions.read_chat, completions.ChatCompletionWriter),
    "/v1/completions": (completions.read_completion, completions.TextCompletionWriter),
    "/v1/messages": (messages.read_message, messages.MessagesWriter),
    "/v1/responses": (responses.read_response, responses.ResponsesWriter),
}
"""For each route of answers, the function that reads a request and the class that writes them."""
OPEN = ("/", "/health")  # to those without a key, too
LOCAL = ("localhost", "127.0.0.1", "::1")
_PAGES = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
_POLICY = (
    "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "style-src 'sha256-{}'; script-src 'sha256-{}'"
)
IGNORED = "X-Ignored-Fields"
"""The header that names the fields of a request that are ignored: unknown ones, and hints."""
TOOL_CALLS = "X-Tool-Calls"
"""The header that says that the form of this model's calls is not known."""
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
}
"""What Anthropic's API calls an error, by its status; OpenAI's has kinds of its own for few."""
_READ_ON = 8  # bodies of how many times the largest that is read are read to their end
# Both phrases are looked for: Anthropic's, and OpenAI's.
_TOO_LONG = (
    "prompt is too long: {} tokens > {} maximum; expected less than the model's maximum context "
    "length; shorten it"
)
_HELD = "ssmlx.held"
"""Where a request's scope has its part of `BodyBytes`."""
_log = logging.getLogger("ssmlx")


@dataclass(frozen=True)
class Routes:
    """The handlers of all routes, with the checks of host, origin and API key.

    `hosts` are names of this server in lower case; without `keys` nobody needs one.
    """

    handler: RequestHandler
    config: GenerateConfig
    hosts: Sequence[str]
    keys: Sequence[bytes]

    async def get_page(self, request: Request) -> Response:
        """Answer GET of the chat page, which needs no key.

        Raises:
            HTTPException: the host or origin is refused.
        """
        self._check_access_and_find_prompt_cache(request)
        return _chat_page()

    async def get_health(self, request: Request) -> Response:
        """Answer GET of /health, which needs no key.

        Raises:
            HTTPException: the host or origin is refused.
        """
        self._check_access_and_find_prompt_cache(request)
        return JSONResponse({"status": "ok"})

    async def get_metrics(self, request: Request) -> Response:
        """Answer GET of the counters, in Prometheus's form.

        Raises:
            HTTPException: the host, origin or key is refused.
        """
        self._check_access_and_find_prompt_cache(request)
        counts = generate_latest(self.handler.metrics.registry)
        return Response(counts, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def list_models(self, request: Request) -> Response:
        """Answer GET of the list of models.

        Raises:
            HTTPException: the host, origin or key is refused.
        """
        self._check_access_and_find_prompt_cache(request)
        names = [*self.handler.models]
        pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return JSONResponse({"object": "list", "data": [*map(self._model_entry, names)], **pages})

    async def get_model(self, request: Request) -> Response:
        """Answer GET of one model.

        Raises:
            HTTPException: the model is unknown (404), or the host, origin or key is refused.
        """
        self._check_access_and_find_prompt_cache(request)
        name = request.path_params["name"]
        if name not in self.handler.models:
            raise self.handler.unknown_model_error(name)
        return JSONResponse(self._model_entry(name))

    def _model_entry(self, name: str) -> dict[str, Any]:
        """Return a model's object, with the fields that OpenAI's, Anthropic's and vLLM's clients
        read.

        Times are the epoch, as a model has none here.
        """
        size = self.handler.context_length
        return {
            "id": name,
            "object": "model",
            "type": "model",
            "display_name": name,
            "owned_by": "ssmlx",
            "created": 0,
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
        """Answer a POST with a whole answer, or a stream of it.

        The answer begins when the response is sent, so what it raises is not raised here.

        Raises:
            HTTPException, InputError: as `_read_request` does, or the host, origin or key is
                refused.
        """
        prompt_cache = self._check_access_and_find_prompt_cache(request)
        read, writer = APIS[request.url.path]
        ask, headers = await self._read_request(request, read)
        reply = AnswerResponse(self.handler, ask, writer(ask), prompt_cache)
        reply.headers.update(headers)
        return reply

    async def count_tokens(self, request: Request) -> Response:
        """Answer a POST with the number of tokens of its prompt, as Anthropic's API does.

        Raises:
            HTTPException, InputError: as `_read_request` does, the host, origin or key is refused,
                the prompt cannot be made into tokens, or the server is being stopped (503).
            TimeoutError: that took more than `limits.time` seconds.
        """
        self._check_access_and_find_prompt_cache(request)
        ask, headers = await self._read_request(request, messages.read_message)
        counting = READING.run(
            ask.num_bytes, self.handler.reader.first_prompt_and_seeded_config, ask
        )
        async with asyncio.timeout(self.handler.limits.time):
            prompt, _ = await _unless_client_leaves(request, counting)
        return JSONResponse({"input_tokens": len(prompt)}, headers=headers)

    async def _read_request(
        self, request: Request, read: RequestReader
    ) -> tuple[AnswerRequest, dict[str, str]]:
        """Read the body of a POST, and check its fields.

        Args:
            request: whose host, origin and key are checked already.
            read: of the API.

        Returns:
            (ask, headers): the request, with the name of a model that is served, and headers of its
            response: `X-Ignored-Fields`, which names the fields that are ignored, and tools and
            blocks that are left out, if there are any; `X-Tool-Calls` if tools are offered to a
            model whose form of calls is not known.

        Raises:
            HTTPException: the content type is not JSON (415), the model is unknown (404), or the
                body is too large (413) or too slow (408), or has no room beside others (503).
            InputError: the body is no JSON object, or the request cannot be followed.
            TimeoutError: to read it took more than `limits.time` seconds.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HTTPException(415, "the content type is not application/json")
        body = await self._read_body_in_time(request)

        def read_checked() -> tuple[AnswerRequest, Sequence[str]]:
            """Return the request, and the names of what is ignored or left out of it."""
            fields = _parse_json_object(body)
            ignored = check_fields_and_list_ignored(request.url.path, fields)
            ask = replace(read(fields, self.config), num_bytes=len(body))
            return self.handler.with_served_model_or_404(ask), [*ignored, *ask.left_out]

        async with asyncio.timeout(self.handler.limits.time):
            reading = READING.run(len(body), read_checked)
            ask, names = await _unless_client_leaves(request, reading)
        headers = {IGNORED: _header_text(names)} if names else {}
        if ask.tools and self.handler.has_unknown_calls:
            headers[TOOL_CALLS] = "unknown form"
        return ask, headers

    def _check_access_and_find_prompt_cache(self, request: Request) -> PromptCache:
        """Return the prompt cache of the request's API key; the first one where no key is needed:
        if there are no keys, and for the page and /health.

        `Host` and `Origin` have to be names of this server, so that a page of another site, whose
        name may resolve to this machine, cannot use it. A request without `Origin` passes. The key
        stands in `x-api-key`, or else as the bearer in `Authorization`.

        Raises:
            HTTPException: host or origin is unknown (403), or the key is wrong or missing (401).
        """
        headers = request.headers
        if not self._is_known_host("//" + headers.get("host", "")):
            raise HTTPException(403, "the server is not called that; see --allow-host")
        if not self._is_known_host(headers.get("origin", "//localhost")):
            raise HTTPException(403, "pages of other places may not ask here")
        if not self.keys or request.url.path in OPEN:
            return self.handler.prompt_caches[0]
        kind, _, token = headers.get("authorization", "").partition(" ")
        given = headers.get("x-api-key") or (token.strip() if kind.lower() == "bearer" else "")
        # All are compared, so that the time that it takes says nothing.
        same = [hmac.compare_digest(key, given.encode("latin-1")) for key in self.keys]
        if not any(same):
            raise HTTPException(401, "a key is needed", {"WWW-Authenticate": "Bearer"})
        return self.handler.prompt_caches[same.index(True)]

    def _is_known_host(self, address: str) -> bool:
        """Whether the host name of a URL is one of this server's; False where it is no URL. The
        port is not looked at.
        """
        with suppress(ValueError):
            return urlsplit(address).hostname in self.hosts
        return False

    async def _read_body_in_time(self, request: Request) -> bytes:
        """Return the bytes of a body.

        Raises:
            InputError: the client has gone.
            HTTPException: it took more than `limits.wait` seconds in all (408), is too large (413),
                or there is no memory for it beside those of others (503).
        """
        try:
            async with asyncio.timeout(self.handler.limits.wait):
                return await self._read_body_or_refuse_large(request)
        except TimeoutError as error:
            raise HTTPException(408, "the body took too long to come") from error
        except ClientDisconnect:
            return b""

    async def _read_body_or_refuse_large(self, request: Request) -> bytes:
        """Return the bytes of a body.

        One that is too large is read on, up to `_READ_ON` times the limit, and dropped: a client
        that still sends reads no answer. What is kept counts in `bodies` until the response is
        sent.

        Raises:
            HTTPException: it has more than `limits.body` bytes (413), or there is no room for it
                (503).
            ClientDisconnect: the client has gone.
        """
        limit = self.handler.limits.body
        held = request.scope[_HELD]
        pieces = []
        size = 0
        has_room = True
        async for piece in request.stream():
            size += len(piece)
            has_room = has_room and held.grow_to(size)
            if size <= limit and has_room:
                pieces.append(piece)
            else:
                pieces.clear()
                held.grow_to(0)
                if size > _READ_ON * limit:
                    break
        if size > limit:
            raise HTTPException(413, f"the body has more than {limit} bytes")
        if not has_room:
            raise HTTPException(503, "other requests are too large; try again later", AGAIN)
        return b"".join(pieces)

    async def error_response(self, request: Request, failure: Exception) -> Response:
        """Turn an exception into an error response with its status, and count it by that."""
        error = _as_http_error(failure)
        status = error.status_code
        self.handler.metrics.refused.labels(status).inc()
        return JSONResponse(_error_object(error), status_code=status, headers=error.headers)


def _parse_json_object(body: bytes) -> dict[str, Any]:
    """Return the object that a body is; raises InputError where it is none."""
    try:
        value = parse_json(body)
    except ValueError:
        value = None
    found: dict[str, Any] = value if isinstance(value, dict) else {}
    is_object = isinstance(value, dict)
    require(is_object, "the body", expected="a JSON object", do="correct it")
    return found


async def _unless_client_leaves(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work` and return its result or raise its error; it is cancelled if the client leaves.

    Args:
        request: whose body was read.
        work: what is awaited.

    Raises:
        InputError: the client has gone; nobody reads it.
    """

    async def watch() -> None:
        """End as soon as the client has gone."""
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.create_task(work)
    leaving = asyncio.create_task(watch())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        gone = "the client has gone"
        require(working.done(), gone, expected="one that waits", do="ask again")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()


def _header_text(names: Sequence[str]) -> str:
    """Return names of fields for a header: at most 20, of 80 characters each.

    Characters other than ASCII letters, digits, `_`, `.`, `-`, brackets and spaces become `?`.
    """
    plain = [re.sub(r"[^\w.() \[\]-]", "?", name[:80], flags=re.ASCII) for name in names[:20]]
    return ", ".join(plain)


def _as_http_error(failure: Exception) -> HTTPException:
    """Return the HTTP error for an exception; one that is an HTTP error stays.

    Input errors become 400, no memory 503, a timeout 504, and all else 500 without its message,
    which is for the log. Nothing is logged here.
    """
    match failure:
        case HTTPException():
            return failure
        case ContextLengthError(num_tokens=tokens, limit=limit):
            return DetailedHTTPException(
                400, _TOO_LONG.format(tokens, limit), code="context_length_exceeded"
            )
        case NoRoomError(wanted=wanted, limit=limit):
            again = AGAIN if wanted <= limit else None
            return DetailedHTTPException(503, str(failure), again, code="no_room")
        case RequestError():
            return DetailedHTTPException(
                400, str(failure), param=failure.param, details=failure.details
            )
        case TurnError():
            return DetailedHTTPException(400, str(failure), param=failure.place)
        case InputError():
            return HTTPException(400, str(failure))
        case TimeoutError():
            return HTTPException(504, "the answer took too long")
    return HTTPException(500, "the answer failed; the server's log says why")


def _error_object(http_error: HTTPException) -> dict[str, Any]:
    """Return the JSON object of an error, with the fields of OpenAI's and of Anthropic's."""
    usual = "api_error" if http_error.status_code >= 500 else "invalid_request_error"
    error = {"message": http_error.detail, "param": None, "code": None}
    if isinstance(http_error, DetailedHTTPException):
        error |= {"param": http_error.param, "code": http_error.code}
    kind = _KINDS.get(http_error.status_code, usual)
    inner: dict[str, Any] = {"type": kind, **error}
    if isinstance(http_error, DetailedHTTPException) and http_error.details is not None:
        inner["details"] = http_error.details
    return {"type": "error", **error, "error": inner}


class AnswerResponse(StreamingResponse):
    """The response to a POST: one JSON object, or a stream of events.

    The answer is cancelled as soon as the client disconnects, or does not take what is sent within
    `limits.wait` seconds.
    """

    def __init__(
        self,
        handler: RequestHandler,
        ask: AnswerRequest,
        writer: ResponseWriter,
        prompt_cache: PromptCache,
    ) -> None:
        """Prepare the response; the answer begins when it is sent.

        Args:
            handler: answers the request.
            ask: the request; its `stream` decides the form.
            writer: writes the answer's parts in the API's form.
            prompt_cache: of the client.
        """
        self._limits = handler.limits
        self._parts = handler.merged_parts_of_choices(ask, prompt_cache)
        self._writer = writer
        self._stream = ask.stream
        self._is_begun = False
        kind = "text/event-stream" if ask.stream else "application/json"
        super().__init__((), media_type=kind, headers={"Cache-Control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        """Send the answer, as events or as one object.

        An error before the first byte is raised, so that it gets a status; a later one is sent as
        an event `error`, and logged where its status is 500. An answer that takes more than
        `limits.time` seconds ends in a TimeoutError.

        Args:
            send: of ASGI.

        Raises:
            ClientDisconnect: the client has gone, or does not take what is sent.
            Exception: any error of the answer, while nothing was sent.
        """
        try:
            async with aclosing(self._parts), asyncio.timeout(self._limits.time):
                async for event in self._writer.events(
                    self._yield_items_and_send_keep_alives(send)
                ):
                    if self._stream:
                        await self._send_headers_then_text(send, _event(*event))
            if not self._stream:
                await self._send_headers_then_text(send, json.dumps(self._writer.reply))
        except Exception as failure:
            if not self._is_begun or isinstance(failure, ClientDisconnect):
                raise
            error = _as_http_error(failure)
            if error.status_code == 500:
                _log.error("an answer failed", exc_info=failure)
            await self._send_headers_then_text(send, _event("error", _error_object(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _yield_items_and_send_keep_alives(self, send: Send) -> AsyncIterator[StreamItem]:
        """Yield all items of the answer, `Begun` and `Waiting` included.

        Before one of these is yielded, a stream's headers are sent where nothing was sent yet; else
        a `Waiting` sends a keep-alive.
        """
        async for part in self._parts:
            if self._stream and isinstance(part, Begun | Waiting):
                text = ""
                if self._is_begun and isinstance(part, Waiting):
                    text = self._writer.keep_alive(part)
                await self._send_headers_then_text(send, text)
            yield part

    async def _send_headers_then_text(self, send: Send, text: str) -> None:
        """Send text, with status 200 and the headers before the first one; empty text sends at
        most these.

        Raises:
            ClientDisconnect: the client did not take it within `limits.wait` seconds.
        """
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        body = {"type": "http.response.body", "body": text.encode(), "more_body": True}
        try:
            async with asyncio.timeout(self._limits.wait):
                if not self._is_begun:
                    await send(start)
                self._is_begun = True
                if text:
                    await send(body)
        except TimeoutError as error:
            raise ClientDisconnect from error


def _event(name: str | None, data: Mapping[str, Any] | str) -> str:
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "") + f"data: {text}\n\n"


@cache
def _chat_page() -> Response:
    """Return the chat page, with a policy that lets only its own script and style run; it is read
    once.
    """
    page = Path(__file__).with_name("page.html").read_bytes()
    found = re.findall(rb"<(style|script)>(.*?)</\1>", page, re.DOTALL)
    sums = [base64.b64encode(sha256(block).digest()).decode() for _, block in found]
    policy = _POLICY.format(*sums)
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
    return Response(page, headers=headers, media_type="text/html")


class _HoldBodies:
    """Counts a request's body among those of all, from its first byte to the end of the response.

    As middleware, since a response is sent after its route's function has ended.
    """

    def __init__(self, app: ASGIApp, bodies: BodyBytes) -> None:
        """Wrap an application, whose requests find their part of `bodies` in the scope."""
        self._app = app
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._bodies.part() as scope[_HELD]:
            await self._app(scope, receive, send)


def make_app(
    handler: RequestHandler,
    config: GenerateConfig | None = None,
    hosts: Sequence[str] = LOCAL,
    keys: Sequence[bytes] = (),
) -> Starlette:
    """Make the ASGI application of the server.

    Pages of this machine may use it from any port (CORS).

    Args:
        handler: answers the requests.
        config: settings for what a request does not say; its `max_tokens` is a maximum. None for
            the defaults.
        hosts: names by which the server may be addressed, in lower case.
        keys: API keys, in the order of the handler's prompt caches; without any, nobody needs one.
    """
    routes = Routes(handler, config or GenerateConfig(), hosts, keys)
    failures = (Exception, HTTPException, InputError, TimeoutError)
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
        exception_handlers={kind: routes.error_response for kind in failures},
    )
    app.add_middleware(_HoldBodies, bodies=BodyBytes(handler.limits.bodies))
    any_: Any = {
        "allow_headers": "*",
        "allow_methods": "*",
        "expose_headers": [IGNORED, TOOL_CALLS],
    }
    app.add_middleware(CORSMiddleware, allow_origin_regex=_PAGES, **any_)
    return app
