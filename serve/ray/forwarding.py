"""Forwards HTTP requests from the endpoint's process to a replica's, and the messages of their answers back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from starlette.types import ASGIApp, Message, Scope

from ..request_log import REQUEST_ID_HEADER

MessageBatch: TypeAlias = list[Message]
REPLICA_HEADER: Final = b"x-replica"
"""Response header with the replica that answered."""
REPLICA_REQUEST_ID_HEADER: Final = b"x-replica-request-id"
"""Response header with the request id of the replica's log. Serve's proxies set their own X-Request-Id."""
SECONDS_TO_LEAVE: Final = 5.0
"""Time for the application to end after its client disconnected."""
_LOG: Final = logging.getLogger("adaptrt.replica")


@dataclass(frozen=True)
class ForwardedRequest:
    """A request whose body has been read."""

    method: str
    path: str
    query_string: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    client: tuple[str, int] | None
    body: bytes
    home: str = ""
    """Home of the stored response that the request is about; empty: it is about none."""

    @classmethod
    def of(cls, scope: Scope, body: bytes) -> ForwardedRequest:
        """Makes a forwarded request from an ASGI request."""
        client = scope.get("client")
        return cls(
            method=scope["method"],
            path=scope["path"],
            query_string=scope.get("query_string", b""),
            headers=tuple((bytes(name), bytes(value)) for name, value in scope["headers"]),
            client=None if client is None else (client[0], client[1]),
            body=body,
        )

    def scope(self) -> Scope:
        """Returns the ASGI scope for the application that answers."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query_string,
            "root_path": "",
            "headers": list(self.headers),
            "client": self.client,
            "server": None,
        }


@dataclass(frozen=True)
class WholeAnswer:
    """The complete answer of one replica."""

    replica: str
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


async def answer(app: ASGIApp, request: ForwardedRequest, replica: str) -> AsyncGenerator[MessageBatch, None]:
    """Yields the messages of an application's answer, with the replica's name in its headers. Messages that are ready
    at the same time form one batch.

    Closing the generator early tells the application that its client disconnected. Raises the application's errors
    before its answer has begun; later errors are logged, as servers do.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    has_body = True
    has_gone = asyncio.Event()

    async def receive() -> Message:
        nonlocal has_body
        if has_body:
            has_body = False
            return {"type": "http.request", "body": request.body, "more_body": False}
        await has_gone.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(request.scope(), receive, messages.put)
        finally:
            messages.put_nowait(None)

    task = asyncio.create_task(run())
    has_begun = False
    try:
        batch: list[Message | None] = []
        while None not in batch:
            batch = [await messages.get()]
            while not messages.empty():
                batch.append(messages.get_nowait())
            ready = [_named(message, replica) for message in batch if message is not None]
            if ready:
                has_begun = True
                yield ready
        await asyncio.wait({task})
        failure = task.exception()
        if failure is not None:
            if not has_begun:
                raise failure
            _LOG.error("%s %s failed", request.method, request.path, exc_info=failure)
    finally:
        has_gone.set()
        await asyncio.wait({task}, timeout=SECONDS_TO_LEAVE)
        task.cancel()
        await asyncio.wait({task})


def _named(message: Message, replica: str) -> Message:
    if message["type"] != "http.response.start":
        return message
    headers = [(REPLICA_HEADER, replica.encode())]
    for name, value in message["headers"]:
        if name == REQUEST_ID_HEADER.encode():
            headers.append((REPLICA_REQUEST_ID_HEADER, value))
        elif name != b"date":  # the proxy sets its own
            headers.append((name, value))
    return {**message, "headers": headers}


async def whole_answer(app: ASGIApp, request: ForwardedRequest, replica: str) -> WholeAnswer:
    """Returns the complete answer of an application."""
    start: Any = None
    body = bytearray()
    async for batch in answer(app, request, replica):
        for message in batch:
            if message["type"] == "http.response.start":
                start = message
            else:
                body += message.get("body", b"")
    return WholeAnswer(replica, start["status"], tuple((name, value) for name, value in start["headers"]), bytes(body))
