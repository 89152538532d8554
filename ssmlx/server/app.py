"""The server as an ASGI application: routes, who may ask, and how a reply is given up."""

import asyncio
import base64
import hmac
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..errors import ContextLengthError, InputError, NoRoomError, require
from ..json_files import parse_json
from ..settings import GenerateConfig
from . import blocks, openai
from .answering import Answering
from .asks import Ask, Body, Heard, Refusal, RequestError, Waiting
from .fields import check_fields
from .prompts import AGAIN

Teller = openai.Texts | blocks.Messages | blocks.Responses
"""Tells an answer's parts as events, one a part at least; then has it in one piece, as `reply`."""
APIS: dict[str, tuple[Callable[[Body, GenerateConfig], Ask], type[Teller]]] = {
    "/v1/chat/completions": (openai.read_chat, openai.Chats),
    "/v1/completions": (openai.read_completion, openai.Texts),
    "/v1/messages": (blocks.read_message, blocks.Messages),
    "/v1/messages/count_tokens": (blocks.read_message, blocks.Messages),
    "/v1/responses": (blocks.read_response, blocks.Responses),
}
"""What is asked by POST: what reads a request, with the server's settings, and tells its answer."""
OPEN = ("/", "/health")  # to those without a key, too
LOCAL = ("localhost", "127.0.0.1", "::1")
_PAGES = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
_POLICY = (
    "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "style-src 'sha256-{}'; script-src 'sha256-{}'"
)
IGNORED = "X-Ignored-Fields"
"""The header that names the fields of a request that nobody knows."""
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
_log = logging.getLogger("ssmlx")


@dataclass(frozen=True)
class Routes:
    """What is at each address; for whom, by the names that the server is called by, and by keys."""

    answering: Answering
    config: GenerateConfig
    hosts: Sequence[str]
    keys: Sequence[bytes]

    async def tell(self, request: Request) -> Response:
        """Whatever is asked by GET."""
        self._user(request)
        match request.url.path:
            case "/":
                return _page()
            case "/health":
                return JSONResponse({"status": "ok"})
            case "/metrics":
                told = generate_latest(self.answering.metrics.registry)
                return Response(told, media_type=CONTENT_TYPE_PLAIN_0_0_4)
        names = [*self.answering.models]
        pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return JSONResponse({"object": "list", "data": [*map(self._described, names)], **pages})

    async def tell_model(self, request: Request) -> Response:
        """What is asked by GET of one model."""
        self._user(request)
        name = request.path_params["name"]
        if name not in self.answering.models:
            raise self.answering.unknown_model(name)
        return JSONResponse(self._described(name))

    def _described(self, name: str) -> dict[str, Any]:
        """A model, as OpenAI's, Anthropic's and vLLM's clients read it."""
        size = self.answering.context_length
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

    async def ask(self, request: Request) -> Response:
        user = self._user(request)
        path = request.url.path
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HTTPException(415, "the content type is not application/json")
        read, teller = APIS[path]
        body = await self._body(request)
        ignored = check_fields(path, body)
        ask = self.answering.named(read(body, self.config))
        reply: Response
        if path.endswith("/count_tokens"):
            prompt, _ = await asyncio.to_thread(self.answering.prepared, ask)
            reply = JSONResponse({"input_tokens": len(prompt)})
        else:
            reply = Reply(self.answering, ask, teller(ask), user)
        if ignored:
            reply.headers[IGNORED] = _header_of(ignored)
        return reply

    def _user(self, request: Request) -> int:
        """Whose request it is: the place of the key that was given; 0 where none is needed.

        A page elsewhere, whose own name may lead to this machine, tells where it is from.
        """
        headers = request.headers
        if not self._knows("//" + headers.get("host", "")):
            raise HTTPException(403, "the server is not called that; see --allow-host")
        if not self._knows(headers.get("origin", "//localhost")):
            raise HTTPException(403, "pages of other places may not ask here")
        if not self.keys or request.url.path in OPEN:
            return 0
        kind, _, token = headers.get("authorization", "").partition(" ")
        given = headers.get("x-api-key") or (token.strip() if kind.lower() == "bearer" else "")
        # All are compared, so that the time that it takes tells nothing.
        same = [hmac.compare_digest(key, given.encode("latin-1")) for key in self.keys]
        if not any(same):
            raise HTTPException(401, "a key is needed", {"WWW-Authenticate": "Bearer"})
        return same.index(True)

    def _knows(self, address: str) -> bool:
        with suppress(ValueError):
            return urlsplit(address).hostname in self.hosts
        return False

    async def _body(self, request: Request) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self.answering.limits.wait):
                body: Any = parse_json(await self._data(request))
        except TimeoutError as error:
            raise HTTPException(408, "the body took too long to come") from error
        except (ValueError, ClientDisconnect):
            body = None
        found: dict[str, Any] = body if isinstance(body, dict) else {}
        is_object = isinstance(body, dict)
        require(is_object, "the body", expected="a JSON object", do="correct it")
        return found

    async def _data(self, request: Request) -> bytes:
        """The bytes of a body. One that is too large is read on for a while, and not kept: a client
        reads no answer while it still sends."""
        limit = self.answering.limits.body
        pieces = []
        size = 0
        async for piece in request.stream():
            size += len(piece)
            if size <= limit:
                pieces.append(piece)
            elif size > _READ_ON * limit:
                break
        if size > limit:
            raise HTTPException(413, f"the body has more than {limit} bytes")
        return b"".join(pieces)

    async def refuse(self, request: Request, failure: Exception) -> Response:
        told = _refusal(failure)
        self.answering.metrics.refused.labels(told.status_code).inc()
        return JSONResponse(_error(told), status_code=told.status_code, headers=told.headers)


def _header_of(names: Sequence[str]) -> str:
    """Names of fields, as a header may hold them: a few, in ASCII, on one line."""
    plain = [re.sub(r"[^\w.-]", "?", name, flags=re.ASCII)[:40] for name in names]
    return ", ".join(plain[:20])


def _refusal(failure: Exception) -> HTTPException:
    match failure:
        case HTTPException():
            return failure
        case ContextLengthError(num_tokens=tokens, limit=limit):
            return Refusal(400, _TOO_LONG.format(tokens, limit), code="context_length_exceeded")
        case NoRoomError(wanted=wanted, limit=limit):
            again = AGAIN if wanted <= limit else None
            return Refusal(503, str(failure), again, code="no_room")
        case RequestError():
            return Refusal(400, str(failure), param=failure.param, details=failure.details)
        case InputError():
            return HTTPException(400, str(failure))
        case TimeoutError():
            return HTTPException(504, "the answer took too long")
    return HTTPException(500, "the answer failed; the server's log says why")


def _error(told: HTTPException) -> dict[str, Any]:
    """As clients of every API look for it, in a body or in an event."""
    usual = "api_error" if told.status_code >= 500 else "invalid_request_error"
    error = {"message": told.detail, "param": None, "code": None}
    if isinstance(told, Refusal):
        error |= {"param": told.param, "code": told.code}
    kind = _KINDS.get(told.status_code, usual)
    inner: dict[str, Any] = {"type": kind, **error}
    if isinstance(told, Refusal) and told.details is not None:
        inner["details"] = told.details
    return {"type": "error", **error, "error": inner}


class Reply(StreamingResponse):
    """An answer, in one piece or as events; given up as soon as its client is gone, or does not
    take what is sent."""

    def __init__(self, answering: Answering, ask: Ask, teller: Teller, user: int) -> None:
        self._limits = answering.limits
        self._parts = answering.parts(ask, user)
        self._teller = teller
        self._stream = ask.stream
        self._is_begun = False
        kind = "text/event-stream" if ask.stream else "application/json"
        super().__init__((), media_type=kind, headers={"Cache-Control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        try:
            async with aclosing(self._parts), asyncio.timeout(self._limits.time):
                async for event in self._teller.events(self._heard(send)):
                    if self._stream:
                        await self._send(send, _event(*event))
            if not self._stream:
                await self._send(send, json.dumps(self._teller.reply))
        except Exception as failure:
            if not self._is_begun or isinstance(failure, ClientDisconnect):
                raise
            told = _refusal(failure)
            if told.status_code == 500:
                _log.error("an answer failed", exc_info=failure)
            await self._send(send, _event("error", _error(told)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _heard(self, send: Send) -> AsyncIterator[Heard]:
        """The parts, whose stream has headers at once, and does not fall silent behind them."""
        async for part in self._parts:
            if self._stream and isinstance(part, Waiting):
                text = self._teller.keep_alive(part) if self._is_begun else ""
                await self._send(send, text)
            yield part

    async def _send(self, send: Send, text: str) -> None:
        """Until the headers are sent, with the first text, a refusal has a status of its own."""
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
def _page() -> Response:
    """The page, whose own blocks alone may run or apply."""
    page = Path(__file__).with_name("page.html").read_bytes()
    found = re.findall(rb"<(style|script)>(.*?)</\1>", page, re.DOTALL)
    sums = [base64.b64encode(sha256(block).digest()).decode() for _, block in found]
    policy = _POLICY.format(*sums)
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
    return Response(page, headers=headers, media_type="text/html")


def make_app(
    answering: Answering,
    config: GenerateConfig | None = None,
    hosts: Sequence[str] = LOCAL,
    keys: Sequence[bytes] = (),
) -> Starlette:
    """The application; `config` holds where a request says nothing, its `max_tokens` always."""
    routes = Routes(answering, config or GenerateConfig(), hosts, keys)
    failures = (Exception, HTTPException, InputError, TimeoutError)
    app = Starlette(
        routes=[
            *(Route(path, routes.tell) for path in (*OPEN, "/metrics", "/v1/models")),
            Route("/v1/models/{name:path}", routes.tell_model),
            *(Route(path, routes.ask, methods=["POST"]) for path in APIS),
        ],
        exception_handlers={kind: routes.refuse for kind in failures},
    )
    any_: Any = {"allow_headers": "*", "allow_methods": "*", "expose_headers": [IGNORED]}
    app.add_middleware(CORSMiddleware, allow_origin_regex=_PAGES, **any_)
    return app
