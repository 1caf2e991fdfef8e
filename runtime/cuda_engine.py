"""Engines of the CUDA backend: maps the engine file, checks every byte, and starts it on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from .. import _core
from .._core import ConfigError, ExecutorConfig
from ..common.parallel import num_part_threads
from ..formats.engine.engine_config import EngineConfig, engine_file
from ..formats.engine.engine_file import EngineFile
from ..formats.engine.weight_usage import WeightUsage, usage_names
from .compiled_engine import CompiledEngine, checked_program
from .cuda_module import gpu_of, import_cuda
from .engine_weights import EngineBase
from .file_weights import RowMajorWeights
from .loaded_engine import engine_adapters


@dataclass(frozen=True)
class CudaEngine(CompiledEngine):
    """An engine whose weights are memory-mapped, and copied to the GPU when it starts."""

    device_index: int = 0
    """Number of the GPU that runs it."""
    weight_memory: int = 0
    """Bytes that weights may take on the GPU; layers that do not fit are copied there ahead of use. 0: no limit."""

    def base_weights(self) -> EngineBase:
        """Returns the weights in the engine file."""
        return self._base

    @cached_property
    def _base(self) -> EngineBase:
        return EngineBase([(self.program, self.storage)], self.directory, RowMajorWeights(self.storage))

    def with_weight_memory(self, num_bytes: int | None) -> CudaEngine:
        """See LoadedEngine.with_weight_memory."""
        return self if num_bytes is None else replace(self, weight_memory=num_bytes)

    @property
    def num_load_threads(self) -> int:
        """See LoadedEngine.num_load_threads."""
        return num_part_threads()

    def with_device(self, index: int | None) -> CudaEngine:
        """See LoadedEngine.with_device."""
        return self if index is None else replace(self, device_index=index)

    def gpu(self) -> dict[str, str]:
        """See LoadedEngine.gpu."""
        return gpu_of(import_cuda(str(self.directory)), self.device_index)

    def start(self, config: ExecutorConfig, *, beside: _core.Engine | None = None) -> _core.Engine:
        """Starts the engine on its GPU.

        Raises ConfigError for kernels of the CPU, if this install or this machine cannot run CUDA engines, if there is
        no such GPU, if it has too little memory, and for a weight_memory that is too small; EngineError for an invalid
        weight_usage.json.
        """
        if config.kernels:
            raise ConfigError(
                f"{self.directory}: kernels is '{config.kernels}'; expected '': a CUDA engine runs on a GPU"
            )
        cuda = import_cuda(str(self.directory))
        device = cuda.CudaDevice(self.device_index)
        engine: _core.Engine = cuda.CudaEngine(
            self.program, device, weight_memory=self.weight_memory, neuron_usage=self._neuron_usage()
        )
        return engine

    def _neuron_usage(self) -> list[tuple[int, ...]]:
        """Returns how often a text used the neurons of each sparse MLP, if the build ran one and this matters.

        Raises EngineError for an invalid file.
        """
        if not self.weight_memory:
            return []
        program = self.storage.program
        found = WeightUsage.load(self.directory, self.config.engine_checksums[0], program)
        return [] if found is None else [found.counts[name] for name, _ in usage_names(program).values()]

    def device_name(self) -> str:
        """Name of its GPU. Raises ConfigError as start()."""
        name: str = import_cuda(str(self.directory)).CudaDevice(self.device_index).info.name
        return name

    def measure_device_limits(self, **sizes: int) -> tuple[float, float]:
        """Returns (bytes per second of a copy on its GPU, FLOPs per second of a product) in the engine's type.

        sizes: arguments of _cuda.measure_device_limits. Raises ConfigError as start().
        """
        cuda = import_cuda(str(self.directory))
        device = cuda.CudaDevice(self.device_index)
        bandwidth, flops = cuda.measure_device_limits(device, dtype=self.program.dtype.value, **sizes)
        return bandwidth, flops


def load_cuda_engine(directory: Path, config: EngineConfig) -> CudaEngine:
    """Loads an engine directory. Needs no GPU.

    Raises EngineError for an engine file that is damaged or disagrees with config.json.
    """
    storage = EngineFile(directory / engine_file(0), config.engine_checksums[0])
    return _checked(directory, config, storage, engine_adapters(config, directory))


def cuda_engine_in_memory(subject: Path, config: EngineConfig, engine: bytes | bytearray | memoryview) -> CudaEngine:
    """Loads the bytes of an engine file, which are copied. It carries no adapters. subject: path for messages."""
    return _checked(subject, config, EngineFile(subject / engine_file(0), config.engine_checksums[0], engine), {})


def _checked(directory: Path, config: EngineConfig, storage: EngineFile, adapters: Mapping[str, Path]) -> CudaEngine:
    program = checked_program(directory, config, storage)
    weight_memory = config.build_config.weight_memory or 0
    return CudaEngine(directory, config, adapters, program, storage, weight_memory=weight_memory)
