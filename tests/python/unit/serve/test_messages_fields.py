"""Fields of Anthropic's messages: each arrives in the chat, is refused by name, or has no effect."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from adaptrt.serve.messages_fields import CountRequest, MessagesRequest, chat_of
from adaptrt.serve.openai_chat_fields import ChatRequest
from adaptrt.serve.openai_fields import SamplingFields

USER = [{"role": "user", "content": "a"}]
TOOL: dict[str, Any] = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
CHAT_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
}
STRICT = {"type": "function", "function": {**CHAT_TOOL["function"], "strict": True}}
CACHE = {"type": "ephemeral", "ttl": "5m"}


def request(**fields: Any) -> MessagesRequest:
    return MessagesRequest.model_validate({"messages": USER, "max_tokens": 5, **fields})


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": USER, "max_completion_tokens": 5, **fields})


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
THINKS = {"enable_thinking": True, "thinking": True}
RECEIPT = {"return_receipt": True, "return_receipt_prompt": True}
OTHERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(({name: value}, {name: value}) for name, value in SHARED.items()),
    (RECEIPT, RECEIPT),
    ({"max_tokens": 7}, {"max_completion_tokens": 7}),
    ({"stop_sequences": ["x"]}, {"stop": ["x"]}),
    ({"system": "s"}, {"messages": [{"role": "system", "content": "s"}, *USER]}),
    (
        {"system": [{"type": "text", "text": t, "cache_control": CACHE} for t in "st"]},
        {"messages": [{"role": "system", "content": [{"type": "text", "text": t} for t in "st"]}, *USER]},
    ),
    ({"chat_template_kwargs": {"a": 1}}, {"chat_template_kwargs": {"a": 1}}),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"chat_template_kwargs": THINKS, "thinking_token_budget": 1024},
    ),
    ({"thinking": {"type": "adaptive", "display": "summarized"}}, {"chat_template_kwargs": THINKS}),
    (
        {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"thinking": True}},
        {"chat_template_kwargs": {"enable_thinking": False, "thinking": True}},
    ),
    ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": {"type": "object"}},
            }
        },
    ),
    ({"tools": [TOOL | {"type": "custom", "cache_control": CACHE}]}, {"tools": [CHAT_TOOL]}),
    ({"tools": [TOOL | {"strict": True, "eager_input_streaming": True}]}, {"tools": [STRICT]}),
    ({"tools": [TOOL], "tool_choice": {"type": "auto"}}, {"tools": [CHAT_TOOL], "tool_choice": "auto"}),
    ({"tools": [TOOL], "tool_choice": {"type": "any"}}, {"tools": [CHAT_TOOL], "tool_choice": "required"}),
    ({"tools": [TOOL], "tool_choice": {"type": "none"}}, {"tools": [CHAT_TOOL], "tool_choice": "none"}),
    (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}},
        {"tools": [CHAT_TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        {"tools": [CHAT_TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    ),
    (
        {"messages": [*USER, {"role": "assistant", "content": "b"}]},
        {
            "messages": [*USER, {"role": "assistant", "content": "b"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ),
]


@pytest.mark.parametrize(("fields", "expected"), OTHERS, ids=lambda value: "+".join(value))
def test_a_field_arrives_in_the_chat(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    made, wanted = chat_of(request(**fields)), chat(**expected)
    assert dict(made) == dict(wanted)
    # The model's recommended sampling replaces only what the client did not set.
    sampling = SamplingFields.model_fields.keys()
    assert made.model_fields_set & sampling == wanted.model_fields_set & sampling


def test_the_table_has_every_shared_field() -> None:
    assert SHARED.keys() == SamplingFields.model_fields.keys()


WITHOUT_EFFECT: list[tuple[str, Any]] = [
    ("metadata", {"user_id": "u"}),
    ("service_tier", "auto"),
    ("service_tier", "standard_only"),
    ("cache_control", CACHE),
    ("tools", []),
    ("output_config", {}),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": "a", "citations": []}]}]),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": CACHE}]}]),
]


@pytest.mark.parametrize(("name", "value"), WITHOUT_EFFECT)
def test_a_field_does_not_change_the_chat(name: str, value: Any) -> None:
    assert dict(chat_of(request(**{name: value}))) == dict(chat())


def test_every_field_is_in_a_table() -> None:
    arriving = {name for fields, _ in OTHERS for name in fields}
    assert arriving | {name for name, _ in WITHOUT_EFFECT} == MessagesRequest.model_fields.keys()


def message(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


INFINITE = json.loads("1e999")
FILE = {"type": "base64", "media_type": "image/png", "data": "aGk="}
CALL = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (message("user", {"type": "document"}), "messages.0", "content of role 'user': [0] is of type 'document'; "
     "accepted: 'text', 'image', 'tool_result'"),
    (message("user", {"type": "image", "source": {"type": "file", "file_id": "f"}}),
     "messages.0.content.0.image.source", "'base64', 'url'"),
    (message("user", {"type": "image", "source": {**FILE, "media_type": "image/svg"}}),
     "messages.0.content.0.image.source.base64.media_type", "'image/webp'"),
    (message("assistant", {"type": "image", "source": FILE}), "messages.0", "[0] is of type 'image'; accepted: 'text'"),
    (message("user", CALL), "messages.0", "[0] is of type 'tool_use'"),
    (message("assistant", {"type": "redacted_thinking", "data": "x"}), "messages.0", "'text', 'thinking', 'tool_use'"),
    (message("user", {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "document"}]}),
     "messages.0.content.0.tool_result.content", "[0] is of type 'document'; accepted: 'text', 'image'"),
    (message("user", {"type": "text", "text": "a", "citations": [{}]}), "messages.0.content.0.text.citations", "acc"),
    (message("assistant", {**CALL, "caller": {"type": "x"}}), "messages.0.content.0.tool_use.caller", "accepted"),
    (message("assistant", CALL | {"input": {"a": INFINITE}}), "messages.0.content.0.tool_use.input", "out of range"),
    (message("user", {"type": "text"}), "messages.0.content.0.text.text", "required"),
    ({"messages": [{"role": "robot", "content": []}]}, "messages.0.role", "'user'"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages.0", "is 3; accepted: a text, or a list of blocks"),
    ({"messages": []}, "messages", "at least 1"),
    (message("assistant", CALL), "", "expected the tool's result"),
    ({"system": [{"type": "image"}]}, "system", "[0] is of type 'image'"),
    ({"max_tokens": None}, "max_tokens", "required"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools", "[0] is of type 'bash_20250124'"),
    ({"tools": [TOOL | {"defer_loading": True}]}, "tools.0.defer_loading", "accepted: False"),
    ({"tools": [TOOL | {"allowed_callers": ["code"]}]}, "tools.0.allowed_callers", "accepted: ['direct']"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice", "expected a name"),
    ({"tool_choice": {"type": "any", "name": "f"}}, "tool_choice", "expected a name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "", "tool_choice.name is 'g'; expected one of"),
    ({"thinking": {"type": "enabled", "display": "omitted"}}, "thinking.display", "accepted: 'summarized'"),
    ({"stop": ["a"], "stop_sequences": ["b"]}, "", "expected one of them"),
    ({"service_tier": "fast"}, "service_tier", "'auto'"),
    ({"container": "c"}, "container", "not permitted"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "place", "said"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_field_that_cannot_be_used_is_named(fields: dict[str, Any], place: str, said: str) -> None:
    with pytest.raises(ValidationError) as raised:
        request(**fields)
    (problem,) = raised.value.errors()
    assert ".".join(map(str, problem["loc"])) == place
    assert said in problem["msg"]


def test_blocks_become_messages() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                *({"type": "text", "text": t} for t in "cd"),
                {**CALL, "id": "c1", "input": {"city": "Köln"}, "caller": {"type": "direct"}},
                {**CALL, "id": "c2"},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "r1", "is_error": True},
                {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": t} for t in "xy"]},
                {"type": "tool_result", "tool_use_id": "c3"},
                {"type": "text", "text": "e"},
            ],
        },
        {"role": "system", "content": "s"},
        {"role": "user", "content": "f"},
        {"role": "assistant", "content": "g"},
    ]

    def parts(texts: str) -> list[dict[str, Any]]:
        return [{"type": "text", "text": text} for text in texts]

    made = chat_of(request(messages=messages)).messages
    assert [one.model_dump(exclude_none=True, exclude_defaults=True) for one in made] == [
        {"role": "user", "content": parts("ab")},
        {
            "role": "assistant",
            "content": parts("cd"),
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "function": {"name": "f", "arguments": '{"city": "Köln"}'}},
                {"id": "c2", "function": {"name": "f", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "r1"},
        {"role": "tool", "tool_call_id": "c2", "content": parts("xy")},
        {"role": "tool", "tool_call_id": "c3", "content": ""},
        {"role": "user", "content": "e"},
        {"role": "system", "content": "s"},
        {"role": "user", "content": "f"},
        {"role": "assistant", "content": "g"},
    ]


def test_images_become_parts() -> None:
    file, url = {"type": "image", "source": FILE}, {"type": "image", "source": {"type": "url", "url": "http://h/i"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [file]}
    made = chat_of(request(messages=[*USER, {"role": "user", "content": [file, url, result]}])).messages
    parts = [
        {"type": "image_url", "image_url": {"url": where}} for where in ("data:image/png;base64,aGk=", "http://h/i")
    ]
    assert [one.model_dump(exclude_none=True, exclude_defaults=True) for one in made] == [
        {"role": "user", "content": [{"type": "text", "text": "a"}, *parts]},
        {"role": "tool", "tool_call_id": "c", "content": parts[:1]},
    ]


def test_counting_needs_no_max_tokens() -> None:
    made = chat_of(CountRequest.model_validate({"messages": USER, "system": "s"}))
    assert [one.role for one in made.messages] == ["system", "user"]
    assert made.answer_tokens is None
