"""Events of a response: their order, their numbers, and the body that they add up to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from adaptrt.runtime.token_log_probs import TokenLogProbs
from adaptrt.serve.answer_parts import AnswerPart, CallArguments, CallBegin, CallEnd, ReasoningPart, TextPart
from adaptrt.serve.conversation import SplitAnswer
from adaptrt.serve.errors import ApiError
from adaptrt.serve.generation import TextPiece
from adaptrt.serve.json_answer import json_parts
from adaptrt.serve.responses_answer import ResponseAnswer
from adaptrt.serve.tools.form import Functions
from adaptrt.serve.tools.forms import FORMS, REASONING_FORMS
from adaptrt.serve.tools.reader import Steps, TextReader
from adaptrt.serve.tools.sink import PartSink
from adaptrt.serve.tools.splitter import FormSplitter

CALL: list[AnswerPart] = [CallBegin(0, "c0", "f"), CallArguments(0, '{"a"'), CallArguments(0, ":1}"), CallEnd(0)]
SECOND: list[AnswerPart] = [CallBegin(1, "c1", "g"), CallArguments(1, "{}"), CallEnd(1)]


class Texts:
    """Texts of tokens."""

    def __getitem__(self, token: int) -> Any:
        from adaptrt.runtime.text_stream import TokenText

        return TokenText(f"t{token}", f"t{token}".encode())


class Scripted:
    """Splitter that knows the parts of each piece."""

    def __init__(self, pieces: Sequence[Sequence[AnswerPart]], spans: Sequence[tuple[float, float]] = ()) -> None:
        self._pieces = [*pieces]
        self.reasoning_spans = spans

    def add(self, text: str) -> Sequence[AnswerPart]:
        return self._pieces.pop(0) if self._pieces else ()

    def finish(self) -> Sequence[AnswerPart]:
        return ()


def streamed(pieces: Sequence[Sequence[AnswerPart]], reason: str = "stop", **how: Any) -> tuple[Any, list[Any]]:
    """Returns the answer and its events; each piece has one token."""
    answer = ResponseAnswer({"model": "base"}, 3, how.get("texts"))
    events = answer.begin()
    split = SplitAnswer(Scripted(pieces, how.get("spans", ())))
    for i in range(len(pieces)):
        is_last = i == len(pieces) - 1
        log_probs = (TokenLogProbs(i, -1.0, (), i),) if "texts" in how else ()
        piece = TextPiece("", (i,), log_probs, finish_reason=reason if is_last else None, offsets=(i,))
        events += asyncio.run(answer.add(piece, split))
    return answer, events


def replayed(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds up a stream like a client. Fails for an event that may not come at its place."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    state, text, kind = "between", "", ""
    for event in events[2:-1]:
        name = event["type"].removeprefix("response.")
        if name == "output_item.added":
            assert state == "between"
            items.append(event["item"])
            assert (event["output_index"], event["item"]["status"]) == (len(items) - 1, "in_progress")
            is_call = event["item"]["type"] == "function_call"
            kind = {
                "function_call": "function_call_arguments",
                "message": "output_text",
                "reasoning": "reasoning_text",
            }[event["item"]["type"]]
            state, text = "open" if is_call else "item", ""
            continue
        assert event["output_index"] == len(items) - 1
        if name == "output_item.done":
            assert state == "done"
            assert event["item"]["id"] == items[-1]["id"]
            items[-1], state = event["item"], "between"
            continue
        assert event["item_id"] == items[-1]["id"]
        if name == "content_part.added":
            assert (state, event["part"]["type"], event["part"]["text"]) == ("item", kind, "")
            state = "open"
        elif name == f"{kind}.delta":
            assert state == "open"
            text += event["delta"]
        elif name == f"{kind}.done":
            assert state == "open"
            assert event["arguments" if kind == "function_call_arguments" else "text"] == text
            state = "done" if kind == "function_call_arguments" else "part"
        else:
            assert (name, state, event["part"]["text"]) == ("content_part.done", "part", text)
            state = "done"
    assert state == "between"
    return items


def shown(items: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (item["name"], item["arguments"], item["call_id"])
        if item["type"] == "function_call"
        else (item["type"], item["content"][0]["text"])
        for item in items
    ]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([[TextPart("a")], [TextPart("b")], []], [("message", "ab")]),
        ([[]], [("message", "")]),
        ([[ReasoningPart("hm")], [ReasoningPart("m"), TextPart("a")]], [("reasoning", "hmm"), ("message", "a")]),
        ([CALL], [("f", '{"a":1}', "c0")]),
        ([CALL[:2], CALL[2:3], [*CALL[3:], *SECOND]], [("f", '{"a":1}', "c0"), ("g", "{}", "c1")]),
        ([[TextPart("a"), *CALL, TextPart("b")]], [("message", "a"), ("f", '{"a":1}', "c0"), ("message", "b")]),
    ],
)
def test_events_add_up_to_the_body(pieces: list[list[AnswerPart]], expected: list[tuple[Any, ...]]) -> None:
    answer, events = streamed(pieces)
    items = replayed(events)
    assert shown(items) == expected
    last = events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.completed", "completed")
    assert last["response"]["output"] == items == answer.body()["output"]
    assert {item["status"] for item in items} == {"completed"}
    assert last["response"]["completed_at"] is not None
    assert last["response"]["usage"]["output_tokens"] == len(pieces)
    assert events[0]["response"]["usage"] is None
    whole, _ = streamed([[part for parts in pieces for part in parts]])
    assert shown(whole.body()["output"]) == expected


@pytest.mark.parametrize(("reason", "said"), [("length", "max_output_tokens"), ("abort", "max_request_seconds")])
def test_a_cut_answer_says_why(reason: str, said: str) -> None:
    answer, events = streamed([[TextPart("a")], CALL[:2]], reason)
    assert [item["status"] for item in replayed(events)] == ["completed", "incomplete"]
    body = answer.body()
    assert events[-1]["type"] == "response.incomplete"
    assert (body["status"], body["incomplete_details"], body["completed_at"]) == ("incomplete", {"reason": said}, None)
    # The arguments are no JSON yet, so a continued conversation does not have the call.
    assert [message.tool_calls for message in answer.messages()] == [None]


def test_a_call_whose_arguments_stop_being_json_is_incomplete() -> None:
    answer, events = streamed([[*CALL[:2], TextPart("a")]])
    items = replayed(events)
    assert [(item["type"], item["status"]) for item in items] == [
        ("function_call", "incomplete"),
        ("message", "completed"),
    ]
    assert [(message.content, message.tool_calls) for message in answer.messages()] == [("a", None)]


def test_the_body_has_what_has_arrived() -> None:
    answer, _ = streamed([[TextPart("a")], [TextPart("b"), *CALL[:2]]], None)  # type: ignore[arg-type]
    text, call = answer.body()["output"]
    assert (text["status"], text["content"][0]["text"]) == ("completed", "ab")
    assert (call["status"], call["arguments"]) == ("in_progress", '{"a"')
    answer, _ = streamed([[TextPart("a")]] * 40, None, texts=Texts())  # type: ignore[arg-type]
    body = json.loads(b"".join(asyncio.run(json_parts(answer.body()))))
    (item,) = body["output"]
    assert (item["status"], item["content"][0]["text"]) == ("in_progress", "a" * 40)
    assert len(item["content"][0]["logprobs"]) == 40


def test_a_cancelled_answer() -> None:
    answer, events = streamed([[TextPart("a")]], None)  # type: ignore[arg-type]
    answer.cancel()
    events += asyncio.run(answer.add(TextPiece("", (), finish_reason="abort"), SplitAnswer(Scripted([]))))
    assert [item["status"] for item in replayed(events)] == ["incomplete"]
    assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.incomplete", "cancelled")
    assert answer.body()["incomplete_details"] is None


def test_a_failure_ends_the_open_item() -> None:
    answer, events = streamed([[TextPart("a")]], None)  # type: ignore[arg-type]
    events += answer.fail(ApiError("the engine broke"))
    assert shown(replayed(events)) == [("message", "a")]
    assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.failed", "failed")
    assert answer.body()["error"] == {"code": "server_error", "message": "the engine broke"}


def test_messages_of_an_answer() -> None:
    answer, _ = streamed([[ReasoningPart("hm"), TextPart("a"), *CALL, *SECOND, TextPart("b")]])
    messages = [message.model_dump(exclude_none=True, exclude_defaults=True) for message in answer.messages()]
    assert [(message.get("reasoning_content"), message["content"]) for message in messages] == [
        ("hm", "a"),
        (None, "b"),
    ]
    assert [call["id"] for call in messages[0]["tool_calls"]] == ["c0", "c1"]


@pytest.mark.parametrize("num_tokens", [3, 40])
def test_log_probs_of_deltas_are_those_of_the_text(num_tokens: int) -> None:
    # The second token is a part of a character, so it has no text. The last one ends the answer without text.
    pieces: list[list[AnswerPart]] = [[TextPart("a")] for _ in range(num_tokens)]
    pieces[1] = pieces[-1] = []
    _, events = streamed(pieces, texts=Texts())

    def plain(event: dict[str, Any]) -> Any:
        return json.loads(b"".join(asyncio.run(json_parts(event))))

    deltas = [plain(event)["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [[entry["token"] for entry in delta] for delta in deltas[:2]] == [["t0"], ["t1", "t2"]][: len(deltas)]
    body = plain(events[-1])["response"]
    (item,) = body["output"]
    tokens = [entry["token"] for entry in item["content"][0]["logprobs"]]
    assert tokens == [f"t{i}" for i in range(num_tokens)]
    assert plain(events[-1]) == plain(events[-1])


@pytest.mark.parametrize("size", [1, 3, 200])
def test_each_text_has_the_log_probs_of_its_own_tokens(size: int) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
    texts = ["<think>I see.</think>\n\n", "Hello.", "\n" + call + "\n", "and bye", call, "!"]
    answer = "".join(texts)

    def read(reader: TextReader, sink: PartSink) -> Steps[None]:
        return REASONING_FORMS["qwen3"].read(
            reader, sink, lambda reader, sink: FORMS["hermes"].read(reader, sink, Functions({"f": None}))
        )

    made = ResponseAnswer({}, 3, Texts())  # type: ignore[arg-type]
    split = SplitAnswer(FormSplitter(read))
    for begin in range(0, len(answer), size):
        text = answer[begin : begin + size]
        # Each character is a token; its number is its place. The end token has no text.
        places = [*range(begin, begin + len(text))]
        is_last = begin + size >= len(answer)
        log_probs = [TokenLogProbs(place, -1.0, (), place) for place in [*places, *([len(answer)] if is_last else [])]]
        reason = "stop" if is_last else None
        piece = TextPiece(text, tuple(places), tuple(log_probs), finish_reason=reason, offsets=tuple(places))
        asyncio.run(made.add(piece, split))
    output = json.loads(b"".join(asyncio.run(json_parts(made.body()))))["output"]
    kinds = " ".join(item["type"] for item in output)
    assert kinds == "reasoning message function_call message function_call message"
    first = 0
    found = [item["content"][0] for item in output if item["type"] == "message"]
    for shown in ("Hello.", "\nand bye", "!"):
        part = found.pop(0)
        assert part["text"] == shown
        first = answer.index(shown, first)
        end = first + len(shown) + (shown == "!")
        assert [entry["token"] for entry in part["logprobs"]] == [f"t{i}" for i in range(first, end)]


def test_cached_tokens_of_the_prompt_are_counted() -> None:
    answer = ResponseAnswer({}, 5, None)
    piece = TextPiece("", (1,), finish_reason="stop", num_cached_tokens=4)
    asyncio.run(answer.add(piece, SplitAnswer(Scripted([[TextPart("a")]]))))
    usage = answer.body()["usage"]
    assert (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]) == (5, 4)


def test_reasoning_tokens_are_counted() -> None:
    answer, _ = streamed([[ReasoningPart("a")], [ReasoningPart("b")], [TextPart("c")]], spans=[(0, 2)])
    assert answer.body()["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 6,
    }
