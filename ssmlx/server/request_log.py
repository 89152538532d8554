"""One line for each request in the log, when it is over: who asked for what, and what came of it.

The line has no text of a request or an answer.
"""

import logging
import time
from collections.abc import MutableMapping, Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import one_line
from ..generation.segments import GenerationResponse

_PROBES = ("/health", "/metrics")  # asked every few seconds, and not logged
_CLIENT_HAS_GONE = 499
_ENDS = "ssmlx.ends"  # where a request's scope has the last segments of its answers
_MOST_LETTERS = 200
_log = logging.getLogger("ssmlx")


def note_answer(scope: MutableMapping[str, Any], last: GenerationResponse) -> None:
    """Note the end of an answer for the line of its request."""
    scope.get(_ENDS, []).append(last)


class LogRequests:
    """Logs each request that the application below has ended."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _PROBES:
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        ends = scope[_ENDS] = []
        status = _CLIENT_HAS_GONE

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, send_noting_status)
        except Exception:  # which is answered above
            status = 500
            raise
        finally:
            _log.info("%s", _line(scope, status, time.perf_counter() - started, ends))


def _line(scope: Scope, status: int, seconds: float, ends: Sequence[GenerationResponse]) -> str:
    client = (scope.get("client") or ("-",))[0]
    path = one_line(scope["path"][:_MOST_LETTERS])
    words = [time.strftime("%H:%M:%S"), client, scope["method"], path, status, f"{seconds:.2f} s"]
    if ends:
        prompt = sum(one.prompt_tokens for one in ends)
        tokens = sum(one.generation_tokens for one in ends)
        calls = sum(one.target_calls for one in ends)
        words.append(f"· {prompt} prompt tokens, {tokens} tokens in {calls} calls")
    return " ".join(map(str, words))
