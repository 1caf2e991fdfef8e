"""langchain-openai: its methods for structured output, and its tools."""

from __future__ import annotations

import pytest
from conftest import MODEL, City, Weather
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


def chat(address: str, *, uses_responses: bool = False) -> ChatOpenAI:
    options = {"use_responses_api": True} if uses_responses else {}
    return ChatOpenAI(
        model=MODEL, base_url=address, api_key="none", max_retries=0, max_tokens=200, temperature=0, **options
    )


@pytest.mark.parametrize("uses_responses", [False, True])
def test_an_answer_with_a_form(address: str, uses_responses: bool) -> None:
    answer = (
        chat(address, uses_responses=uses_responses)
        .with_structured_output(Weather)
        .invoke("What is the weather in Paris?")
    )
    assert isinstance(answer, Weather)


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_each_method(address: str, method: str) -> None:
    asked = chat(address).with_structured_output(Weather, method=method)
    assert isinstance(asked.invoke("What is the weather in Paris?"), Weather)


@tool
def weather(city: City) -> str:
    """How it is outside."""
    return f"sun in {city}"


@pytest.mark.parametrize("choice", ["auto", "any", "weather"])
def test_tools(address: str, choice: str) -> None:
    bound = chat(address).bind_tools([weather], tool_choice=choice)
    answer = bound.invoke("What is the weather in Paris?")
    if choice != "auto":
        assert [call["name"] for call in answer.tool_calls][:1] == ["weather"]
        assert all(set(call["args"]) == {"city"} for call in answer.tool_calls)


@pytest.mark.parametrize("uses_responses", [False, True])
def test_strict_tools_in_a_stream(address: str, uses_responses: bool) -> None:
    bound = chat(address, uses_responses=uses_responses).bind_tools(
        [weather], tool_choice="any", strict=True, parallel_tool_calls=False
    )
    pieces = list(bound.stream("What is the weather in Paris?"))
    answer = pieces[0]
    for piece in pieces[1:]:
        answer += piece
    (call,) = answer.tool_calls
    assert (call["name"], set(call["args"])) == ("weather", {"city"})
