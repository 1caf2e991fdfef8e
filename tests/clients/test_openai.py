"""openai's own package: chats, completions and responses, whole, streamed, with tools, forms and images."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import openai
import pytest
from conftest import MODEL, PICTURE, PICTURE_ANSWERS, PICTURE_ASKED, Weather

ASKED = "What is the weather in Paris?"
MESSAGES = [{"role": "user", "content": ASKED}]


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("model", [MODEL, "pirate"])
def test_a_stream_is_the_chat(client: openai.OpenAI, model: str) -> None:
    fields = {"model": model, "messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**fields).choices[0].message.content
    chunks = client.chat.completions.create(**fields, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    answer = client.responses.create(model=model, input=ASKED, max_output_tokens=20, temperature=0)
    assert answer.output_text == whole


def test_an_answer_with_a_form(client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "temperature": 0}
    chat = client.chat.completions.parse(**fields, messages=MESSAGES, response_format=Weather, max_tokens=100)
    assert isinstance(chat.choices[0].message.parsed, Weather)
    answer = client.responses.parse(**fields, input=ASKED, text_format=Weather, max_output_tokens=100)
    assert answer.output_parsed == chat.choices[0].message.parsed


def test_tools(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Weather)
    fields = {"model": MODEL, "temperature": 0, "tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(**fields, messages=MESSAGES, tools=[tool], max_tokens=100) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Weather)
    named = {"type": "function", **tool["function"]}
    with client.responses.stream(**fields, input=ASKED, tools=[named], max_output_tokens=100) as stream:
        (item,) = stream.get_final_response().output
    assert item.type == "function_call"
    assert Weather.model_validate_json(item.arguments) == call.function.parsed_arguments


def test_a_stored_conversation(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input=ASKED, max_output_tokens=10)
    assert client.responses.retrieve(first.id).output == first.output
    second = client.responses.create(
        model=MODEL, input="And in Rome?", previous_response_id=first.id, max_output_tokens=10
    )
    assert [item.type for item in client.responses.input_items.list(second.id)] == ["message"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_completions_and_models(client: openai.OpenAI) -> None:
    assert {model.id for model in client.models.list()} == {MODEL, "pirate"}
    assert client.completions.create(model="pirate", prompt="Q:").choices[0].text


@pytest.mark.parametrize("model", PICTURE_ANSWERS)
def test_an_image(seeing_address: str, model: str) -> None:
    url = "data:image/png;base64," + base64.b64encode(PICTURE.read_bytes()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": PICTURE_ASKED}]
    content = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": PICTURE_ASKED}]
    with openai.OpenAI(base_url=seeing_address, api_key="none", max_retries=0) as client:
        chat = client.chat.completions.create(model=model, messages=[{"role": "user", "content": parts}], temperature=0)
        assert chat.choices[0].message.content.strip() == PICTURE_ANSWERS[model]
        answer = client.responses.create(model=model, input=[{"role": "user", "content": content}], temperature=0)
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
