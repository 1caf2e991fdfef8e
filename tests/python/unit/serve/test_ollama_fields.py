"""Fields of Ollama's requests: each arrives in the chat or the completion, is refused by name, or has no effect."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from adaptrt.serve.errors import ApiError
from adaptrt.serve.ollama_create import OllamaCopyRequest, OllamaCreateRequest, OllamaDeleteRequest
from adaptrt.serve.ollama_fields import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    Preset,
    chat_of,
    chat_of_prompt,
    completion_of,
    plain_name,
)
from adaptrt.serve.ollama_models import OllamaShowRequest
from adaptrt.serve.ollama_options import OllamaOptions
from adaptrt.serve.openai_chat_fields import ChatRequest
from adaptrt.serve.openai_fields import CompletionRequest, Fields, SamplingFields

USER = [{"role": "user", "content": "a"}]
SYSTEM = {"role": "system", "content": "s"}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/*;base64,aGk="}}
CALLED = [{"role": "assistant", "images": ["aGk="], "tool_calls": [{"id": "c", "function": {"name": "f"}}]}]
CALLING = {
    "role": "assistant",
    "content": [IMAGE],
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
POET = Preset("poet")
OBJECT = {"response_format": {"type": "json_object"}}
OF_SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}}


def thinks(is_on: bool) -> dict[str, Any]:
    return {"chat_template_kwargs": {"enable_thinking": is_on, "thinking": is_on}}


ARRIVING_OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "num_predict": (7, {"max_completion_tokens": 7}),
    "temperature": (0.5, {"temperature": 0.5}),
    "top_k": (3, {"top_k": 3}),
    "top_p": (0.5, {"top_p": 0.5}),
    "min_p": (0.1, {"min_p": 0.1}),
    "seed": (7, {"seed": 7}),
    "stop": (["x", "y"], {"stop": ["x", "y"]}),
    "repeat_penalty": (1.1, {"repetition_penalty": 1.1}),
    "presence_penalty": (1.0, {"presence_penalty": 1.0}),
    "frequency_penalty": (1.0, {"frequency_penalty": 1.0}),
}
OPTIONS_WITHOUT_EFFECT: dict[str, Any] = {
    "num_ctx": 4,  # the routes compare it with the engine's context
    "repeat_last_n": 64,
    "typical_p": 1,
    "tfs_z": 1.0,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "penalize_newline": True,
    "f16_kv": True,
    "logits_all": False,
    "vocab_only": False,
    "embedding_only": False,
    "num_keep": 24,
    "num_batch": 512,
    "num_gpu": -1,
    "main_gpu": 0,
    "num_thread": 8,
    "draft_num_predict": 4,
    "numa": True,
    "low_vram": True,
    "use_mmap": False,
    "use_mlock": True,
}
SHARED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(({"options": {name: value}}, expected) for name, (value, expected) in ARRIVING_OPTIONS.items()),
    ({"options": {"num_predict": -1, "seed": -1}}, {}),
    ({"stream": False}, {"stream": False}),
    ({"format": "json"}, OBJECT),
    ({"format": SCHEMA}, OF_SCHEMA),
    ({"think": True}, thinks(True)),
    ({"think": False}, thinks(False)),
    ({"think": "low"}, {**thinks(True), "reasoning_effort": "low"}),
    ({"logprobs": True}, {"logprobs": True}),
    ({"logprobs": True, "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
]
"""Fields of both routes, with those of the chat."""
CHATS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *SHARED,
    ({"tools": [TOOL]}, {"tools": [TOOL]}),
    ({"messages": [{"role": "System", "content": "s"}, *USER]}, {"messages": [SYSTEM, *USER]}),
    (
        {"messages": [*USER, {"role": "assistant", "content": "b", "thinking": "t"}]},
        {
            "messages": [*USER, {"role": "assistant", "content": "b", "reasoning_content": "t"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ),
    ({"messages": [{"role": "user", "content": "a", "images": ["aGk=", "aGk="]}]},
     {"messages": [{"role": "user", "content": [IMAGE, IMAGE, {"type": "text", "text": "a"}]}]}),
    ({"messages": [*CALLED, {"role": "tool", "images": ["aGk="]}]},
     {"messages": [CALLING, {"role": "tool", "content": [IMAGE], "tool_call_id": "c"}]}),
]  # fmt: skip
PROMPTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *SHARED,
    ({"prompt": "p"}, {"messages": [{"role": "user", "content": "p"}]}),
    ({"system": "s"}, {"messages": [SYSTEM, *USER]}),
    ({"images": ["aGk="]}, {"messages": [{"role": "user", "content": [IMAGE, {"type": "text", "text": "a"}]}]}),
    ({"suffix": "x"}, {"chat_template_kwargs": {"suffix": "x"}}),
]
WITHOUT_EFFECT: list[dict[str, Any]] = [
    *({"options": {name: value}} for name, value in OPTIONS_WITHOUT_EFFECT.items()),
    {"keep_alive": "1h30m"},
    {"keep_alive": -1},
    {"format": ""},
    {"truncate": False},
    {"shift": False},
]
NO_EFFECT_ON_PROMPTS: list[dict[str, Any]] = [
    *({"template": ""}, {"context": []}),  # test_serve_ollama.py uses templates
    *({"width": None}, {"height": None}, {"steps": None}),
]


def body(**fields: Any) -> OllamaChatRequest:
    return OllamaChatRequest.model_validate({"model": "m", "messages": USER, **fields})


def prompt_body(**fields: Any) -> OllamaGenerateRequest:
    return OllamaGenerateRequest.model_validate({"model": "m", "prompt": "a", **fields})


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"model": "poet", "messages": USER, "stream": True, **fields})


def check_equal(made: Any, wanted: Any) -> None:
    assert dict(made) == dict(wanted)
    # The model's recommended sampling replaces only what the client did not set.
    sampling = SamplingFields.model_fields.keys() - {"model", "stream"}
    assert made.model_fields_set & sampling == wanted.model_fields_set & sampling


@pytest.mark.parametrize(("fields", "expected"), CHATS, ids=str)
def test_a_field_arrives_in_the_chat(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    check_equal(chat_of(body(**fields), POET), chat(**expected))


@pytest.mark.parametrize(("fields", "expected"), PROMPTS, ids=str)
def test_a_field_arrives_in_the_chat_of_a_prompt(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    check_equal(chat_of_prompt(prompt_body(**fields), POET), chat(**expected))


def test_a_raw_prompt_is_a_completion() -> None:
    sampling = {name: value for name, value in ARRIVING_OPTIONS.items() if name != "num_predict"}
    options = {name: value for name, (value, _) in sampling.items()}
    wanted = {name: value for _, fields in sampling.values() for name, value in fields.items()}
    asked = {"options": options, "format": SCHEMA, "logprobs": True, "top_logprobs": 2, "stream": False}
    made = completion_of(prompt_body(raw=True, **asked), POET)
    shared = {"model": "poet", "prompt": "a", "logprobs": 2, "stream": False}
    check_equal(made, CompletionRequest.model_validate({**shared, **wanted, **OF_SCHEMA}))


@pytest.mark.parametrize("fields", WITHOUT_EFFECT, ids=str)
def test_a_field_changes_nothing(fields: dict[str, Any]) -> None:
    check_equal(chat_of(body(**fields), POET), chat())
    check_equal(chat_of_prompt(prompt_body(**fields), POET), chat())


@pytest.mark.parametrize("fields", NO_EFFECT_ON_PROMPTS, ids=str)
def test_a_field_of_prompts_changes_nothing(fields: dict[str, Any]) -> None:
    check_equal(chat_of_prompt(prompt_body(**fields), POET), chat())


def test_every_field_is_in_a_table() -> None:
    assert ARRIVING_OPTIONS.keys() | OPTIONS_WITHOUT_EFFECT.keys() == OllamaOptions.model_fields.keys()
    shared = {"model", *(name for fields in WITHOUT_EFFECT for name in fields)}
    chats = {name for fields, _ in CHATS for name in fields}
    prompts = {name for fields, _ in PROMPTS for name in fields} | {"raw"}
    assert shared | chats == OllamaChatRequest.model_fields.keys()
    assert shared | prompts | {name for fields in NO_EFFECT_ON_PROMPTS for name in fields} == (
        OllamaGenerateRequest.model_fields.keys()
    )
    # test_serve_ollama.py shows what these do.
    assert OllamaEmbedRequest.model_fields.keys() == {
        *("model", "keep_alive", "options", "input", "truncate", "dimensions"),
    }
    assert OllamaEmbeddingsRequest.model_fields.keys() == {"model", "keep_alive", "options", "prompt"}
    assert OllamaShowRequest.model_fields.keys() == {"model", "name", "verbose"}
    assert OllamaDeleteRequest.model_fields.keys() == {"model", "name"}
    assert OllamaCopyRequest.model_fields.keys() == {"source", "destination"}
    assert OllamaCreateRequest.model_fields.keys() == {
        *("model", "name", "from_", "adapters", "files", "template", "system", "parameters", "messages", "license"),
        *("quantize", "stream"),
    }


def test_a_created_model_adds_messages_before_those_of_a_request() -> None:
    first = OllamaMessage(role="user", content="q"), OllamaMessage(role="assistant", content="r")
    preset = Preset(None, "jinja", "s", first)
    before = [SYSTEM, {"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]
    wanted = chat(model=None, messages=[*before, *USER], chat_template="jinja")
    check_equal(chat_of(body(), preset), wanted)
    check_equal(chat_of_prompt(prompt_body(), preset), wanted)
    own = [{"role": "system", "content": "own"}]
    assert chat_of_prompt(prompt_body(system="own"), preset).messages[0].content == "own"
    made = chat_of(body(messages=[*own, *USER]), Preset(None, None, "s")).messages
    assert [message.content for message in made] == ["own", "a"]


CALL = {"function": {"name": "f", "arguments": {"city": "Rome"}}}


def test_calls_and_results_get_ids() -> None:
    messages = [
        *USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL, {"function": {"name": "g", "index": 1}}]},
        {"role": "tool", "tool_name": "g", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "tool_calls": [{**CALL, "id": "given"}]},
        {"role": "tool", "content": "3", "tool_call_id": "given"},
    ]
    made = chat_of(body(messages=messages), Preset()).messages
    first, second = made[1].tool_calls or [], made[4].tool_calls or []
    assert [call.id for call in (*first, *second)] == ["call00001", "call00002", "given"]
    assert [message.tool_call_id for message in made if message.role == "tool"] == ["call00002", "call00001", "given"]
    assert [message.name for message in made if message.role == "tool"] == ["g", None, None]
    assert json.loads(first[0].function.arguments) == {"city": "Rome"}
    assert made[1].content is None


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        (OllamaChatRequest, {"model": ""}, "model"),
        (OllamaChatRequest, {"messages": [{"role": "user", "images": [5]}]}, "messages.0.images.0"),
        (OllamaChatRequest, {"messages": [{"role": "user", "thinking": "t"}]}, "thinking is given with role 'user'"),
        (OllamaChatRequest, {"messages": [{"role": "assistant", "tool_name": "f"}]}, "with role 'tool' only"),
        (OllamaChatRequest, {"truncate": True}, "is True; accepted: False (a prompt that does not fit is refused)"),
        (OllamaChatRequest, {"format": "xml"}, "is 'xml'; expected 'json', a JSON schema, or ''"),
        (OllamaChatRequest, {"keep_alive": "soon"}, "is 'soon'; expected a number of seconds, or a duration"),
        (OllamaChatRequest, {"think": "hard"}, "think"),
        (OllamaChatRequest, {"other": 1}, "other"),
        (OllamaGenerateRequest, {"raw": True, "images": ["aGk="]}, "raw is true with images"),
        (OllamaCreateRequest, {"from": "a", "messages": [{"role": "user", "images": ["aGk="]}]},
         "messages[0].images is given; expected none"),
        (OllamaGenerateRequest, {"width": 9}, "is 9; expected no such field (the model makes no images)"),
        (OllamaGenerateRequest, {"context": [1]}, "give the conversation to /api/chat"),
        (OllamaGenerateRequest, {"raw": True, "system": "s"}, "raw is true with system"),
        (OllamaGenerateRequest, {"raw": True, "think": True}, "raw is true with think"),
        (OllamaGenerateRequest, {"raw": True, "template": "x"}, "raw is true with template"),
        (OllamaGenerateRequest, {"raw": True, "suffix": "x"}, "raw is true with suffix"),
        (OllamaCreateRequest, {"from": "a", "files": {"a.gguf": "x"}}, "a server has one base model, which from names"),
        (OllamaCreateRequest, {"from": "a", "quantize": "q4_0"}, "with --quantization"),
        (OllamaGenerateRequest, {"options": {"mirostat": 2}}, "is 2; accepted: 0 (tokens are chosen by"),
        (OllamaGenerateRequest, {"options": {"num_predict": 0}}, "num_predict is 0; expected 1 or more, or -1"),
        (OllamaGenerateRequest, {"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}},
         "repeat_last_n is 64 with repeat_penalty; expected -1"),
        (OllamaShowRequest, {}, "model is not given"),
        (OllamaShowRequest, {"model": "a", "name": "b"}, "model and name are given, and they differ"),
    ],
)  # fmt: skip
def test_a_field_is_refused(kind: type[Fields], fields: dict[str, Any], said: str) -> None:
    needed = {} if kind is OllamaShowRequest else {"model": "m"}
    with pytest.raises(ValidationError) as raised:
        kind.model_validate({**needed, **fields})
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("given", "unloads"), [(None, False), (0, True), ("0s", True), (0.0, True), (300, False), ("0m1s", False)]
)
def test_keep_alive(given: Any, unloads: bool) -> None:
    assert body(keep_alive=given).unloads is unloads


def test_penalties_with_the_whole_context_and_a_context() -> None:
    options = OllamaOptions(repeat_penalty=1.1, repeat_last_n=-1, num_ctx=8)
    options.check_context(8)
    with pytest.raises(ApiError, match=r"num_ctx is 8; expected at most 7"):
        options.check_context(7)
    assert [plain_name(name) for name in ("a", "a:latest", "a:b")] == ["a", "a", "a:b"]
