"""What the bodies of OpenAI's routes may hold, and how what they may not is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from adaptrt.serve.errors import ApiError
from adaptrt.serve.http import parse_json
from adaptrt.serve.openai_chat_fields import ChatRequest, TokenizeRequest
from adaptrt.serve.openai_fields import CompletionRequest
from adaptrt.serve.options import ServerLimits

LIMITS = ServerLimits()
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def completion(**fields: Any) -> CompletionRequest:
    return parse_json(json.dumps({"prompt": "a", **fields}).encode(), CompletionRequest, LIMITS)


def chat(**fields: Any) -> ChatRequest:
    return parse_json(json.dumps({"messages": [USER], **fields}).encode(), ChatRequest, LIMITS)


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [2, 3]], ["a", [2, 3]]),
    ],
)
def test_prompts(prompt: Any, parsed: object) -> None:
    assert completion(prompt=prompt).prompt == parsed


def test_null_is_as_if_absent() -> None:
    assert completion(temperature=None, stop=None, stream_options=None) == completion()
    message = {**USER, "name": None, "tool_calls": None}
    assert chat(messages=[message], tools=None, response_format=None) == chat()


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"prompt": []}, "prompt", "is an empty list"),
        ({"prompt": {}}, "prompt", "accepted: a text"),
        ({"prompt": [1, "a"]}, "prompt", "[1] is 'a'; accepted: a token id"),
        ({"prompt": [[1], [True]]}, "prompt", "[1][0] is True"),
        ({"prompt": [2**31]}, "prompt", "[0] is 2147483648"),
        ({"prompt": [-1]}, "prompt", "[0] is -1"),
        ({"prompt": ["a", 1]}, "prompt", "[1] is 1; accepted: a text"),
        ({"prompt": None}, "prompt", "Field required"),
        ({"tempersture": 1}, "tempersture", "is not known here"),
        ({"temperature": "1"}, "temperature", "valid number"),
        ({"temperature": True}, "temperature", "valid number"),
        ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
        ({"temperature": 10**400}, "temperature", ""),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"top_k": 2**31}, "top_k", "less than or equal to"),
        ({"seed": 2**64}, "seed", "less than"),
        ({"seed": 10**400}, "seed", ""),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": True}, "n", "valid integer"),
        ({"n": 2**31}, "n", "less than or equal to"),
        ({"best_of": 3}, "best_of", "is 3; accepted: 1 (no answers are generated but those that are returned"),
        ({"suffix": "x"}, "suffix", "accepted: ''"),
        ({"use_beam_search": True}, "use_beam_search", "beam search is not supported"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"logprobs": True}, "logprobs", "valid integer"),
        ({"max_tokens": 0}, None, "max_tokens is 0; accepted: 1 or more, and 0 with echo"),
        ({"max_tokens": 4, "min_tokens": 5}, None, "min_tokens is 5; max_tokens is 4"),
        ({"min_tokens": 1, "stop": "a"}, None, "min_tokens does not keep stop from ending"),
        ({"stop": [""]}, "stop.0", "at least 1 character"),
        ({"stop": ["a"] * 65}, "stop", "at most 64 items"),
        ({"stop": "a" * 1025}, "stop.0", "at most 1024 characters"),
        ({"stream_options": {"include_usage": True}}, None, "stream is false"),
        ({"stream_options": {"x": 1}, "stream": True}, "stream_options.x", "is not known here"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "has 'a'; accepted: token ids"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "has 101 for token 1; accepted: -100 to 100"),
        ({"logit_bias": [1]}, "logit_bias", "accepted: an object"),
        ({"priority": 101}, "priority", "less than or equal to 100"),
        ({"cache_salt": ""}, "cache_salt", "at least 1 character"),
    ],
)
def test_what_completions_refuse(fields: dict[str, Any], param: str | None, said: str) -> None:
    with pytest.raises(ApiError) as refused:
        completion(**fields)
    assert refused.value.param == param
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": "hi"}, "messages", "valid list"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role", "'system', 'user'"),
        ({"messages": [{"role": "user"}]}, "messages.0", "a message with role 'user' has no content"),
        ({"messages": [{**USER, "audio": {}}]}, "messages.0.audio", "is not known here"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content",
            "[0] is of type 'image_url'; accepted: 'text'",
        ),
        ({"messages": [{**USER, "content": 5}]}, "messages.0.content", "is 5; accepted: a text"),
        (
            {"messages": [{**USER, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
            "messages.0",
            "tool_calls",
        ),
        ({"max_tokens": 3, "max_completion_tokens": 4}, None, "give one"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"top_logprobs": 3}, None, "logprobs is false"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "Input should be 'text', 'json_object'"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "is 'required'; accepted: 'none', 'auto'"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "accepted: 'none'",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
            "tools.0.function.strict",
            "schema",
        ),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "accepted: True"),
        ({"continue_final_message": True}, None, "both true"),
        ({"continue_final_message": True, "add_generation_prompt": False}, None, "is not the assistant's"),
        ({"chat_template": "x"}, "chat_template", "is not known here"),
        ({"audio": {}}, "audio", "is not known here"),
    ],
)
def test_what_chats_refuse(fields: dict[str, Any], param: str | None, said: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat(**fields)
    assert refused.value.param == param
    assert said in str(refused.value)


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": [USER]}, {"messages": []}, {"prompt": None}])
def test_one_of_a_text_and_a_conversation_is_tokenised(body: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="expected prompt, a text, or messages"):
        parse_json(json.dumps(body).encode(), TokenizeRequest, LIMITS)


def test_half_a_surrogate_pair_is_refused_and_a_pair_is_a_character() -> None:
    with pytest.raises(ApiError, match=r"half a surrogate pair, \\ud83d"):
        parse_json(rb'{"prompt": "\ud83d"}', CompletionRequest, LIMITS)
    with pytest.raises(ApiError, match="half a surrogate pair"):
        parse_json(rb'{"prompt": "a", "\udead": 1}', CompletionRequest, LIMITS)
    assert parse_json(rb'{"prompt": "\ud83d\ude00"}', CompletionRequest, LIMITS).prompt == ["\U0001f600"]
