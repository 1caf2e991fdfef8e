"""Finish reasons of chats with function calls, whole and streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from adaptrt.runtime.adapter_tokenizers import TextTokenizer
from adaptrt.runtime.text_bound import longest_token
from adaptrt.runtime.vocabulary import Vocabulary
from adaptrt.serve.answer_parts import AnswerPart, CallArguments, CallBegin, CallEnd, ReasoningPart, TextPart
from adaptrt.serve.chat import ChatAnswer
from adaptrt.serve.conversation import Conversation
from adaptrt.serve.generation import TextPiece, TextRequest
from adaptrt.serve.openai_chat_fields import ChatRequest
from adaptrt.serve.service import Service
from adaptrt.serve.tools.form import Functions
from adaptrt.serve.tools.forms import FORMS
from adaptrt.serve.tools.splitter import FormSplitter
from support.tokenizers import byte_level

TOKENIZER = byte_level()
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
FUNCTION: dict[str, Any] = {"type": "function", "function": {"name": "f"}}


def answer(**fields: Any) -> ChatAnswer:
    asked = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "a"}], "tools": [FUNCTION], **fields}, strict=True
    )
    service = cast(Service, SimpleNamespace(shown_model=lambda adapter: "base"))
    own = TextTokenizer(Vocabulary(TOKENIZER), (), longest_token(TOKENIZER))
    request = TextRequest([1], None, 1)

    def make_splitter() -> FormSplitter:
        return FormSplitter(lambda reader, sink: FORMS["hermes"].read(reader, sink, Functions({"f": None})))

    return ChatAnswer(service, asked, Conversation(None, own, request, make_splitter))


def streamed(texts: Sequence[str], reason: str, **fields: Any) -> list[dict[str, Any]]:
    """Returns the choices of all chunks but the first, which has the role. `reason` arrives with the last text."""

    async def pieces() -> AsyncIterator[tuple[int, TextPiece]]:
        for i, text in enumerate(texts):
            yield 0, TextPiece(text, (1,), finish_reason=reason if i == len(texts) - 1 else None)

    async def collect() -> list[dict[str, Any]]:
        return [chunk["choices"][0] async for chunk in answer(**fields).chunks(pieces())]

    return asyncio.run(collect())[1:]


@pytest.mark.parametrize(
    ("texts", "num_calls"),
    [
        ([CALL, ""], 1),
        ([CALL, " and", " more", ""], 1),
        ([CALL, "\n", CALL, " ", "x"], 2),
        (["a", CALL + CALL], 2),
    ],
)
def test_only_the_last_piece_says_why_a_calling_answer_ends(texts: list[str], num_calls: int) -> None:
    choices = streamed(texts, "stop")
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(texts) - 1) + ["tool_calls"]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert [(call["index"], call["function"]["name"]) for call in calls] == [(i, "f") for i in range(num_calls)]
    (whole,) = asyncio.run(answer().whole([TextPiece("".join(texts), (1,), finish_reason="stop")]))["choices"].items
    assert (whole["finish_reason"], len(whole["message"]["tool_calls"])) == ("tool_calls", num_calls)


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_an_answer_that_is_cut_says_so_although_it_calls(reason: str) -> None:
    for texts in ([CALL, " and"], [CALL + "<tool_call>{"]):
        assert streamed(texts, reason)[-1]["finish_reason"] == reason
        (whole,) = asyncio.run(answer().whole([TextPiece("".join(texts), (1,), finish_reason=reason)]))["choices"].items
        assert (whole["finish_reason"], len(whole["message"]["tool_calls"])) == (reason, 1)


def test_an_answer_without_calls_stops() -> None:
    assert [choice["finish_reason"] for choice in streamed(["a", "b"], "stop")] == [None, "stop"]


def test_a_call_that_the_request_names_is_no_reason() -> None:
    assert streamed([CALL, ""], "stop", tool_choice=FUNCTION)[-1]["finish_reason"] == "stop"


def test_arguments_and_reasoning_arrive_as_the_model_writes_them() -> None:
    parts: list[list[AnswerPart]] = [
        [ReasoningPart("hm")],
        [TextPart("a"), CallBegin(0, "c0", "f"), CallArguments(0, '{"x"')],
        [CallArguments(0, ":1"), CallArguments(0, "}"), CallEnd(0), CallBegin(1, "c1", "f"), CallArguments(1, "{}")],
    ]

    class Scripted:
        reasoning_spans = ((0, 3),)

        def __init__(self) -> None:
            self.left = [*parts]

        def add(self, text: str) -> list[AnswerPart]:
            return self.left.pop(0) if text == "x" else [part for left in self.left for part in left]

        def finish(self) -> list[AnswerPart]:
            return []

    asked = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}]})

    def made() -> ChatAnswer:
        own = TextTokenizer(Vocabulary(TOKENIZER), (), longest_token(TOKENIZER))
        service = cast(Service, SimpleNamespace(shown_model=lambda adapter: "base"))
        return ChatAnswer(
            service, asked, Conversation(None, own, TextRequest([1], None, 1), Scripted, has_reasoning=True)
        )

    async def collect() -> list[dict[str, Any]]:
        async def pieces() -> AsyncIterator[tuple[int, TextPiece]]:
            for i in range(3):
                yield 0, TextPiece("x", (1,), finish_reason="stop" if i == 2 else None, offsets=(2 * i,))

        return [chunk["choices"][0] async for chunk in made().chunks(pieces())]

    def begun(index: int, arguments: str) -> dict[str, Any]:
        return {
            "index": index,
            "id": f"c{index}",
            "type": "function",
            "function": {"name": "f", "arguments": arguments},
        }

    assert [choice["delta"] for choice in asyncio.run(collect())[1:]] == [
        {"reasoning": "hm", "reasoning_content": "hm"},
        {"content": "a", "tool_calls": [begun(0, '{"x"')]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}, begun(1, "{}")]},
    ]
    (whole,) = asyncio.run(made().whole([TextPiece("all", (1,), finish_reason="stop")]))["choices"].items
    calls = [
        {name: call[name] for name in ("id", "type", "function")} for call in (begun(0, '{"x":1}'), begun(1, "{}"))
    ]
    thought = {"reasoning": "hm", "reasoning_content": "hm"}
    assert whole["message"] == {"role": "assistant", "content": "a", **thought, "tool_calls": calls}
    asked.include_reasoning = False
    answer = asyncio.run(made().whole([TextPiece("all", (1, 2, 3), finish_reason="stop", offsets=(0, 2, 3))]))
    (whole,) = answer["choices"].items
    assert whole["message"] == {"role": "assistant", "content": "a", "tool_calls": calls}
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
