"""Idle connections end within their limits; answers that wait for the model do not."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from adaptrt.serve.connections import ConnectionWatch, Phase
from adaptrt.serve.options import ServerLimits
from adaptrt.serve.protocol import LimitedHttpProtocol

SHORT, LONG, PATIENCE = 0.2, 60.0, 30.0
MAX_HEAD = 1 << 12
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n"
LARGE = 16 << 20
"""Bytes; more than the kernel buffers for a client that does not read."""

Body = Callable[["Client"], Coroutine[Any, Any, None]]


def limits(**seconds: float) -> ServerLimits:
    names = ("header_seconds", "body_seconds", "keep_alive_seconds", "write_seconds")
    return ServerLimits(**{name: seconds.get(name, LONG) for name in names})  # type: ignore[arg-type]


class Client:
    """A client with connections to a server."""

    def __init__(self, port: int, state: ServerState) -> None:
        self._port = port
        self.state = state
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self._port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 14)
        self._writers.append(writer)
        writer.write(sent)
        await writer.drain()
        return reader, writer

    async def wait_until_the_server_has_none(self) -> None:
        while self.state.connections:
            await asyncio.sleep(SHORT / 10)

    def end_server(self) -> None:
        """Shuts all connections down, as uvicorn does at its end."""
        for connection in list(self.state.connections):
            connection.shutdown()

    async def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)


def run(app: ASGIApp, given: ServerLimits, body: Body, max_connections: int = 100) -> None:
    """Runs `body` with a client of a server for `app`."""

    async def main() -> None:
        class Protocol(LimitedHttpProtocol):
            max_head_bytes = MAX_HEAD
            watch = ConnectionWatch(given, max_connections)

        # Only the watch ends idle connections; uvicorn would end each at once.
        config = uvicorn.Config(app, lifespan="off", log_level="critical", access_log=False, timeout_keep_alive=0)
        state = ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Protocol(config, state, {}), "127.0.0.1", 0)
        client = Client(server.sockets[0].getsockname()[1], state)
        try:
            await asyncio.wait_for(body(client), PATIENCE)
        finally:
            await client.close()
            server.close()
            for task in state.tasks:
                task.cancel()

    asyncio.run(main())


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a request with the size of its body."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message["body"]), message["more_body"]
    text = str(size).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(text))]})
    await send({"type": "http.response.body", "body": text})


def large_answer(num_pieces: int) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % LARGE)]})
        for rest in reversed(range(num_pieces)):
            await send({"type": "http.response.body", "body": bytes(LARGE // num_pieces), "more_body": rest > 0})

    return app


def status(answered: bytes) -> int:
    return int(answered.split(b" ", 2)[1])


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return head + await reader.readexactly(length)


def test_a_connection_that_sends_nothing_is_closed_without_an_answer() -> None:
    async def body(client: Client) -> None:
        reader, _ = await client.connect()
        assert await reader.read() == b""

    run(answer, limits(header_seconds=SHORT), body)


@pytest.mark.parametrize("first", [b"", GET], ids=["the first", "a later one"])
@pytest.mark.parametrize("piece", [b"", b"a: b\r\n"], ids=["stops", "goes on"])
def test_a_head_that_does_not_end_is_answered_with_408(first: bytes, piece: bytes) -> None:
    async def body(client: Client) -> None:
        reader, writer = await client.connect(first)
        if first:
            assert status(await read_answer(reader)) == 200
        writer.write(b"GET / HTTP/1.1\r\n")

        async def send_pieces() -> None:
            while not writer.is_closing():
                await asyncio.sleep(SHORT / 20)
                writer.write(piece)

        pieces = asyncio.create_task(send_pieces())
        with contextlib.suppress(ConnectionResetError):  # pieces may arrive after the server has closed
            assert status(await reader.readuntil(b"\r\n\r\n")) == 408
        pieces.cancel()

    run(answer, limits(header_seconds=SHORT), body)


@pytest.mark.parametrize(
    "begun",
    [POST + b"12345", b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n"],
    ids=["with a length", "in chunks"],
)
def test_a_body_that_does_not_end_is_answered_with_408(begun: bytes) -> None:
    left = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(scope, receive, send)
        left.set()

    async def body(client: Client) -> None:
        reader, _ = await client.connect(begun)
        assert status(await reader.read()) == 408
        await left.wait()

    run(app, limits(body_seconds=SHORT), body)


def test_a_body_that_the_server_does_not_take_is_not_late() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(5 * SHORT)
        await answer(scope, receive, send)

    async def body(client: Client) -> None:
        size = 1 << 24  # more than the kernel buffers for a server that does not read
        reader, writer = await client.connect(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % size)
        writer.write(bytes(size))
        assert (await read_answer(reader)).endswith(b"%d" % size)

    run(app, limits(body_seconds=SHORT), body)


def test_a_body_that_was_refused_does_not_go_on_for_long() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def body(client: Client) -> None:
        reader, writer = await client.connect(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert status(await read_answer(reader)) == 413
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b"5\r\n12345\r\n")
                await writer.drain()
                await asyncio.sleep(SHORT / 20)

    run(app, limits(body_seconds=SHORT), body)


def test_a_body_after_one_that_was_refused_has_the_whole_time() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def body(client: Client) -> None:
        reader, writer = await client.connect(POST)
        assert status(await read_answer(reader)) == 413
        (connection,) = client.state.connections
        assert isinstance(connection, LimitedHttpProtocol)
        began = connection.phase_since
        writer.write(b"0123456789" + POST)  # the end of one body and the next request arrive together
        assert status(await read_answer(reader)) == 413
        assert connection.phase is Phase.BODY
        assert connection.phase_since > began

    run(app, limits(), body)


@pytest.mark.parametrize("piece", [b"", b"\r\n"], ids=["nothing", "blank lines"])
def test_an_idle_connection_is_closed(piece: bytes) -> None:
    async def body(client: Client) -> None:
        reader, writer = await client.connect(POST + b"0123456789")
        assert (await read_answer(reader)).endswith(b"10")
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(piece)
                # Raises if a piece arrived just before the server closed: the reader sees no end of file then.
                await writer.drain()
                await asyncio.sleep(SHORT / 20)
            assert await reader.read() == b""

    run(answer, limits(keep_alive_seconds=SHORT), body)


@pytest.mark.parametrize("begun", [b"GET / HTTP/1.1\r\n", POST + b"12345"], ids=["a head", "a body"])
def test_an_answer_that_waits_for_the_model_is_not_cut(begun: bytes) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            await answer(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in (b"first", b"second", b"last"):
            await asyncio.sleep(3 * SHORT)
            await send({"type": "http.response.body", "body": piece, "more_body": piece != b"last"})

    async def body(client: Client) -> None:
        # Part of the next request has arrived, and counts as late only after the answer has ended.
        reader, _ = await client.connect(GET + begun)
        streamed = await reader.readuntil(b"0\r\n\r\n")
        assert all(piece in streamed for piece in (b"first", b"second", b"last"))
        assert status(await reader.read()) == 408

    short = dict.fromkeys(("header_seconds", "body_seconds", "keep_alive_seconds", "write_seconds"), SHORT)
    run(app, limits(**short), body)


@pytest.mark.parametrize("num_pieces", [1, 64], ids=["whole", "in pieces"])
def test_a_client_that_reads_nothing_is_cut(num_pieces: int) -> None:
    async def body(client: Client) -> None:
        reader, writer = await client.connect(GET)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.wait_until_the_server_has_none()
        with contextlib.suppress(ConnectionError):
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert len(await reader.read()) < LARGE

    run(large_answer(num_pieces), limits(write_seconds=SHORT), body)


@pytest.mark.parametrize("num_pieces", [1, 64], ids=["whole", "in pieces"])
def test_a_client_that_reads_slowly_gets_all(num_pieces: int) -> None:
    async def body(client: Client) -> None:
        reader, _ = await client.connect(GET)
        await reader.readuntil(b"\r\n\r\n")
        rest = LARGE
        while rest > 0:
            rest -= len(await reader.readexactly(min(rest, LARGE // 32)))
            await asyncio.sleep(SHORT / 4)

    run(large_answer(num_pieces), limits(write_seconds=2 * SHORT), body)


@pytest.mark.parametrize(
    ("sent", "num_answers", "refused"),
    [
        (b"", 0, b""),
        (GET, 1, b""),
        (b"GET / HTTP/1.1\r\n", 0, b"503"),
        (GET + b"GET / HTTP/1.1\r\n", 1, b"503"),
        (POST, 0, b"503"),
        (POST + b"12345", 0, b"503"),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n", 0, b"503"),
    ],
    ids=["nothing", "idle", "a head", "a later head", "no body", "a part of a body", "a chunk"],
)
def test_a_server_that_ends_waits_for_no_request(sent: bytes, num_answers: int, refused: bytes) -> None:
    async def body(client: Client) -> None:
        reader, _ = await client.connect(sent)
        for _ in range(num_answers):
            assert status(await read_answer(reader)) == 200
        while not client.state.connections:
            await asyncio.sleep(SHORT / 20)
        await asyncio.sleep(SHORT)  # until the server has read what was sent
        client.end_server()
        assert refused in await reader.read()
        await client.wait_until_the_server_has_none()
        while client.state.tasks:
            await asyncio.sleep(SHORT / 20)

    run(answer, limits(), body)


@pytest.mark.parametrize("more", [b"", GET.removesuffix(b"\r\n"), POST + b"12345"], ids=["nothing", "a head", "a body"])
def test_a_server_that_ends_finishes_its_answers(more: bytes) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            begun.set()
            await may_end.wait()
        await answer(scope, receive, send)

    async def body(client: Client) -> None:
        slow = POST.replace(b"POST /", b"POST /slow") + b"0123456789"
        # The second request is complete and waits for the answer to the first.
        reader, _ = await client.connect(slow + POST + b"0123456789" + more)
        await begun.wait()
        await asyncio.sleep(SHORT)
        client.end_server()
        await asyncio.sleep(SHORT)
        may_end.set()
        for _ in range(2):
            assert (await read_answer(reader)).endswith(b"\r\n\r\n10")
        rest = await reader.read()
        assert rest == b"" if more != POST + b"12345" else status(rest) == 503
        await client.wait_until_the_server_has_none()

    run(app, limits(), body)


def test_connections_without_requests_make_room() -> None:
    async def body(client: Client) -> None:
        oldest, _ = await client.connect()
        begun, _ = await client.connect(b"GET / HTTP/1.1\r\n")
        answered, _ = await client.connect(GET)
        assert status(await read_answer(answered)) == 200
        for ended in (oldest, begun, answered):
            fresh, writer = await client.connect()
            with contextlib.suppress(ConnectionError):
                assert await ended.read() == b""
            writer.write(POST)
            await asyncio.sleep(SHORT)
        refused, _ = await client.connect()
        said = await refused.read()
        assert status(said) == 503
        assert b"\r\nretry-after: 1\r\n" in said
        writer.write(b"0123456789")
        assert status(await read_answer(fresh)) == 200

    run(answer, limits(), body, max_connections=3)


def test_one_timer_watches_all_connections_and_none_runs_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(client: Client) -> None:
        loop = asyncio.get_running_loop()
        timers: list[asyncio.TimerHandle] = []
        call_later: Callable[..., asyncio.TimerHandle] = loop.call_later

        def call_later_counted(*args: Any, **kwargs: Any) -> asyncio.TimerHandle:
            timers.append(call_later(*args, **kwargs))
            return timers[-1]

        with monkeypatch.context() as patched:
            patched.setattr(loop, "call_later", call_later_counted)
            opened = [await client.connect(GET) for _ in range(20)]
            for reader, _ in opened:
                await read_answer(reader)
        running = [timer for timer in timers if not timer.cancelled()]
        assert len(running) == 1
        await client.close()
        await client.wait_until_the_server_has_none()
        assert running[0].cancelled()

    run(answer, limits(), body)


def head_of(size: int) -> bytes:
    """Returns a request whose target and header names and values have `size` bytes together."""
    return b"GET / HTTP/1.1\r\nlarge: " + b"x" * (size - len("/large")) + b"\r\n\r\n"


@pytest.mark.parametrize("first", [b"", GET], ids=["the first", "a later one"])
def test_a_head_that_is_too_large_is_answered_with_431(first: bytes) -> None:
    async def body(client: Client) -> None:
        reader, writer = await client.connect(first + head_of(MAX_HEAD))
        for _ in range(2 if first else 1):
            assert status(await read_answer(reader)) == 200
        writer.write(head_of(MAX_HEAD + 1))
        said = await reader.read()
        assert status(said) == 431
        assert said.endswith(b"the request's target and headers have more than %d bytes" % MAX_HEAD)

    run(answer, limits(), body)


@pytest.mark.parametrize("num_pieces", [MAX_HEAD // 64, MAX_HEAD // 64 + 1])
def test_a_head_that_does_not_end_is_answered_before_it_is_long(num_pieces: int) -> None:
    async def body(client: Client) -> None:
        is_too_large = num_pieces > MAX_HEAD // 64
        for begun in (b"", GET):  # each head is counted from its beginning
            reader, writer = await client.connect(begun)
            if begun:
                await read_answer(reader)
            writer.write(b"GET / HTTP/1.1\r\nlarge: ")
            await asyncio.sleep(SHORT / 10)
            for _ in range(num_pieces):
                writer.write(b"x" * 64)
                await asyncio.sleep(0.001)  # each piece arrives alone
            if not is_too_large:
                # Each piece is small enough, but the head is too large.
                writer.write(b"\r\n\r\n")
            assert status(await reader.read()) == 431

    run(answer, limits(), body)


def test_each_head_has_the_whole_limit() -> None:
    async def body(client: Client) -> None:
        reader, writer = await client.connect()
        for _ in range(3):
            request = head_of(MAX_HEAD // 2)
            for at in range(0, len(request), 256):
                writer.write(request[at : at + 256])
                await asyncio.sleep(0.001)
            assert status(await read_answer(reader)) == 200

    run(answer, limits(), body)


def test_malformed_http_is_answered_with_400() -> None:
    async def body(client: Client) -> None:
        reader, _ = await client.connect(b"\x16\x03\x01\r\n\r\n")
        assert status(await reader.read()) == 400

    run(answer, limits(), body)


def test_a_request_that_asks_for_another_protocol_is_read_as_http_1() -> None:
    async def body(client: Client) -> None:
        upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"
        reader, _ = await client.connect((POST.removesuffix(b"\r\n") + upgrade + b"\r\n0123456789") * 2)
        for _ in range(2):
            assert (await read_answer(reader)).endswith(b"\r\n\r\n10")

    run(answer, limits(), body)


@pytest.mark.parametrize(
    ("phase", "is_paused", "is_closing", "stalled"),
    [
        (Phase.ANSWER, False, False, 0),  # the model may add data at any time
        (Phase.ANSWER, True, False, 7),
        (Phase.ANSWER, False, True, 7),
        (Phase.IDLE, False, False, 7),
        (Phase.BODY, False, False, 7),
    ],
)
def test_unread_bytes_count_once_nothing_is_added(
    phase: Phase, is_paused: bool, is_closing: bool, stalled: int
) -> None:
    connection: Any = object.__new__(LimitedHttpProtocol)
    connection.phase = phase
    connection.flow = SimpleNamespace(write_paused=is_paused)
    connection.transport = SimpleNamespace(is_closing=lambda: is_closing, get_write_buffer_size=lambda: 7)
    assert connection.num_stalled_bytes() == stalled
