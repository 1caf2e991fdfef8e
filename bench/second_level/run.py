"""Measures the gain of the KV cache's file: time to first token of a long prompt, computed or read back.

    python bench/second_level/run.py ENGINE [--tokens 4096] [--directory DIR] [--repeats 5] [--threads N]

ENGINE is a directory of a native engine whose max_seq_len is above --tokens. Four ways alternate, each with its own
executor: the prompt is computed; read back from the page cache; read back from disk, after the system has dropped the
file's pages; or found in the KV pool. The file is written in DIR (default: the temporary directory), and deleted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

import adaptrt

WAYS = ("computed", "page cache", "disk", "pool")


def main() -> None:
    """Prints the median of each way, and the number of bytes read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        prompt = np.random.default_rng(0).integers(100, 1000, options.tokens).tolist()
        with _executor(options, directory) as executor:
            _first_token(executor, prompt)
            info = executor.engine_info
        for _ in range(options.repeats):
            for way in WAYS:
                seconds[way].append(_round(options, directory, prompt, way))
    num_bytes = options.tokens // info.tokens_per_block * info.kv_block_bytes
    print(f"{options.tokens} tokens, {num_bytes / 2**20:.1f} MiB of KV, kernels {info.kernels}")
    for way in WAYS:
        median = statistics.median(seconds[way])
        print(f"{way:>10}: first token after {median * 1000:8.1f} ms")


def _round(options: argparse.Namespace, directory: str, prompt: list[int], way: str) -> float:
    (file,) = Path(directory).iterdir()
    if way == "disk":
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    elif way == "page cache":
        file.read_bytes()
    with _executor(options, None if way == "computed" else directory) as executor:
        if way == "pool":
            _first_token(executor, prompt)
        return _first_token(executor, prompt)


def _executor(options: argparse.Namespace, directory: str | None) -> adaptrt.Executor:
    cache = adaptrt.KvCacheConfig(
        max_tokens=2 * options.tokens, host_cache_size=None if directory is None else 1 << 34, host_cache_dir=directory
    )
    config = adaptrt.ExecutorConfig(
        num_threads=options.threads, kv_cache_config=cache, enable_chunked_context=True, iter_stats_max_iterations=0
    )
    return adaptrt.Executor(options.engine, executor_config=config)


def _first_token(executor: adaptrt.Executor, prompt: list[int]) -> float:
    start = time.perf_counter()
    (response,) = executor.await_responses(executor.enqueue_request(adaptrt.Request(prompt, 1)))
    assert not response.has_error(), response.error_msg
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
