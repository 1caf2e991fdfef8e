"""Fields of vLLM's requests: each is a field here, or refused with what to use instead."""

from __future__ import annotations

import json
from typing import Any

import pytest

from adaptrt.serve.errors import ApiError
from adaptrt.serve.http import parse_json
from adaptrt.serve.openai_chat_fields import ChatRequest
from adaptrt.serve.openai_fields import (
    ClassificationRequest,
    CompletionRequest,
    EmbeddingRequest,
    Fields,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from adaptrt.serve.options import ServerLimits
from support.vllm_names import names_of

REQUESTS: dict[type[Fields], tuple[str, dict[str, Any]]] = {
    CompletionRequest: ("CompletionRequest", {"prompt": "a"}),
    ChatRequest: ("ChatCompletionRequest", {"messages": [{"role": "user", "content": "a"}]}),
    EmbeddingRequest: ("EmbeddingRequest", {"input": "a"}),
    ClassificationRequest: ("ClassificationRequest", {"input": "a"}),
    PoolingRequest: ("PoolingRequest", {"input": "a"}),
    ScoreRequest: ("ScoreRequest", {"text_1": "a", "text_2": "b"}),
    RerankRequest: ("RerankRequest", {"query": "a", "documents": ["b"]}),
}


@pytest.mark.parametrize("model", REQUESTS)
def test_every_field_of_vllm_is_a_field_or_refused_with_advice(model: type[Fields]) -> None:
    name, body = REQUESTS[model]
    own, table = set(model.model_fields), model.vllm_fields
    assert not own & table.keys()
    assert set(names_of(name)) <= own | table.keys()
    for field, accepted in table.items():
        with pytest.raises(ApiError) as refused:
            parse_json(json.dumps({**body, field: "odd"}).encode(), model, ServerLimits())
        assert refused.value.param == field
        assert accepted.reason in str(refused.value)
        for value in accepted.values:
            parse_json(json.dumps({**body, field: value}).encode(), model, ServerLimits())


def test_what_an_error_says() -> None:
    for field, value, said in (
        ("stream_interval", 2, "stream_interval: is 2; expected 1: streams have each piece at once"),
        ("session_id", "s", "session_id: is not supported; give cache_salt"),
        ("stream_intervall", 2, "stream_intervall: is not known here"),
    ):
        with pytest.raises(ApiError) as refused:
            parse_json(json.dumps({"prompt": "a", field: value}).encode(), CompletionRequest, ServerLimits())
        assert str(refused.value).startswith(said)
