"""Measures a prompt chunk and a decoded token after a long context, without computing that context.

    python bench/long_context/behind.py WORK_DIR [--behind 0 8192 32768 65536 98304 129024] [--kv int8]
        [--longest 131072] [--tokens 16] [--threads N]

Uses the model and engine that run.py makes for its longest length. First, short prompts fill every block of the KV
cache. Then one sequence uses all blocks as its context. The cost of attention depends on the number of keys and their
addresses, not on their values.

Also prints the time of whole prompts, up to the largest depth: the sum over their chunks, whose times are interpolated
linearly between the measured depths.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from long_context.run import CHUNK, KINDS, make_engine

import adaptrt
from adaptrt.runtime.engine import load_engine

DEPTHS = (0, 8192, 32768, 65536, 98304, 129024)
FILLING_PROMPTS = 4
"""The number of prompts in one step."""
LENGTHS = (8192, 32768, 131072)
Timed = Callable[[int, int], float]
"""timed(tokens, depth): seconds of this many tokens after a context of this depth."""


def main() -> None:
    """Prints a line for each depth and prompt length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("--behind", type=int, nargs="+", default=list(DEPTHS))
    parser.add_argument("--kv", choices=KINDS, default="int8")
    parser.add_argument("--longest", type=int, default=131072)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    engine = load_engine(make_engine(options.work_dir, options.kv, options.longest + options.tokens + 1))
    running = engine.start(adaptrt.ExecutorConfig(num_threads=options.threads))
    block = running.info.tokens_per_block
    blocks = np.arange(-(-(options.longest + CHUNK) // block), dtype=np.int32)
    running.allocate_kv_blocks(len(blocks))
    tokens = np.random.default_rng(0).integers(100, 20000, CHUNK).astype(np.int32)

    def step(tables: np.ndarray, length: int, behind: int) -> float:
        sequences = len(tables)
        offsets = np.arange(sequences + 1, dtype=np.int32) * length
        begin = time.perf_counter()
        running.step(
            token_ids=tokens[: offsets[-1]],
            positions=np.tile(np.arange(behind, behind + length, dtype=np.int32), sequences),
            sequence_offsets=offsets,
            prompt_lengths=np.full(sequences, behind + length, np.int32),
            block_tables=tables,
            logit_rows=offsets[1:] - 1,
        )
        return time.perf_counter() - begin

    filled = CHUNK // FILLING_PROMPTS
    for first in range(0, len(blocks), CHUNK // block):
        step(blocks[first : first + CHUNK // block].reshape(FILLING_PROMPTS, -1), filled, 0)
    measure("adaptrt", lambda length, behind: step(blocks[None], length, behind), options)


def measure(name: str, timed: Timed, options: argparse.Namespace) -> None:
    """Prints the time of a chunk and of a token at each depth, and the estimated time of whole prompts."""
    chunks = []
    for behind in options.behind:
        chunks.append(timed(CHUNK, behind))
        token = statistics.median(timed(1, behind) for _ in range(options.tokens))
        print(
            f"{name:>9}, behind {behind:6} tokens: {CHUNK} more {chunks[-1]:7.2f} s, {CHUNK / chunks[-1]:6.1f} tok/s; "
            f"decode {1 / token:6.2f} tok/s",
            flush=True,
        )
    for length in LENGTHS:
        if length - CHUNK > max(options.behind):
            continue
        whole = prompt_seconds(options.behind, chunks, length)
        print(f"{name:>9}, {length:6} tokens, from these: prefill {whole:7.1f} s, {length / whole:6.1f} tok/s")


def prompt_seconds(depths: Sequence[int], chunks: Sequence[float], length: int) -> float:
    """Seconds of all chunks of a prompt."""
    return float(np.interp(np.arange(0, length, CHUNK), depths, chunks).sum())


if __name__ == "__main__":
    main()
