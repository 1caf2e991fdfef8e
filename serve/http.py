"""Functions of all routes: read a body within its limits, answer errors, stream, and notice clients that disconnect."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from typing import Any, Final, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import FormData
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from .errors import TOO_LARGE, ApiError
from .options import ServerLimits
from .work import Work, WorkKind

Model = TypeVar("Model", bound=BaseModel)
Returned = TypeVar("Returned")

LONG_BODY: Final = 1 << 16
"""Bytes; a longer body is parsed in a thread, because all other requests wait for the loop."""
PROBLEMS_SHOWN: Final = 10
"""Maximum number of a body's errors that an answer lists."""
LONGEST_PLACE: Final = 100
"""Maximum number of characters of a field's name in an error; clients may choose the name."""
UPLOAD_TYPE: Final = "multipart/form-data"
"""Content-Type of uploads."""
CLIENT_CLOSED_REQUEST: Final = 499
"""nginx's status code for a client that closed the connection before the answer."""
_UNKNOWN: Final = "is not known here"
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
"""Matches the JSON escape of a surrogate."""


def error_response(error: ApiError) -> JSONResponse:
    """Makes an error response in OpenAI's format."""
    return JSONResponse(error.body(), status_code=int(error.status), headers=error.headers)


def health_response(is_alive: bool) -> Response:
    """Makes a response for load balancers. It has a status and no body."""
    return Response(status_code=HTTPStatus.OK if is_alive else HTTPStatus.SERVICE_UNAVAILABLE)


async def read_body(request: Request, limits: ServerLimits, *, is_json: bool = False) -> bytes:
    """Reads the whole body. Raises ApiError if it is too large, before reading if its size is stated.

    is_json: the body is pure JSON.
    """
    max_bytes, flag = limits.max_body_bytes, "--max-body-bytes"
    if is_json and limits.max_json_bytes < max_bytes:
        max_bytes, flag = limits.max_json_bytes, "--max-json-bytes"
    stated = request.headers.get("content-length")
    if stated is not None and stated.isascii() and stated.isdigit() and int(stated) > max_bytes:
        _refuse_size("body", max_bytes, flag)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            _refuse_size("body", max_bytes, flag)
    return bytes(body)


def limited_form(
    request: Request, max_bytes: int, parts: str, too_large: Callable[[], ApiError]
) -> Callable[..., AbstractAsyncContextManager[FormData]]:
    """Returns Request.form of an upload, which raises too_large() for a body of more than `max_bytes`.

    parts: names the expected parts in errors. Raises ApiError for another Content-Type.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != UPLOAD_TYPE:
        raise ApiError(
            f"Content-Type is '{kind[:100]}'; expected {UPLOAD_TYPE} with {parts}",
            status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        )
    num_received = 0

    async def receive() -> Message:
        nonlocal num_received
        message = await request.receive()
        num_received += len(message.get("body", b""))
        if num_received > max_bytes:
            raise too_large()
        return message

    return Request(request.scope, receive).form


async def read_json(
    request: Request, model: type[Model], limits: ServerLimits, work: Work, *, if_empty: bytes = b""
) -> Model:
    """Parses the body to a model's fields. A thread of WorkKind.TEXTS parses long bodies.

    if_empty: used instead of an empty body. Raises ApiError that names the wrong fields, and ClientDisconnect if the
    client disconnects; then parsing that has not begun is cancelled.
    """
    body = await read_body(request, limits, is_json=True) or if_empty
    if len(body) <= LONG_BODY:
        return parse_json(body, model, limits)
    return await unless_disconnected(request, work.run(WorkKind.TEXTS, parse_json, body, model, limits))


def parse_json(body: bytes, model: type[Model], limits: ServerLimits) -> Model:
    """Parses a body that has been read, like read_json."""
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
        raise validation_error(error, model) from error


def check_json_size(body: bytes, limits: ServerLimits) -> None:
    """Raises ApiError for JSON that would take long to parse. No other thread can run while JSON is parsed."""
    if len(body) > limits.max_json_bytes:
        _refuse_size("body's JSON", limits.max_json_bytes, "--max-json-bytes")
    if _has_more_items(body, limits.max_json_items):
        raise ApiError(
            f"lists and objects in the body's JSON have more than {limits.max_json_items} items together; expected at "
            "most as many (the server's --max-json-items)"
        )


def read_query(request: Request, model: type[Model]) -> Model:
    """Parses the URL's query to a model's fields. Raises ApiError that names all wrong fields."""
    times = Counter(name for name, _ in request.query_params.multi_items())
    for name, count in times.items():
        if count > 1:
            raise ApiError(f"{name}: is given {count} times; expected once", param=name)
    try:
        return model.model_validate(dict(request.query_params))
    except ValidationError as error:
        raise validation_error(error) from error


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Returned]) -> Returned:
    """Awaits work. If the client disconnects first, cancels it and raises ClientDisconnect."""
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
    """Server-sent events until the last event or until the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncIterator[bytes], source: AbstractAsyncContextManager[Any]) -> None:
        """frames: sent as they arrive. source: context of the frames; always left at the end."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers as an ASGI application."""
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


class LineStream(EventStream):
    """Lines of JSON until the last line or until the client disconnects."""

    media_type = "application/x-ndjson"


STREAM_TYPES: Final = (EventStream.media_type, LineStream.media_type)
"""Content types of answers that are streams."""


def data_frame(content: Any) -> bytes:
    """Makes one event with JSON in it."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def json_line(content: Any) -> bytes:
    """Makes one line with JSON in it."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


async def disconnected(receive: Receive) -> None:
    """Returns when the client has disconnected. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def end_task(task: asyncio.Future[Any]) -> None:
    """Cancels the task and waits until it has ended. Drops its exception."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


def _refuse_size(what: str, max_bytes: int, flag: str) -> NoReturn:
    raise ApiError(
        f"the {what} is larger than {max_bytes} bytes (the server's {flag})",
        status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        kind=TOO_LARGE,
    )


def _too_deep(limits: ServerLimits) -> ApiError:
    return ApiError(
        f"the body's JSON is nested deeper than {limits.max_json_depth} levels; expected at most as many (the server's "
        "--max-json-depth)"
    )


def _has_more_items(body: bytes, most: int) -> bool:
    """True if lists and objects may have more items. Counts commas, possibly also some that are in texts."""
    if body.count(b",") < most:
        return False
    without_escapes = body.replace(rb"\\", b"").replace(rb"\"", b"")
    # An item has at most two texts, with a quotation mark on each side.
    parts = without_escapes.split(b'"', 4 * most + 1)
    return len(parts) > 4 * most + 1 or sum(part.count(b",") for part in parts[::2]) >= most


def _refuse_lone_surrogates(content: Any) -> None:
    """Raises ApiError for half a surrogate pair, which UTF-8 cannot encode in an answer."""
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


def validation_error(error: ValidationError, model: type[BaseModel] | None = None) -> ApiError:
    """Returns the error that names the wrong fields of a body. model: gives advice on unknown fields."""
    advice: Callable[[str, Any], str] = getattr(model, "advice", lambda name, value: _UNKNOWN)
    problems = []
    for problem in error.errors(include_url=False, include_context=False)[:PROBLEMS_SHOWN]:
        place = ".".join(str(part)[:LONGEST_PLACE] for part in problem["loc"])
        if problem["type"] != "extra_forbidden":
            said = problem["msg"].removeprefix("Value error, ")
        else:
            said = advice(place, problem["input"]) if len(problem["loc"]) == 1 else _UNKNOWN
        problems.append((place, f"{place}: {said}" if place else said))
    more = error.error_count() - len(problems)
    texts = [text for _, text in problems] + ([f"and {more} more"] if more else [])
    return ApiError("; ".join(texts), param=problems[0][0] or None)
