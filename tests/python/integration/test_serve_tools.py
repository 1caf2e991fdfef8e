"""Function calls through the openai package, with a model that answers as the test tells it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
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
SCRIPTS = {
    "hermes": {
        "<call>": [
            *("<think>", "\nI need ", "<tool_call>?", "\n</think>", "\n\n"),
            *("Let me", " look.\n"),
            *("<tool_call>", '\n{"name": "wea', 'ther", "arguments"', ': {"city": "Paris"}}\n', "</tool_call>"),
        ],
        "<talk>": ["It is", " sunny."],
    },
    "llama3_json": {
        "<call>": ["<|python_tag|>", '{"name": "wea', 'ther", "parameters"', ': {"city": "Paris"}', "}"],
        "<talk>": ["It is", " sunny."],
    },
}
TEXT_BEFORE = {"hermes": "Let me look.", "llama3_json": ""}
THOUGHT = {"hermes": "I need <tool_call>?", "llama3_json": None}
# One template shows the formats of calls and reasoning. For the other model a flag names the format.
SHOWN = {"hermes": "{# <tool_call> <think> #}", "llama3_json": ""}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "How it is outside",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
ASKED: Any = {"model": "base", "messages": [{"role": "user", "content": "weather?"}], "temperature": 0}


@pytest.fixture(scope="module", params=SCRIPTS)
def asked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, openai.OpenAI]]:
    kind = request.param
    root = tmp_path_factory.mktemp(kind)
    model = save_scripted_model(SCRIPTS[kind], root / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE + SHOWN[kind])
    flag = [] if SHOWN[kind] else ["--tool_call_parser", kind]
    engine = build_engine(model, root, max_seq_len=512, max_input_len=500, lora_plugin="disable", dora_plugin="disable")
    with (
        http_server(engine, "--served_model_name", "base", *flag) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield kind, client


def test_a_call_and_its_answer(asked: tuple[str, openai.OpenAI]) -> None:
    kind, client = asked
    answer = client.chat.completions.create(**ASKED, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.content or "") == TEXT_BEFORE[kind]
    assert getattr(choice.message, "reasoning", None) == THOUGHT[kind]
    details = answer.usage.completion_tokens_details
    assert (details and details.reasoning_tokens) == (3 if THOUGHT[kind] else None)
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "weather",
        {"city": "Paris"},
    )
    # Clients send the message back unchanged.
    messages = [*ASKED["messages"], choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sun"}]
    after = client.chat.completions.create(**{**ASKED, "messages": messages})
    assert (after.choices[0].message.content, after.choices[0].finish_reason) == ("It is sunny.", "stop")
    assert after.choices[0].message.tool_calls is None


def test_a_streamed_call(asked: tuple[str, openai.OpenAI]) -> None:
    kind, client = asked
    chunks = list(client.chat.completions.create(**ASKED, tools=TOOLS, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == TEXT_BEFORE[kind]
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == (THOUGHT[kind] or "")
    call, *more = [call for delta in deltas for call in delta.tool_calls or []]
    assert (call.index, call.type, call.function.name) == (0, "function", "weather")
    assert call.id
    assert [(other.index, other.id, other.function.name) for other in more] == [(0, None, None)] * len(more)
    assert json.loads("".join(one.function.arguments for one in (call, *more))) == {"city": "Paris"}
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["tool_calls"]


def test_no_call_without_tools(asked: tuple[str, openai.OpenAI]) -> None:
    _, client = asked
    for extra in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        answer = client.chat.completions.create(**ASKED, **extra)
        assert answer.choices[0].message.content == "It is sunny."


def test_a_call_of_a_function_that_is_not_there_is_text(asked: tuple[str, openai.OpenAI]) -> None:
    kind, client = asked
    other = [{"type": "function", "function": {"name": "other"}}]
    (choice,) = client.chat.completions.create(**ASKED, tools=other).choices
    written = "".join(SCRIPTS[kind]["<call>"])
    assert choice.message.content == (written.partition("</think>\n\n")[2] or written)
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")


STRICT: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    "extra",
    [
        {"tools": STRICT},
        {"tools": STRICT, "tool_choice": "required"},
        {"tools": STRICT, "tool_choice": NAMED},
        {"tools": TOOLS, "parallel_tool_calls": False},
        {"tools": STRICT, "response_format": {"type": "json_object"}},
    ],
    ids=["strict", "required", "named", "not parallel", "with a guide"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_guides_let_the_model_call_what_it_would(
    asked: tuple[str, openai.OpenAI], extra: dict[str, Any], stream: bool
) -> None:
    _, client = asked
    if not stream:
        (choice,) = client.chat.completions.create(**ASKED, **extra, max_tokens=200).choices
        calls, reason = choice.message.tool_calls, choice.finish_reason
    else:
        chunks = list(client.chat.completions.create(**ASKED, **extra, max_tokens=200, stream=True))
        first, *rest = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        first.function.arguments += "".join(call.function.arguments for call in rest)
        calls = [first]
        (reason,) = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason]
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("weather", {"city": "Paris"})
    ]
    assert reason == ("stop" if extra.get("tool_choice") == NAMED else "tool_calls")


def test_a_model_that_would_call_something_else_is_held_to_the_tools(asked: tuple[str, openai.OpenAI]) -> None:
    _, client = asked
    tools = json.loads(json.dumps(STRICT))
    tools[0]["function"]["name"] = "time"
    tools[0]["function"]["parameters"]["properties"] = {"zone": {"enum": ["UTC"]}}
    tools[0]["function"]["parameters"]["required"] = ["zone"]
    for choice in ("required", {"type": "function", "function": {"name": "time"}}):
        (answer,) = client.chat.completions.create(**ASKED, tools=tools, tool_choice=choice, max_tokens=200).choices
        (call,) = answer.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("time", {"zone": "UTC"})
        assert not answer.message.content


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_called(asked: tuple[str, openai.OpenAI], mode: str) -> None:
    _, client = asked
    parameters = {"properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
    tools: Any = [
        {"type": "function", "function": {"name": name, "strict": True, "parameters": parameters}}
        for name in ("weather", "time")
    ]
    listed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "time"}}]}
    choice: Any = {"type": "allowed_tools", "allowed_tools": listed}
    (answer,) = client.chat.completions.create(**ASKED, tools=tools, tool_choice=choice, max_tokens=150).choices
    # The model would call weather.
    (call,) = answer.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("time", {"city": "Paris"})
    assert answer.finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("extra", [{"tools": TOOLS}, {"tools": STRICT, "tool_choice": "required"}])
def test_reasoning_within_a_budget(asked: tuple[str, openai.OpenAI], extra: dict[str, Any], stream: bool) -> None:
    kind, client = asked
    fields: Any = {**ASKED, **extra, "extra_body": {"thinking_token_budget": 1}}
    if THOUGHT[kind] is None:
        with pytest.raises(openai.BadRequestError, match="neither the chat template nor --reasoning-parser"):
            client.chat.completions.create(**fields)
        return
    if stream:
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**fields, stream=True)]
        reasoning = "".join(getattr(delta, "reasoning", "") for delta in deltas)
        names = [call.function.name for delta in deltas for call in delta.tool_calls or [] if call.function.name]
    else:
        answer = client.chat.completions.create(**fields)
        (choice,) = answer.choices
        assert answer.usage.completion_tokens_details.reasoning_tokens == 2
        reasoning = choice.message.reasoning
        names = [call.function.name for call in choice.message.tool_calls]
    # The model would write two more tokens, of which one ends the reasoning.
    assert (reasoning, names) == ("I need", ["weather"])


def test_parameters_that_cannot_be_enforced_are_refused_by_name(asked: tuple[str, openai.OpenAI]) -> None:
    _, client = asked
    bad = json.loads(json.dumps([*STRICT, *STRICT]))
    bad[1]["function"]["name"] = "other"
    bad[1]["function"]["parameters"]["properties"] = {"a": {"type": "nothing"}}
    with pytest.raises(openai.BadRequestError, match=r"tools\[1\].function.parameters of 'other' cannot be enforced"):
        client.chat.completions.create(**ASKED, tools=bad)
    with pytest.raises(openai.BadRequestError, match="a guide that is not JSON"):
        client.chat.completions.create(**ASKED, tools=STRICT, extra_body={"guided_regex": "a"})


def test_a_server_without_a_parser_can_be_asked_for_a_call(tmp_path: Path) -> None:
    model = save_scripted_model(SCRIPTS["llama3_json"], tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    engine = build_engine(
        model, tmp_path, max_seq_len=512, max_input_len=500, lora_plugin="disable", dora_plugin="disable"
    )
    with (
        http_server(engine, "--served_model_name", "base") as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        (choice,) = client.chat.completions.create(**ASKED, tools=STRICT, tool_choice=NAMED, max_tokens=200).choices
        (call,) = choice.message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        with pytest.raises(openai.BadRequestError, match="started without --tool-call-parser"):
            client.chat.completions.create(**ASKED, tools=STRICT)
