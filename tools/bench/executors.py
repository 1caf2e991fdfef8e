"""Executors that scenarios share, with registered adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from ..._core import (
    ConfigError,
    Engine,
    Executor,
    ExecutorConfig,
    KvCacheConfig,
    LoraConfig,
    LoraLayout,
    LoraSite,
    PeftCacheConfig,
    StepProfile,
    dtype_name,
    lora_modules,
)
from ...formats.engine.build_config import CUDA, NATIVE
from ...formats.network.adapter_sites import NEW_TOKENS, NORM
from ...runtime.compiled_engine import CompiledEngine
from ...runtime.engine import load_engine
from ...runtime.memory import available_memory
from ...runtime.native_engine import NativeEngine
from ...runtime.options.parallel import OrchestratorConfig
from ...runtime.orchestrator.workers import Workers
from .on_ranks import call_ranks, is_run_by_workers
from .scenario_types import AdapterMix, Decode, Prefill, Scenario, Serve

STATISTICS_KEPT: Final = 4096
MAX_STEPS: Final = 4096


@dataclass(frozen=True)
class CpuUse:
    """CPU resources of an engine."""

    num_threads: int
    kernels: str
    """Empty: chosen automatically for this CPU."""


@dataclass(frozen=True)
class ExecutorKey:
    """Scenarios with equal keys run on one executor."""

    engine: str
    device_adapters: int | None
    ranks: tuple[int, ...]
    """For a device level that does not hold all adapters: their ranks. Its pages are sized for the maximum."""
    num_threads: int | None
    """None: the run's number of threads."""
    lora_storage: str
    """PeftCacheConfig.lora_storage."""


def load_native_engine(directory: Path, weight_memory: int | None = None) -> NativeEngine:
    """Loads an engine for CPUs. `weight_memory` as in ExecutorConfig.

    Raises EngineError for a damaged engine, ConfigError for an engine of another backend.
    """
    engine = load_engine(directory, weight_memory=weight_memory)
    if not isinstance(engine, NativeEngine):
        raise ConfigError(f"{directory}: is an engine of another backend; expected backend {NATIVE}")
    return engine


def load_measured_engine(directory: Path, weight_memory: int | None = None) -> CompiledEngine:
    """Loads an engine that the bench can measure, for CPUs or a GPU. `weight_memory` as in ExecutorConfig.

    Raises EngineError for a damaged engine, ConfigError for a TensorRT plan.
    """
    engine = load_engine(directory, weight_memory=weight_memory)
    if not isinstance(engine, CompiledEngine):
        raise ConfigError(f"{directory}: is a TensorRT plan; the bench measures engines of backend {NATIVE} and {CUDA}")
    return engine


def key_of(scenario: Scenario) -> ExecutorKey:
    """The executor that a scenario runs on."""
    storage = scenario.adapters.storage
    if isinstance(scenario, Serve) and scenario.device_adapters is not None:
        return ExecutorKey(scenario.engine, scenario.device_adapters, scenario.adapters.ranks, None, storage)
    num_threads = scenario.num_threads if isinstance(scenario, (Prefill, Decode)) else None
    return ExecutorKey(scenario.engine, None, (), num_threads, storage)


class AdapterLibrary:
    """Adapters of AdapterMix objects, for one engine."""

    def __init__(self, engine: CompiledEngine) -> None:
        self.engine: Final = engine

    def task_id(self, mix: AdapterMix, index: int) -> int:
        """Id of an adapter; the same in every scenario."""
        return (2 * mix.rank(index) + mix.is_dora(index)) << 20 | index

    def reference(self, mix: AdapterMix, index: int) -> LoraConfig:
        """LoraConfig of an adapter that the executor already has."""
        return LoraConfig(self.task_id(mix, index))

    def references(self, mix: AdapterMix) -> list[LoraConfig]:
        """LoraConfigs of all adapters of a mix."""
        return [self.reference(mix, index) for index in range(mix.count)]

    def tensors(self, mix: AdapterMix, index: int, *, task_id: int | None = None) -> LoraConfig:
        """LoraConfig of an adapter with weights, under its own id or another one."""
        task = self.task_id(mix, index) if task_id is None else task_id
        return LoraConfig.from_peft(task, Path(mix.directories[index]), self.engine)

    def num_bytes(self, mix: AdapterMix, index: int) -> int:
        """Size of an adapter's submitted weights. On the device it needs no more, except padding."""
        return int(self.tensors(mix, index).weights.nbytes)


class BenchExecutor:
    """An executor, its engine and its adapters."""

    def __init__(
        self,
        engine: CompiledEngine,
        key: ExecutorKey,
        scenarios: Sequence[Scenario],
        cpu: CpuUse,
        *,
        profiled: bool,
        block_reuse: bool = False,
        library: AdapterLibrary | None = None,
    ) -> None:
        """Creates the executor and registers the scenarios' adapters from `library`.

        profiled: records every step.
        block_reuse: reuses KV blocks. Prompts repeat between samples, so all but the first sample become cheap.

        Raises ConfigError if there is too little memory.
        """
        self.engine = engine
        self.library: Final = AdapterLibrary(engine) if library is None else library
        mixes = [scenario.adapters for scenario in scenarios if scenario.adapters.count]
        num_threads = key.num_threads or cpu.num_threads
        config = self._config(key, mixes, num_threads, cpu.kernels, block_reuse)
        # Chunks would change how other prompts are scheduled, so they are on only where a prompt needs them.
        config.enable_chunked_context = any(num_chunks(scenario, engine) > 1 for scenario in scenarios)
        self.profile = StepProfile(MAX_STEPS)
        """The newest steps of a profiled executor."""
        self._workers: Workers | None = None
        if isinstance(engine, NativeEngine) and is_run_by_workers(engine):
            if profiled:
                raise ConfigError(f"{engine.directory}: steps of workers are not recorded here")
            self._workers = Workers(engine, config, OrchestratorConfig())
        try:
            self.executor = self._start(config, profiled=profiled)
            self._register(mixes)
        except BaseException:
            self._stop_workers()
            raise

    @property
    def processes(self) -> list[int]:
        """Process ids of the workers that run the engine."""
        return [] if self._workers is None else self._workers.processes

    def close(self) -> None:
        """End the executor's thread and free its caches. The workers have ended when this returns."""
        self.executor.shutdown()
        self._stop_workers()

    def _start(self, config: ExecutorConfig, *, profiled: bool) -> Executor:
        native: Engine
        if self._workers is not None:
            native, memory = self._workers.engine, self._workers.available_memory
        else:
            if isinstance(self.engine, NativeEngine):
                if self.engine.num_ranks > 1:
                    call_ranks(self.engine, config)
                native = self.engine.start(config, profile=self.profile if profiled else None)
            else:
                native = self.engine.start(config)
            memory = self.engine.available_memory()
        self.info = native.info
        return Executor(native, config, memory)

    def _register(self, mixes: Sequence[AdapterMix]) -> None:
        registered = set()
        for mix in mixes:
            for index in range(mix.count):
                task = self.library.task_id(mix, index)
                if task not in registered:
                    self.executor.put_adapter(self.library.tensors(mix, index))
                    registered.add(task)

    def _stop_workers(self) -> None:
        if self._workers is not None:
            self._workers.stop()

    def _config(
        self, key: ExecutorKey, mixes: Sequence[AdapterMix], num_threads: int, kernels: str, block_reuse: bool
    ) -> ExecutorConfig:
        layout = self.engine.program.lora
        config = ExecutorConfig(
            kv_cache_config=KvCacheConfig(enable_block_reuse=block_reuse),
            num_threads=num_threads,
            kernels=kernels,
            iter_stats_max_iterations=STATISTICS_KEPT,
        )
        if not mixes:
            return config
        if not layout.sites:
            raise ConfigError(f"{self.engine.directory} was built without LoRA")
        largest = max(max(mix.ranks) for mix in mixes)
        if largest > layout.max_rank:
            raise ConfigError(f"{self.engine.directory} takes adapters up to rank {layout.max_rank}, not {largest}")
        # Room for one more adapter on each level, for those that come and go during a sample.
        different = {
            self.library.task_id(mix, index): (mix, index) for mix in mixes for index in range(mix.count)
        }.values()
        host = sum(self._packed_bytes(mix, index) for mix, index in different)
        spare = self._bytes_on_device(largest)
        if key.device_adapters is None:
            ranks = [mix.rank(index) for mix, index in different]
            device = spare + host
            optimal = min(ranks)
        else:
            device = key.device_adapters * spare
            optimal = largest
        # The engine's device is the CPU, where an adapter on the device level takes no memory besides the host level's.
        if host > available_memory():
            raise ConfigError(
                f"its {len(different)} adapters take up to {host / 1e9:.1f} GB in the cache; "
                f"{available_memory() / 1e9:.1f} GB are available"
            )
        config.peft_cache_config = PeftCacheConfig(
            optimal_adapter_size=optimal,
            max_adapter_size=largest,
            num_device_module_layer=-(-device // _widest_module_bytes(layout)),
            host_cache_size=host + 2 * (spare + _bytes_on_host(layout, largest)),
            lora_storage=key.lora_storage,
        )
        return config

    def _packed_bytes(self, mix: AdapterMix, index: int) -> int:
        """Size of an adapter, packed. An adapter of lm_head has more bytes than those of layers."""
        return max(self._bytes_on_device(mix.rank(index)), self.library.num_bytes(mix, index))

    def _bytes_on_device(self, rank: int) -> int:
        """Device size of an adapter of `rank` on every module, including magnitudes and panel padding."""
        layout = self.engine.program.lora
        size = np.dtype(dtype_name(layout.dtype)).itemsize
        total = 0
        for site in _sites_of_layers(layout):
            for part in site.parts:
                total += site.most_rows_of_a(rank) * (site.in_size + 1) * size
                total += (rank + 1) * site.most_rows_of_b(part.out_size) * size
                total += 4 * part.out_size if layout.dora_enabled else 0
        return total


def _sites_of_layers(layout: LoraLayout) -> list[LoraSite]:
    """All sites except those of tokens and norms, which the bench's adapters do not change."""
    others = {info.id for info in lora_modules() if info.is_of_vocabulary or info.name in (NEW_TOKENS, NORM)}
    return [site for site in layout.sites if site.parts[0].module not in others]


def _bytes_on_host(layout: LoraLayout, rank: int) -> int:
    """Host size of an adapter of `rank` on every module, as submitted: rows padded to one width.

    The host level must have room for one adapter of the maximum rank, in addition to the registered ones.
    """
    parts = [(site.whole_in_size, part.whole_out_size) for site in _sites_of_layers(layout) for part in site.parts]
    width = max(rank * (inputs + outputs) + outputs for inputs, outputs in parts)
    return len(parts) * width * int(np.dtype(dtype_name(layout.dtype)).itemsize)


def _widest_module_bytes(layout: LoraLayout) -> int:
    """Size of rank-1 weights of the widest module in one layer: the unit of the device level's size."""
    widest = 0
    for site in _sites_of_layers(layout):
        outputs = {part.module: part.whole_out_size for part in site.parts}
        for module in lora_modules():
            parts = {info.id for info in lora_modules() if info.name in module.parts}
            if module.id in layout.target_modules and parts <= outputs.keys():
                widest = max(widest, site.whole_in_size + sum(outputs[part] for part in parts))
    return widest * np.dtype(dtype_name(layout.dtype)).itemsize


def num_chunks(scenario: Scenario, engine: CompiledEngine) -> int:
    """Number of steps that compute the scenario's longest prompt."""
    return -(-scenario.sizes.longest_input // engine.config.build_config.max_num_tokens)


def problems_of(scenario: Scenario, engine: CompiledEngine) -> list[str]:
    """Reasons why a scenario cannot run on an engine: lengths or batches above its limits, or unsupported adapters."""
    limits, problems = engine.config.build_config, []
    assert limits.max_input_len is not None
    assert limits.max_seq_len is not None
    sizes = scenario.sizes
    if sizes.requests > limits.max_batch_size:
        problems.append(f"has {sizes.requests} requests in a batch; the engine takes {limits.max_batch_size}")
    if sizes.longest_input > limits.max_input_len:
        problems.append(f"has prompts of {sizes.longest_input} tokens; the engine takes {limits.max_input_len}")
    if sizes.longest_input + sizes.longest_output > limits.max_seq_len:
        tokens = f"{sizes.longest_input} + {sizes.longest_output} tokens"
        problems.append(f"has {tokens}; the engine takes {limits.max_seq_len} in all")
    mix = scenario.adapters
    if mix.count and not limits.lora_enabled:
        problems.append("has adapters; the engine was built without LoRA")
    elif mix.count and max(mix.ranks) > limits.lora_config.max_lora_rank:
        problems.append(f"has rank {max(mix.ranks)}; the engine takes {limits.lora_config.max_lora_rank}")
    if mix.count and mix.dora_share and limits.lora_enabled and not limits.dora_enabled:
        problems.append("has DoRA adapters; the engine was built without DoRA")
    return problems
