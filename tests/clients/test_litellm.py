"""litellm with its defaults, as a client of OpenAI's API, of vLLM's server and of Anthropic's API."""

from __future__ import annotations

import litellm
import pytest
from conftest import MODEL, Weather

MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": Weather.model_json_schema()}}


def fields(address: str, provider: str, model: str = MODEL) -> dict[str, object]:
    base = address.removesuffix("/v1") if provider == "anthropic" else address
    return {"model": f"{provider}/{model}", "api_base": base, "api_key": "none", "max_tokens": 100, "num_retries": 0}


@pytest.mark.parametrize("model", [MODEL, "pirate"])
@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_a_stream_is_the_chat(address: str, provider: str, model: str) -> None:
    asked = {**fields(address, provider, model), "messages": MESSAGES, "temperature": 0}
    whole = litellm.completion(**asked).choices[0].message.content
    chunks = litellm.completion(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_tools(address: str, provider: str) -> None:
    answer = litellm.completion(
        **fields(address, provider), messages=MESSAGES, tools=[TOOL], tool_choice="required", temperature=0
    )
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "weather"
    Weather.model_validate_json(call.function.arguments)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_an_answer_with_a_form(address: str, provider: str) -> None:
    answer = litellm.completion(**fields(address, provider), messages=MESSAGES, response_format=Weather)
    Weather.model_validate_json(answer.choices[0].message.content)


def test_responses(address: str) -> None:
    asked = {**fields(address, "openai"), "max_output_tokens": 20}
    del asked["max_tokens"]
    answer = litellm.responses(input="What is the weather in Paris?", **asked)
    assert answer.output[0].content[0].text
