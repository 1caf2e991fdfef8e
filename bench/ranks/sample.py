"""One sample of one engine: `[mpirun -n N] python bench/ranks/sample.py ENGINE WHOLE THREADS`.

WHOLE is the engine of the same model in one rank, for whose sizes adapters are made; THREADS are each rank's. Rank 0
prints tokens a second of each row as JSON.
"""

from __future__ import annotations

import json
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
        _decode(executor, adapters, 2)  # the warm-up, which loads them
        figures = {
            "prefill, 512 tokens": PROMPT / _seconds(executor, [(PROMPT, 1, None)] * 1),
            "decode, 1 request": _decode(executor, [None], GENERATED),
            "decode, 16 requests": _decode(executor, [None] * BATCH, GENERATED),
            "decode, 16 requests, 16 adapters": _decode(executor, adapters, GENERATED),
        }
    print(json.dumps(figures))


def _decode(executor: adaptrt.Executor, adapters: Sequence[adaptrt.LoraConfig | None], tokens: int) -> float:
    """Tokens a second behind the prompts, of requests that all begin at once."""
    prefill = _seconds(executor, [(CONTEXT, 1, adapter) for adapter in adapters])
    whole = _seconds(executor, [(CONTEXT, 1 + tokens, adapter) for adapter in adapters])
    return len(adapters) * tokens / (whole - prefill)


def _seconds(executor: adaptrt.Executor, requests: Sequence[tuple[int, int, adaptrt.LoraConfig | None]]) -> float:
    """Until requests of (prompt, tokens, adapter) have ended."""
    random = np.random.default_rng(0)
    vocabulary = executor.engine_info.vocab_size
    made = [
        adaptrt.Request(random.integers(100, vocabulary, prompt).tolist(), tokens, lora_config=adapter)
        for prompt, tokens, adapter in requests
    ]
    began = time.perf_counter()
    left = set(executor.enqueue_requests(made))
    while left:
        for response in executor.await_responses():
            if response.has_error():
                raise RuntimeError(response.error_msg)
            if response.result.is_final:
                left.discard(response.request_id)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
