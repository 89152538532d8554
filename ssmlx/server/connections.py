"""Connections that end: by time if nothing comes or nothing is read, and by number."""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .handler import Limits

# Files beside connections: of models and caches, and of connections that were just accepted.
_RESERVED = 256
ACCEPTED_AT_ONCE = 64  # connections that are accepted before any of them is counted
# Bytes that a client may send after a request that is not answered yet.
_MOST_AHEAD = 64 * 2**10
# Bytes a second at which a client has to send or read, once `Limits.wait` has passed.
SLOWEST = 16 * 2**10
_log = logging.getLogger("ssmlx")


class BoundedConnection(H11Protocol):
    """uvicorn's connection, which does not stay open for ever."""

    def __init__(self, *args: Any, limits: Limits, most: int, **more: Any) -> None:
        super().__init__(*args, **more)
        self._limits = limits
        self._most = most
        self._waits_since = 0.0  # for its client; a time of `time.monotonic`
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._num_unread = 0  # bytes that were not sent yet when that timer was started

    @property
    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _waits_for_client(self) -> bool:
        """Whether its client has to send something next: a request, or more of one."""
        if self._is_between_requests:
            return self.transport.get_write_buffer_size() == 0
        return bool(self.cycle.more_body)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waits_since = time.monotonic()
        self._start_head_timer()
        if len(self.connections) > self._most:
            self._close_longest_waiting()

    def _close_longest_waiting(self) -> None:
        """Close the connection that has waited longest for its client, perhaps this one."""
        every = cast("set[BoundedConnection]", self.connections)
        waiting = [one for one in every if one._waits_for_client]
        oldest = min(waiting, key=lambda one: one._waits_since)
        self.connections.discard(oldest)
        oldest.transport.abort()

    def _start_head_timer(self) -> None:
        """Close the connection unless the whole head of a request comes in time."""
        self._head_timer = self.loop.call_later(self._limits.head, self.timeout_keep_alive_handler)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.MUST_CLOSE:
            return  # nothing may come after its last request
        if self._is_between_requests and self._head_timer is None:
            self._start_head_timer()
        super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self._is_between_requests:
            return
        self._stop_head_timer()
        self._waits_since = time.monotonic()
        if not self.cycle.more_body:
            self._read_on()

    def _read_on(self) -> None:
        """Read on while a request is answered, since only reading shows that the client has
        disconnected."""
        # h11 keeps what comes meanwhile, such as another request, and uvicorn stops to read for it.
        ahead, _ = self.conn.trailing_data
        if len(ahead) > _MOST_AHEAD:
            self.transport.abort()
        else:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        self._waits_since = time.monotonic()
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_unless_read()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_unless_read()

    def _abort_unless_read(self) -> None:
        """Drop what was sent unless it is read in time, or at a tolerable rate."""
        if self._read_timer is None:
            self._num_unread = self.transport.get_write_buffer_size()
            self._read_timer = self.loop.call_later(self._limits.wait, self._abort_or_wait_on)

    def _abort_or_wait_on(self) -> None:
        self._read_timer = None
        num_read = self._num_unread - self.transport.get_write_buffer_size()
        if num_read >= SLOWEST * self._limits.wait:
            self._abort_unless_read()
        else:
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._abort_unless_read()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read_timer is not None and not self.transport.is_closing():
            self._read_timer.cancel()
            self._read_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._stop_head_timer()
        if self._read_timer is not None:
            self._read_timer.cancel()


def make_connection_class(limits: Limits) -> Callable[..., BoundedConnection]:
    """Return the class of connections; with fewer than `limits.connections` if the process may not
    open so many files."""
    files = _raise_limit_of_files()
    most = limits.connections if files is None else min(limits.connections, files - _RESERVED)
    return partial(BoundedConnection, limits=limits, most=max(1, most))


def _raise_limit_of_files() -> int | None:
    """Raise how many files the process may open as far as allowed; return that, or None if there is
    no limit."""
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


def log_refused_connections_once(loop: asyncio.AbstractEventLoop) -> None:
    """Have a loop log only the first connection that it cannot accept."""
    has_logged = False  # asyncio may log thousands a second, with the whole stack

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal has_logged
        if "accept()" not in context.get("message", ""):
            loop.default_exception_handler(context)
        elif not has_logged:
            has_logged = True
            _log.error("connections cannot be accepted (%s)", context.get("exception"))

    loop.set_exception_handler(handle)
