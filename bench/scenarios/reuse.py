"""Measures the time to first token of a prompt whose beginning was computed before."""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np

from adaptrt import Executor, ExecutorConfig, KvCacheConfig, LoraConfig
from adaptrt.runtime.native_engine import NativeEngine
from adaptrt.tools.bench.executors import CpuUse
from adaptrt.tools.bench.measure import Metrics, first_token_seconds
from adaptrt.tools.bench.workload import random_prompt

from .kinds import Reuse
from .random_adapters import RandomAdapters

FILE_BYTES = 1 << 34
"""Maximum size of the KV cache's file."""


def reuse(engine: NativeEngine, scenario: Reuse, cpu: CpuUse) -> Metrics:
    """Measures the milliseconds to first token on a new executor."""
    generator = np.random.default_rng(scenario.input_length)
    shared, own = (
        random_prompt(length, engine.program.vocab_size, generator)
        for length in (scenario.input_length, scenario.question)
    )
    with tempfile.TemporaryDirectory() as folder:
        directory = folder if scenario.kv_from in ("page_cache", "disk") else None
        if directory is not None:
            with _executor(engine, scenario, cpu, directory) as executor:
                first_token_seconds(executor, shared)
            _read_or_drop(Path(folder), drop=scenario.kv_from == "disk")
        with _executor(engine, scenario, cpu, directory) as executor:
            lora = None
            if scenario.adapters.count:
                adapter = RandomAdapters(engine).tensors(scenario.adapters, 0)
                executor.put_adapter(adapter)
                lora = LoraConfig(adapter.task_id, active_from=len(shared) if scenario.alora else 0)
            if scenario.kv_from == "pool":
                first_token_seconds(executor, shared)
            return {"value": 1e3 * first_token_seconds(executor, [*shared, *own], lora)}


def _executor(engine: NativeEngine, scenario: Reuse, cpu: CpuUse, directory: str | None) -> Executor:
    cache = KvCacheConfig(
        max_tokens=2 * scenario.sizes.longest_input, host_cache_size=None if directory is None else FILE_BYTES,
        host_cache_dir=directory,
    )  # fmt: skip
    config = ExecutorConfig(kv_cache_config=cache, enable_chunked_context=True, **asdict(cpu))
    return Executor(engine.directory, executor_config=config)


def _read_or_drop(folder: Path, *, drop: bool) -> None:
    """Reads the files into the page cache, or drops their pages from it."""
    for path in folder.iterdir():
        if not drop:
            path.read_bytes()
            continue
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
