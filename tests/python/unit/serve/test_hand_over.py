"""Every field of every route's requests, and its place in the executor's Request.

Each field has a row in a table: a value, and the fields of the Request that differ from the same request without it. A
field without a row fails the test.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from pydantic import BaseModel
from tokenizers import processors

from adaptrt.serve.openai_chat_fields import ChatRequest
from adaptrt.serve.openai_fields import (
    ClassificationRequest,
    CompletionRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from adaptrt.serve.openai_requests import salt_id
from adaptrt.serve.options import ServerLimits, ServerOptions
from adaptrt.serve.triton_requests import ACCEPTED, INPUTS
from support.handed_over import Served, captured, differences
from support.models import ModelSpec, save_adapter
from support.pooled import save_random, save_sentence_transformer
from support.serving import build_engine
from support.tokenizers import byte_level, save_tokenizer

SPEC = ModelSpec(vocab_size=272)
TOKENIZER = byte_level()
TEMPLATE = (
    "{{ (tools or []) | length }}{{ mood }}{{ reasoning_effort }}{{ (documents or [{}])[0].text }}"
    "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
SECONDS = 7.5
TIME_LIMIT = datetime.timedelta(seconds=SECONDS)
START_ID, END_ID = 0, 1
NOTHING: dict[str, Any] = {}
Row = tuple[Any, dict[str, Any]]
"""A value of a field, and the changes in the Request."""

OUTPUT_DEFAULTS = {
    "output_config.exclude_input_from_output": True,
    "output_config.return_context_logits": False,
    "output_config.return_encoder_output": False,
    "output_config.return_generation_logits": False,
    "output_config.return_log_probs": False,
    "output_config.return_perf_metrics": False,
    "output_config.return_prompt_log_probs": False,
    "output_config.top_log_probs": 0,
}
TASK = {"lora_config.task_id": 1 << 63, "lora_config.active_from": 0, "lora_config.replace": False}
"""Task of the first named adapter."""
MODEL_FIELDS: dict[str, Row] = {
    "model": ("first", TASK),
    "adapter_id": ("first", TASK),
    "lora_path": ("first", TASK),
    "lora_request": ({"lora_name": "first", "lora_int_id": 3}, TASK),
    "lora": ([{"id": 0, "scale": 1.0}], TASK),
}


def ids(text: str) -> list[int]:
    return [START_ID, *TOKENIZER.encode(text, add_special_tokens=False).ids]


def guide(kind: str, text: str | None = None) -> dict[str, Any]:
    found = {"guided_decoding_params.guide_type": kind}
    return found if text is None else {**found, "guided_decoding_params.guide": text}


OBJECT = {"type": "object"}
SPACED = '{"x-guidance": {"whitespace_pattern": " ?"}, "type": "object"}'
GENERATION_FIELDS: dict[str, Row] = {
    **MODEL_FIELDS,
    "temperature": (0.5, {"sampling_config.temperature": 0.5}),
    "top_p": (0.25, {"sampling_config.top_p": 0.25}),
    "top_k": (5, {"sampling_config.top_k": 5}),
    "min_p": (0.125, {"sampling_config.min_p": 0.125}),
    "presence_penalty": (0.5, {"sampling_config.presence_penalty": 0.5}),
    "frequency_penalty": (-0.5, {"sampling_config.frequency_penalty": -0.5}),
    "repetition_penalty": (1.5, {"sampling_config.repetition_penalty": 1.5}),
    "seed": (-1, {"sampling_config.seed": 2**64 - 1}),
    "min_tokens": (2, {"sampling_config.min_tokens": 2}),
    "stop": (["x"], NOTHING),
    "stop_token_ids": ([9, 8], {"stop_words": [[9], [8]]}),
    "ignore_eos": (True, {"end_id": None}),
    "skip_special_tokens": (False, NOTHING),
    "logit_bias": ({"3": 1.5}, {"embedding_bias": [1.5 if i == 3 else 0.0 for i in range(SPEC.vocab_size)]}),
    "stream": (True, NOTHING),
    "stream_options": ({"include_usage": True}, NOTHING),
    "return_token_ids": (True, NOTHING),
    "return_receipt": (True, {"output_config.return_log_probs": True}),
    "return_receipt_prompt": (True, NOTHING),
    "priority": (-50, {"priority": 0.75}),
    "cache_salt": ("a", {"cache_salt_id": salt_id("a")}),
    "response_format": ({"type": "json_object"}, guide("JSON")),
    "structured_outputs": ({"regex": "a+"}, guide("REGEX", "a+")),
    "guided_json": (OBJECT, guide("JSON_SCHEMA", '{"type": "object"}')),
    "guided_regex": ("a+", guide("REGEX", "a+")),
    "guided_choice": (["a", "b."], guide("REGEX", "(a)|(b\\.)")),
    "guided_grammar": ('start: "a"', guide("EBNF_GRAMMAR", 'start: "a"')),
    "guided_whitespace_pattern": (" ?", {"guided_decoding_params.guide": SPACED}),
    "guided_decoding_backend": ("guidance", NOTHING),
    "user": ("me", NOTHING),
    "metadata": ({"a": "b"}, NOTHING),
    "service_tier": ("auto", NOTHING),
    "prompt_cache_key": ("key", NOTHING),
    "prompt_cache_retention": ("in_memory", NOTHING),
    "safety_identifier": ("me", NOTHING),
    "store": (False, NOTHING),
    "include_stop_str_in_output": (True, NOTHING),
    "include_eos": (True, {"end_id": None, "stop_words": [[END_ID]]}),
    "length_penalty": (2.0, {"sampling_config.length_penalty": 2.0}),
    "early_stopping": (True, {"sampling_config.early_stopping": 1}),
    "detokenize": (True, NOTHING),
    "spaces_between_special_tokens": (True, NOTHING),
    "return_tokens_as_token_ids": (True, NOTHING),
    "allowed_token_ids": ([3], {"embedding_bias": [0.0 if i == 3 else -np.inf for i in range(SPEC.vocab_size)]}),
    "bad_words": (["a"], {"bad_words": [ids("a")[1:], ids(" a")[1:]]}),
    "prompt_logprobs": (3, {"output_config.return_prompt_log_probs": True, "output_config.top_log_probs": 3}),
    "request_id": ("mine", NOTHING),
    "vllm_xargs": ({}, NOTHING),
    "n": (3, {"num_return_sequences": 3}),
    "best_of": (1, NOTHING),
    "use_beam_search": (
        True,
        {
            **dict.fromkeys(f"sampling_config.{name}" for name in ("top_k", "top_p", "min_p", "temperature", "seed")),
            "sampling_config.beam_width": 2,
            "sampling_config.length_penalty": 1.0,
            "sampling_config.early_stopping": 2,
            "streaming": False,
        },
    ),
}
BEAMS = {"use_beam_search": True, "n": 2}
GENERATION_TOGETHER = {
    "return_receipt_prompt": {"return_receipt": True},
    "length_penalty": BEAMS,
    "early_stopping": BEAMS,
    "use_beam_search": {"n": 2},
    "truncation_side": {"truncate_prompt_tokens": 2},
    "stream_options": {"stream": True},
    "guided_whitespace_pattern": {"guided_json": OBJECT},
}
POOLED_TOGETHER = {"truncation_side": {"truncate_prompt_tokens": 2}}
POOLED_FIELDS: dict[str, Row] = {
    **MODEL_FIELDS,
    "request_id": ("mine", NOTHING),
    "priority": (-50, {"priority": 0.75}),
    "cache_salt": ("a", {"cache_salt_id": salt_id("a")}),
    "user": ("me", NOTHING),
}
POOLED_BASE = {
    "max_tokens": 0, "streaming": False, "priority": 0.5, "num_return_sequences": 1, "allotted_time_ms": TIME_LIMIT,
    "return_all_generated_tokens": False,
    "request_type": "REQUEST_TYPE_CONTEXT_AND_GENERATION", "sampling_config.beam_width": 1,
    "pooling_params.pooling_type": "LAST", "pooling_params.row_interval": 1, **OUTPUT_DEFAULTS,
}  # fmt: skip
CLASSES_BASE = {**POOLED_BASE, "pooling_params.layers": 1, "pooling_params.normalize": False}
TRITON_LIMIT = datetime.timedelta(milliseconds=250)


def options(adapter: Path, **limits: Any) -> ServerOptions:
    return ServerOptions(
        served_model_name=("base",),
        lora_modules=(("first", adapter),),
        tool_call_parser="hermes",
        trust_request_chat_template=True,
        cut_embeddings=True,
        limits=ServerLimits(max_request_seconds=SECONDS, **limits),
    )


def build(model: Any, directory: Path) -> Path:
    """Builds an engine next to the model; returns the model's directory."""
    saved = save_random(model, directory / "model")
    # Its prompts begin with a special token, so add_special_tokens has an effect.
    tokenizer = byte_level()
    start = tokenizer.id_to_token(START_ID)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A", pair=f"{start} $A {start} $B", special_tokens=[(start, START_ID)]
    )
    save_tokenizer(tokenizer, saved)
    (saved / "chat_template.jinja").write_text(TEMPLATE)
    save_sentence_transformer(saved, "lasttoken", normalize=True)
    build_engine(saved, directory, max_beam_width=2)
    return saved


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its engine and an adapter."""
    made = tmp_path_factory.mktemp("generating")
    model = build(transformers.AutoModelForCausalLM.from_config(SPEC.config()), made)
    save_adapter(model, made / "first", 1, r=4)
    return made


@pytest.fixture(scope="module")
def generating(directory: Path) -> Iterator[Served]:
    with captured(directory / "engine", options(directory / "first")) as served:
        yield served


@pytest.fixture(scope="module")
def classifying(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = tmp_path_factory.mktemp("classifying")
    config = SPEC.config()
    config.num_labels, config.pad_token_id = 1, 2
    build(transformers.AutoModelForSequenceClassification.from_config(config), made)
    with captured(made / "engine", options(directory / "first")) as served:
        yield served


def check(
    served: Served,
    path: str,
    model: type[BaseModel],
    body: Mapping[str, Any],
    table: Mapping[str, Row],
    together: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Checks each row. together: other fields that are sent with a field; their changes do not count."""
    assert set(table) == {field.alias or name for name, field in model.model_fields.items()}
    for name, (value, expected) in table.items():
        others = (together or {}).get(name, {})
        without = served.request(path, {**body, **others})
        changed = served.request(path, {**body, **others, name: value})
        assert differences(without, changed) == expected, name


def test_every_field_of_completions_arrives(generating: Served) -> None:
    body = {"prompt": "hi", "seed": 7}
    assert generating.request("/v1/completions", body) == {
        "input_token_ids": ids("hi"), "max_tokens": 16, "streaming": True, "end_id": END_ID, "priority": 0.5,
        "num_return_sequences": 1, "allotted_time_ms": TIME_LIMIT, "return_all_generated_tokens": False,
        "request_type": "REQUEST_TYPE_CONTEXT_AND_GENERATION",
        "sampling_config.beam_width": 1, "sampling_config.top_k": 0, "sampling_config.top_p": 1.0,
        "sampling_config.min_p": 0.0, "sampling_config.temperature": 1.0, "sampling_config.seed": 7,
        "sampling_config.min_tokens": 0, "sampling_config.repetition_penalty": 1.0,
        "sampling_config.presence_penalty": 0.0, "sampling_config.frequency_penalty": 0.0,
        **OUTPUT_DEFAULTS,
    }  # fmt: skip
    table: dict[str, Row] = {
        **GENERATION_FIELDS,
        "prompt": ([5, 6], {"input_token_ids": [5, 6]}),
        "max_tokens": (3, {"max_tokens": 3}),
        "echo": (True, {"output_config.return_prompt_log_probs": True}),
        "logprobs": (4, {"output_config.return_log_probs": True, "output_config.top_log_probs": 4}),
        "add_special_tokens": (False, {"input_token_ids": ids("hi")[1:]}),
        "suffix": ("", NOTHING),
        "truncate_prompt_tokens": (2, {"input_token_ids": [START_ID, *ids("i")[1:]]}),
        "truncation_side": ("right", {"input_token_ids": ids("h")}),
    }
    together = {**GENERATION_TOGETHER, "echo": {"logprobs": 2}}
    check(generating, "/v1/completions", CompletionRequest, body, table, together)


def test_every_field_of_chats_arrives(generating: Served) -> None:
    body = {"messages": [{"role": "assistant", "content": "hi"}], "seed": 7}
    prompt = ids("0hi>")[1:]
    room = 704 - len(prompt)
    base = generating.request("/v1/chat/completions", body)
    completion = generating.request("/v1/completions", {"prompt": prompt, "seed": 7, "max_tokens": room})
    assert base == completion

    def changed(text: str) -> dict[str, Any]:
        tokens = ids(text)[1:]
        return {"input_token_ids": tokens, "max_tokens": 704 - len(tokens)}

    tool = {"type": "function", "function": {"name": "f"}}
    table: dict[str, Row] = {
        **GENERATION_FIELDS,
        "messages": ([{"role": "user", "content": "a"}, {"role": "user", "content": "bc"}], changed("0abc>")),
        "tools": ([tool], {"input_token_ids": ids("1hi>")[1:]}),
        "chat_template_kwargs": ({"mood": "sad"}, changed("0sadhi>")),
        "add_generation_prompt": (False, changed("0hi")),
        "continue_final_message": (True, NOTHING),
        "add_special_tokens": (True, {"input_token_ids": [START_ID, *prompt], "max_tokens": room - 1}),
        "max_tokens": (3, {"max_tokens": 3}),
        "max_completion_tokens": (4, {"max_tokens": 4}),
        "logprobs": (True, {"output_config.return_log_probs": True}),
        "top_logprobs": (4, {"output_config.top_log_probs": 4}),
        "tool_choice": ("none", {"input_token_ids": prompt}),
        "parallel_tool_calls": (True, NOTHING),
        "reasoning_effort": ("low", changed("0lowhi>")),
        "modalities": (["text"], NOTHING),
        "verbosity": ("medium", NOTHING),
        "documents": ([{"text": "d"}], changed("0dhi>")),
        "chat_template": ("new", changed("new")),
        "truncate_prompt_tokens": (2, {"input_token_ids": prompt[-2:], "max_tokens": 702}),
        "truncation_side": ("right", {"input_token_ids": prompt[:2]}),
        "mm_processor_kwargs": ({}, NOTHING),
        "echo": (True, NOTHING),
        "include_reasoning": (True, NOTHING),
        "thinking_token_budget": (-1, NOTHING),
    }
    together = {
        **GENERATION_TOGETHER,
        "top_logprobs": {"logprobs": True},
        "continue_final_message": {"add_generation_prompt": False},
        "tool_choice": {"tools": [tool]},
        "parallel_tool_calls": {"tools": [tool]},
    }
    check(generating, "/v1/chat/completions", ChatRequest, body, table, together)


def test_required_calls_arrive_as_guides(generating: Served) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools}
    for fields in ({"tool_choice": "required"}, {"parallel_tool_calls": False}):
        asked = generating.request("/v1/chat/completions", {**body, **fields})
        assert asked["guided_decoding_params.guide_type"] == "EBNF_GRAMMAR", fields
        assert "guided_decoding_params.guide" in asked, fields


def test_every_field_of_embeddings_arrives(generating: Served) -> None:
    body = {"input": "hi"}
    base = {**POOLED_BASE, "pooling_params.layers": 0, "pooling_params.normalize": True, "input_token_ids": ids("hi")}
    assert generating.request("/v1/embeddings", body) == base
    table: dict[str, Row] = {
        **POOLED_FIELDS,
        "input": ([5, 6], {"input_token_ids": [5, 6]}),
        "add_special_tokens": (False, {"input_token_ids": ids("hi")[1:]}),
        "encoding_format": ("base64", NOTHING),
        "dimensions": (8, NOTHING),
        "truncate_prompt_tokens": (2, {"input_token_ids": ids("h")}),
        "truncation_side": ("left", {"input_token_ids": ids("i")}),
    }
    check(generating, "/v1/embeddings", EmbeddingRequest, body, table, POOLED_TOGETHER)


def test_every_field_of_pooling_arrives(generating: Served, classifying: Served) -> None:
    body = {"input": "hi"}
    assert generating.request("/pooling", body) == generating.request("/v1/embeddings", body)
    table: dict[str, Row] = {
        **POOLED_FIELDS,
        "input": ([5, 6], {"input_token_ids": [5, 6]}),
        "add_special_tokens": (False, {"input_token_ids": ids("hi")[1:]}),
        "encoding_format": ("base64", NOTHING),
        "dimensions": (8, NOTHING),
        "truncate_prompt_tokens": (2, {"input_token_ids": ids("h")}),
        "truncation_side": ("left", {"input_token_ids": ids("i")}),
        "task": ("token_embed", {"pooling_params.pooling_type": "ALL"}),
    }
    check(generating, "/pooling", PoolingRequest, body, table, POOLED_TOGETHER)
    for task in (None, "classify"):
        asked = classifying.request("/pooling", {**body, "task": task})
        assert asked == classifying.request("/classify", body)
    for fields, said in (
        ({"task": "token_classify"}, "task is 'token_classify'; expected 'classify'"),
        ({"dimensions": 2}, "dimensions is given, and the model is a classifier"),
    ):
        assert said in classifying.refusal("/pooling", {**body, **fields})


def test_every_field_of_classes_arrives(classifying: Served) -> None:
    body = {"input": "hi"}
    base = {**CLASSES_BASE, "input_token_ids": ids("hi")}
    assert classifying.request("/classify", body) == base
    table: dict[str, Row] = {
        **POOLED_FIELDS,
        "input": ([5, 6], {"input_token_ids": [5, 6]}),
        "add_special_tokens": (False, {"input_token_ids": ids("hi")[1:]}),
        "truncate_prompt_tokens": (2, {"input_token_ids": ids("h")}),
        "truncation_side": ("left", {"input_token_ids": ids("i")}),
    }
    check(classifying, "/classify", ClassificationRequest, body, table, POOLED_TOGETHER)


def test_every_field_of_scores_arrives(classifying: Served) -> None:
    body = {"text_1": "a", "text_2": "bcd"}
    base = {**CLASSES_BASE, "input_token_ids": ids("a") + ids("bcd")}
    assert classifying.request("/score", body) == base
    table: dict[str, Row] = {
        **POOLED_FIELDS,
        "text_1": ("c", {"input_token_ids": ids("c") + ids("bcd")}),
        "text_2": (["c"], {"input_token_ids": ids("a") + ids("c")}),
        "add_special_tokens": (False, {"input_token_ids": ids("a")[1:] + ids("bcd")[1:]}),
        "truncate_prompt_tokens": (5, {"input_token_ids": ids("a") + ids("bc")}),
        "truncation_side": ("left", {"input_token_ids": ids("a") + ids("cd")}),
    }
    together = {"truncation_side": {"truncate_prompt_tokens": 5}}
    check(classifying, "/score", ScoreRequest, body, table, together)
    assert classifying.request("/v1/score", body) == base


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_every_field_of_ranks_arrives(classifying: Served, path: str) -> None:
    body = {"query": "abc", "documents": ["b"]}
    base = {**CLASSES_BASE, "input_token_ids": ids("abc") + ids("b")}
    assert classifying.request(path, body) == base
    table: dict[str, Row] = {
        **POOLED_FIELDS,
        "query": ("c", {"input_token_ids": ids("c") + ids("b")}),
        "documents": ([{"text": "c"}], {"input_token_ids": ids("abc") + ids("c")}),
        "top_n": (1, NOTHING),
        "return_documents": (False, NOTHING),
        "add_special_tokens": (False, {"input_token_ids": ids("abc")[1:] + ids("b")[1:]}),
        "truncate_prompt_tokens": (4, {"input_token_ids": ids("a") + ids("b")}),
        "truncation_side": ("left", {"input_token_ids": ids("c") + ids("b")}),
    }
    together = {"truncation_side": {"truncate_prompt_tokens": 4}}
    check(classifying, path, RerankRequest, body, table, together)


TRITON_ROWS: dict[str, Row] = {
    "input_ids": ([5, 6, 7], {"input_token_ids": [5, 6, 7]}),
    "input_lengths": (1, {"input_token_ids": [5]}),
    "request_output_len": (3, {"max_tokens": 3}),
    "end_id": (9, {"end_id": 9}),
    "pad_id": (2, {"pad_id": 2}),
    "temperature": (0.5, {"sampling_config.temperature": 0.5}),
    "runtime_top_k": (5, {"sampling_config.top_k": 5}),
    "runtime_top_p": (0.25, {"sampling_config.top_p": 0.25}),
    "random_seed": (7, {"sampling_config.seed": 7}),
    "repetition_penalty": (1.5, {"sampling_config.repetition_penalty": 1.5}),
    "presence_penalty": (0.5, {"sampling_config.presence_penalty": 0.5}),
    "frequency_penalty": (-0.5, {"sampling_config.frequency_penalty": -0.5}),
    "min_length": (2, {"sampling_config.min_tokens": 2}),
    "len_penalty": (1.0, NOTHING),
    "beam_width": (2, {"sampling_config.beam_width": 2}),
    "stop_words_list": ([[5, 6, 7], [2, 3, -1]], {"stop_words": [[5, 6], [7]]}),
    "bad_words_list": ([[5, 6], [1, 2]], {"bad_words": [[5], [6]]}),
    "stop_words": (["x"], NOTHING),
    "bad_words": ([""], NOTHING),
    "embedding_bias": ([0.5] * SPEC.vocab_size, {"embedding_bias": [0.5] * SPEC.vocab_size}),
    "streaming": (False, NOTHING),
    "exclude_input_in_output": (True, NOTHING),
    "return_log_probs": (True, {"output_config.return_log_probs": True}),
    "return_context_logits": (True, {"output_config.return_context_logits": True}),
    "return_generation_logits": (True, {"output_config.return_generation_logits": True}),
    "lora_task_id": (3, {**TASK, "lora_config.task_id": 3}),
}
"""Inputs of every request in addition to input_ids and request_output_len."""
OTHER_TRITON_INPUTS = {"text_input", "lora_weights", "lora_config", "decoder_input_ids", "decoder_input_lengths"}
"""The first three have other tests here. The rest are for encoder-decoder models; see test_triton_requests.py."""


def infer_body(inputs: Mapping[str, Any], **parameters: Any) -> dict[str, Any]:
    tensors = []
    for name, value in inputs.items():
        spec = ACCEPTED[name]
        values = np.array(value if isinstance(value, list) else [value])
        data = values.ravel().tolist()
        tensors.append({"name": name, "datatype": spec.datatypes[-1], "shape": [1, *values.shape], "data": data})
    return {"inputs": tensors, "parameters": parameters}


def test_every_triton_input_arrives(generating: Served) -> None:
    assert set(TRITON_ROWS) | OTHER_TRITON_INPUTS == {spec.name for spec in INPUTS}
    body = {"input_ids": [5, 6], "request_output_len": 4}
    base = {
        "input_token_ids": [5, 6], "max_tokens": 4, "streaming": True, "priority": 0.5, "num_return_sequences": 1,
        "allotted_time_ms": TIME_LIMIT, "return_all_generated_tokens": False,
        "request_type": "REQUEST_TYPE_CONTEXT_AND_GENERATION", "sampling_config.beam_width": 1,
        **OUTPUT_DEFAULTS,
    }  # fmt: skip
    path = "/v2/models/base"
    assert generating.request(f"{path}/generate", body) == base
    assert generating.request(f"{path}/generate_stream", body) == base
    assert generating.request(f"{path}/infer", infer_body(body)) == base
    for name, (value, expected) in TRITON_ROWS.items():
        changed = {**body, name: value}
        assert differences(base, generating.request(f"{path}/generate", changed)) == expected, name
        assert differences(base, generating.request(f"{path}/infer", infer_body(changed))) == expected, name


def test_triton_texts_and_adapters_arrive(generating: Served) -> None:
    path = "/v2/models/base/generate"
    body = {"text_input": "hi", "request_output_len": 4}
    asked = generating.request(path, body)
    assert (asked["input_token_ids"], asked["end_id"]) == (ids("hi"), END_ID)
    assert differences(asked, generating.request("/v2/models/first/generate", body)) == TASK


def test_a_triton_time_limit_arrives_unless_the_servers_is_shorter(generating: Served) -> None:
    body = {"input_ids": [5, 6], "request_output_len": 4}
    for microseconds, limit in ((250_000, TRITON_LIMIT), (60_000_000, TIME_LIMIT)):
        asked = generating.request("/v2/models/base/infer", infer_body(body, timeout=microseconds))
        assert asked["allotted_time_ms"] == limit


def test_the_limits_of_chat_templates_arrive(directory: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    limited = ServerOptions(served_model_name=("base",), limits=ServerLimits(max_template_bytes=10))
    with captured(directory / "engine", limited) as served:
        for path in ("/v1/chat/completions", "/tokenize"):
            assert "it does more work than 10 bytes" in served.refusal(path, chat), path
    limited = ServerOptions(served_model_name=("base",), limits=ServerLimits(max_template_seconds=1e-9))
    with captured(directory / "engine", limited) as served:
        assert "it takes more than 1e-09 seconds" in served.refusal("/v1/chat/completions", chat)


def test_the_recommended_sampling_arrives(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25}')
    for name, temperature in (("vllm", 1.0), (str(tmp_path), 0.25)):
        with captured(directory / "engine", ServerOptions(generation_config=name)) as served:
            assert served.request("/v1/completions", {"prompt": "hi"})["sampling_config.temperature"] == temperature


def test_without_a_time_limit_requests_have_none(directory: Path) -> None:
    unlimited = ServerOptions(served_model_name=("base",), limits=ServerLimits(max_request_seconds=0))
    with captured(directory / "engine", unlimited) as served:
        for path, body in (
            ("/v1/completions", {"prompt": "hi"}),
            ("/v1/embeddings", {"input": "hi"}),
            ("/v2/models/base/generate", {"input_ids": [5], "request_output_len": 4}),
        ):
            assert "allotted_time_ms" not in served.request(path, body), path
