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
from adaptrt.serve.chat import ChatAnswer
from adaptrt.serve.generation import TextPiece
from adaptrt.serve.openai_chat_fields import ChatRequest
from adaptrt.serve.service import Service
from adaptrt.serve.tool_calls import PARSERS
from support.tokenizers import byte_level

TOKENIZER = byte_level()
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
FUNCTION: dict[str, Any] = {"type": "function", "function": {"name": "f"}}


def answer(**fields: Any) -> ChatAnswer:
    asked = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "a"}], "tools": [FUNCTION], **fields}, strict=True
    )
    service = cast(Service, SimpleNamespace(model_names=("base",)))
    own = TextTokenizer(Vocabulary(TOKENIZER), (), longest_token(TOKENIZER))
    return ChatAnswer(service, asked, None, own, [1], lambda: PARSERS["hermes"]({"f"}))


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
    (whole,) = answer().whole([TextPiece("".join(texts), (1,), finish_reason="stop")])["choices"].items
    assert (whole["finish_reason"], len(whole["message"]["tool_calls"])) == ("tool_calls", num_calls)


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_an_answer_that_is_cut_says_so_although_it_calls(reason: str) -> None:
    for texts in ([CALL, " and"], [CALL + "<tool_call>{"]):
        assert streamed(texts, reason)[-1]["finish_reason"] == reason
        (whole,) = answer().whole([TextPiece("".join(texts), (1,), finish_reason=reason)])["choices"].items
        assert (whole["finish_reason"], len(whole["message"]["tool_calls"])) == (reason, 1)


def test_an_answer_without_calls_stops() -> None:
    assert [choice["finish_reason"] for choice in streamed(["a", "b"], "stop")] == [None, "stop"]


def test_a_call_that_the_request_names_is_no_reason() -> None:
    assert streamed([CALL, ""], "stop", tool_choice=FUNCTION)[-1]["finish_reason"] == "stop"
