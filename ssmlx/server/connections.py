"""Connections that end: by time where no request comes or nothing is read, and by number."""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

from .handler import Limits

_RESERVED = 256
"""Files beside connections: of models and caches, and of connections that were just accepted."""
ACCEPTED_AT_ONCE = 64
"""Connections that are accepted before any of them is counted."""
_log = logging.getLogger("ssmlx")


class BoundedConnection(H11Protocol):
    """uvicorn's connection, which does not stay open for ever.

    It is closed if the head of a request does not come in time, a response is not read, or there
    are too many connections; then the one goes that has waited longest for a request.
    """

    def __init__(self, *args: Any, limits: Limits, most: int, **more: Any) -> None:
        """Make a connection that uvicorn opens, with its arguments.

        Args:
            args, more: uvicorn's.
            limits: the times.
            most: connections at once.
        """
        super().__init__(*args, **more)
        self._limits = limits
        self._most = most
        self._waits_since = 0.0  # for a request; a time of `time.monotonic`
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    @property
    def _waits_for_request(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()
        if len(self.connections) > self._most:
            self._close_longest_waiting()

    def _close_longest_waiting(self) -> None:
        """Close the connection that has waited longest for a request, perhaps this one."""
        every = cast("set[BoundedConnection]", self.connections)
        waiting = [one for one in every if one._waits_for_request]
        oldest = min(waiting, key=lambda one: one._waits_since)
        self.connections.discard(oldest)
        oldest.transport.abort()

    def _wait_for_head(self) -> None:
        """Close the connection unless the whole head of a request comes in time."""
        self._stop_head_timer()
        self._waits_since = time.monotonic()
        self._head_timer = self.loop.call_later(self._limits.head, self.timeout_keep_alive_handler)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def handle_events(self) -> None:
        super().handle_events()
        if not self._waits_for_request:
            self._stop_head_timer()

    def on_response_complete(self) -> None:
        self._wait_for_head()
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_if_not_read()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_if_not_read()

    def _abort_if_not_read(self) -> None:
        """Drop what was sent if it is not read in time."""
        if self._read_timer is None:
            self._read_timer = self.loop.call_later(self._limits.wait, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._abort_if_not_read()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read_timer is not None and not self.transport.is_closing():
            self._read_timer.cancel()
            self._read_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_head_timer()
        if self._read_timer is not None:
            self._read_timer.cancel()


def make_connection_class(limits: Limits) -> Callable[..., BoundedConnection]:
    """Return what makes the connections of a server: at most `limits.connections`, and fewer where
    the process may not open as many files.

    The process's own limit of files is raised as far as it may be.
    """
    files = _raise_limit_of_files()
    most = limits.connections if files is None else min(limits.connections, files - _RESERVED)
    return partial(BoundedConnection, limits=limits, most=max(1, most))


def _raise_limit_of_files() -> int | None:
    """Raise how many files the process may open as far as it may, and return it; None if there is
    no limit, or no such thing on this system.
    """
    try:
        import resource
    except ImportError:  # on Windows
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    except (OSError, ValueError):  # macOS has another limit, which is lower
        pass
    return None if soft == resource.RLIM_INFINITY else soft


def log_each_refused_connection_once(loop: asyncio.AbstractEventLoop) -> None:
    """Have a loop log only the first connection that it cannot accept; asyncio may log thousands a
    second, with the whole stack.
    """
    has_logged = False

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error of the loop, those of accepting connections once."""
        nonlocal has_logged
        if "accept()" not in context.get("message", ""):
            loop.default_exception_handler(context)
        elif not has_logged:
            has_logged = True
            _log.error("connections cannot be accepted (%s)", context.get("exception"))

    loop.set_exception_handler(handle)
