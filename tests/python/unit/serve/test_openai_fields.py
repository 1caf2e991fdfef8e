"""Accepted and rejected fields of OpenAI's routes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from adaptrt.serve import messages_fields, responses
from adaptrt.serve.errors import ApiError
from adaptrt.serve.http import parse_json
from adaptrt.serve.openai_chat_fields import ChatRequest, TokenizeRequest, ToolChoice
from adaptrt.serve.openai_fields import CompletionRequest, EmbeddingRequest, Fields, GenerationFields, RerankRequest
from adaptrt.serve.options import ServerLimits

LIMITS = ServerLimits()
INT32_MAX = (1 << 31) - 1
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "g"}}
LISTED = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}
ALLOWED = {"type": "allowed_tools", "allowed_tools": LISTED}


# By model and field: the smallest and largest accepted values, then refused values.
BOUNDS: dict[type[Fields], dict[str, tuple[tuple[float, ...], tuple[float, ...]]]] = {
    GenerationFields: {
        "temperature": ((0,), (-0.01,)),
        "top_p": ((0.01, 1), (0, 1.01)),
        "top_k": ((-1, INT32_MAX), (-2, INT32_MAX + 1)),
        "min_p": ((0, 1), (-0.01, 1.01)),
        "presence_penalty": ((-2, 2), (-2.01, 2.01)),
        "frequency_penalty": ((-2, 2), (-2.01, 2.01)),
        "repetition_penalty": ((0.01,), (0,)),
        "seed": ((-(1 << 63), (1 << 64) - 1), (-(1 << 63) - 1, 1 << 64)),
        "min_tokens": ((0, INT32_MAX), (-1, INT32_MAX + 1)),
        "prompt_logprobs": ((0, 20), (-1, 21)),
        "truncate_prompt_tokens": ((-1, INT32_MAX), (-2, INT32_MAX + 1)),
        "priority": ((-100, 100), (-101, 101)),
        "n": ((1, INT32_MAX), (0, INT32_MAX + 1)),
    },
    CompletionRequest: {
        "max_tokens": ((0, INT32_MAX), (-1, INT32_MAX + 1)),
        "logprobs": ((0, 20), (-1, 21)),
    },
    ChatRequest: {
        "max_tokens": ((1, INT32_MAX), (0, INT32_MAX + 1)),
        "max_completion_tokens": ((1, INT32_MAX), (0, INT32_MAX + 1)),
        "top_logprobs": ((0, 20), (-1, 21)),
        "thinking_token_budget": ((-1, 0, INT32_MAX), (-2, INT32_MAX + 1)),
    },
    EmbeddingRequest: {
        "priority": ((-100, 100), (-101, 101)),
        "truncate_prompt_tokens": ((-1, INT32_MAX), (-2, INT32_MAX + 1)),
        "dimensions": ((1, INT32_MAX), (0, INT32_MAX + 1)),
    },
    RerankRequest: {
        "priority": ((-100, 100), (-101, 101)),
        "truncate_prompt_tokens": ((-1, INT32_MAX), (-2, INT32_MAX + 1)),
        "top_n": ((1, INT32_MAX), (0, INT32_MAX + 1)),
    },
}


def is_number_with_bounds(field: FieldInfo) -> bool:
    """True if a field's values are compared with a minimum or maximum."""
    schema = TypeAdapter(Annotated[field.annotation, field]).json_schema()
    bounds = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
    return any(bounds & part.keys() for part in (schema, *schema.get("anyOf", [])))


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


@pytest.mark.parametrize("model", BOUNDS)
def test_every_number_is_accepted_up_to_its_bounds(model: type[Fields]) -> None:
    inherited = GenerationFields.model_fields if GenerationFields in model.__mro__[1:] else {}
    checked = {
        name: field
        for name, field in model.model_fields.items()
        if name not in inherited and is_number_with_bounds(field)
    }
    assert checked.keys() == BOUNDS[model].keys()
    for name, field in checked.items():
        adapter: TypeAdapter[Any] = TypeAdapter(Annotated[field.annotation, field])
        accepted, refused = BOUNDS[model][name]
        for value in accepted:
            assert adapter.validate_python(value) == value
        for value in refused:
            with pytest.raises(ValidationError):
                adapter.validate_python(value)


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
        ({"use_beam_search": True, "stream": True}, None, "stream is True with use_beam_search; expected False: beams"),
        ({"use_beam_search": True, "stop": "a"}, None, "stop is ['a'] with use_beam_search"),
        ({"use_beam_search": True, "top_p": 0.5}, None, "top_p is 0.5 with use_beam_search; expected 1.0"),
        ({"early_stopping": True}, None, "early_stopping is true without use_beam_search"),
        ({"prompt_logprobs": 1, "stream": True}, None, "prompt_logprobs is given, but stream is true"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least 1 item"),
        ({"bad_words": [""]}, "bad_words.0", "at least 1 character"),
        ({"bad_words": ["a"] * 65}, "bad_words", "at most 64 items"),
        ({"truncate_prompt_tokens": 0}, None, "truncate_prompt_tokens is 0; expected 1 or more, or -1"),
        ({"truncation_side": "left"}, None, "truncation_side is given without truncate_prompt_tokens"),
        ({"request_id": "a b"}, "request_id", "is 'a b'; expected 1 to 128 printable ASCII characters"),
        ({"request_id": "a" * 129}, "request_id", "expected 1 to 128"),
        ({"request_id": "a\n"}, "request_id", "expected 1 to 128"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"logprobs": True}, "logprobs", "valid integer"),
        ({"max_tokens": 0}, None, "max_tokens is 0; accepted: 1 or more, and 0 with echo"),
        ({"max_tokens": 4, "min_tokens": 5}, None, "min_tokens is 5; expected at most max_tokens, 4"),
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
        ({"store": True}, "store", "is True; accepted: False (answers are not stored)"),
        ({"metadata": {"a": 1}}, "metadata.a", "valid string"),
        ({"metadata": {str(i): "a" for i in range(17)}}, "metadata", "at most 16 items"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a", "at most 512 characters"),
        ({"service_tier": "flex"}, "service_tier", "'auto' or 'default'"),
        ({"prompt_cache_retention": "24h"}, "prompt_cache_retention", "accepted: 'in_memory'"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "F"),
        ({"length_penalty": 1.5}, None, "length_penalty is 1.5 without use_beam_search; expected 1, or both"),
        ({"length_penalty": True}, "length_penalty", "valid number"),
        ({"lora_request": {"lora_int_id": 1}}, "lora_request.lora_name", "Field required"),
        ({"lora_request": {"lora_name": "a", "lora_ckpt_source": "nemo"}}, "lora_request.lora_ckpt_source", "'hf'"),
        ({"structured_outputs": {}}, "structured_outputs", "has []; expected one of json"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "has ['json', 'regex']; expected"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs",
            "has ['whitespace_pattern'] with regex; expected json",
        ),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}},
            "structured_outputs",
            "has whitespace_pattern and disable_any_whitespace; expected one",
        ),
    ],
)
def test_fields_that_completions_refuse(fields: dict[str, Any], param: str | None, said: str) -> None:
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
            {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x"}}]}]},
            "messages.0.content",
            "[0] is of type 'video_url'; accepted: 'text', 'image_url'",
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
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "is 'any'; expected 'none', 'auto', 'required' or {"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", "expected 'none', 'auto', 'required'"),
        ({"tool_choice": "required"}, None, "tool_choice asks for a call, but tools is empty"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            None,
            "tool_choice.function.name is 'g'; expected one of ['f']",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {**LISTED, "tools": [OTHER]}}},
            None,
            "tool_choice.allowed_tools.tools[0].function.name is 'g'; expected one of ['f']",
        ),
        ({"tool_choice": ALLOWED}, None, "tools[0].function.name is 'f'; expected one of []"),
        ({"tool_choice": {**ALLOWED, "allowed_tools": {**LISTED, "tools": []}}}, "tool_choice", "'mode': 'auto'"),
        ({"tool_choice": {**ALLOWED, "allowed_tools": {**LISTED, "mode": "none"}}}, "tool_choice", "'mode': 'auto'"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, None, "differ"),
        ({"messages": [{**USER, "reasoning_content": "h"}]}, "messages.0", "only an assistant's message may have it"),
        (
            {"messages": [{"role": "assistant", "content": "a", "reasoning_content": "b", "reasoning": "c"}]},
            "messages.0",
            "reasoning_content and reasoning are given, and they differ",
        ),
        ({"modalities": ["audio"]}, "modalities", "is ['audio']; accepted: ['text']"),
        ({"messages": [{**USER, "annotations": [{}]}]}, "messages.0.annotations", "accepted: []"),
        ({"messages": [{**USER, "cache_control": {"type": "x"}}]}, "messages.0.cache_control.type", "'ephemeral'"),
        ({"verbosity": "low"}, "verbosity", "accepted: 'medium'"),
        ({"prediction": {"type": "content", "content": "a"}}, "prediction", "is not known here"),
        ({"continue_final_message": True}, None, "both true"),
        ({"continue_final_message": True, "add_generation_prompt": False}, None, "is not the assistant's"),
        ({"chat_template": ""}, "chat_template", "at least 1 character"),
        ({"documents": [{"text": 1}]}, "documents.0.text", "valid string"),
        ({"audio": {}}, "audio", "is not known here"),
    ],
)
def test_fields_that_chats_refuse(fields: dict[str, Any], param: str | None, said: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat(**fields)
    assert refused.value.param == param
    assert said in str(refused.value)


def subclasses(cls: type[Fields]) -> Iterator[type[Fields]]:
    for found in cls.__subclasses__():
        yield found
        yield from subclasses(found)


def body_classes() -> list[type[Fields]]:
    # Classes are known once their modules are imported.
    found = {*subclasses(Fields), *subclasses(messages_fields.Fields), *subclasses(responses.Fields)}
    return sorted(found, key=lambda cls: cls.__name__)


@pytest.mark.parametrize("cls", body_classes())
def test_a_default_is_a_value_that_its_field_accepts(cls: type[Fields]) -> None:
    for name, field in cls.model_fields.items():
        default = field.get_default(call_default_factory=True, validated_data={})
        # JSON cannot express a ToolChoice.
        if not field.is_required() and not isinstance(default, ToolChoice):
            # Annotated needs a second argument, also for a field without metadata.
            validator = TypeAdapter(Annotated[(field.annotation, None, *field.metadata)])
            assert validator.validate_python(default) == default, name


def test_fields_that_ask_for_what_happens_anyway_are_taken() -> None:
    common = {
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "include_stop_str_in_output": False,
        "length_penalty": 1,
        "early_stopping": False,
        "detokenize": True,
        "spaces_between_special_tokens": True,
        "return_tokens_as_token_ids": False,
        "bad_words": [],
        "vllm_xargs": {},
        "guided_decoding_backend": "guidance",
        "stream": True,
        "stream_options": {"include_obfuscation": False},
    }
    completion(**common)
    cached = {"type": "ephemeral", "ttl": "1h"}
    parts = [{"type": "text", "text": "a", "cache_control": cached, "annotations": []}]
    said = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "reasoning_content": "h"}
    chat(
        **common,
        messages=[{"role": "user", "content": parts, "cache_control": cached}, said, USER],
        tools=[{**TOOL, "cache_control": cached}],
        modalities=["text"],
        verbosity="medium",
        documents=[],
        mm_processor_kwargs={},
        echo=False,
        include_reasoning=True,
    )


def test_reasoning_effort_is_a_variable_of_the_template() -> None:
    asked = chat(reasoning_effort="low", chat_template_kwargs={"a": 1, "reasoning_effort": "low"})
    assert asked.chat_template_kwargs == {"a": 1, "reasoning_effort": "low"}
    assert chat(reasoning_effort="low").chat_template_kwargs == {"reasoning_effort": "low"}
    assert chat().chat_template_kwargs == {}


@pytest.mark.parametrize(
    ("choice", "parsed"),
    [
        ("auto", ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "function": {"name": "f"}}, ToolChoice("required", "f")),
        (ALLOWED, ToolChoice("auto", allowed=("f",))),
        ({**ALLOWED, "allowed_tools": {**LISTED, "mode": "required"}}, ToolChoice("required", allowed=("f",))),
    ],
)
def test_tool_choices(choice: Any, parsed: ToolChoice) -> None:
    assert chat(tools=[TOOL], tool_choice=choice).tool_choice == parsed


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": [USER]}, {"messages": []}, {"prompt": None}])
def test_one_of_a_text_and_a_conversation_is_tokenised(body: dict[str, Any]) -> None:
    with pytest.raises(
        ApiError, match="expected one of prompt, a text, messages, a list that is not empty, or content"
    ):
        parse_json(json.dumps(body).encode(), TokenizeRequest, LIMITS)


def test_unknown_fields_are_named_before_a_missing_text() -> None:
    for body in ({"promt": "a"}, {"messages": [], "promt": "a"}, {"prompt": "a", "messages": [USER], "promt": 1}):
        with pytest.raises(ApiError, match="promt: is not known here") as refused:
            parse_json(json.dumps(body).encode(), TokenizeRequest, LIMITS)
        assert refused.value.param == "promt"


def test_half_a_surrogate_pair_is_refused_and_a_pair_is_a_character() -> None:
    with pytest.raises(ApiError, match=r"half a surrogate pair, \\ud83d"):
        parse_json(rb'{"prompt": "\ud83d"}', CompletionRequest, LIMITS)
    with pytest.raises(ApiError, match="half a surrogate pair"):
        parse_json(rb'{"prompt": "a", "\udead": 1}', CompletionRequest, LIMITS)
    assert parse_json(rb'{"prompt": "\ud83d\ude00"}', CompletionRequest, LIMITS).prompt == ["\U0001f600"]
