"""Measures the gain of aLoRA: time to first token of turns over one long prompt, compared with plain LoRA.

    python bench/alora/run.py ENGINE [--prompt 4096] [--turns 3] [--repeats 5] [--rank 16] [--threads N]

ENGINE is any engine directory with LoRA and room for the prompt; its weights may be random. In each round the base
model answers the prompt, and then each of `--turns` adapters is asked about it: the same prompt followed by 32 other
tokens. The aLoRA adapter acts only on these tokens, the LoRA adapter on the whole prompt. Both have the same random
weights. The two kinds alternate, and no round reuses the KV cache of another one (cache_salt_id).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import adaptrt
from adaptrt.runtime.native_engine import NativeEngine
from adaptrt.tools.bench.scenario_types import AdapterMix
from scenarios.random_adapters import RandomAdapters

QUESTION = 32
KINDS = ("aLoRA", "LoRA")


def main() -> None:
    """Prints the medians of both kinds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    config = adaptrt.ExecutorConfig(num_threads=options.threads, enable_chunked_context=True)
    with adaptrt.Executor(options.engine, executor_config=config) as executor:
        engine = executor.engine
        if not isinstance(engine, NativeEngine):
            parser.error(f"{options.engine}: is not an engine of the CPU")
        library, mix = RandomAdapters(engine), AdapterMix(options.turns, (options.rank,))
        for turn in range(options.turns):
            executor.put_adapter(library.tensors(mix, turn))
        tasks = [library.task_id(mix, turn) for turn in range(options.turns)]
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(options.repeats + 1):
            for kind in KINDS:
                salt = 2 * number + KINDS.index(kind) + 1
                found = _round(executor, kind, tasks, options.prompt, salt)
                if number > 0:  # Round 0 is the warm-up.
                    times[kind] += found
        for kind, found in times.items():
            low, middle, high = (1e3 * value for value in statistics.quantiles(found, n=4))
            print(f"{kind:6} time to the first token of a later turn: {middle:8.1f} ms ({low:.1f} to {high:.1f})")
        ratio = statistics.median(a / b for a, b in zip(times["aLoRA"], times["LoRA"], strict=True))
        print(f"aLoRA / LoRA, turn by turn: {100 * ratio:.1f}%")


def _round(executor: adaptrt.Executor, kind: str, tasks: Sequence[int], prompt_length: int, salt: int) -> list[float]:
    """Seconds of each turn."""
    random = np.random.default_rng(salt)
    prompt = random.integers(100, executor.engine_info.vocab_size, prompt_length).tolist()
    _answer(executor, adaptrt.Request(prompt, 1, cache_salt_id=salt))
    times = []
    for task_id in tasks:
        question = random.integers(100, executor.engine_info.vocab_size, QUESTION).tolist()
        lora = adaptrt.LoraConfig(task_id, active_from=prompt_length if kind == "aLoRA" else 0)
        times.append(_answer(executor, adaptrt.Request(prompt + question, 1, lora_config=lora, cache_salt_id=salt)))
    return times


def _answer(executor: adaptrt.Executor, request: adaptrt.Request) -> float:
    start = time.perf_counter()
    responses = executor.await_responses(executor.enqueue_request(request))
    assert not responses[-1].has_error(), responses[-1].error_msg
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
