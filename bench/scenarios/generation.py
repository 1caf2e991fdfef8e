"""Measures requests with restricted texts (guides), and requests with drafts from their own text."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from adaptrt import (
    Executor,
    ExecutorConfig,
    GuidedDecodingParams,
    KvCacheConfig,
    LookaheadDecodingConfig,
    Request,
    SamplingConfig,
)
from adaptrt.tools.bench.executors import STATISTICS_KEPT, CpuUse
from adaptrt.tools.bench.measure import Metrics
from adaptrt.tools.bench.workload import random_prompt

from .kinds import Generation

FEW_TOKENS: Final = np.arange(100, 124)
RECORD: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}


def generation_executor(engine: Path, cpu: CpuUse) -> Executor:
    """Makes an executor that computes every prompt, without reuse."""
    config = ExecutorConfig(
        kv_cache_config=KvCacheConfig(enable_block_reuse=False),
        iter_stats_max_iterations=STATISTICS_KEPT,
        **asdict(cpu),
    )
    return Executor(engine, executor_config=config)


def generate(executor: Executor, scenario: Generation) -> Metrics:
    """Measures the tokens per second of all requests together after their first tokens, and the drafts."""
    executor.get_latest_iteration_stats()
    live = set(executor.enqueue_requests(_requests(executor, scenario)))
    without_token, tokens, begin = set(live), 0, 0.0
    while live:
        for response in executor.await_responses():
            if response.has_error():
                raise RuntimeError(response.error_msg)
            if not without_token:
                tokens += len(response.result.output_token_ids[0])
            if response.result.is_final:
                live.discard(response.request_id)
            without_token.discard(response.request_id)
            if not without_token and begin == 0.0:
                begin = time.perf_counter()
    metrics = {"value": tokens / (time.perf_counter() - begin)}
    steps = [step.spec_decoding_stats for step in executor.get_latest_iteration_stats()]
    drafts = [step for step in steps if step is not None]
    if scenario.drafts:
        metrics["drafts"] = float(sum(step.num_draft_tokens for step in drafts))
        metrics["drafts_right"] = float(sum(step.num_accepted_tokens for step in drafts))
    return metrics


def _requests(executor: Executor, scenario: Generation) -> list[Request]:
    """Returns the requests, the same for every sample. None of them ends before its output length."""
    generator = np.random.default_rng(scenario.input_length)
    vocab_size = executor.engine_info.vocab_size
    requests = []
    for number in range(scenario.requests):
        prompt = random_prompt(scenario.input_length, vocab_size, generator)
        if scenario.text == "few_tokens":
            prompt = generator.choice(FEW_TOKENS, scenario.input_length).tolist()
        fields = _fields(executor, scenario.text, number)
        if scenario.drafts:
            fields["lookahead_config"] = LookaheadDecodingConfig(scenario.drafts, 4, 4)
        requests.append(Request(prompt, scenario.output_length, streaming=True, **fields))
    return requests


def _fields(executor: Executor, text: str, number: int) -> dict[str, Any]:
    """Returns the fields of request `number` that make its text one of kinds.TEXTS."""
    vocab_size = executor.engine_info.vocab_size
    if text == "greedy":
        return {}
    if text == "one_token":
        return {"embedding_bias": _only(FEW_TOKENS[:1], vocab_size)}
    if text == "few_tokens":
        # A token is forbidden if it followed the same two tokens before, so all drafts are wrong.
        sampling = SamplingConfig(no_repeat_ngram_size=3, top_p=1.0)
        return {"embedding_bias": _only(FEW_TOKENS, vocab_size), "sampling_config": sampling}
    # Only a guide can end these requests, and the bias on end tokens prevents that.
    ends = np.zeros(vocab_size, np.float32)
    ends[list(executor.engine.config.pretrained_config.eos_token_id)] = -np.inf
    fields = {"embedding_bias": ends, "sampling_config": SamplingConfig(top_p=1.0, seed=number)}
    if text == "json":
        grammar = f"start: record+\nrecord: %json {json.dumps(RECORD)}\n"
        fields["guided_decoding_params"] = GuidedDecodingParams(GuidedDecodingParams.GuideType.EBNF_GRAMMAR, grammar)
    return fields


def _only(tokens: Any, vocab_size: int) -> Any:
    bias = np.full(vocab_size, -np.inf, np.float32)
    bias[tokens] = 0.0
    return bias
