"""What all routes do alike: read a body within its limits, answer errors, stream, and notice clients that go away."""

from __future__ import annotations

import asyncio
import json
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

Model = TypeVar("Model", bound=BaseModel)
Returned = TypeVar("Returned")

CLIENT_CLOSED_REQUEST: Final = 499
"""nginx's code for an answer that nobody waits for."""


def error_response(error: ApiError) -> JSONResponse:
    """In OpenAI's form."""
    return JSONResponse(error.body(), status_code=int(error.status), headers=error.headers)


async def read_body(request: Request, limits: ServerLimits) -> bytes:
    """The whole body. Raises ApiError for one that is too large, before it is read where its size is stated."""
    stated = request.headers.get("content-length")
    if stated is not None and stated.isascii() and stated.isdigit() and int(stated) > limits.max_body_bytes:
        _refuse_size(limits)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limits.max_body_bytes:
            _refuse_size(limits)
    return bytes(body)


async def read_json(request: Request, model: type[Model], limits: ServerLimits) -> Model:
    """The body as a model's fields. Raises ApiError that names the first field that is wrong, and all that are."""
    return parse_json(await read_body(request, limits), model, limits)


def parse_json(body: bytes, model: type[Model], limits: ServerLimits) -> Model:
    """As read_json, of a body that was read."""
    try:
        content = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8: byte {error.start} is 0x{body[error.start]:02x}") from error
    except RecursionError:
        raise ApiError(f"the body's JSON is nested deeper than {limits.max_json_depth} levels") from None
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ApiError(f"the body is a JSON {type(content).__name__}; expected an object")
    if _is_deeper(content, limits.max_json_depth):
        raise ApiError(f"the body's JSON is nested deeper than {limits.max_json_depth} levels")
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise _of_validation(error) from error


def read_query(request: Request, model: type[Model]) -> Model:
    """What follows the question mark as a model's fields. Raises ApiError that names all that are wrong."""
    times = Counter(name for name, _ in request.query_params.multi_items())
    for name, count in times.items():
        if count > 1:
            raise ApiError(f"{name}: is there {count} times", param=name)
    try:
        return model.model_validate(dict(request.query_params))
    except ValidationError as error:
        raise _of_validation(error) from error


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Returned]) -> Returned:
    """Awaits work, and cancels it when the client goes away. Raises ClientDisconnect then."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        await _end(watch)
        await _end(task)


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
            watch = asyncio.ensure_future(_disconnected(receive))
            try:
                await asyncio.wait({pump, watch}, return_when=asyncio.FIRST_COMPLETED)
                if pump.done():
                    pump.result()
            finally:
                await _end(watch)
                await _end(pump)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for frame in self._frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def data_frame(content: Any) -> bytes:
    """One event with JSON in it."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Future[Any]) -> None:
    """Cancels it if need be, and waits until it has ended; what it raised was looked at, or nobody waits for it."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


def _refuse_size(limits: ServerLimits) -> NoReturn:
    raise ApiError(
        f"the body is larger than {limits.max_body_bytes} bytes",
        status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        kind=TOO_LARGE,
    )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _is_deeper(content: Any, levels: int) -> bool:
    layer = [content]
    for _ in range(levels):
        layer = [
            child
            for parent in layer
            if isinstance(parent, (dict, list))
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not layer:
            return False
    return any(isinstance(entry, (dict, list)) for entry in layer)


def _of_validation(error: ValidationError) -> ApiError:
    problems = []
    for problem in error.errors(include_url=False, include_context=False):
        place = ".".join(str(part) for part in problem["loc"])
        said = "is not known here" if problem["type"] == "extra_forbidden" else problem["msg"].removeprefix("Value error, ")
        problems.append((place, f"{place}: {said}" if place else said))
    return ApiError("; ".join(text for _, text in problems), param=problems[0][0] or None)
