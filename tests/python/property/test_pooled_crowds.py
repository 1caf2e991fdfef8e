"""Embeddings, classes and generated tokens have the same bits as alone, in any batch, with any chunks and any size of
KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import adaptrt
from adaptrt import PoolingParams, PoolingType, Request
from support.models import ModelSpec, save_adapter, save_model
from support.pooled import save_pooled_adapter
from support.serving import build_engine, crowd_fields

SPEC = ModelSpec("qwen2", hidden_size=72, head_dim=24, num_attention_heads=4, num_key_value_heads=2, vocab_size=257)
LONG = list(range(2, 140))
PROMPTS = [[5], [9, 8, 7, 6], LONG[:40], LONG[:41], LONG, [*LONG[:64], 3, 3, 3]]
MAX_TOKENS = 12
LAYER = adaptrt.PoolingLayer(np.random.default_rng(0).normal(size=(7, SPEC.hidden_size)), np.arange(7.0))
POOLING = {
    "last": PoolingParams(PoolingType.LAST, normalize=True),
    "cls": PoolingParams(PoolingType.CLS),
    "mean": PoolingParams(PoolingType.MEAN, normalize=True),
    "all": PoolingParams(PoolingType.ALL),
    "classes": PoolingParams(PoolingType.LAST, [LAYER]),
    "classes of tokens": PoolingParams(PoolingType.ALL, [LAYER]),
}
KINDS = ["tokens", *POOLING, "own classes"]
ADAPTERS = ["lora", "dora", "moods"]


class Service:
    """An engine and its adapters, one of them a classifier; the result of each request alone is computed once."""

    def __init__(self, directory: Path, dtype: str) -> None:
        model = save_model(SPEC, directory / "model")
        self.engine = build_engine(model, directory, dtype, tokens_per_block=16)
        save_adapter(model, directory / "lora", 1, r=4)
        save_adapter(model, directory / "dora", 2, r=7, use_dora=True)
        base = transformers.AutoModelForSequenceClassification.from_pretrained(model, num_labels=3, dtype=torch.float32)
        save_pooled_adapter(base, directory / "moods", 3, peft.TaskType.SEQ_CLS, r=5)
        self.directory = directory
        # One executor for all requests alone: starting one takes longer than a request.
        self.quiet = self.executor(num_threads=1, kv_cache_config=adaptrt.KvCacheConfig(enable_block_reuse=False))
        self.alone = cache(self._alone)

    def executor(self, **fields: Any) -> adaptrt.Executor:
        config = adaptrt.ExecutorConfig(**fields)
        executor = adaptrt.Executor(self.engine, adaptrt.ModelType.DECODER_ONLY, config)
        for name in ADAPTERS:
            executor.add_adapter(name, self.directory / name)
        return executor

    def _alone(self, kind: str, prompt: int, adapter: str | None) -> bytes:
        return answer(self.quiet, ask(self.quiet, kind, prompt, adapter))


def ask(executor: adaptrt.Executor, kind: str, prompt: int, adapter: str | None) -> int:
    if kind == "tokens":
        output = adaptrt.OutputConfig(exclude_input_from_output=True, return_generation_logits=True)
        request = Request(PROMPTS[prompt], MAX_TOKENS, output_config=output)
    else:
        own = kind == "own classes"
        params = executor.adapters.classifier_for("moods").params if own else POOLING[kind]
        request = Request(PROMPTS[prompt], 0, pooling_params=params)
    return executor.enqueue_request(request, adapter=adapter)


def answer(executor: adaptrt.Executor, request_id: int) -> bytes:
    (response,) = executor.await_responses(request_id, 60.0)
    assert not response.has_error(), response.error_msg
    result = response.result
    if result.pooled_output is None:
        return np.asarray(result.generation_logits).tobytes()
    return np.asarray(result.pooled_output).tobytes()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    made = Service(tmp_path_factory.mktemp(request.param), request.param)
    with made.quiet:
        yield made


requests = st.tuples(
    st.sampled_from(KINDS), st.integers(0, len(PROMPTS) - 1), st.none() | st.sampled_from(ADAPTERS)
).map(lambda drawn: (drawn[0], drawn[1], fitting(drawn[0], drawn[2])))


def fitting(kind: str, adapter: str | None) -> str | None:
    """Replaces adapters that do not fit: a classifier does not generate, and its own classes need its own adapter."""
    if kind == "own classes":
        return "moods"
    return "lora" if kind == "tokens" and adapter == "moods" else adapter


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    crowd=st.lists(requests, min_size=1, max_size=16),
    policy=st.sampled_from(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"]),
    kv_tokens=st.sampled_from([176, 512, 4096]),
    reuse=st.booleans(),
    max_num_tokens=st.sampled_from([16, 33, 1024]),
    num_threads=st.integers(1, 3),
)
def test_bits_are_those_of_each_request_alone(
    service: Service,
    crowd: list[tuple[str, int, str | None]],
    policy: str,
    kv_tokens: int,
    reuse: bool,
    max_num_tokens: int,
    num_threads: int,
) -> None:
    fields = crowd_fields(policy, kv_tokens, reuse, max_num_tokens=max_num_tokens, num_threads=num_threads)
    with service.executor(**fields) as executor:
        ids = [ask(executor, *request) for request in crowd]
        for request_id, request in zip(ids, crowd, strict=True):
            assert answer(executor, request_id) == service.alone(*request)
