"""Bodies are read within their limits, however they come."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

import pytest
from starlette.requests import Request
from starlette.types import Message

from adaptrt.serve.errors import ApiError
from adaptrt.serve.http import read_body
from adaptrt.serve.options import ServerLimits

PIECE = b"12345678"
LIMITS = ServerLimits(max_body_bytes=100)
MOST_PIECES = LIMITS.max_body_bytes // len(PIECE)


def read(num_pieces: int | None, stated: str | None = None, most_read: int = MOST_PIECES + 1) -> bytes:
    """Reads a body of `num_pieces`, at most `most_read` of them; None: it does not end."""
    num_read = 0

    async def receive() -> Message:
        nonlocal num_read
        num_read += 1
        assert num_read <= most_read, "more was read than a body may have"
        return {"type": "http.request", "body": PIECE, "more_body": num_read != num_pieces}

    headers = [] if stated is None else [(b"content-length", stated.encode())]
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)
    return asyncio.run(read_body(request, LIMITS))


@pytest.mark.parametrize("stated", [None, "8", "100", "x"])
def test_a_body_without_an_end_is_refused_as_soon_as_it_is_too_large(stated: str | None) -> None:
    with pytest.raises(ApiError, match="the body is larger than 100 bytes") as refused:
        read(None, stated)
    assert refused.value.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE


def test_a_body_whose_stated_size_is_too_large_is_not_read() -> None:
    with pytest.raises(ApiError, match="the body is larger than 100 bytes"):
        read(None, "101", most_read=0)


def test_a_body_within_the_limit_is_read_whole() -> None:
    assert read(MOST_PIECES) == PIECE * MOST_PIECES
