"""Bodies are read within their limits, in any number of pieces."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import pytest
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from adaptrt.serve.errors import ApiError
from adaptrt.serve.http import LONG_BODY, check_json_size, parse_json, read_body, read_json
from adaptrt.serve.options import MAX_JSON_DEPTH, ServerLimits
from adaptrt.serve.work import Work, WorkKind

PIECE = b"12345678"
LIMITS = ServerLimits(max_body_bytes=100)
MOST_PIECES = LIMITS.max_body_bytes // len(PIECE)
JSON_LIMITS = ServerLimits(max_json_bytes=100)


class Content(BaseModel):
    content: Any


def read(
    num_pieces: int | None, stated: str | None = None, most_read: int = MOST_PIECES + 1, *, is_json: bool = False
) -> bytes:
    """Reads a body of `num_pieces` (None: endless). At most `most_read` of them may be read."""
    num_read = 0

    async def receive() -> Message:
        nonlocal num_read
        num_read += 1
        assert num_read <= most_read, "more was read than a body may have"
        return {"type": "http.request", "body": PIECE, "more_body": num_read != num_pieces}

    headers = [] if stated is None else [(b"content-length", stated.encode())]
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)
    return asyncio.run(read_body(request, JSON_LIMITS if is_json else LIMITS, is_json=is_json))


@pytest.mark.parametrize("is_json", [False, True])
@pytest.mark.parametrize("stated", [None, "8", "100", "x"])
def test_a_body_without_an_end_is_refused_as_soon_as_it_is_too_large(stated: str | None, is_json: bool) -> None:
    flag = "--max-json-bytes" if is_json else "--max-body-bytes"
    with pytest.raises(ApiError, match=rf"the body is larger than 100 bytes \(the server's {flag}\)") as refused:
        read(None, stated, is_json=is_json)
    assert refused.value.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE


@pytest.mark.parametrize("is_json", [False, True])
def test_a_body_whose_stated_size_is_too_large_is_not_read(is_json: bool) -> None:
    with pytest.raises(ApiError, match="the body is larger than 100 bytes"):
        read(None, "101", most_read=0, is_json=is_json)


def test_a_body_within_the_limit_is_read_whole() -> None:
    assert read(MOST_PIECES) == PIECE * MOST_PIECES


@pytest.mark.parametrize(
    ("text", "num_items"),
    [
        ("[1,2,3]", 3),
        ('{"a":1,"b":[2,3]}', 3),
        ('["a,b,c","d"]', 2),
        (r'["a\",\",","\\",","]', 3),
        (r'["\\\\",1]', 2),
        ('["' + "," * 1000 + '"]', 1),
        ("[" + '"",' * 99 + '""]', 100),
    ],
)
def test_items_of_json_are_counted_without_its_texts(text: str, num_items: int) -> None:
    body = b'{"content":' + text.encode() + b"}"
    check_json_size(body, ServerLimits(max_json_items=num_items))
    if num_items > 1:
        with pytest.raises(ApiError, match=f"more than {num_items - 1} items .* --max-json-items"):
            parse_json(body, Content, ServerLimits(max_json_items=num_items - 1))
    parse_json(body, Content, ServerLimits(max_json_items=num_items))


def test_json_has_fewer_bytes_than_a_body_may_have() -> None:
    limits = ServerLimits(max_json_bytes=20)
    parse_json(b'{"content":"' + b"a" * 6 + b'"}', Content, limits)
    with pytest.raises(ApiError, match="the body's JSON is larger than 20 bytes") as raised:
        parse_json(b'{"content":"' + b"a" * 7 + b'"}', Content, limits)
    assert raised.value.status is HTTPStatus.REQUEST_ENTITY_TOO_LARGE


@pytest.mark.parametrize("levels", [2, 64, MAX_JSON_DEPTH])
def test_levels_of_json_are_limited(levels: int) -> None:
    def body(num_lists: int) -> bytes:
        return b'{"content":' + b"[" * num_lists + rb'"\ud83d\ude00"' + b"]" * num_lists + b"}"

    limits = ServerLimits(max_json_depth=levels)
    assert parse_json(body(levels - 1), Content, limits).content
    for num_lists in (levels, 100_000):
        with pytest.raises(ApiError, match=f"nested deeper than {levels} levels; .* --max-json-depth"):
            parse_json(body(num_lists), Content, limits)


def request_of(messages: Sequence[Message], has_left: asyncio.Event) -> Request:
    """Makes a request of these messages; the event disconnects its client."""
    left = list(messages)

    async def receive() -> Message:
        if left:
            return left.pop(0)
        await has_left.wait()
        return {"type": "http.disconnect"}

    return Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)


def test_long_bodies_are_parsed_by_the_threads_for_texts() -> None:
    long = b'{"content":"' + b"a" * LONG_BODY + b'"}'

    async def main() -> None:
        work, has_left, gate = Work(ServerLimits(text_threads=1)), asyncio.Event(), threading.Event()

        async def read(body: bytes, if_empty: bytes = b"") -> Content:
            request = request_of([{"type": "http.request", "body": body}], has_left)
            return await read_json(request, Content, ServerLimits(), work, if_empty=if_empty)

        async def until_waiting(number: int) -> None:
            while work.counts(WorkKind.TEXTS) != (number, 1):
                await asyncio.sleep(0)

        busy = asyncio.create_task(work.run(WorkKind.TEXTS, gate.wait))
        try:
            await until_waiting(0)
            waiting = asyncio.create_task(read(long))
            await until_waiting(1)
            assert (await read(b'{"content":1}')).content == 1
            assert (await read(b"", b'{"content":2}')).content == 2
            has_left.set()
            with pytest.raises(ClientDisconnect):
                await waiting
            assert work.counts(WorkKind.TEXTS) == (0, 1)
        finally:
            gate.set()
        assert await busy
        has_left.clear()
        assert (await read(long)).content == "a" * LONG_BODY
        await work.close()

    asyncio.run(asyncio.wait_for(main(), 60))
