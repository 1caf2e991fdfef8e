"""OpenAI's Responses API through the openai package, with a model that answers as the test tells it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from support.http_server import http_server
from support.scripted_model import save_scripted_model
from support.serving import build_engine

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}\n{% endfor %}"
    "{{ '<call>' if tools else '<talk>' }}"
)
SCRIPT = {
    "<call>": ["Let me", " look.\n", "<tool_call>", '\n{"name": "wea', 'ther", "arguments"', ': {"city": "Paris"}}\n',
               "</tool_call>"],
    "<talk>": ["It is", " sunny."],
}  # fmt: skip
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("responses")
    model = save_scripted_model(SCRIPT, root / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    engine = build_engine(model, root, max_seq_len=512, max_input_len=500, lora_plugin="disable", dora_plugin="disable")
    with http_server(engine, "--served_model_name", "base", "--tool_call_parser", "hermes", "--num_threads", 1) as made:
        yield made


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as made:
        yield made


ASKED: Any = {"model": "base", "temperature": 0}


def test_a_response_is_the_chats_answer(client: openai.OpenAI) -> None:
    made = client.responses.create(**ASKED, input="weather?", instructions="be brief", metadata={"a": "b"})
    messages: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "weather?"}]
    chat = client.chat.completions.create(**ASKED, messages=messages)
    assert chat.usage is not None
    assert made.usage is not None
    assert (made.output_text, made.status, made.instructions) == ("It is sunny.", "completed", "be brief")
    assert made.output_text == chat.choices[0].message.content
    assert (made.usage.input_tokens, made.usage.output_tokens, made.usage.total_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
        chat.usage.total_tokens,
    )
    assert (made.metadata, made.temperature, made.error) == ({"a": "b"}, 0, None)


def test_a_stream_ends_with_the_whole_response(client: openai.OpenAI) -> None:
    with client.responses.stream(**ASKED, input="weather?") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert final.output_text == "It is sunny."
    kept = client.responses.retrieve(final.id)
    assert (kept.output_text, [item.id for item in kept.output]) == ("It is sunny.", [item.id for item in final.output])


def test_a_loop_of_tools_by_previous_response_or_by_items(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASKED, input="weather?", tools=TOOLS)
    message, call = first.output
    assert (message.type, call.type) == ("message", "function_call")
    assert call.type == "function_call"
    assert (first.output_text, call.name, json.loads(call.arguments)) == ("Let me look.", "weather", {"city": "Paris"})
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    second = client.responses.create(**ASKED, input=[result], previous_response_id=first.id)
    items: Any = [{"role": "user", "content": "weather?"}, *first.output, result]
    same = client.responses.create(**ASKED, input=items, store=False)
    assert second.output_text == same.output_text == "It is sunny."
    assert second.usage is not None
    assert same.usage is not None
    assert second.usage.input_tokens == same.usage.input_tokens
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(same.id)


def test_a_streamed_call(client: openai.OpenAI) -> None:
    events = list(client.responses.create(**ASKED, input="weather?", tools=TOOLS, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert json.loads(arguments) == {"city": "Paris"}
    last = events[-1]
    assert last.type == "response.completed"
    assert [item.type for item in last.response.output] == ["message", "function_call"]


def test_structured_output(client: openai.OpenAI) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "name": "place", "schema": schema}
    made = client.responses.create(**ASKED, input="where?", text={"format": form}, max_output_tokens=40)
    assert json.loads(made.output_text) == {"city": "Paris"}
    forced = client.responses.create(
        **ASKED,
        input="a",
        tools=[{"type": "function", "name": "weather", "parameters": schema, "strict": True}],
        tool_choice={"type": "function", "name": "weather"},
    )
    assert [item.type for item in forced.output] == ["function_call"]


def test_log_probs_and_lengths(client: openai.OpenAI) -> None:
    made = client.responses.create(
        **ASKED, input="a", include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=1
    )
    assert (made.status, made.incomplete_details and made.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    (message,) = made.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    (entry,) = part.logprobs
    assert (entry.token, len(entry.top_logprobs)) == ("It is", 2)


def test_stored_responses(client: openai.OpenAI) -> None:
    made = client.responses.create(**ASKED, input=[{"role": "user", "content": c} for c in "abc"])
    assert client.responses.retrieve(made.id).output == made.output
    listed = list(client.responses.input_items.list(made.id, limit=2, order="asc"))
    assert [item.content[0].text for item in listed if item.type == "message"] == ["a", "b", "c"]  # type: ignore[union-attr]
    newest = client.responses.input_items.list(made.id, limit=1)
    assert (newest.data[0].id, newest.has_more) == (listed[-1].id, True)
    with pytest.raises(openai.BadRequestError, match="is completed; expected one that is being generated"):
        client.responses.cancel(made.id)
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    with pytest.raises(openai.NotFoundError, match="is not stored here") as raised:
        client.responses.create(**ASKED, input="a", previous_response_id=made.id)
    assert raised.value.param == "previous_response_id"


def test_fields_that_cannot_be_used_are_named(client: openai.OpenAI) -> None:
    for extra, param in (
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"input": "x" * 600}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]}, "input"),
    ):
        with pytest.raises(openai.BadRequestError) as raised:
            client.responses.create(**{**ASKED, "input": "a", **extra})
        assert str(raised.value.param).partition(".")[0] == param
