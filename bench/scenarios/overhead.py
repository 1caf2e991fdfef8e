"""Measures the parts of a step outside of the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from adaptrt import Executor, LoraConfig
from adaptrt.tools.bench.measure import PERCENTILES, Metrics, decode_steps, finish, pinned, request

ENQUEUED: Final = 64
"""Number of requests that a sample enqueues one by one."""


def overhead(
    executor: Executor, prompts: Sequence[list[int]], adapters: Sequence[LoraConfig | None], max_tokens: int
) -> Metrics:
    """Runs a generating batch, and meanwhile enqueues requests of one token one after another.

    Returns the percentage of the batch's step time outside of the engine, and the microseconds per enqueue_request.
    """
    executor.get_latest_iteration_stats()
    seconds = []
    with pinned(executor, adapters):
        ids = executor.enqueue_requests(
            [request(prompt, max_tokens, lora) for prompt, lora in zip(prompts, adapters, strict=True)]
        )
        for number in range(ENQUEUED):
            made = request(prompts[number % len(prompts)], 1, adapters[number % len(prompts)])
            start = time.perf_counter()
            ids.append(executor.enqueue_request(made))
            seconds.append(time.perf_counter() - start)
        for request_id in ids:
            finish(executor, request_id)
    between_ends, engine = decode_steps(executor, len(prompts))
    return {
        "value": 100 * float(1 - engine.sum() / between_ends.sum()),
        "step_ms": 1e3 * float(np.median(between_ends)),
        "outside_engine_us": 1e6 * float(np.median(between_ends - engine)),
        **{f"enqueue_us_p{p}": 1e6 * float(np.percentile(seconds, p)) for p in PERCENTILES},
    }
