"""openai-agents with its defaults: strict functions, and in addition an answer that follows a JSON schema."""

from __future__ import annotations

import asyncio

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from conftest import MODEL, City, Weather
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def weather(city: City) -> str:
    """How it is outside."""
    return f"sun in {city}"


def run(address: str, **settings: object) -> object:
    async def main() -> object:
        async with AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
            agent = Agent(
                name="a",
                instructions="Answer.",
                model=OpenAIChatCompletionsModel(MODEL, client),
                model_settings=ModelSettings(max_tokens=200, temperature=0),
                **settings,
            )
            return (await Runner.run(agent, "What is the weather in Paris?")).final_output

    return asyncio.run(main())


def test_an_answer_with_a_form(address: str) -> None:
    assert isinstance(run(address, output_type=Weather), Weather)


def test_text_beside_a_tool(address: str) -> None:
    assert isinstance(run(address, tools=[weather]), str)
