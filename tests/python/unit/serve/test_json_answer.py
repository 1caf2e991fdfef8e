"""Answers that are made while they are written: the same JSON, and the loop serves others."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from starlette.types import Message

from adaptrt.serve.json_answer import Items, JsonAnswer, Numbers, frame
from support.loop_work import LoopWork

LONGEST = 20_000
"""Steps; the answer's are more than 300,000."""


def plain(content: Any) -> Any:
    """Returns the content with lists instead of Items."""
    if isinstance(content, Numbers):
        return [number for piece in content.items for number in piece.tolist()]
    if isinstance(content, Items):
        return [plain(item) for item in content.items]
    if isinstance(content, dict):
        return {name: plain(value) for name, value in content.items()}
    return content


async def sent(answer: JsonAnswer) -> list[Message]:
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    async def receive() -> Message:
        raise AssertionError

    await answer({"type": "http"}, receive, send)
    return messages


CONTENTS: list[Any] = [
    {},
    {"a": [], "b": None, "c": 0.1, "d": "€\n\ud7ff", "e": {"f": {}}},
    {"a": Items([])},
    {"a": {"b": Items([1])}, "c": True},
    {"a": Items([{"b": Items(["x", None]), "c": [1, 2]}, {}, Items([Items([])])]), "d": "e"},
    Items(range(100_000)),
    *(Items([Numbers(np.arange(size, dtype=np.float32).reshape(-1, 5))]) for size in (0, 5, 4095, 20_480, 20_485)),
]


@pytest.mark.parametrize("content", CONTENTS)
def test_the_json_is_that_of_the_whole(content: Any) -> None:
    begin, *parts = asyncio.run(sent(JsonAnswer(content)))
    body = b"".join(part["body"] for part in parts)
    assert body == json.dumps(plain(content), ensure_ascii=False, separators=(",", ":")).encode()
    headers = dict(begin["headers"])
    assert (headers[b"content-length"], headers[b"content-type"]) == (str(len(body)).encode(), b"application/json")
    assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]


def test_a_number_that_json_does_not_have_is_found_before_anything_is_sent() -> None:
    messages: list[Message] = []

    async def body() -> None:
        async def send(message: Message) -> None:
            messages.append(message)

        await JsonAnswer({"a": Items([1.0] * 100_000 + [math.nan])})({"type": "http"}, send, send)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="not JSON compliant"):
        asyncio.run(body())
    assert messages == []


@pytest.mark.parametrize("content", [{"choices": [{"a": 1}]}, {"choices": [{"a": {"b": Items([1, 2])}}], "c": [3]}])
def test_events_may_have_items_in_their_lists(content: dict[str, Any]) -> None:
    event = asyncio.run(frame(content))
    expected = {**content, "choices": [plain(choice) for choice in content["choices"]]}
    assert event == b"data: " + json.dumps(expected, separators=(",", ":")).encode() + b"\n\n"


def test_values_that_json_cannot_hold_raise() -> None:
    with pytest.raises(TypeError, match="bytes"):
        asyncio.run(frame({"a": b"b"}))


def test_others_are_served_while_a_long_answer_is_written() -> None:
    def items() -> Iterator[dict[str, Any]]:
        for i in range(20_000):
            yield {"token": str(i), "bytes": [1, 2, 3], "logprob": -0.5}

    async def body() -> int:
        async with LoopWork() as work:
            await sent(JsonAnswer({"a": Items(items())}))
        async with LoopWork() as of_event:
            await frame({"a": [{"b": Items(items())}]})
        return max(work.longest, of_event.longest)

    assert asyncio.run(body()) < LONGEST
