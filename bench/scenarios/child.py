"""Measurements that need a fresh process: the time to load an engine, and the memory of a serving process.

Run as `python -m scenarios.child '<JSON of a task>'`; prints the metrics as one line of JSON.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from adaptrt import Executor, ExecutorConfig, KvCacheConfig
from adaptrt.common.process_memory import peak_memory
from adaptrt.tools.bench.executors import BenchExecutor, CpuUse, key_of, load_native_engine
from adaptrt.tools.bench.measure import Metrics, finish, first_token_seconds, request
from adaptrt.tools.bench.scenario_types import AdapterMix
from adaptrt.tools.bench.workload import random_prompt

from .kinds import Load, Memory, VariedMix
from .random_adapters import RandomAdapters

MEGABYTE = 1e6
BENCH = Path(__file__).parents[1]


def run_module(module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a module of bench/ or of the package in a fresh process."""
    path = os.pathsep.join(filter(None, (str(BENCH), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})


def run_child(scenario: Load | Memory, engine: Path, cpu: CpuUse) -> Metrics:
    """Measures in a fresh process. Raises RuntimeError with the child's error if it fails."""
    task = {
        "kind": type(scenario).__name__,
        "scenario": asdict(scenario),
        "engine": str(engine),
        "cpu": asdict(cpu),
    }
    done = run_module("scenarios.child", json.dumps(task))
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or ["the process failed"])[-1])
    metrics: Metrics = json.loads(done.stdout)
    return metrics


def measure_load(scenario: Load, engine: Path, cpu: CpuUse) -> Metrics:
    """Measures the time from the engine's directory to the first token, without imports."""
    config = ExecutorConfig(kv_cache_config=KvCacheConfig(enable_block_reuse=False), **asdict(cpu))
    start = time.perf_counter()
    with Executor(engine, executor_config=config) as executor:
        loaded = time.perf_counter() - start
        prompt = random_prompt(
            scenario.input_length, executor.engine.config.pretrained_config.vocab_size, np.random.default_rng(0)
        )
        first_token_seconds(executor, prompt)
        return {"value": time.perf_counter() - start, "load_seconds": loaded}


def measure_memory(scenario: Memory, engine: Path, cpu: CpuUse) -> Metrics:
    """Measures the peak resident size while a batch is served, and its excess over the data that must be in memory."""
    loaded = load_native_engine(engine)
    library = RandomAdapters(loaded)
    bench = BenchExecutor(loaded, key_of(scenario), [scenario], cpu, profiled=False, library=library)
    adapters = library.references(scenario.adapters)
    library.forget()
    gc.collect()
    # Resets the peak, so that only serving counts: registering made the adapters' tensors, which a server would read
    # from files.
    Path("/proc/self/clear_refs").write_text("5")
    generator = np.random.default_rng(0)
    ids = []
    for number in range(scenario.requests):
        prompt = random_prompt(scenario.input_length, loaded.program.vocab_size, generator)
        lora = adapters[number % len(adapters)] if adapters else None
        ids.append(bench.executor.enqueue_request(request(prompt, scenario.output_length, lora)))
    for request_id in ids:
        finish(bench.executor, request_id)
    steps = bench.executor.get_latest_iteration_stats()
    peak = peak_memory()
    # The system allocates the KV pool's pages when they are written, so only used blocks count.
    kv_blocks = max(step.kv_cache_stats.used_num_blocks for step in steps if step.kv_cache_stats is not None)
    needed = {
        "engine": float(loaded.storage.num_bytes),
        "kv_cache": float(kv_blocks * bench.info.kv_block_bytes),
        "adapters": 0.0,
    }
    if adapters:
        needed["adapters"] = float(bench.executor.lora_cache_stats().memory_bytes)
    bench.close()
    return {
        "value": (peak - sum(needed.values())) / MEGABYTE,
        "peak_mb": peak / MEGABYTE,
        **{f"{name}_mb": num_bytes / MEGABYTE for name, num_bytes in needed.items()},
    }


def main(task: dict[str, Any]) -> Metrics:
    """Runs a task of run_child."""
    values = task["scenario"]
    mix = {**values["adapters"], "ranks": tuple(values["adapters"]["ranks"])}
    values["adapters"] = VariedMix(**mix) if "variant" in mix else AdapterMix(**mix)
    engine, cpu = Path(task["engine"]), CpuUse(**task["cpu"])
    if task["kind"] == "Load":
        return measure_load(Load(**values), engine, cpu)
    return measure_memory(Memory(**values), engine, cpu)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
