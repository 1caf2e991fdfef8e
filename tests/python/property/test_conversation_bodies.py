"""Bodies of responses and messages with random mistakes: each is refused by name, or becomes a chat."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from adaptrt.serve import messages, responses
from adaptrt.serve.errors import ApiError
from adaptrt.serve.http import parse_json
from adaptrt.serve.messages_fields import CountRequest, MessagesRequest
from adaptrt.serve.openai_chat_fields import ChatRequest
from adaptrt.serve.options import ServerLimits
from adaptrt.serve.responses_fields import ResponseRequest, listed

RESPONSE: dict[str, Any] = {
    "model": "m",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}],
         "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": []}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "o"},
    ],
    "instructions": "i",
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}],
    "tool_choice": {"type": "function", "name": "f"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}, "verbosity": "medium"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "stop": ["a"],
    "logit_bias": {"3": 1},
    "chat_template_kwargs": {"a": 1},
}  # fmt: skip
COUNT: dict[str, Any] = {
    "model": "m",
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": ""},
                                          {"type": "text", "text": "x"},
                                          {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 10},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
}  # fmt: skip
MESSAGE: dict[str, Any] = {**COUNT, "max_tokens": 5, "metadata": {"user_id": "u"}, "stop_sequences": ["x"]}
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 3.5, 10**40, float("inf"), "", "a", "text", "message", "user", "assistant", "system"),
    *([], {}, [[]], [{}], ["a"], [None], {"a": None}, {"type": "text"}, {"type": "message"}, {"type": ["a"]}),
    *({"role": ["a"]}, {"type": "input_text", "text": "q"}, {"type": "function", "name": ["x"]}),
]
KEYS = ("type", "role", "content", "name", "extra", "id", "input", "text")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(value[key], (*path, key))


def spoiled(body: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Returns a copy with one to three changes."""
    made = copy.deepcopy(body)
    for _ in range(draw.randint(1, 3)):
        *path, last = draw.choice(list(places(made)))
        inside = made
        for key in path:
            inside = inside[key]
        kind = draw.random()
        if kind < 0.2:
            inside.pop(last)
        elif kind < 0.35 and isinstance(inside, dict):
            inside[draw.choice(KEYS)] = draw.choice(VALUES)
        else:
            inside[last] = copy.deepcopy(draw.choice(VALUES))
        if not made:
            break
    return made


def of_response(fields: ResponseRequest) -> ChatRequest:
    json.dumps([listed(item) for item in fields.input], allow_nan=False)
    return responses._chat(fields, b"[]")


@pytest.mark.parametrize(
    ("model", "body", "translate"),
    [
        (ResponseRequest, RESPONSE, of_response),
        (MessagesRequest, MESSAGE, messages._chat),
        (CountRequest, COUNT, messages._chat),
    ],
)
def test_a_body_is_refused_or_becomes_a_chat(model: Any, body: dict[str, Any], translate: Callable[..., Any]) -> None:
    draw = random.Random(7)
    num_chats = 0
    refusals: set[int] = set()
    for _ in range(1500):
        # Python writes infinity in a form that is not JSON.
        text = json.dumps(spoiled(body, draw)).replace("Infinity", "1e999")
        try:
            assert isinstance(translate(parse_json(text.encode(), model, ServerLimits())), ChatRequest)
            num_chats += 1
        except ApiError as error:
            refusals.add(int(error.status))
    assert refusals == {400}
    assert 50 < num_chats < 1450
