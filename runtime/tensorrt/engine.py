"""Loads engines of the TensorRT compiler. Needs neither a GPU nor TensorRT."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ... import _core
from ..._core import ConfigError, EngineError, ExecutorConfig
from ...common.safetensors_stream import SafetensorsReader
from ...formats.engine.engine_config import EngineConfig
from ...plugins.definition import VERSION
from ..cuda_module import gpu_of, import_cuda
from ..loaded_engine import engine_adapters
from .layout import engine_sites, lora_layout
from .loaded_plans import LoadedPlans
from .packages import import_tensorrt
from .session import start_session


@dataclass(frozen=True)
class TensorRtEngine(LoadedPlans):
    """An engine that runs the plan for this machine's GPU."""

    def gpu(self) -> dict[str, str]:
        """See LoadedEngine.gpu."""
        return gpu_of(import_cuda(str(self.directory)), self.device_index)

    def start(self, config: ExecutorConfig, *, beside: _core.Engine | None = None) -> _core.TensorRtEngine:
        """Starts the plan for this machine's GPU in its memory.

        Raises ConfigError for kernels of the CPU, and if this install or this machine cannot run plans; EngineError if
        the engine has no plan for the GPU.
        """
        if config.kernels:
            raise ConfigError(
                f"{self.directory}: kernels is '{config.kernels}'; expected '': a TensorRT engine runs on a GPU"
            )
        cuda = import_cuda(str(self.directory))
        trt = import_tensorrt(self.plans, str(self.directory))
        return start_session(self, trt, cuda, cuda.CudaDevice(self.device_index))


def load_tensorrt_engine(directory: Path, config: EngineConfig) -> TensorRtEngine:
    """Loads an engine directory. Raises EngineError for plans of another plugin version, and for missing or damaged
    weights.
    """
    plans = config.tensorrt
    assert plans is not None  # true for this backend
    if plans.plugin_version != VERSION:
        raise EngineError(
            f"{directory}: was built with version {plans.plugin_version} of the plugins; this release "
            f"has version {VERSION}. Build the engine again"
        )
    weights = None
    if plans.weights is not None:
        weights = SafetensorsReader(plans.weights.check(directory), EngineError)
    sites = engine_sites(config)
    return TensorRtEngine(
        directory=directory,
        config=config,
        adapters=engine_adapters(config, directory),
        plans=plans,
        weights=weights,
        sites=sites,
        layout=lora_layout(config, sites),
        weight_memory=config.build_config.weight_memory or 0,
    )
