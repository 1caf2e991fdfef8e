"""Takes one sample: `python bench/weight_memory/sample.py ENGINE WEIGHT_MEMORY TOKENS GROUP`; prints JSON.

The process enters the control group GROUP, unless that is empty.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

if sys.argv[4]:
    (Path(sys.argv[4]) / "cgroup.procs").write_text(str(os.getpid()))

import numpy as np

import adaptrt
from adaptrt.tools.bench.scenario_types import AdapterMix
from scenarios.random_adapters import RandomAdapters

PROMPT, CONTEXT, RANK = 512, 32, 16


def main() -> None:
    """Prints tokens per second."""
    engine, weight_memory, tokens = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    config = adaptrt.ExecutorConfig(
        weight_memory=weight_memory,
        kv_cache_config=adaptrt.KvCacheConfig(max_tokens=1024, enable_block_reuse=False),
        peft_cache_config=adaptrt.PeftCacheConfig(host_cache_size=200 << 20, device_cache_percent=0.3),
    )
    begin = time.perf_counter()
    with adaptrt.Executor(engine, executor_config=config) as executor:
        seconds_to_start = time.perf_counter() - begin
        library, mix = RandomAdapters(executor.engine), AdapterMix(1, (RANK,))
        executor.put_adapter(library.tensors(mix, 0))
        library.forget()
        (adapter,) = library.references(mix)
        decode(executor, adapter, 2)
        plain, read = decode(executor, None, tokens)
        adapted, _ = decode(executor, adapter, tokens)
        figures = {
            "decode": plain,
            "decode_adapter": adapted,
            "prefill": PROMPT / first_token_seconds(executor, PROMPT),
            "megabytes_per_token": read / 1e6,
            "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
            "seconds_to_start": seconds_to_start,
        }
    print(json.dumps(figures))


def decode(executor: adaptrt.Executor, adapter: adaptrt.LoraConfig | None, tokens: int) -> tuple[float, float]:
    """Tokens per second after the prompt, and bytes of weights read per token."""
    executor.get_latest_iteration_stats()
    times = []
    request = adaptrt.Request(prompt_of(CONTEXT), 1 + tokens, streaming=True, lora_config=adapter)
    request_id = executor.enqueue_request(request)
    while len(times) <= tokens:
        for response in executor.await_responses(request_id):
            assert not response.has_error(), response.error_msg
            times += [time.perf_counter()] * len(response.result.output_token_ids[0])
    steps = executor.get_latest_iteration_stats()[-tokens:]
    return tokens / (times[tokens] - times[0]), float(np.mean([step.weight_bytes_read for step in steps]))


def first_token_seconds(executor: adaptrt.Executor, length: int) -> float:
    """Seconds to first token of a prompt of this length."""
    begin = time.perf_counter()
    (response,) = executor.await_responses(executor.enqueue_request(adaptrt.Request(prompt_of(length), 1)))
    assert not response.has_error(), response.error_msg
    return time.perf_counter() - begin


def prompt_of(length: int) -> list[int]:
    """A prompt of random tokens."""
    return np.random.default_rng(length).integers(100, 20000, length).tolist()


if __name__ == "__main__":
    main()
