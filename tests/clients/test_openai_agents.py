"""openai-agents with its defaults: strict functions, and in addition an answer that follows a JSON schema."""

from __future__ import annotations

import asyncio

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from conftest import MODEL, City, Weather
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def weather(city: City) -> str:
    """How it is outside."""
    return f"sun in {city}"


def run(address: str, kind: type, **settings: object) -> object:
    async def main() -> object:
        async with AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
            agent = Agent(
                name="a",
                instructions="Answer.",
                model=kind(MODEL, client),
                model_settings=ModelSettings(max_tokens=200, temperature=0),
                **settings,
            )
            return (await Runner.run(agent, "What is the weather in Paris?")).final_output

    return asyncio.run(main())


@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
def test_an_answer_with_a_form(address: str, kind: type) -> None:
    assert isinstance(run(address, kind, output_type=Weather), Weather)


@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
def test_text_beside_a_tool(address: str, kind: type) -> None:
    assert isinstance(run(address, kind, tools=[weather]), str)


def test_a_stream_of_a_conversation_that_the_server_stores(address: str) -> None:
    async def main() -> None:
        async with AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
            settings = ModelSettings(max_tokens=20, temperature=0)
            agent = Agent(name="a", model=OpenAIResponsesModel(MODEL, client), model_settings=settings)
            first = Runner.run_streamed(agent, "What is the weather in Paris?", previous_response_id=None)
            async for _ in first.stream_events():
                pass
            assert first.last_response_id is not None
            second = Runner.run_streamed(agent, "And in Rome?", previous_response_id=first.last_response_id)
            async for _ in second.stream_events():
                pass
            assert second.final_output

    asyncio.run(main())
