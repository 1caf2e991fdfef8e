"""anthropic's own package with its defaults: messages, streams, tools with their results, and counts of tokens."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest
from conftest import MODEL, Weather

MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL = {"name": "weather", "description": "How it is outside.", "input_schema": Weather.model_json_schema()}


@pytest.fixture
def client(address: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=address.removesuffix("/v1"), api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("model", [MODEL, "pirate"])
def test_a_stream_is_the_message(client: anthropic.Anthropic, model: str) -> None:
    fields = {"model": model, "messages": MESSAGES, "max_tokens": 20, "extra_body": {"temperature": 0}}
    (block,) = client.messages.create(**fields).content
    with client.messages.stream(**fields) as stream:
        assert "".join(stream.text_stream) == block.text
        assert stream.get_final_message().usage.output_tokens > 0
    assert client.messages.count_tokens(model=model, messages=MESSAGES).input_tokens > 0


def test_a_tool_and_its_result(client: anthropic.Anthropic) -> None:
    fields = {"model": MODEL, "tools": [TOOL], "max_tokens": 100}
    asked = client.messages.create(
        **fields, messages=MESSAGES, tool_choice={"type": "any", "disable_parallel_tool_use": True}
    )
    assert asked.stop_reason == "tool_use"
    block = asked.content[-1]
    Weather.model_validate(block.input)
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "sun"}
    turns = [*MESSAGES, {"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**fields, messages=turns).type == "message"


def test_an_error_has_its_type(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as raised:
        client.messages.create(model="other", messages=MESSAGES, max_tokens=5)
    assert raised.value.body["error"]["type"] == "not_found_error"
