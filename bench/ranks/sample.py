"""Takes one sample of one engine: `[mpirun -n N] python bench/ranks/sample.py ENGINE WHOLE THREADS`.

WHOLE is the engine of the same model in one rank; the adapters are made for its sizes. THREADS is the number of threads
per rank. Rank 0 prints the tokens per second of each row as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import adaptrt
from adaptrt.tools.bench.executors import load_native_engine
from adaptrt.tools.bench.scenario_types import AdapterMix
from scenarios.random_adapters import RandomAdapters

PROMPT, CONTEXT, GENERATED, BATCH, RANK = 512, 128, 32, 16, 16
PROMPTS = 3


def main() -> None:
    """Prints the figures of rank 0's executor."""
    engine, whole, threads = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    config = adaptrt.ExecutorConfig(num_threads=threads)
    config.kv_cache_config = adaptrt.KvCacheConfig(
        enable_block_reuse=False, max_tokens=2 * BATCH * (PROMPT + GENERATED)
    )
    with adaptrt.Executor(engine, executor_config=config) as executor:
        if not executor.can_enqueue_requests():
            return
        library, mix = RandomAdapters(load_native_engine(whole)), AdapterMix(BATCH, (RANK,))
        for index in range(BATCH):
            executor.put_adapter(library.tensors(mix, index))
        adapters = library.references(mix)
        _decode(executor, adapters, 2)  # Warm-up, which loads the adapters.
        figures = {
            "prefill, 512 tokens": PROMPT / statistics.median(_prefill(executor) for _ in range(PROMPTS)),
            "decode, 1 request": _decode(executor, [None], GENERATED),
            "decode, 16 requests": _decode(executor, [None] * BATCH, GENERATED),
            "decode, 16 requests, 16 adapters": _decode(executor, adapters, GENERATED),
        }
    print(json.dumps(figures))


def _prefill(executor: adaptrt.Executor) -> float:
    """Seconds of a prompt."""
    first, _ = _run(executor, PROMPT, 1, [None])
    return first


def _decode(executor: adaptrt.Executor, adapters: Sequence[adaptrt.LoraConfig | None], tokens: int) -> float:
    """Tokens per second after the first tokens, for requests that all start at once."""
    first, last = _run(executor, CONTEXT, 1 + tokens, adapters)
    return len(adapters) * tokens / (last - first)


def _run(
    executor: adaptrt.Executor, prompt: int, tokens: int, adapters: Sequence[adaptrt.LoraConfig | None]
) -> tuple[float, float]:
    """Seconds until all requests have their first token, and until all have ended."""
    random = np.random.default_rng(0)
    vocabulary = executor.engine_info.vocab_size
    made = [
        adaptrt.Request(random.integers(100, vocabulary, prompt).tolist(), tokens, streaming=True, lora_config=adapter)
        for adapter in adapters
    ]
    began = time.perf_counter()
    left = set(executor.enqueue_requests(made))
    without_token = set(left)
    first = 0.0
    while left:
        for response in executor.await_responses():
            if response.has_error():
                raise RuntimeError(response.error_msg)
            without_token.discard(response.request_id)
            if not without_token and not first:
                first = time.perf_counter() - began
            if response.result.is_final:
                left.discard(response.request_id)
    return first, time.perf_counter() - began


if __name__ == "__main__":
    main()
