"""Streams completions from an OpenAI-compatible server and records when each piece arrives.

The client shares the machine with the measured server. So it only records bytes and times while answers arrive, and
parses them at the end.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urlsplit

import h11

EVENT = b"data: "


@dataclass(frozen=True)
class Stream:
    """One answer: the time of its request and the arrival times of its pieces, in seconds of the same clock."""

    asked: float
    arrivals: tuple[float, ...]
    num_tokens: int

    @property
    def first(self) -> float:
        """Seconds to the first piece."""
        return self.arrivals[0] - self.asked


@dataclass(frozen=True)
class Crowd:
    """Requests that are sent together: the name of a model or adapter, and a prompt for each."""

    models: Sequence[str]
    prompts: Sequence[Sequence[int]]
    max_tokens: int


def tokens_per_second(streams: Sequence[Stream]) -> float:
    """Tokens per second of a crowd, from the first request to the last token."""
    end = max(stream.arrivals[-1] for stream in streams)
    return sum(stream.num_tokens for stream in streams) / (end - min(stream.asked for stream in streams))


def ask_server(address: str, crowd: Crowd) -> list[Stream]:
    """Sends all requests at once. Raises RuntimeError with the text of an error response, OSError without a
    response."""
    return asyncio.run(_ask_all(address, crowd))


def ask_in_turn(address: str, crowd: Crowd, at_once: int) -> list[Stream]:
    """Like ask_server, but with at most `at_once` requests at a time: when one ends, the next is sent."""
    return asyncio.run(_ask_in_turn(address, crowd, at_once))


@dataclass
class OpenStream(asyncio.Protocol):
    """One request and the received bytes. `ended` is done once the connection is closed."""

    request: bytes
    ended: asyncio.Future[None]
    asked: float = 0.0
    parts: list[tuple[float, bytes]] = field(default_factory=list)

    transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the request."""
        self.asked = time.perf_counter()
        assert isinstance(transport, asyncio.WriteTransport)
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        """Notes bytes and time."""
        self.parts.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the stream."""
        if exc is not None:
            self.ended.set_exception(exc)
        else:
            self.ended.set_result(None)

    def arrivals(self) -> tuple[float, ...]:
        """Arrival times of the pieces so far."""
        return tuple(at for at, data in self.parts if EVENT in data)

    def abort(self) -> None:
        """Closes the connection, so that the server cancels the request."""
        assert self.transport is not None
        self.transport.abort()

    def stream(self) -> Stream:
        """The parsed answer. Raises RuntimeError with the text of an error response."""
        body = _body_of(b"".join(data for _, data in self.parts))
        events = [line.removeprefix(EVENT) for line in body.splitlines() if line.startswith(EVENT)]
        usage = json.loads(events[-2])["usage"]  # The last event before the end mark.
        return Stream(self.asked, self.arrivals(), usage["completion_tokens"])


async def open_stream(address: str, model: str, prompt: Sequence[int], max_tokens: int) -> OpenStream:
    """Sends one request, and returns while its answer arrives."""
    loop = asyncio.get_running_loop()
    place = urlsplit(address)
    stream = OpenStream(_request(place, model, prompt, max_tokens), loop.create_future())
    await loop.create_connection(lambda: stream, place.hostname, place.port)
    return stream


async def _ask_all(address: str, crowd: Crowd) -> list[Stream]:
    loop = asyncio.get_running_loop()
    place = urlsplit(address)
    connections = []
    for model, prompt in zip(crowd.models, crowd.prompts, strict=True):
        request = _request(place, model, prompt, crowd.max_tokens)
        connections.append(OpenStream(request, loop.create_future()))
    await asyncio.gather(
        *(
            loop.create_connection(lambda connection=connection: connection, place.hostname, place.port)
            for connection in connections
        )
    )
    await asyncio.gather(*(connection.ended for connection in connections))
    return [connection.stream() for connection in connections]


async def _ask_in_turn(address: str, crowd: Crowd, at_once: int) -> list[Stream]:
    free = asyncio.Semaphore(at_once)

    async def ask(model: str, prompt: Sequence[int]) -> OpenStream:
        async with free:
            connection = await open_stream(address, model, prompt, crowd.max_tokens)
            await connection.ended
        return connection

    pairs = zip(crowd.models, crowd.prompts, strict=True)
    return [connection.stream() for connection in await asyncio.gather(*(ask(*pair) for pair in pairs))]


def _request(place: SplitResult, model: str, prompt: Sequence[int], max_tokens: int) -> bytes:
    fields = {
        "model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    body = json.dumps(fields).encode()
    head = (
        f"POST {place.path}/v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def _body_of(answer: bytes) -> bytes:
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method="GET", target="/", headers=[("Host", "any")]))
    parser.send(h11.EndOfMessage())
    parser.receive_data(answer)
    parser.receive_data(b"")
    body = b""
    status = 0
    while not isinstance(event := parser.next_event(), (h11.EndOfMessage, h11.ConnectionClosed)):
        if isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            body += event.data
    if status != 200:
        raise RuntimeError(f"the server answered {status}: {body.decode(errors='replace')}")
    return body
