"""Takes one sample of a scenario: sends requests to an executor and returns metrics."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone

import numpy as np
import numpy.typing as npt

from ..._core import ConfigError, Executor, IterationStats, LoraCacheStats, LoraConfig, OutputConfig, Request, Response
from .scenario_types import Serve
from .workload import PlannedRequest

Metrics = dict[str, float]
"""Numbers by name; `value` is always there."""

PERCENTILES = (50, 90, 99)
WEIGHT_BYTES = "weight_bytes_per_token"
"""Bytes of weights read from the engine file, for decode samples of an engine whose weights are not all in memory."""
DIVERGENCE = "divergence"
"""Nats per token that an engine's distributions diverge from another engine's, for samples of perplexity."""
PROMPTS = 3
"""Number of prompts in a prefill sample, sent one after another."""


def request(
    prompt: list[int],
    max_tokens: int,
    lora: LoraConfig | None = None,
    *,
    streaming: bool = False,
    salt: int | None = None,
) -> Request:
    """A greedy request without an end token, so that it generates max_tokens tokens.

    With prefix reuse, requests only reuse prefixes of requests with the same `salt`.
    """
    return Request(
        prompt,
        max_tokens,
        streaming=streaming,
        lora_config=lora,
        cache_salt_id=salt,
        output_config=OutputConfig(exclude_input_from_output=True),
    )


def finish(executor: Executor, request_id: int) -> None:
    """Waits for a request's last response. Raises RuntimeError with the reason if it failed."""
    while True:
        for response in executor.await_responses(request_id):
            if _tokens_of(response)[1]:
                return


def first_token_seconds(executor: Executor, prompt: list[int], lora: LoraConfig | None = None) -> float:
    """Time from sending a request for one token to its answer."""
    start = time.perf_counter()
    finish(executor, executor.enqueue_request(request(prompt, 1, lora)))
    return time.perf_counter() - start


def prefill(executor: Executor, prompt: list[int], lora: LoraConfig | None = None) -> Metrics:
    """Prompt tokens per second, from the median of several times to first token."""
    seconds = float(np.median([first_token_seconds(executor, prompt, lora) for _ in range(PROMPTS)]))
    return {"value": len(prompt) / seconds, "seconds": seconds}


def decode(
    executor: Executor,
    prompts: Sequence[list[int]],
    adapters: Sequence[LoraConfig | None],
    max_tokens: int,
    salt: int | None = None,
) -> Metrics:
    """Generates `max_tokens` tokens for each prompt in one batch; counts only steps in which all requests generate.

    The adapters are pinned meanwhile. Otherwise requests would start one after another, as their adapters are loaded.
    Raises ConfigError if all requests generate in fewer than two steps.
    """
    executor.get_latest_iteration_stats()
    with pinned(executor, adapters):
        ids = executor.enqueue_requests(
            [request(prompt, max_tokens, lora, salt=salt) for prompt, lora in zip(prompts, adapters, strict=True)]
        )
        for request_id in ids:
            finish(executor, request_id)
    steps = _steps_of(executor, len(prompts))
    between_ends, engine = _times_of(steps)
    step_seconds = float(np.median(between_ends))
    metrics = {"value": len(prompts) / step_seconds, "step_ms": 1e3 * step_seconds}
    # The engine's latency of steps begun ahead is only the wait for them.
    if not any(step.begun_ahead for step in steps):
        metrics["outside_engine_share"] = float(1 - engine.sum() / between_ends.sum())
    read = [step.weight_bytes_read for step in steps[1:]]
    if any(read):
        metrics[WEIGHT_BYTES] = float(np.mean(read)) / len(prompts)
    return metrics


@contextmanager
def pinned(executor: Executor, adapters: Sequence[LoraConfig | None]) -> Iterator[None]:
    """Keeps the adapters in the cache during the with statement."""
    tasks = {lora.task_id for lora in adapters if lora is not None}
    try:
        for task in tasks:
            executor.pin_adapter(task)
        yield
    finally:
        for task in tasks:
            executor.unpin_adapter(task)


def decode_steps(executor: Executor, batch_size: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Returns (seconds from one step's end to the next, seconds in the engine) of the newest steps in which all
    requests generate.

    Raises ConfigError if there are fewer than two.
    """
    return _times_of(_steps_of(executor, batch_size))


def _steps_of(executor: Executor, batch_size: int) -> list[IterationStats]:
    steps = [step for step in executor.get_latest_iteration_stats() if _is_decode_of(step, batch_size)]
    if len(steps) < 2:
        raise ConfigError(f"fewer than two steps generated for all {batch_size} requests at once; ask for more output")
    return steps


def _times_of(steps: Sequence[IterationStats]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    engine = np.array([step.engine_latency_ms for step in steps[1:]]) / 1e3
    return np.diff([_end_of(step) for step in steps]), engine


def _end_of(step: IterationStats) -> float:
    return datetime.strptime(step.timestamp, "%m-%d-%Y %H:%M:%S.%f").replace(tzinfo=timezone.utc).timestamp()


def _is_decode_of(step: IterationStats, batch_size: int) -> bool:
    batch = step.inflight_batching_stats
    return batch is not None and batch.num_context_requests == 0 and batch.num_gen_requests == batch_size


@dataclass
class _Live:
    """A request that was sent. Times are seconds since the start."""

    planned: PlannedRequest
    asked: float
    token_times: list[float] = field(default_factory=list)


def serve(
    executor: Executor, scenario: Serve, requests: Sequence[PlannedRequest], adapters: Sequence[LoraConfig]
) -> Metrics:
    """Sends a workload and receives its answers; one client thread does both.

    In an open loop, latencies count from the planned arrival, so they include the delays of a late client or a long
    queue.
    """
    before = executor.lora_cache_stats() if adapters else None
    waiting, live, done = deque(requests), dict[int, _Live](), list[_Live]()
    start = time.perf_counter()
    while waiting or live:
        now = time.perf_counter() - start
        while waiting and _may_send(scenario, waiting[0], len(live), now):
            planned = waiting.popleft()
            lora = None if planned.adapter is None else adapters[planned.adapter]
            asked = now if scenario.rate is None else planned.arrival
            sent = executor.enqueue_request(request(planned.prompt, planned.output_length, lora, streaming=True))
            live[sent] = _Live(planned, asked)
        pause = None if scenario.rate is None or not waiting else max(0.0, waiting[0].arrival - now)
        for response in executor.await_responses(timeout=pause):
            count, is_final = _tokens_of(response)
            record = live[response.request_id]
            record.token_times += [time.perf_counter() - start] * count
            if is_final:
                done.append(live.pop(response.request_id))
    metrics = _latencies(done, scenario)
    if before is not None:
        metrics.update(_cache_metrics(before, executor.lora_cache_stats()))
    return metrics


def _may_send(scenario: Serve, planned: PlannedRequest, num_live: int, now: float) -> bool:
    return num_live < scenario.concurrency if scenario.concurrency is not None else planned.arrival <= now


def _tokens_of(response: Response) -> tuple[int, bool]:
    """Returns (number of new tokens, True if it is the request's last response)."""
    if response.has_error():
        raise RuntimeError(response.error_msg)
    return len(response.result.output_token_ids[0]), response.result.is_final


def _latencies(done: Sequence[_Live], scenario: Serve) -> Metrics:
    seconds = max(record.token_times[-1] for record in done)
    tokens = sum(len(record.token_times) for record in done)
    first = np.array([record.token_times[0] - record.asked for record in done])
    whole = np.array([record.token_times[-1] - record.asked for record in done])
    between = np.concatenate([np.diff(record.token_times) for record in done])
    metrics = {
        "value": tokens / seconds,
        "requests_per_second": len(done) / seconds,
        "prompt_tokens_per_second": sum(len(record.planned.prompt) for record in done) / seconds,
        "seconds": seconds,
        "adapters_used": float(len({record.planned.adapter for record in done} - {None})),
        "first_token_on_time": float(np.mean(first <= scenario.first_token_target)),
    }
    for name, values in (("ttft_ms", first), ("itl_ms", between), ("latency_ms", whole)):
        for percentile in PERCENTILES:
            if values.size:
                metrics[f"{name}_p{percentile}"] = 1e3 * float(np.percentile(values, percentile))
    return metrics


def _cache_metrics(before: LoraCacheStats, after: LoraCacheStats) -> Metrics:
    """Metrics of the requests between two snapshots of the LoRA cache's statistics."""
    metrics = {
        "device_evictions": float(after.device_evictions - before.device_evictions),
        "adapter_load_seconds": after.load_seconds - before.load_seconds,
    }
    for level in ("host", "device"):
        hits = getattr(after, f"{level}_hits") - getattr(before, f"{level}_hits")
        misses = getattr(after, f"{level}_misses") - getattr(before, f"{level}_misses")
        if hits + misses:
            metrics[f"{level}_hit_rate"] = hits / (hits + misses)
    return metrics
