"""Measures one request with a long context: prefill, decoding, and attention's share of the roofline.

    python bench/long_context/run.py WORK_DIR [--lengths 8192 32768] [--kv int8 bfloat16] [--tokens 16] [--repeats 3]
        [--threads N]

Creates the 0.5B model of the other benchmarks, and an engine for each kind of KV cache, in WORK_DIR; existing ones are
kept. A prompt of each length is computed in chunks of 2048 tokens, and then generates; prompts are not reused. A
token's attention time is the time of its step minus that of a step after 128 tokens. Its roofline is the time to read
the keys and values once at the measured bandwidth. The KV cache's memory is the size that `adaptrt inspect` prints.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import adaptrt
from adaptrt._core import measure_machine_limits
from adaptrt.builder.cli import main as adaptrt_command
from adaptrt.runtime.native_engine import NativeEngine
from scenarios.model import BenchModel, write_model

SHORT, CHUNK = 128, 2048
KINDS = {"int8": ["--int8_kv_cache"], "bfloat16": []}


@dataclass(frozen=True)
class Sample:
    """Seconds to the first token, and of each token after it."""

    prefill: float
    token: float


def main() -> None:
    """Prints a line for each kind of KV cache and length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--kv", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    bandwidth = measure_machine_limits(options.threads).read_bandwidth
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s, {options.threads} threads")
    longest = max(options.lengths) + options.tokens + 1
    for kind in options.kv:
        engine = make_engine(options.work_dir, kind, longest)
        with executor_of(engine, longest, options.threads) as executor:
            assert isinstance(executor.engine, NativeEngine)
            program = executor.engine.program
            token_bytes = program.kv_block_bytes() / program.tokens_per_block
            short = median_of(executor, SHORT, options)
            for length in options.lengths:
                found = median_of(executor, length, options)
                roofline = length * token_bytes / bandwidth
                attention = found.token - short.token
                print(
                    f"{kind:>8} KV, {length:6} tokens: {length * token_bytes / 2**20:6.0f} MiB; "
                    f"prefill {found.prefill:7.2f} s, {length / found.prefill:6.0f} tok/s; "
                    f"decode {1 / found.token:6.2f} tok/s; attention {1e3 * attention:6.2f} ms a token, roofline "
                    f"{1e3 * roofline:6.2f} ms, {100 * roofline / attention:4.0f}%"
                )


def median_of(executor: adaptrt.Executor, length: int, options: argparse.Namespace) -> Sample:
    """Median over all repeats."""
    samples = [sample(executor, length, options.tokens) for _ in range(options.repeats)]
    return Sample(
        statistics.median(found.prefill for found in samples), statistics.median(found.token for found in samples)
    )


def sample(executor: adaptrt.Executor, length: int, tokens: int) -> Sample:
    """Measures one request."""
    prompt = np.random.default_rng(length).integers(100, 20000, length).tolist()
    begin, times = time.perf_counter(), []
    request_id = executor.enqueue_request(adaptrt.Request(prompt, 1 + tokens, streaming=True))
    while len(times) <= tokens:
        for response in executor.await_responses(request_id):
            assert not response.has_error(), response.error_msg
            times += [time.perf_counter()] * len(response.result.output_token_ids[0])
    return Sample(times[0] - begin, float(np.median(np.diff(times))))


def executor_of(engine: Path, longest: int, threads: int) -> adaptrt.Executor:
    """An executor with room for one request, whose prompt is computed in chunks."""
    config = adaptrt.ExecutorConfig(
        num_threads=threads,
        enable_chunked_context=True,
        kv_cache_config=adaptrt.KvCacheConfig(
            enable_block_reuse=False, max_tokens=longest + 64, free_gpu_memory_fraction=1.0
        ),
    )
    return adaptrt.Executor(engine, executor_config=config)


def make_engine(work_dir: Path, kind: str, longest: int) -> Path:
    """Directory of an engine for contexts of this length."""
    model, engine = work_dir / f"model-{longest}", work_dir / f"{kind}-{longest}"
    if not (model / "config.json").is_file():
        write_model(replace(BenchModel(), max_position_embeddings=longest), model)
    if not (engine / "config.json").is_file():
        arguments = [
            "build", "--model_dir", str(model), "--output_dir", str(engine), "--dtype", "bfloat16",
            "--max_batch_size", "4", "--max_num_tokens", str(CHUNK), "--max_seq_len", str(longest), *KINDS[kind],
        ]  # fmt: skip
        if adaptrt_command(arguments) != 0:
            raise SystemExit(1)
    return engine


if __name__ == "__main__":
    main()
