"""pydantic-ai with its defaults: strict functions, and answers as calls of a required function."""

from __future__ import annotations

import pytest
from conftest import MODEL, City, Weather
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

pytestmark = pytest.mark.parametrize("kind", [OpenAIChatModel, OpenAIResponsesModel])


def provider(address: str) -> OpenAIProvider:
    return OpenAIProvider(base_url=address, api_key="none")


SETTINGS = {"max_tokens": 200, "temperature": 0.0}


def test_an_answer_with_a_form(address: str, kind: type) -> None:
    for name in (MODEL, "pirate"):
        agent = Agent(kind(name, provider=provider(address)), output_type=Weather, model_settings=SETTINGS)
        answer = agent.run_sync("What is the weather in Paris?").output
        assert isinstance(answer, Weather)


def test_text_beside_a_tool(address: str, kind: type) -> None:
    agent = Agent(kind(MODEL, provider=provider(address)), model_settings=SETTINGS)

    @agent.tool_plain
    def weather(city: City) -> str:
        """How it is outside."""
        return f"sun in {city}"

    assert agent.run_sync("What is the weather in Paris?").output
