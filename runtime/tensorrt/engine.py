"""Engines of the TensorRT compiler, as they are loaded: no GPU and no TensorRT is needed for that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ... import _core
from ..._core import ConfigError, EngineError, ExecutorConfig
from ...common.safetensors_stream import SafetensorsReader
from ...formats.engine.engine_config import EngineConfig
from ...formats.engine.tensorrt.plan_config import TensorRtPlans
from ...formats.network.adapter_sites import AdapterSite
from ...plugins.definition import VERSION
from ..loaded_engine import LoadedEngine, engine_adapters
from .base_weights import WeightsFileBase
from .layout import engine_sites, lora_layout
from .packages import import_cuda, import_tensorrt
from .session import start_session


@dataclass(frozen=True)
class TensorRtEngine(LoadedEngine):
    """An engine with a plan for each compute capability that it was built for."""

    plans: TensorRtPlans
    weights: SafetensorsReader | None
    """The weights that are inputs of the plans; None: they are constants in each plan."""
    sites: tuple[AdapterSite, ...]
    """Where adapters act; () without LoRA."""
    layout: _core.LoraLayout
    weight_memory: int = 0
    """Bytes that weights may take on the GPU; 0: all of them are there."""

    @property
    def lora(self) -> _core.LoraLayout:
        """That of the network."""
        return self.layout

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """There are none: classifiers need native engines."""
        raise EngineError(f"{self.directory}: has no tensor '{name}'")

    def base_weights(self) -> WeightsFileBase | None:
        """The weights beside the plans; None when they are in the plans, which give none back."""
        return None if self.weights is None else WeightsFileBase(self.sites, self.weights, self.directory)

    def with_weight_memory(self, num_bytes: int | None) -> TensorRtEngine:
        """As LoadedEngine.with_weight_memory."""
        if num_bytes is None or num_bytes == self.weight_memory:
            return self
        if num_bytes and not self.streams_weights:
            raise ConfigError(
                f"weight_memory is {num_bytes}; accepted: None and 0, {self.directory} is a TensorRT engine that was "
                "built without weight_memory, so that all of its weights are on the GPU"
            )
        return replace(self, weight_memory=num_bytes)

    @property
    def streams_weights(self) -> bool:
        """Whether the plans can do with some of their weights on the GPU."""
        return self.config.build_config.weight_memory is not None

    def start(self, config: ExecutorConfig, *, beside: _core.Engine | None = None) -> _core.TensorRtEngine:
        """The plan for this machine's GPU, with its memory.

        Raises ConfigError for kernels of the CPU, and when this install or this machine cannot run plans, EngineError
        when the engine is not for them.
        """
        if config.kernels:
            raise ConfigError(
                f"{self.directory}: kernels is '{config.kernels}'; a TensorRT engine runs on a GPU, so it takes none"
            )
        cuda = import_cuda(str(self.directory))
        trt = import_tensorrt(self.plans, str(self.directory))
        return start_session(self, trt, cuda, cuda.CudaDevice())


def load_tensorrt_engine(directory: Path, config: EngineConfig) -> TensorRtEngine:
    """Raises EngineError for plans of other plugins, and for weights that are missing or damaged."""
    plans = config.tensorrt
    assert plans is not None  # EngineConfig.load: the backend says so
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
