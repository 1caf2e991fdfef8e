"""Fields of POST /v1/responses: each arrives in the chat, is refused by name, or has no effect."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from adaptrt.serve.openai_chat_fields import ChatRequest
from adaptrt.serve.openai_fields import SamplingFields
from adaptrt.serve.responses_fields import ResponseRequest, chat_of, listed, messages_of, tool_choice_echo

TOOL: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
CHAT_TOOL = {"type": "function", "function": {name: TOOL[name] for name in ("name", "parameters", "strict")}}
SCHEMA = {"type": "object"}
INFINITE = json.loads("1e999")
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}


def request(**fields: Any) -> ResponseRequest:
    return ResponseRequest.model_validate({"input": "a", **fields})


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **fields})


SHARED: dict[str, Any] = {
    "model": "poet",
    "adapter_id": "poet",
    "lora_path": "poet",
    "lora_request": {"lora_name": "poet"},
    "lora": [{"id": 0, "scale": 1.0}],
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "repetition_penalty": 1.1,
    "seed": 7,
    "min_tokens": 2,
    "stop": ["x", "y"],
    "stop_token_ids": [3],
    "ignore_eos": True,
    "skip_special_tokens": False,
    "logit_bias": {"3": 1.5},
    "priority": 3,
    "cache_salt": "s",
    "stream": True,
}
NAMED = {"type": "function", "name": "f"}
CHAT_NAMED = {"type": "function", "function": {"name": "f"}}
RECEIPT = {"return_receipt": True, "return_receipt_prompt": True}
OTHERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(({name: value}, {name: value}) for name, value in SHARED.items()),
    (RECEIPT, RECEIPT),
    ({"chat_template_kwargs": {"a": 1}}, {"chat_template_kwargs": {"a": 1}}),
    ({"tools": [TOOL]}, {"tools": [CHAT_TOOL]}),
    ({"tools": [TOOL], "tool_choice": "none"}, {"tools": [CHAT_TOOL], "tool_choice": "none"}),
    ({"tools": [TOOL], "tool_choice": "required"}, {"tools": [CHAT_TOOL], "tool_choice": "required"}),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}},
        {"tools": [CHAT_TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}},
        {
            "tools": [CHAT_TOOL],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CHAT_NAMED]}},
        },
    ),
    ({"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
    ({"max_output_tokens": 5}, {"max_completion_tokens": 5}),
    ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
    ({"text": {"format": {"type": "text"}}}, {"response_format": {"type": "text"}}),
    ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
    (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
    ),
    (
        {"include": ["message.output_text.logprobs"], "top_logprobs": 3},
        {"logprobs": True, "top_logprobs": 3},
    ),
    (
        {"include": ["message.output_text.logprobs"], "tools": [TOOL]},
        {"logprobs": True, "tools": [CHAT_TOOL]},
    ),
]


@pytest.mark.parametrize(("fields", "expected"), OTHERS, ids=lambda value: "+".join(value))
def test_a_field_arrives_in_the_chat(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    made, wanted = chat_of(request(**fields), []), chat(**expected)
    assert dict(made) == dict(wanted)
    # The model's recommended sampling replaces only what the client did not set.
    sampling = SamplingFields.model_fields.keys()
    assert made.model_fields_set & sampling == wanted.model_fields_set & sampling


def test_the_table_has_every_shared_field() -> None:
    assert SHARED.keys() == SamplingFields.model_fields.keys()


WITHOUT_EFFECT: dict[str, list[Any]] = {
    "user": ["u"],
    "safety_identifier": ["s"],
    "prompt_cache_key": ["k"],
    "prompt_cache_retention": ["in_memory"],
    "service_tier": ["auto", "default"],
    "max_tool_calls": [3],
    "metadata": [{"a": "b"}],
    "truncation": ["disabled"],
    "background": [False],
    "store": [True, False],
    "include": [[], ["reasoning.encrypted_content"]],
    "text": [{}, {"verbosity": "medium"}],
    "reasoning": [{}, {"summary": "auto"}, {"generate_summary": "auto"}],
    "conversation": [None],
    "prompt": [None],
    "previous_response_id": ["resp_1"],
    "tools": [[]],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WITHOUT_EFFECT.items() for value in values]
)
def test_a_field_does_not_change_the_chat(name: str, value: Any) -> None:
    assert dict(chat_of(request(**{name: value}), [])) == dict(chat())


ELSEWHERE = {
    "input": "test_items_become_messages",
    "instructions": "test_history_stands_between_instructions_and_input",
    "stream_options": "test_a_stream_may_say_that_it_is_not_padded",
}
"""Fields that a test of their own covers."""


def test_every_field_is_in_a_table() -> None:
    arriving = {name for fields, _ in OTHERS for name in fields}
    assert arriving | WITHOUT_EFFECT.keys() | ELSEWHERE.keys() == ResponseRequest.model_fields.keys()
    assert all(test in globals() for test in ELSEWHERE.values())


def test_a_stream_may_say_that_it_is_not_padded() -> None:
    made = chat_of(request(stream=True, stream_options={"include_obfuscation": False}), [])
    assert dict(made) == dict(chat(stream=True))


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"conversation": "c"}, "conversation", "expected no such field"),
    ({"prompt": {"id": "p"}}, "prompt", "expected no such field"),
    ({"background": True}, "background", "accepted: False"),
    ({"truncation": "auto"}, "truncation", "accepted: 'disabled'"),
    ({"service_tier": "flex"}, "service_tier", "'auto' or 'default'"),
    ({"prompt_cache_retention": "24h"}, "prompt_cache_retention", "accepted: 'in_memory'"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "accepted: 'medium'"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format", "has no schema"),
    ({"text": {"format": {"type": "text", "name": "n"}}}, "text.format", "type 'text' has"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "accepted: 'auto'"),
    ({"include": ["file_search_call.results"]}, "include", "accepted: 'message.output_text.logprobs'"),
    ({"tools": [{"type": "web_search"}]}, "tools", "[0] is of type 'web_search'; accepted: 'function'"),
    ({"tools": [TOOL | {"defer_loading": True}]}, "tools.0.defer_loading", "accepted: False"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice", "expected 'none'"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "", "tool_choice.name is 'g'"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{**NAMED, "name": "g"}]}},
        "",
        "tool_choice.tools[0].name is 'g'",
    ),
    ({"tool_choice": {"type": "allowed_tools", "mode": "none", "tools": [NAMED]}}, "tool_choice", "'mode': 'auto'"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice", "'mode': 'auto'"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}}, "tool_choice", "expected"),
    ({"top_logprobs": 3}, "", "include has no 'message.output_text.logprobs'"),
    ({"stream_options": {}}, "", "stream is false"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "False"),
    ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
    ({"input": []}, "input", "a list of one item or more"),
    ({"input": 3}, "input", "is 3; accepted: a text"),
    ({"input": [{"type": "item_reference", "id": "i"}]}, "input", "[0] is of type 'item_reference'"),
    ({"input": [3]}, "input", "[0] is of type None"),
    ({"input": [{"role": "user"}]}, "input.0.message.content", "required"),
    ({"input": [{"role": "robot", "content": "a"}]}, "input.0.message.role", "'system'"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
        "input.0.message.content",
        "[0] is of type 'input_file'; accepted: 'input_text', 'output_text', 'text', 'input_image'",
    ),
    (
        {"input": [{"role": "assistant", "content": [IMAGE]}]},
        "input.0.message",
        "content[0] of role 'assistant' is of type 'input_image'; expected a text",
    ),
    (
        {"input": [{"role": "user", "content": [IMAGE | {"file_id": "f"}]}]},
        "input.0.message.content.0.input_image.file_id",
        "images are not stored",
    ),
    (
        {"input": [{"type": "reasoning", "encrypted_content": "x"}]},
        "input.0.reasoning.encrypted_content",
        "expected no",
    ),
    ({"tools": [TOOL | {"parameters": {"maximum": INFINITE}}]}, "tools.0.parameters", "out of range"),
    (
        {"text": {"format": {"type": "json_schema", "schema": {"maximum": INFINITE}}}},
        "text.format.schema",
        "out of range",
    ),
    ({"n": 2}, "n", "not permitted"),
]


@pytest.mark.parametrize(("fields", "place", "said"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_field_that_cannot_be_used_is_named(fields: dict[str, Any], place: str, said: str) -> None:
    with pytest.raises(ValidationError) as raised:
        request(**fields)
    (problem,) = raised.value.errors()
    assert ".".join(map(str, problem["loc"])) == place
    assert said in problem["msg"]


def text(kind: str, text: str) -> list[dict[str, Any]]:
    return [{"type": kind, "text": text, "annotations": [], "logprobs": []}]


ITEMS: list[dict[str, Any]] = [
    {"role": "developer", "content": "d"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]},
    {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}],
     "content": [{"type": "reasoning_text", "text": "t"}], "encrypted_content": None},
    {"type": "message", "id": "m", "status": "completed", "role": "assistant", "content": text("output_text", "x")},
    {"type": "function_call", "id": "f", "call_id": "c1", "name": "f", "arguments": "{}", "status": "completed"},
    {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "o1"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "o2"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
    {"type": "function_call", "call_id": "c3", "name": "f", "arguments": "{}"},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "more"}]},
    {"role": "assistant", "content": "y"},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "cut"}]},
]  # fmt: skip


def call(call_id: str, name: str) -> dict[str, Any]:
    return {"id": call_id, "function": {"name": name, "arguments": "{}"}}


def test_items_become_messages() -> None:
    made = chat_of(request(input=ITEMS, instructions="i"), [])
    assert [message.model_dump(exclude_none=True, exclude_defaults=True) for message in made.messages] == [
        {"role": "system", "content": "i"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": "x",
            "reasoning_content": "t",
            "tool_calls": [call("c1", "f"), call("c2", "g")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "o1"},
        {"role": "tool", "tool_call_id": "c2", "content": "o2"},
        {
            "role": "assistant",
            "reasoning_content": "s",
            "tool_calls": [call("c3", "f")],
        },
        {"role": "assistant", "content": "y", "reasoning_content": "more"},
        {"role": "assistant", "content": "", "reasoning_content": "cut"},
    ]


def test_images_become_parts() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    output = {"type": "function_call_output", "call_id": "c", "output": [IMAGE]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    fields = request(input=[{"role": "user", "content": [IMAGE, {"type": "input_text", "text": "a"}]}, call, output])
    messages = [message.model_dump(exclude_none=True, exclude_unset=True) for message in messages_of(fields.input)]
    assert messages[0] == {"role": "user", "content": [image, {"type": "text", "text": "a"}]}
    assert messages[2] == {"role": "tool", "tool_call_id": "c", "content": [image]}
    item, _, result = map(listed, fields.input)
    assert item["content"] == [IMAGE | {"detail": "auto"}, {"type": "input_text", "text": "a"}]
    assert result["output"] == [IMAGE | {"detail": "auto"}]


def test_history_stands_between_instructions_and_input() -> None:
    history = chat().messages
    made = chat_of(request(input="b", instructions="i"), history)
    assert [message.content for message in made.messages] == ["i", "a", "b"]


def test_listed_items_have_ids_and_keep_those_of_the_client() -> None:
    items = [listed(item) for item in request(input=ITEMS).input]
    assert [item["id"].partition("_")[0] for item in items] == [
        *("msg", "msg", "r", "m", "f", "fc", "fco", "fco", "rs", "fc", "rs", "msg", "rs")
    ]
    assert len({item["id"] for item in items}) == len(items)
    assert items[1]["content"] == [{"type": "input_text", "text": t} for t in "ab"]
    assert items[3]["content"] == [{"type": "output_text", "text": "x", "annotations": []}]
    assert items[6]["output"] == [{"type": "input_text", "text": "o1"}]
    assert {item["status"] for item in items} == {"completed"}


@pytest.mark.parametrize(
    "choice",
    ["auto", "none", NAMED, {"type": "allowed_tools", "mode": "required", "tools": [NAMED, {**NAMED, "name": "g"}]}],
)
def test_a_response_repeats_the_choice_of_tools(choice: Any) -> None:
    tools = [TOOL, {**TOOL, "name": "g"}]
    fields = ResponseRequest.model_validate({"input": "a", "tools": tools, "tool_choice": choice})
    assert tool_choice_echo(fields.tool_choice) == choice
