"""What all routes do alike: read a body within its limits, answer errors, stream, and notice clients that go away."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from typing import Any, Final, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from .errors import TOO_LARGE, ApiError
from .options import ServerLimits
from .work import Work, WorkKind

Model = TypeVar("Model", bound=BaseModel)
Returned = TypeVar("Returned")

LONG_BODY: Final = 1 << 16
"""Bytes; a longer body is parsed in a thread, because all other requests wait for the loop."""
PROBLEMS_SHOWN: Final = 10
"""Of a body that has more of them."""
LONGEST_PLACE: Final = 100
"""Characters shown of a field's name, which may be a client's."""
CLIENT_CLOSED_REQUEST: Final = 499
"""nginx's code for an answer that nobody waits for."""
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
"""Its escape in JSON."""


def error_response(error: ApiError) -> JSONResponse:
    """In OpenAI's form."""
    return JSONResponse(error.body(), status_code=int(error.status), headers=error.headers)


def health_response(is_alive: bool) -> Response:
    """For load balancers: the status alone."""
    return Response(status_code=HTTPStatus.OK if is_alive else HTTPStatus.SERVICE_UNAVAILABLE)


async def read_body(request: Request, limits: ServerLimits, *, is_json: bool = False) -> bytes:
    """The whole body. Raises ApiError for one that is too large, before it is read where its size is stated.

    is_json: nothing but JSON is in it.
    """
    max_bytes = min(limits.max_body_bytes, limits.max_json_bytes) if is_json else limits.max_body_bytes
    stated = request.headers.get("content-length")
    if stated is not None and stated.isascii() and stated.isdigit() and int(stated) > max_bytes:
        _refuse_size("body", max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            _refuse_size("body", max_bytes)
    return bytes(body)


async def read_json(
    request: Request, model: type[Model], limits: ServerLimits, work: Work, *, if_empty: bytes = b""
) -> Model:
    """The body as a model's fields; a long one is parsed by the threads for texts.

    if_empty: stands for a body without a byte. Raises ApiError that names the fields that are wrong, and
    ClientDisconnect for a client that leaves; its body is not parsed then, if that has not begun.
    """
    body = await read_body(request, limits, is_json=True) or if_empty
    if len(body) <= LONG_BODY:
        return parse_json(body, model, limits)
    return await unless_disconnected(request, work.run(WorkKind.TEXTS, parse_json, body, model, limits))


def parse_json(body: bytes, model: type[Model], limits: ServerLimits) -> Model:
    """As read_json, of a body that was read."""
    check_json_size(body, limits)
    try:
        text = body.decode("utf-8")
        content = json.loads(text, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8: byte {error.start} is 0x{body[error.start]:02x}") from error
    except RecursionError:
        raise _too_deep(limits) from None
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ApiError(f"the body is a JSON {type(content).__name__}; expected an object")
    if _is_deeper(content, limits.max_json_depth):
        raise _too_deep(limits)
    if _SURROGATE.search(text):
        _refuse_lone_surrogates(content)
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise _of_validation(error) from error


def check_json_size(body: bytes, limits: ServerLimits) -> None:
    """Raises ApiError for JSON that takes long to parse, which no other thread can run beside."""
    if len(body) > limits.max_json_bytes:
        _refuse_size("body's JSON", limits.max_json_bytes)
    if _has_more_items(body, limits.max_json_items):
        raise ApiError(
            f"lists and objects in the body's JSON have more than {limits.max_json_items} items together; expected at "
            "most as many (the server's --max_json_items)"
        )


def read_query(request: Request, model: type[Model]) -> Model:
    """What follows the question mark as a model's fields. Raises ApiError that names all that are wrong."""
    times = Counter(name for name, _ in request.query_params.multi_items())
    for name, count in times.items():
        if count > 1:
            raise ApiError(f"{name}: is given {count} times", param=name)
    try:
        return model.model_validate(dict(request.query_params))
    except ValidationError as error:
        raise _of_validation(error) from error


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Returned]) -> Returned:
    """Awaits work, and cancels it when the client goes away. Raises ClientDisconnect then."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        await end_task(watch)
        await end_task(task)


class EventStream(Response):
    """Server-sent events, until all are sent or the client goes away."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncIterator[bytes], source: AbstractAsyncContextManager[Any]) -> None:
        """Each frame is sent as it comes. `source`, what they are made of, is left at the end in any case."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As an ASGI application."""
        async with self._source:
            pump = asyncio.ensure_future(self._send_all(send))
            watch = asyncio.ensure_future(disconnected(receive))
            try:
                await asyncio.wait({pump, watch}, return_when=asyncio.FIRST_COMPLETED)
                if pump.done():
                    pump.result()
            finally:
                await end_task(watch)
                await end_task(pump)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for frame in self._frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def data_frame(content: Any) -> bytes:
    """One event with JSON in it."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone; for a request whose body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def end_task(task: asyncio.Future[Any]) -> None:
    """Cancels it if need be, and waits until it has ended; what it raised was looked at, or nobody waits for it."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


def _refuse_size(what: str, max_bytes: int) -> NoReturn:
    raise ApiError(
        f"the {what} is larger than {max_bytes} bytes",
        status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        kind=TOO_LARGE,
    )


def _too_deep(limits: ServerLimits) -> ApiError:
    return ApiError(
        f"the body's JSON is nested deeper than {limits.max_json_depth} levels; expected at most as many (the server's "
        "--max_json_depth)"
    )


def _has_more_items(body: bytes, most: int) -> bool:
    """True if lists and objects may have more items. Commas are counted, and texts may have some as well."""
    if body.count(b",") < most:
        return False
    without_escapes = body.replace(rb"\\", b"").replace(rb"\"", b"")
    # An item has two texts at most, with a quotation mark on each side.
    parts = without_escapes.split(b'"', 4 * most + 1)
    return len(parts) > 4 * most + 1 or sum(part.count(b",") for part in parts[::2]) >= most


def _refuse_lone_surrogates(content: Any) -> None:
    """A pair of them is one character; one alone is none, and could not be answered with."""
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ApiError(f"the body has half a surrogate pair, \\u{ord(error.object[error.start]):04x}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _is_deeper(content: Any, levels: int) -> bool:
    layer = [content]
    for _ in range(levels):
        layer = [
            child
            for parent in layer
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
    return bool(layer)


def _of_validation(error: ValidationError) -> ApiError:
    problems = []
    for problem in error.errors(include_url=False, include_context=False, include_input=False)[:PROBLEMS_SHOWN]:
        place = ".".join(str(part)[:LONGEST_PLACE] for part in problem["loc"])
        said = (
            "is not known here"
            if problem["type"] == "extra_forbidden"
            else problem["msg"].removeprefix("Value error, ")
        )
        problems.append((place, f"{place}: {said}" if place else said))
    more = error.error_count() - len(problems)
    texts = [text for _, text in problems] + ([f"and {more} more"] if more else [])
    return ApiError("; ".join(texts), param=problems[0][0] or None)
