"""JSON answers. Long ones are written in time slices, so that the event loop serves other requests in between."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .time_slices import TimeSlices

_NUMBERS: Final = 1 << 12
"""Number of array elements that are written at once."""
_PART_CHARACTERS: Final = 1 << 16
"""Number of characters that are encoded and sent at once."""


class Items:
    """A list in an answer. Each item is made when it is written.

    Dicts and Items may contain Items; lists may not.
    """

    def __init__(self, items: Iterable[Any]) -> None:
        self.items: Final = items


class Numbers(Items):
    """Elements of an array in C order, as a list."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        flat = array.reshape(-1)
        super().__init__(np.array_split(flat, max(1, math.ceil(flat.size / _NUMBERS))))


class JsonAnswer(Response):
    """A JSON answer that may contain Items."""

    media_type = "application/json"

    def __init__(self, content: Any) -> None:
        """Encodes nothing until it is sent."""
        super().__init__()
        self._content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer. Raises ValueError, before anything is sent, for a number that JSON cannot express."""
        *parts, last = await json_parts(self._content)
        self.headers["content-length"] = str(sum(map(len, parts)) + len(last))
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def json_parts(content: Any) -> list[bytes]:
    """Returns the JSON in UTF-8 in one or more parts. Raises ValueError for a number that JSON cannot express."""
    slices = TimeSlices()
    parts: list[bytes] = []
    texts: list[str] = []
    num_characters = 0
    for text in _texts(content):
        texts.append(text)
        num_characters += len(text)
        if num_characters >= _PART_CHARACTERS:
            parts.append("".join(texts).encode())
            texts, num_characters = [], 0
        await slices.pause()
    parts.append("".join(texts).encode())
    return parts


async def frame(content: dict[str, Any], *, event: str | None = None) -> bytes:
    """Makes a stream event. Lists in `content` may have dicts that contain Items.

    event: the event's name; None: it has none. Raises ValueError for a number that JSON cannot express.
    """
    name = b"" if event is None else f"event: {event}\n".encode()
    return b"".join([name, b"data: ", *await _stream_parts(content), b"\n\n"])


async def line(content: dict[str, Any]) -> bytes:
    """Makes a line of a stream of JSON. Accepts and raises the same as frame()."""
    return b"".join([*await _stream_parts(content), b"\n"])


async def _stream_parts(content: dict[str, Any]) -> list[bytes]:
    try:
        return [_ENCODER.encode(content).encode()]
    except _ItemsError:
        return await json_parts(
            {name: Items(value) if isinstance(value, list) else value for name, value in content.items()}
        )


class _ItemsError(Exception):
    """Raised for Items in a value that is encoded in one go."""


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, Numbers):
        before = "["
        for piece in content.items:
            yield before + _ENCODER.encode(piece.tolist())[1:-1]
            before = ","
        yield "]"
    elif isinstance(content, Items):
        before = "["
        for item in content.items:
            yield before
            yield from _texts(item)
            before = ","
        yield "[]" if before == "[" else "]"
    elif isinstance(content, dict) and any(isinstance(value, (dict, Items)) for value in content.values()):
        before = "{"
        for name, value in content.items():
            yield f"{before}{_ENCODER.encode(name)}:"
            yield from _texts(value)
            before = ","
        yield "}"
    else:
        yield _ENCODER.encode(content)


def _refuse(value: Any) -> NoReturn:
    raise _ItemsError if isinstance(value, Items) else TypeError(f"{type(value)} has no form in JSON")


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_refuse)
