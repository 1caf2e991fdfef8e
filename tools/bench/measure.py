"""What is measured: each function sends requests to an executor and returns one sample."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

import numpy as np

from ..._core import IterationStats, KvCacheConfig, LoraConfig, OutputConfig, Request
from ...runtime.executor import Executor

PROMPT_TOKENS = 64
PREFILL_TOKENS = 512
DECODE_TOKENS = 96
FIRST_TOKEN_ID = 300  # below are the special tokens of most vocabularies


def without_reuse() -> KvCacheConfig:
    """Prompts repeat between samples: with prefix reuse on, all but the first would cost nothing."""
    return KvCacheConfig(enable_block_reuse=False)


def random_prompt(length: int, vocab_size: int, seed: int) -> list[int]:
    """Token ids of one prompt."""
    prompt: list[int] = np.random.default_rng(seed).integers(FIRST_TOKEN_ID, vocab_size, length).tolist()
    return prompt


def request(prompt: list[int], max_tokens: int, lora: LoraConfig | None = None, *, streaming: bool = False) -> Request:
    """A greedy request without an end token, so that it generates max_tokens tokens."""
    return Request(
        prompt,
        max_tokens,
        streaming=streaming,
        lora_config=lora,
        output_config=OutputConfig(exclude_input_from_output=True),
    )


def finish(executor: Executor, request_id: int) -> None:
    """Wait for a request's last response. Raises RuntimeError with the reason when it failed."""
    while True:
        for response in executor.await_responses(request_id):
            if response.has_error():
                raise RuntimeError(response.error_msg)
            if response.result.is_final:
                return


def time_to_first_token(executor: Executor, prompt: list[int], lora: LoraConfig | None = None) -> float:
    """Seconds from sending a request of one token to its answer."""
    start = time.perf_counter()
    finish(executor, executor.enqueue_request(request(prompt, 1, lora)))
    return time.perf_counter() - start


@dataclass(frozen=True)
class DecodeSample:
    """Steps in which every request of the batch generated and none computed its prompt."""

    step_seconds: float  # median, from the end of one step to the end of the next
    overhead: float  # share of that time that was not the engine's


def decode(executor: Executor, prompts: Sequence[list[int]], adapters: Sequence[LoraConfig | None]) -> DecodeSample:
    """Generate DECODE_TOKENS tokens for each prompt in one batch.

    Raises RuntimeError when fewer than two steps had all of them.
    """
    executor.get_latest_iteration_stats()
    ids = executor.enqueue_requests(
        [request(prompt, DECODE_TOKENS, lora) for prompt, lora in zip(prompts, adapters, strict=True)]
    )
    for request_id in ids:
        finish(executor, request_id)
    steps = [step for step in executor.get_latest_iteration_stats() if _is_decode_of(step, len(prompts))]
    if len(steps) < 2:
        raise RuntimeError(f"no two steps generated for all {len(prompts)} requests at once")
    ends = np.array([_end_of(step) for step in steps])
    engine = np.array([step.engine_latency_ms for step in steps]) / 1e3
    between_ends = np.diff(ends)
    return DecodeSample(float(np.median(between_ends)), float(1 - engine[1:].sum() / between_ends.sum()))


def _end_of(step: IterationStats) -> float:
    return datetime.strptime(step.timestamp, "%m-%d-%Y %H:%M:%S.%f").replace(tzinfo=timezone.utc).timestamp()


def _is_decode_of(step: IterationStats, batch_size: int) -> bool:
    batch = step.inflight_batching_stats
    return batch is not None and batch.num_context_requests == 0 and batch.num_gen_requests == batch_size
