"""What one connection may do to the others, and when it ends: uvicorn's, with short limits."""

import asyncio
import json
import socket
import time
from contextlib import ExitStack, contextmanager
from threading import Event, Thread
from typing import NamedTuple

import pytest

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from asking import CHAT, chat
from served import GET, is_well, wait_until

from ssmlx.server.connections import make_connection_class
from ssmlx.server.handler import Limits

LARGE = 16 * 2**20  # bytes: more than the system takes for a client that does not read
SECONDS = 30  # that a busy machine may take
HEAD = "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


class Listening(NamedTuple):
    """A server in a thread of this process."""

    server: uvicorn.Server
    port: int

    @property
    def connections(self):
        return len(self.server.server_state.connections)

    def has_connections(self, number):
        """Wait until it has so many connections; whether that came."""
        return wait_until(lambda: self.connections == number)


@contextmanager
def listening(app, **limits):
    """Serve an application inside the block; `limits` are those of connections."""
    own = Limits(**limits)
    more = {"timeout_keep_alive": own.idle, "http": make_connection_class(own), "ws": "none"}
    settings = uvicorn.Config(app, port=0, log_level="warning", lifespan="off", **more)
    server = uvicorn.Server(settings)
    thread = Thread(target=server.run)
    thread.start()
    assert wait_until(lambda: server.started)
    try:
        yield Listening(server, server.servers[0].sockets[0].getsockname()[1])
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


@contextmanager
def connected(server, data=b"", buffer=None):
    """A connection on which bytes were sent; `buffer` bounds what the system keeps for it."""
    with socket.socket() as own:
        if buffer is not None:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        own.settimeout(SECONDS)
        own.connect(("127.0.0.1", server.port))
        own.sendall(data)
        yield own


def status_of(server, data=GET):
    """The status that a request gets; none if the connection is closed instead."""
    with connected(server, data) as own:
        return own.recv(100).split(b" ", 2)[1:2]


def post(body, path=CHAT, more="", size=None):
    body = json.dumps(body).encode()
    size = len(body) if size is None else size
    return f"{HEAD.format(path)}Content-Length: {size}\r\n{more}\r\n".encode() + body


async def say_much(scope, receive, send):
    """Answer with `LARGE` bytes at once."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x" * LARGE})


class Waits:
    """An application that works until its client has gone."""

    def __init__(self):
        self.has_begun = Event()
        self.has_gone = Event()

    async def __call__(self, scope, receive, send):
        while (message := await receive())["type"] != "http.disconnect":
            if not message["more_body"]:
                self.has_begun.set()
        self.has_gone.set()


# --- what is read ---


def test_who_reads_slowly_gets_all_and_who_reads_nothing_is_closed():
    wait = 0.7
    with listening(say_much, wait=wait) as server:
        with connected(server, GET, buffer=2**16) as reader:
            started = time.monotonic()
            num_read = 0
            while num_read < LARGE and (data := reader.recv(2**18)):
                num_read += len(data)
                time.sleep(0.02)
            assert num_read >= LARGE and time.monotonic() - started > 2 * wait
        with connected(server, GET, buffer=2**16):
            assert server.has_connections(1) and server.has_connections(0)


def test_a_stream_that_nobody_reads_is_given_up():
    has_ended = Event()

    async def stream(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        sending = asyncio.create_task(send_for_ever(send))
        while (await receive())["type"] != "http.disconnect":
            pass
        sending.cancel()
        has_ended.set()

    async def send_for_ever(send):
        while True:
            await send({"type": "http.response.body", "body": b"x" * 2**16, "more_body": True})

    with listening(stream, wait=0.5) as server, connected(server, GET, buffer=2**16):
        assert has_ended.wait(SECONDS)


def test_a_reply_that_is_still_read_is_not_closed_for_a_new_connection():
    with listening(say_much, connections=2) as server, ExitStack() as stack:
        reader = stack.enter_context(connected(server, GET, buffer=2**16))
        assert reader.recv(1) == b"H"
        for _ in range(4):
            stack.enter_context(connected(server))
        num_read = 1
        while num_read < LARGE and (data := reader.recv(2**20)):
            num_read += len(data)
        assert num_read >= LARGE


# --- what is sent ---


def test_bodies_that_do_not_come_keep_nobody_out(serve):
    with listening(serve(), connections=5) as server, ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(connected(server, post({}, size=1000)))
        assert server.has_connections(5)
        assert [status_of(server) for _ in range(3)] == [[b"200"]] * 3


def test_a_body_may_come_slowly_but_not_by_drops(serve):
    limits = Limits(wait=0.6)
    pieces = [post(chat("w1", max_tokens=1, padding="x" * 60_000))]
    pieces = [pieces[0][n : n + 10_000] for n in range(0, len(pieces[0]), 10_000)]
    with listening(serve(limits=limits), wait=0.6) as server:
        with connected(server) as own:
            for piece in pieces:
                own.sendall(piece)
                time.sleep(0.2)
            assert own.recv(100).startswith(b"HTTP/1.1 200")
        with connected(server, post(chat(), size=10_000)) as silent:
            assert silent.recv(100).startswith(b"HTTP/1.1 408")
        with connected(server, post(chat(), size=10_000)) as dripping:
            started = time.monotonic()
            dripping.settimeout(0.2)
            while time.monotonic() - started < SECONDS:
                dripping.sendall(b" ")
                try:
                    found = dripping.recv(100)
                    break
                except TimeoutError:
                    pass
            assert found.startswith(b"HTTP/1.1 408")


def test_a_connection_may_be_silent_between_requests_but_not_in_a_head(serve):
    with listening(serve(), head=0.4, idle=2.0) as server:
        with connected(server, GET) as own:
            for _ in range(2):
                assert is_well(own)
                time.sleep(0.6)
                own.sendall(GET)
            assert is_well(own)
            assert own.recv(1000) == b"", "it is closed in the end"
        for begun in (b"", GET[:30]):
            with connected(server, begun) as own:
                started = time.monotonic()
                assert own.recv(1000) == b"" and time.monotonic() - started < 3
        with connected(server, GET) as own:
            assert is_well(own)
            own.sendall(GET[:30])
            started = time.monotonic()
            assert own.recv(1000) == b"" and time.monotonic() - started < 3


# --- who has gone ---


@pytest.mark.parametrize("trailing", [b"\r\n", b"\n", GET, post(chat())])
@pytest.mark.parametrize("at_once", [True, False])
def test_who_has_gone_is_noticed_whatever_came_after_the_request(trailing, at_once):
    app = Waits()
    with listening(app) as server:
        with connected(server, post(chat()) + (trailing if at_once else b"")) as own:
            assert app.has_begun.wait(SECONDS)
            if not at_once:
                for byte in trailing:
                    own.sendall(bytes([byte]))
                    time.sleep(0.01 if len(trailing) < 9 else 0)
            time.sleep(0.1)
            assert not app.has_gone.is_set()
        assert app.has_gone.wait(SECONDS)


def test_who_sends_too_much_after_a_request_is_closed():
    app = Waits()
    with listening(app) as server, connected(server, post(chat())) as own:
        assert app.has_begun.wait(SECONDS)
        with pytest.raises(OSError):
            for _ in range(1000):
                own.sendall(b"x" * 2**16)
                time.sleep(0.01)
        assert app.has_gone.wait(SECONDS)


def test_two_requests_at_once_are_answered_after_each_other(serve):
    with listening(serve()) as server, connected(server, GET + GET) as own:
        assert wait_until(lambda: own.recv(10_000, socket.MSG_PEEK).count(b"HTTP/1.1 200") == 2)


def test_what_comes_after_a_last_request_is_not_read(serve):
    with listening(serve()) as server:
        more = "Connection: close\r\n"
        with connected(server, post(chat("w1", max_tokens=3), more=more)) as own:
            own.sendall(b"\r\n")
            assert own.recv(1000).startswith(b"HTTP/1.1 200")
