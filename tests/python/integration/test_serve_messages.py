"""Anthropic's Messages API through the anthropic package, with a model that answers as the test tells it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from support.http_server import http_server
from support.scripted_model import save_scripted_model
from support.serving import build_engine

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}"
    "{% if not loop.last or message.role != 'assistant' %}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<call>' if tools else '<ponder>' if enable_thinking else '<talk>' }}{% endif %}"
    "{# <think> #}"
)
SCRIPT = {
    "<call>": ["Let me", " look.\n", "<tool_call>", '\n{"name": "wea', 'ther", "arguments"', ': {"city": "Paris"}}\n',
               "</tool_call>"],
    "<talk>": ["It is", " sunny."],
    "<ponder>": ["<think>", "Look", " outside.", "</think>", "Sun", "shine."],
}  # fmt: skip
TOOLS: Any = [{"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}]
ASKED: Any = {"model": "base", "max_tokens": 100, "messages": [{"role": "user", "content": "weather?"}]}
KEY = "secret"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("messages")
    model = save_scripted_model(SCRIPT, root / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    engine = build_engine(model, root, max_seq_len=512, max_input_len=500, lora_plugin="disable", dora_plugin="disable")
    flags = ("--served_model_name", "base", "--tool_call_parser", "hermes", "--num_threads", 1, "--api_key", KEY)
    with http_server(engine, *flags, "--generation_config", "vllm") as made:
        yield made


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=address, api_key=KEY, max_retries=0) as made:
        yield made


def test_a_message_is_the_chats_answer(client: anthropic.Anthropic, address: str) -> None:
    made = client.messages.create(**ASKED, system="be brief", extra_body={"temperature": 0})
    messages: Any = [{"role": "system", "content": "be brief"}, *ASKED["messages"]]
    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as other:
        chat = other.chat.completions.create(model="base", messages=messages, temperature=0)
    (block,) = made.content
    assert block.type == "text"
    assert (block.text, made.stop_reason, made.model) == ("It is sunny.", "end_turn", "base")
    assert block.text == chat.choices[0].message.content
    assert chat.usage is not None
    num_input_tokens = made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0)
    assert (num_input_tokens, made.usage.output_tokens) == (chat.usage.prompt_tokens, chat.usage.completion_tokens)
    counted = client.messages.count_tokens(model="base", messages=ASKED["messages"], system="be brief")
    assert counted.input_tokens == num_input_tokens


def test_a_stream_adds_up(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "It is sunny."
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", 2)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_loop_of_tools(client: anthropic.Anthropic, is_streamed: bool) -> None:
    if is_streamed:
        with client.messages.stream(**ASKED, tools=TOOLS) as stream:
            first = stream.get_final_message()
    else:
        first = client.messages.create(**ASKED, tools=TOOLS)
    text, call = first.content
    assert text.type == "text"
    assert call.type == "tool_use"
    assert (text.text, call.name, call.input, first.stop_reason) == (
        "Let me look.",
        "weather",
        {"city": "Paris"},
        "tool_use",
    )
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "sun"}
    # Clients send the blocks back unchanged.
    messages: Any = [*ASKED["messages"], {"role": "assistant", "content": first.content},
                     {"role": "user", "content": [result]}]  # fmt: skip
    second = client.messages.create(**{**ASKED, "messages": messages})
    assert [block.type == "text" and block.text for block in second.content] == ["It is sunny."]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_reasoning(client: anthropic.Anthropic, address: str, is_streamed: bool) -> None:
    asked: Any = {**ASKED, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    if is_streamed:
        with client.messages.stream(**asked) as stream:
            made = stream.get_final_message()
    else:
        made = client.messages.create(**asked)
    thinking, text = made.content
    assert thinking.type == "thinking"
    assert text.type == "text"
    assert (thinking.thinking, text.text, made.stop_reason) == ("Look outside.", "Sunshine.", "end_turn")
    assert made.usage.output_tokens_details is not None
    assert (made.usage.output_tokens, made.usage.output_tokens_details.thinking_tokens) == (6, 3)
    # Clients send the blocks back unchanged.
    messages: Any = [*ASKED["messages"], {"role": "assistant", "content": made.content}, *ASKED["messages"]]
    client.messages.create(**{**ASKED, "messages": messages})

    asked = {"model": "base", "input": "weather?", "extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as other:
        if is_streamed:
            events = list(other.responses.create(**asked, include=["message.output_text.logprobs"], stream=True))
            deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
            assert "".join(deltas) == "Look outside."
            response = events[-1].response
        else:
            response = other.responses.create(**asked, include=["message.output_text.logprobs"])
        item, message = response.output
        assert (item.type, item.content[0].text, response.output_text) == ("reasoning", "Look outside.", "Sunshine.")
        assert [entry.token for entry in message.content[0].logprobs] == ["Sun", "shine."]
        assert response.usage.output_tokens_details.reasoning_tokens == 3
        items: Any = [{"role": "user", "content": "weather?"}, *response.output, {"role": "user", "content": "why?"}]
        assert other.responses.create(model="base", input=items).output_text == "It is sunny."


@pytest.mark.parametrize(("budget", "thought"), [(1, "Look"), (2, "Look outside."), (99, "Look outside.")])
def test_a_budget_for_reasoning(client: anthropic.Anthropic, budget: int, thought: str) -> None:
    made = client.messages.create(**ASKED, thinking={"type": "enabled", "budget_tokens": budget})
    thinking, text = made.content
    assert (thinking.type, text.type) == ("thinking", "text")
    assert (thinking.thinking, text.text, made.stop_reason) == (thought, "Sunshine.", "end_turn")


def test_ends_of_answers(client: anthropic.Anthropic) -> None:
    assert client.messages.create(**{**ASKED, "max_tokens": 1}).stop_reason == "max_tokens"
    stopped = client.messages.create(**ASKED, stop_sequences=["sun"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "sun")
    # Clients ask for more tokens than the context has.
    assert client.messages.create(**{**ASKED, "max_tokens": 5000}).stop_reason == "end_turn"
    full = client.messages.create(**{**ASKED, "max_tokens": 5000}, extra_body={"ignore_eos": True})
    assert full.stop_reason == "model_context_window_exceeded"
    num_input_tokens = full.usage.input_tokens + (full.usage.cache_read_input_tokens or 0)
    assert num_input_tokens + full.usage.output_tokens == 512


def test_the_last_message_of_the_assistant_is_continued(client: anthropic.Anthropic) -> None:
    messages: Any = [*ASKED["messages"], {"role": "assistant", "content": "It is"}]
    made = client.messages.create(**{**ASKED, "messages": messages})
    assert [block.type == "text" and block.text for block in made.content] == [" sunny."]


def test_a_tool_that_must_be_called(client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
    tools: Any = [{"name": "weather", "strict": True, "input_schema": schema}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}):
        # The model may think before the call, but not until the answer's end.
        asked: Any = {**ASKED, "tools": tools, "tool_choice": choice, "extra_body": {"temperature": 0}}
        made = client.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 1})
        (call,) = (block for block in made.content if block.type == "tool_use")
        assert (call.input, made.stop_reason) == ({"city": "Paris"}, "tool_use")


def test_errors_have_anthropics_form(client: anthropic.Anthropic, address: str) -> None:
    document: Any = [{"role": "user", "content": [{"type": "document", "source": {"type": "url", "url": "u"}}]}]
    with pytest.raises(anthropic.BadRequestError, match=r"content of role 'user'.*'document'") as raised:
        client.messages.create(**{**ASKED, "messages": document})
    body: Any = raised.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["request_id"] == raised.value.response.headers["x-request-id"]
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**ASKED, "model": "nobody"})
    with (
        anthropic.Anthropic(base_url=address, api_key="wrong", max_retries=0) as other,
        pytest.raises(anthropic.AuthenticationError, match="x-api-key"),
    ):
        other.messages.create(**ASKED)
    refused = httpx.get(f"{address}/v1/messages/batches", headers={"x-api-key": KEY})
    assert (refused.status_code, json.loads(refused.text)["error"]["type"]) == (404, "not_found_error")
    bearer = httpx.post(f"{address}/v1/messages", headers={"Authorization": f"Bearer {KEY}"}, json=ASKED)
    assert bearer.status_code == 200
