"""The server as an ASGI application: routes, who may ask, and how a reply is given up."""

import asyncio
import base64
import hmac
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..errors import InputError
from ..settings import GenerateConfig, parse_json
from . import anthropic, openai, responses
from .answering import Answering
from .asks import Api, Ask, Event, Ids, Part

APIS: dict[str, Api] = {
    "/v1/chat/completions": openai.CHAT,
    "/v1/completions": openai.COMPLETIONS,
    "/v1/messages": anthropic.MESSAGES,
    "/v1/messages/count_tokens": anthropic.MESSAGES,
    "/v1/responses": responses.RESPONSES,
}
"""What is asked by POST, by route."""
LOCAL = ("localhost", "127.0.0.1", "::1")
_LOCAL_PAGES = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
_GRACE = 5.0  # seconds in which a stream can tell that its time is over
_PAGE = Path(__file__).with_name("page.html")
_POLICY = (
    "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; script-src {}; style-src {}"
)
_log = logging.getLogger("ssmlx")
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, kw_only=True)
class Doors:
    """Who may ask: by the names that the server is called by, and by keys, if there are any."""

    hosts: Sequence[str] = LOCAL
    keys: Sequence[bytes] = ()

    def guard(self, handler: Handler, *, needs_key: bool = True) -> Handler:
        """A handler that those reach alone who may."""

        async def guarded(request: Request) -> Response:
            self._check_names(request.headers)
            request.state.user = self._user(request.headers) if needs_key else 0
            return await handler(request)

        return guarded

    def _check_names(self, headers: Mapping[str, str]) -> None:
        """A page elsewhere, whose own name may lead to this machine, tells where it is from."""
        if not self._knows("//" + headers.get("host", "")):
            raise HTTPException(403, "the server is not called that; see --allow-host")
        if not self._knows(headers.get("origin", "//localhost")):
            raise HTTPException(403, "pages of other places may not ask here")

    def _knows(self, address: str) -> bool:
        try:
            return urlsplit(address).hostname in self.hosts
        except ValueError:
            return False

    def _user(self, headers: Mapping[str, str]) -> int:
        """The place of the key that was given; 0 where none is needed."""
        kind, _, token = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), token.strip() if kind.lower() == "bearer" else ""]
        # All are compared, so that the time that it takes tells nothing.
        pairs = [
            [hmac.compare_digest(key, one.encode("latin-1")) for one in given] for key in self.keys
        ]
        users = [place for place, same in enumerate(pairs) if any(same)]
        if self.keys and not users:
            raise HTTPException(401, "a key is needed", {"WWW-Authenticate": "Bearer"})
        return users[0] if users else 0


class Routes:
    """What is at each address."""

    def __init__(self, answering: Answering, config: GenerateConfig) -> None:
        self._answering, self._config = answering, config

    async def ask(self, request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HTTPException(415, "the content type is not application/json")
        api = APIS[request.url.path]
        ask = api.read(await self._body(request), self._config)
        if request.url.path.endswith("/count_tokens"):
            name = self._answering.model_name(ask)
            prompt, _ = await asyncio.to_thread(self._answering.prepared, ask, name)
            return _json({"input_tokens": len(prompt)})
        return Reply(self._answering, api, ask, request.state.user)

    async def _body(self, request: Request) -> dict[str, Any]:
        limits, found = self._answering.limits, bytearray()
        try:
            async with asyncio.timeout(limits.wait):
                async for piece in request.stream():
                    found += piece
                    if len(found) > limits.body:
                        raise HTTPException(413, f"the body has more than {limits.body} bytes")
        except TimeoutError as error:
            raise HTTPException(408, "the body took too long to come") from error
        except ClientDisconnect as error:
            raise HTTPException(400, "the body is not whole") from error
        try:
            body = parse_json(bytes(found))
        except ValueError:
            body = None
        if not isinstance(body, dict):
            found_one = "the body is no JSON object"
            raise InputError(found_one, expected="one", do="correct it")
        return body

    async def models(self, request: Request) -> Response:
        """All of them, or the one that is named; with what either service tells of a model."""
        more = {"object": "model", "created": 0, "owned_by": "ssmlx"}
        more |= {"type": "model", "created_at": "1970-01-01T00:00:00Z"}
        known = {one: {"id": one, "display_name": one, **more} for one in self._answering.models}
        name = request.path_params.get("name")
        if name is None:
            return _json({"object": "list", "data": [*known.values()], "has_more": False})
        if name not in known:
            raise HTTPException(404, "no such model")
        return _json(known[name])

    async def health(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return Response(*self._answering.metrics.told())

    async def page(self, request: Request) -> Response:
        page = _PAGE.read_bytes()
        policy = _POLICY.format(_hashes(page, b"script"), _hashes(page, b"style"))
        headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
        return Response(page, headers=headers, media_type="text/html")

    async def refuse(self, request: Request, failure: Exception) -> Response:
        status, message, headers = _refusal(failure)
        self._answering.metrics.refused.labels(status).inc()
        return _json(_api_of(request).error(status, message), status, headers)


def _api_of(request: Request) -> Api:
    return APIS.get(request.url.path, openai.CHAT)


def _refusal(failure: Exception) -> tuple[int, str, Mapping[str, str] | None]:
    """Status, message and headers."""
    if isinstance(failure, InputError):
        return 400, str(failure), None
    if isinstance(failure, HTTPException):
        return failure.status_code, failure.detail, failure.headers
    if isinstance(failure, TimeoutError):
        return 504, "the answer took too long", None
    return 500, "the answer failed; the server's log says why", None


class Reply(Response):
    """An answer, in one piece or as events; given up as soon as its client is gone."""

    def __init__(self, answering: Answering, api: Api, ask: Ask, user: int) -> None:
        super().__init__()
        self._limit, self._parts = answering.limits.time, answering.parts(ask, user)
        self._api, self._ask, self._ids = api, ask, Ids(answering.model_name(ask))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        told = asyncio.create_task(self._tell(scope, receive, send))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({told, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            told.cancel()
            gone.cancel()
            # What was begun is ended before this returns.
            failure, _ = await asyncio.gather(told, gone, return_exceptions=True)
        if isinstance(failure, Exception):
            raise failure

    async def _tell(self, scope: Scope, receive: Receive, send: Send) -> None:
        end = asyncio.get_running_loop().time() + self._limit
        async with asyncio.timeout_at(end + _GRACE), aclosing(self._parts) as parts:
            async with asyncio.timeout_at(end):
                found = [await anext(parts)]  # before it, a refusal still has a status
                if not self._ask.stream:
                    found += [part async for part in parts]
                    whole = _json(self._api.whole(self._ask, found, self._ids))
                    await whole(scope, receive, send)
                    return
            await self._stream(_chain(found, parts), end, send)

    async def _stream(self, parts: AsyncIterator[Part], end: float, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async with asyncio.timeout_at(end):
                async for event in self._api.events(self._ask, parts, self._ids):
                    await _send_event(event, send)
        except Exception as failure:
            status, message, _ = _refusal(failure)
            if status == 500:
                _log.error("an answer failed", exc_info=failure)
            error = self._api.error(status, message)
            await _send_event((self._api.error_name, error), send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_event(event: Event, send: Send) -> None:
    name, data = event
    text = data.encode() if isinstance(data, str) else _encoded(data)
    body = (f"event: {name}\n".encode() if name else b"") + b"data: " + text + b"\n\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _chain(first: Sequence[Part], more: AsyncIterator[Part]) -> AsyncIterator[Part]:
    for part in first:
        yield part
    async for part in more:
        yield part


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _json(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_encoded(data), status, headers, "application/json")


def _encoded(data: Any) -> bytes:
    # Half a surrogate pair, which a request may hold, has no UTF-8.
    return json.dumps(data, ensure_ascii=False).encode(errors="replace")


def _hashes(page: bytes, tag: bytes) -> str:
    """The blocks of a page that may run or apply, as a content security policy names them."""
    blocks = re.findall(b"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
    sums = [base64.b64encode(sha256(block).digest()).decode() for block in blocks]
    return " ".join(f"'sha256-{one}'" for one in sums) or "'none'"


def make_app(
    answering: Answering, config: GenerateConfig | None = None, doors: Doors | None = None
) -> Starlette:
    """The application; `config` holds where a request says nothing, its `max_tokens` always."""
    routes, doors = Routes(answering, config or GenerateConfig()), doors or Doors()
    open_to_all = {"/": routes.page, "/health": routes.health}
    with_key = {
        "/v1/models": routes.models,
        "/v1/models/{name:path}": routes.models,
        "/metrics": routes.metrics,
    }
    pages = Middleware(
        CORSMiddleware, allow_origin_regex=_LOCAL_PAGES, allow_headers="*", allow_methods="*"
    )
    return Starlette(
        middleware=[pages],
        exception_handlers={
            kind: routes.refuse for kind in (Exception, HTTPException, InputError, TimeoutError)
        },
        routes=[
            *(Route(path, doors.guard(one, needs_key=False)) for path, one in open_to_all.items()),
            *(Route(path, doors.guard(one)) for path, one in with_key.items()),
            *(Route(path, doors.guard(routes.ask), methods=["POST"]) for path in APIS),
        ],
    )
