"""The server as an ASGI application: routes, who may ask, and how a reply is given up."""

import asyncio
import base64
import hmac
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import InputError
from ..settings import GenerateConfig, parse_json
from . import openai
from .answering import Answering, StatusError
from .asks import Api, Ask, Event, Ids

APIS: dict[str, Api] = {
    "/v1/chat/completions": openai.CHAT,
    "/v1/completions": openai.COMPLETIONS,
}
"""What is asked by POST, by route; the first is the one whose errors others are told in."""
LOCAL = ("localhost", "127.0.0.1", "::1")
OPEN_ROUTES = ("/", "/health")  # which need no key
_PAGE = Path(__file__).with_name("page.html")
_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; script-src {}; style-src {}"
)
_GRACE = 5.0  # seconds to tell that the time is over
_log = logging.getLogger("ssmlx")


@dataclass(frozen=True, kw_only=True)
class Doors:
    """Who may ask: by the names that the server is called by, and by keys, if there are any."""

    hosts: Sequence[str] = LOCAL
    keys: Sequence[bytes] = ()

    def user(self, headers: dict[str, str], *, is_open: bool) -> int:
        """The place of the key that was given; 0 where there are none. Raises StatusError."""
        if not self._knows("//" + headers.get("host", "")):
            raise StatusError(403, "this server is not called by that name; see --allow-host")
        if not self.admits_origin(headers.get("origin")):
            raise StatusError(403, "pages of other places may not ask here")
        if is_open or not self.keys:
            return 0
        kind, _, token = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), token.strip() if kind.lower() == "bearer" else ""]
        # All are compared, so that the time it takes tells nothing.
        same = [
            any([hmac.compare_digest(key, one.encode("latin-1")) for one in given])
            for key in self.keys
        ]
        if not any(same):
            raise StatusError(401, "a key is needed", {"WWW-Authenticate": "Bearer"})
        return same.index(True)

    def admits_origin(self, origin: str | None) -> bool:
        """Whether a page from there may ask, or it is no page that asks."""
        return origin is None or (
            origin.startswith(("http://", "https://")) and self._knows(origin)
        )

    def _knows(self, address: str) -> bool:
        try:
            return urlsplit(address).hostname in self.hosts
        except ValueError:
            return False


class Guard:
    """Lets in whom `Doors` admits, counts requests, and tells every refusal as its API does."""

    def __init__(self, app: ASGIApp, doors: Doors, answering: Answering) -> None:
        self._app, self._doors, self._metrics = app, doors, answering.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): one.decode("latin-1") for name, one in scope["headers"]}
        path, is_begun = scope["path"], False
        origin = headers.get("origin")

        async def sent(message: Message) -> None:
            nonlocal is_begun
            if message["type"] == "http.response.start":
                is_begun = True
                message["headers"] = [*message.get("headers", ()), *_shared_headers(origin)]
                route = path if path in ROUTES else "other"
                self._metrics.requests.labels(route, message["status"]).inc()
            await send(message)

        try:
            is_open = path in OPEN_ROUTES or scope["method"] == "OPTIONS"
            scope["user"] = self._doors.user(headers, is_open=is_open)
            _check_form(path, scope["method"], headers)
            if scope["method"] == "OPTIONS":
                await Response(status_code=204)(scope, receive, sent)
                return
            await self._app(scope, receive, sent)
        except ClientDisconnect:
            return
        except Exception as failure:
            if is_begun:
                raise
            origin = origin if self._doors.admits_origin(origin) else None
            status, told, more = refusal_of(failure)
            body = _api_of(path).error(status, told)
            await _json(body, status, more)(scope, receive, sent)


def _check_form(path: str, method: str, headers: Mapping[str, str]) -> None:
    """Raises StatusError where nothing is asked like that here."""
    known = ROUTES.get(path)
    if known is None:
        raise StatusError(404, "there is nothing at this address")
    if method not in (known[0], "OPTIONS", "HEAD" if known[0] == "GET" else ""):
        raise StatusError(405, f"this address takes {known[0]}", {"Allow": known[0]})
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if method == "POST" and kind != "application/json":
        raise StatusError(415, "content-type is not application/json")


def _shared_headers(origin: str | None) -> list[tuple[bytes, bytes]]:
    found = {"X-Content-Type-Options": "nosniff", "Vary": "Origin"}
    if origin is not None:
        found["Access-Control-Allow-Origin"] = origin
        found["Access-Control-Allow-Methods"] = "GET, POST"
        found["Access-Control-Allow-Headers"] = "*, Authorization"
    return [(name.lower().encode(), one.encode("latin-1")) for name, one in found.items()]


def refusal_of(failure: Exception) -> tuple[int, str, dict[str, str]]:
    """Status, message and headers of what went wrong; what is no request's fault is logged."""
    if isinstance(failure, InputError):
        return 400, str(failure), {}
    if isinstance(failure, StatusError):
        return failure.status, str(failure), failure.headers
    if isinstance(failure, TimeoutError):
        return 504, "the answer took too long", {}
    _log.error("an answer failed", exc_info=failure)
    return 500, "the answer failed; the server's log says why", {}


def _api_of(path: str) -> Api:
    return APIS.get(path, openai.CHAT)


def _json(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_encoded(data), status, headers, "application/json")


def _encoded(data: Any) -> bytes:
    # Half a surrogate pair, which JSON can ask for, has no UTF-8.
    return json.dumps(data, ensure_ascii=False).encode(errors="replace")


class Server:
    """What the routes have in common."""

    def __init__(self, answering: Answering, config: GenerateConfig) -> None:
        self._answering, self._config = answering, config

    async def ask(self, request: Request) -> Response:
        api = _api_of(request.url.path)
        try:
            async with asyncio.timeout(self._answering.limits.wait):
                body = await self._body(request)
        except TimeoutError:
            raise StatusError(408, "the request took too long to come") from None
        ask = api.read(body, self._config)
        return Reply(self._answering, api, ask, request.scope["user"])

    async def _body(self, request: Request) -> dict[str, Any]:
        most, found = self._answering.limits.body, b""
        async for piece in request.stream():
            found += piece
            if len(found) > most:
                raise StatusError(413, f"the request has more than {most} bytes")
        try:
            body = parse_json(found)
        except ValueError as error:
            raise InputError(
                "the body is not JSON", expected="an object", do="correct it"
            ) from error
        if not isinstance(body, dict):
            raise InputError("the body is no object", expected="an object", do="correct it")
        return body

    async def models(self, request: Request) -> Response:
        told = [
            {"id": name, "object": "model", "created": 0, "owned_by": "ssmlx"}
            for name in self._answering.models
        ]
        return _json({"object": "list", "data": told})

    async def health(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self._answering.metrics.text(), media_type=kind)

    async def page(self, request: Request) -> Response:
        page = _PAGE.read_bytes()
        policy = _POLICY.format(_hashes(page, b"script"), _hashes(page, b"style"))
        headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"}
        return Response(page, media_type="text/html", headers=headers)


def _hashes(page: bytes, tag: bytes) -> str:
    """The blocks of a page that may run or apply, as a content security policy names them."""
    blocks = re.findall(b"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
    sums = [base64.b64encode(sha256(block).digest()).decode() for block in blocks]
    return " ".join(f"'sha256-{one}'" for one in sums) or "'none'"


class Reply(Response):
    """An answer, in one piece or as events; given up as soon as its client is gone."""

    def __init__(self, answering: Answering, api: Api, ask: Ask, user: int) -> None:
        super().__init__()
        self._answering, self._api, self._ask, self._user = answering, api, ask, user

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        told = asyncio.ensure_future(self._tell(scope, receive, send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({told, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (told, gone):
                task.cancel()
            # What was begun is ended before this returns.
            (failure, _) = await asyncio.gather(told, gone, return_exceptions=True)
        if isinstance(failure, Exception):
            raise failure

    async def _tell(self, scope: Scope, receive: Receive, send: Send) -> None:
        ids = Ids(self._answering.model_name(self._ask))
        end = asyncio.get_running_loop().time() + self._answering.limits.time
        grace = _GRACE if self._ask.stream else 0.0
        async with asyncio.timeout_at(end + grace):
            async with self._answering.opened(self._ask, self._user) as parts:
                if self._ask.stream:
                    await self._send_events(self._api.events(self._ask, parts, ids), end, send)
                    return
                whole = self._api.whole(self._ask, [part async for part in parts], ids)
        await _json(whole)(scope, receive, send)

    async def _send_events(self, events: AsyncIterator[Event], end: float, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async with asyncio.timeout_at(end):
                async for event in events:
                    await _send_event(event, send)
        except Exception as failure:
            status, told, _ = refusal_of(failure)
            await _send_event(self._api.failed(status, told), send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_event(event: Event, send: Send) -> None:
    name, data = event
    text = data.encode() if isinstance(data, str) else _encoded(data)
    line = f"event: {name}\n".encode() if name else b""
    body = line + b"data: " + text + b"\n\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


ROUTES: dict[str, tuple[str, Callable[[Server], Callable[[Request], Awaitable[Response]]]]] = {
    **{path: ("POST", lambda server: server.ask) for path in APIS},
    "/v1/models": ("GET", lambda server: server.models),
    "/health": ("GET", lambda server: server.health),
    "/metrics": ("GET", lambda server: server.metrics),
    "/": ("GET", lambda server: server.page),
}


def make_app(
    answering: Answering, config: GenerateConfig | None = None, doors: Doors | None = None
) -> ASGIApp:
    """The application; it closes the engine when it is shut down."""
    server = Server(answering, config or GenerateConfig())

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(answering.close)

    routes = [
        Route(path, handler(server), methods=[method]) for path, (method, handler) in ROUTES.items()
    ]
    return Guard(Router(routes, lifespan=lifespan), doors or Doors(), answering)
