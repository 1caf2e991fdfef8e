"""Events of Anthropic's messages: their order, and the body that they add up to; the form of errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import pytest

from adaptrt.serve.answer_parts import AnswerPart, CallArguments, CallBegin, CallEnd, ReasoningPart, TextPart
from adaptrt.serve.app import last_frames
from adaptrt.serve.conversation import SplitAnswer
from adaptrt.serve.errors import ApiError
from adaptrt.serve.generation import TextPiece
from adaptrt.serve.messages import error_body
from adaptrt.serve.messages_answer import MessageAnswer
from adaptrt.serve.records import RequestRecord, current_request

CALL: list[AnswerPart] = [CallBegin(0, "c0", "f"), CallArguments(0, '{"a"'), CallArguments(0, ":1}"), CallEnd(0)]
SECOND: list[AnswerPart] = [CallBegin(1, "c1", "g"), CallArguments(1, "{}"), CallEnd(1)]


class Scripted:
    """Splitter that knows the parts of each piece."""

    def __init__(self, pieces: Sequence[Sequence[AnswerPart]], spans: Sequence[tuple[float, float]] = ()) -> None:
        self._pieces = [*pieces]
        self.reasoning_spans = spans

    def add(self, text: str) -> Sequence[AnswerPart]:
        return self._pieces.pop(0) if self._pieces else ()

    def finish(self) -> Sequence[AnswerPart]:
        return ()


def streamed(
    pieces: Sequence[Sequence[AnswerPart]], reason: str = "stop", stop: str | int | None = None, *, is_cut: bool = False
) -> tuple[MessageAnswer, list[Any]]:
    """Returns the answer and its events; each piece has one token."""
    answer = MessageAnswer("base", 3, is_cut=is_cut)
    events = answer.begin()
    split = SplitAnswer(Scripted(pieces, [(0, 1)]))
    for i in range(len(pieces)):
        is_last = i == len(pieces) - 1
        end = {"finish_reason": reason, "stop_reason": stop} if is_last else {}
        events += asyncio.run(answer.add(TextPiece("", (i,), offsets=(i,), **end), split))  # type: ignore[arg-type]
    return answer, events


def replayed(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Adds up a stream like a client. Fails for an event that may not come at its place."""
    first, ping, *middle, delta, stop = events
    assert [event["type"] for event in (first, ping, delta, stop)] == [
        "message_start",
        "ping",
        "message_delta",
        "message_stop",
    ]
    message: dict[str, Any] = first["message"]
    assert (message["content"], message["stop_reason"], message["usage"]["output_tokens"]) == ([], None, 0)
    blocks: list[dict[str, Any]] = []
    is_open, arguments = False, ""
    for event in middle:
        if event["type"] == "content_block_start":
            assert (is_open, event["index"]) == (False, len(blocks))
            blocks.append(dict(event["content_block"]))
            is_open, arguments = True, ""
            continue
        assert (is_open, event["index"]) == (True, len(blocks) - 1)
        block = blocks[-1]
        if event["type"] == "content_block_delta":
            (kind, field) = {
                "text": ("text_delta", "text"),
                "thinking": ("thinking_delta", "thinking"),
                "tool_use": ("input_json_delta", "partial_json"),
            }[block["type"]]
            assert event["delta"]["type"] == kind
            if block["type"] == "tool_use":
                arguments += event["delta"][field]
            else:
                block[field] += event["delta"][field]
        else:
            assert event["type"] == "content_block_stop"
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = json.loads(arguments)
    assert not is_open
    return {**message, "content": blocks, **delta["delta"], "usage": delta["usage"]}


TEXT_A = {"type": "text", "text": "a", "citations": None}
CALL_F = {"type": "tool_use", "id": "c0", "name": "f", "input": {"a": 1}}
CALL_G = {"type": "tool_use", "id": "c1", "name": "g", "input": {}}


@pytest.mark.parametrize(
    ("pieces", "content"),
    [
        ([[TextPart("a")], []], [TEXT_A]),
        ([[]], []),
        (
            [[ReasoningPart("hm")], [ReasoningPart("m"), TextPart("a")]],
            [{"type": "thinking", "thinking": "hmm", "signature": ""}, TEXT_A],
        ),
        ([CALL[:2], CALL[2:3], [*CALL[3:], *SECOND]], [CALL_F, CALL_G]),
        ([[TextPart("a"), *CALL, TextPart("a")]], [TEXT_A, CALL_F, TEXT_A]),
    ],
)
def test_events_add_up_to_the_body(pieces: list[list[AnswerPart]], content: list[dict[str, Any]]) -> None:
    answer, events = streamed(pieces)
    body = replayed(events)
    assert body["content"] == content
    assert body == answer.body()
    has_calls = any(block["type"] == "tool_use" for block in content)
    assert body["stop_reason"] == ("tool_use" if has_calls else "end_turn")
    assert (body["usage"]["input_tokens"], body["usage"]["output_tokens"]) == (3, len(pieces))
    assert body["usage"]["output_tokens_details"] == {"thinking_tokens": 1}
    whole, _ = streamed([[part for parts in pieces for part in parts]])
    assert whole.body()["content"] == content


def test_cached_tokens_of_the_prompt_are_not_input_tokens() -> None:
    answer = MessageAnswer("base", 5, is_cut=False)
    assert answer.body()["usage"]["input_tokens"] == 5
    piece = TextPiece("", (1,), finish_reason="stop", num_cached_tokens=4)
    events = asyncio.run(answer.add(piece, SplitAnswer(Scripted([[TextPart("a")]]))))
    for usage in (answer.body()["usage"], events[-2]["usage"]):
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (1, 4)


@pytest.mark.parametrize(
    ("reason", "stop", "is_cut", "expected"),
    [
        ("stop", None, False, ("end_turn", None)),
        ("stop", 7, False, ("end_turn", None)),
        ("stop", "END", False, ("stop_sequence", "END")),
        ("stop", None, True, ("end_turn", None)),
        ("length", None, False, ("max_tokens", None)),
        ("length", None, True, ("model_context_window_exceeded", None)),
        ("abort", None, True, ("max_tokens", None)),
    ],
)
def test_stop_reasons(reason: str, stop: str | int | None, is_cut: bool, expected: tuple[Any, Any]) -> None:
    answer, events = streamed([[TextPart("a")]], reason, stop, is_cut=is_cut)
    assert (answer.body()["stop_reason"], answer.body()["stop_sequence"]) == expected
    assert replayed(events) == answer.body()


def test_a_call_without_its_end_is_left_out() -> None:
    answer, events = streamed([[TextPart("a"), *CALL[:2]]], "length")
    assert (answer.body()["content"], answer.body()["stop_reason"]) == ([TEXT_A], "max_tokens")
    assert [event["type"] for event in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    broken, _ = streamed([[*CALL[:2], TextPart("a")]])
    assert (broken.body()["content"], broken.body()["stop_reason"]) == ([TEXT_A], "end_turn")


def test_half_a_surrogate_pair_can_be_sent() -> None:
    parts = [CallBegin(0, "c", "f"), CallArguments(0, '{"a": "\\ud83d", "b": "\\ud83d\\ude00"}'), CallEnd(0)]
    answer, _ = streamed([parts])
    assert answer.body()["content"][0]["input"] == {"a": "\ufffd", "b": "\U0001f600"}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (415, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_errors_have_anthropics_form(status: int, kind: str) -> None:
    error = ApiError("no", status=HTTPStatus(status))
    assert error_body(error) == {"type": "error", "error": {"type": kind, "message": "no"}}
    token = current_request.set(RequestRecord(id="r"))
    try:
        assert error_body(error)["request_id"] == "r"
    finally:
        current_request.reset(token)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (
            "/v1/messages",
            b'event: error\ndata: {"type":"error","error":{"type":"invalid_request_error","message":"no"}}\n\n',
        ),
        ("/api/chat", b'{"error":"no"}\n'),
        ("/v2/models/m/generate_stream", b'data: {"error":"no"}\n\n'),
        (
            "/v1/responses",
            b'data: {"error":{"message":"no","type":"BadRequestError","param":null,"code":400}}\n\ndata: [DONE]\n\n',
        ),
    ],
)
def test_a_stream_that_fails_ends_in_the_form_of_its_api(path: str, expected: bytes) -> None:
    assert last_frames(path, ApiError("no")) == expected
