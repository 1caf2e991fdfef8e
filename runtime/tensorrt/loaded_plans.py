"""Loaded plans of an engine directory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ... import _core
from ..._core import ConfigError, EngineError
from ...common.parallel import num_part_threads
from ...common.safetensors_stream import SafetensorsReader
from ...formats.engine.tensorrt.plan_config import TensorRtPlans
from ...formats.network.adapter_sites import AdapterSite
from ..loaded_engine import LoadedEngine
from .base_weights import WeightsFileBase


@dataclass(frozen=True)
class LoadedPlans(LoadedEngine):
    """An engine with a plan for each compute capability that it was built for."""

    plans: TensorRtPlans
    weights: SafetensorsReader | None
    """Weights that are inputs of the plans; None: they are constants in each plan."""
    sites: tuple[AdapterSite, ...]
    """Layers that adapters act on; () without LoRA."""
    layout: _core.LoraLayout
    weight_memory: int = 0
    """Maximum bytes of weights on the GPU; 0: all of them."""
    device_index: int = 0
    """Number of the GPU that runs it."""

    @property
    def lora(self) -> _core.LoraLayout:
        """Layout of the network's adapters."""
        return self.layout

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """Raises EngineError: classifiers need native engines."""
        raise EngineError(f"{self.directory}: has no tensor '{name}'")

    def base_weights(self) -> WeightsFileBase | None:
        """Returns the weights next to the plans; None if they are inside the plans, which cannot return them."""
        return None if self.weights is None else WeightsFileBase(self.sites, self.weights, self.directory)

    def with_weight_memory(self, num_bytes: int | None) -> LoadedPlans:
        """See LoadedEngine.with_weight_memory."""
        if num_bytes is None or num_bytes == self.weight_memory:
            return self
        if num_bytes and not self.streams_weights:
            raise ConfigError(
                f"weight_memory is {num_bytes}; accepted: None and 0, {self.directory} is a TensorRT engine that was "
                "built without weight_memory, so that all of its weights are on the GPU"
            )
        return replace(self, weight_memory=num_bytes)

    @property
    def num_load_threads(self) -> int:
        """See LoadedEngine.num_load_threads."""
        return num_part_threads()

    def with_device(self, index: int | None) -> LoadedPlans:
        """See LoadedEngine.with_device."""
        return self if index is None else replace(self, device_index=index)

    @property
    def streams_weights(self) -> bool:
        """True if the plans were built to run with only some of their weights on the GPU."""
        return self.config.build_config.weight_memory is not None
