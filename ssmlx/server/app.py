"""The server as an ASGI application: routes, who may ask, and how a reply is given up."""

import asyncio
import base64
import hmac
import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..errors import InputError, require
from ..settings import GenerateConfig, parse_json
from . import blocks, openai
from .answering import Answering
from .asks import Api, Ask, Event

APIS: dict[str, Api] = {
    "/v1/chat/completions": openai.CHAT,
    "/v1/completions": openai.COMPLETIONS,
    "/v1/messages": blocks.MESSAGES,
    "/v1/messages/count_tokens": blocks.MESSAGES,
    "/v1/responses": blocks.RESPONSES,
}
"""What is asked by POST, by route."""
OPEN = ("/", "/health")  # to those without a key, too
LOCAL = ("localhost", "127.0.0.1", "::1")
_PAGES = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
_POLICY = (
    "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "style-src 'sha256-{}'; script-src 'sha256-{}'"
)
_STREAM = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
_log = logging.getLogger("ssmlx")


@dataclass(frozen=True, kw_only=True)
class Doors:
    """Who may ask: by the names that the server is called by, and by keys, if there are any."""

    hosts: Sequence[str] = LOCAL
    keys: Sequence[bytes] = ()

    def user(self, headers: Mapping[str, str], *, needs_key: bool = True) -> int:
        """Whose request it is: the place of the key that was given; 0 where none is needed.

        A page elsewhere, whose own name may lead to this machine, tells where it is from.
        """
        if not self._knows("//" + headers.get("host", "")):
            raise HTTPException(403, "the server is not called that; see --allow-host")
        if not self._knows(headers.get("origin", "//localhost")):
            raise HTTPException(403, "pages of other places may not ask here")
        if not (self.keys and needs_key):
            return 0
        kind, _, token = headers.get("authorization", "").partition(" ")
        given = headers.get("x-api-key") or (token.strip() if kind.lower() == "bearer" else "")
        # All are compared, so that the time that it takes tells nothing.
        same = [hmac.compare_digest(key, given.encode("latin-1")) for key in self.keys]
        if not any(same):
            raise HTTPException(401, "a key is needed", {"WWW-Authenticate": "Bearer"})
        return same.index(True)

    def _knows(self, address: str) -> bool:
        try:
            return urlsplit(address).hostname in self.hosts
        except ValueError:
            return False


class Routes:
    """What is at each address."""

    def __init__(self, answering: Answering, config: GenerateConfig, doors: Doors) -> None:
        self._answering, self._config, self._doors = answering, config, doors
        self._page = _page()

    async def tell(self, request: Request) -> Response:
        """Whatever is asked by GET."""
        self._doors.user(request.headers, needs_key=request.url.path not in OPEN)
        match request.url.path:
            case "/":
                return self._page
            case "/health":
                return _json({"status": "ok"})
            case "/metrics":
                told = generate_latest(self._answering.metrics.registry)
                return Response(told, media_type=CONTENT_TYPE_PLAIN_0_0_4)
        # What either service tells of a model.
        more = {"object": "model", "created": 0, "owned_by": "ssmlx"}
        more |= {"type": "model", "created_at": "1970-01-01T00:00:00Z"}
        known = {one: {"id": one, "display_name": one, **more} for one in self._answering.models}
        name = request.path_params.get("name")
        if name is None:
            return _json({"object": "list", "data": [*known.values()], "has_more": False})
        if name not in known:
            raise HTTPException(404, "no such model")
        return _json(known[name])

    async def ask(self, request: Request) -> Response:
        user, path = self._doors.user(request.headers), request.url.path
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HTTPException(415, "the content type is not application/json")
        ask = APIS[path].read(await self._body(request), self._config)
        ask = replace(ask, model=self._answering.model_name(ask))
        if path.endswith("/count_tokens"):
            prompt, _ = await asyncio.to_thread(self._answering.prepared, ask)
            return _json({"input_tokens": len(prompt)})
        return Reply(self._answering, APIS[path], ask, user)

    async def _body(self, request: Request) -> dict[str, Any]:
        limits, found = self._answering.limits, bytearray()
        try:
            async with asyncio.timeout(limits.wait):
                async for piece in request.stream():
                    found += piece
                    if len(found) > limits.body:
                        raise HTTPException(413, f"the body has more than {limits.body} bytes")
            body = parse_json(bytes(found))
        except TimeoutError as error:
            raise HTTPException(408, "the body took too long to come") from error
        except ClientDisconnect as error:
            raise HTTPException(400, "the body is not whole") from error
        except ValueError:
            body = None
        require(isinstance(body, dict), "the body", expected="a JSON object", do="correct it")
        return body

    async def refuse(self, request: Request, failure: Exception) -> Response:
        told = _refusal(failure)
        self._answering.metrics.refused.labels(told.status_code).inc()
        api = APIS.get(request.url.path, openai.CHAT)
        error = api.error(told.status_code, told.detail)
        return _json(error, status_code=told.status_code, headers=told.headers)


def _refusal(failure: Exception) -> HTTPException:
    match failure:
        case HTTPException():
            return failure
        case InputError():
            return HTTPException(400, str(failure))
        case TimeoutError():
            return HTTPException(504, "the answer took too long")
    return HTTPException(500, "the answer failed; the server's log says why")


class Reply(Response):
    """An answer, in one piece or as events; given up as soon as its client is gone, or does not
    take what is sent."""

    def __init__(self, answering: Answering, api: Api, ask: Ask, user: int) -> None:
        super().__init__()
        self._limits, self._parts = answering.limits, answering.parts(ask, user)
        self._api, self._ask = api, ask

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
        if isinstance(failure, Exception) and not isinstance(failure, ClientDisconnect):
            raise failure

    async def _tell(self, scope: Scope, receive: Receive, send: Send) -> None:
        teller, is_begun = self._api.teller(self._ask), False
        try:
            async with aclosing(self._parts) as parts, asyncio.timeout(self._limits.time):
                async for event in teller.events(parts):
                    if self._ask.stream and not is_begun:  # before it, a refusal has a status
                        start = {"type": "http.response.start", "status": 200, "headers": _STREAM}
                        await send(start)
                        is_begun = True
                    if is_begun:
                        await self._send(event, send)
        except Exception as failure:
            if not is_begun or isinstance(failure, ClientDisconnect):
                raise
            told = _refusal(failure)
            if told.status_code == 500:
                _log.error("an answer failed", exc_info=failure)
            error = self._api.error(told.status_code, told.detail)
            await self._send((self._api.error_name, error), send)
        if is_begun:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await _json(teller.reply)(scope, receive, send)

    async def _send(self, event: Event, send: Send) -> None:
        name, data = event
        text = data.encode() if isinstance(data, str) else _encoded(data)
        body = (f"event: {name}\n".encode() if name else b"") + b"data: " + text + b"\n\n"
        try:
            async with asyncio.timeout(self._limits.wait):
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except TimeoutError as error:
            raise ClientDisconnect from error


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _json(data: Any, **more: Any) -> Response:
    return Response(_encoded(data), media_type="application/json", **more)


def _encoded(data: Any) -> bytes:
    # Half a surrogate pair, which a request may hold, has no UTF-8.
    return json.dumps(data, ensure_ascii=False).encode(errors="replace")


def _page() -> Response:
    """The page, whose own blocks alone may run or apply."""
    page = Path(__file__).with_name("page.html").read_bytes()
    found = re.findall(rb"<(style|script)>(.*?)</\1>", page, re.DOTALL)
    sums = [base64.b64encode(sha256(block).digest()).decode() for _, block in found]
    policy = _POLICY.format(*sums)
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
    return Response(page, headers=headers, media_type="text/html")


def make_app(
    answering: Answering, config: GenerateConfig | None = None, doors: Doors | None = None
) -> Starlette:
    """The application; `config` holds where a request says nothing, its `max_tokens` always."""
    routes = Routes(answering, config or GenerateConfig(), doors or Doors())
    told = (*OPEN, "/metrics", "/v1/models", "/v1/models/{name:path}")
    failures = (Exception, HTTPException, InputError, TimeoutError)
    app = Starlette(
        routes=[
            *(Route(path, routes.tell) for path in told),
            *(Route(path, routes.ask, methods=["POST"]) for path in APIS),
        ],
        exception_handlers={kind: routes.refuse for kind in failures},
    )
    pages: Any = {"allow_origin_regex": _PAGES, "allow_headers": "*", "allow_methods": "*"}
    app.add_middleware(CORSMiddleware, **pages)
    return app
