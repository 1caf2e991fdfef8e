"""Base class of loaded engine directories of all compilers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from .. import _core
from .._core import ConfigError, EngineError, ExecutorConfig, ModelType, PoolingLayer
from ..formats.adapter.base_weights import BaseWeights
from ..formats.engine.engine_config import ADAPTERS_DIRECTORY, EngineConfig
from ..formats.network import ops
from ..formats.network.adapter_sites import AdaptedModules
from ..formats.network.weights import Tensor
from .memory import available_memory

IN_MEMORY: Final = Path("<engine in memory>")
"""Stands for the directory of an engine in memory, in errors and logs."""


@dataclass(frozen=True)
class LoadedEngine(ABC):
    """An engine directory that has been read and checked."""

    directory: Path
    config: EngineConfig
    adapters: Mapping[str, Path]
    """PEFT directories of the adapters that the engine carries, by adapter name."""

    @property
    def rank(self) -> int:
        """Rank of this process among those that run the engine."""
        return 0

    def available_memory(self) -> int:
        """Returns the bytes that this process may still allocate.

        With several ranks, every rank must call it; all get the minimum.
        """
        return available_memory()

    @property
    def num_ranks(self) -> int:
        """Number of processes that run the engine together."""
        return self.config.pretrained_config.mapping.world_size

    @property
    def model_type(self) -> ModelType:
        """Model type to pass to executors of this engine."""
        config = self.config.pretrained_config
        if config.is_encoder_only:
            return ModelType.ENCODER_ONLY
        return ModelType.ENCODER_DECODER if config.num_encoder_layers > 0 else ModelType.DECODER_ONLY

    @property
    def num_load_threads(self) -> int:
        """Number of threads that read, check and convert one adapter. Steps on CPUs need them more."""
        return 1

    @property
    @abstractmethod
    def lora(self) -> _core.LoraLayout:
        """Adapters that the engine accepts; without sites if it was built without LoRA."""

    @cached_property
    def adapted_modules(self) -> AdaptedModules:
        """Linear layers that adapters can change, by their paths in the Hugging Face model."""
        return AdaptedModules(self.config.network)

    @cached_property
    def pooler(self) -> PoolingLayer | None:
        """Layer that some classifiers apply to pooled hidden states before their last layer; None: there is none."""
        layer = self.config.network.pooler
        return None if layer is None else self._loaded(layer)

    @cached_property
    def classes(self) -> PoolingLayer | None:
        """The last layer of a classifier; None for other models."""
        layer = self.config.network.classes
        return None if layer is None else self._loaded(layer)

    @cached_property
    def embedding_layers(self) -> list[PoolingLayer]:
        """Layers on pooled hidden states that make a text's embedding, in order."""
        return [self._loaded(layer) for layer in self.config.network.embedding_layers]

    def _loaded(self, layer: ops.PoolingLayer) -> PoolingLayer:
        def values(tensor: Tensor) -> npt.NDArray[np.float32]:
            return self.tensor(str(tensor.name)).reshape(tensor.shape)

        def optional(tensor: Tensor | None) -> npt.NDArray[np.float32] | None:
            return None if tensor is None else values(tensor)

        norm, norm_bias = optional(layer.norm), optional(layer.norm_bias)
        return PoolingLayer(
            values(layer.weight), optional(layer.bias), layer.activation, norm, norm_bias, layer.epsilon
        )

    @abstractmethod
    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """Returns a tensor that the program does not use, as float32, flat. Raises EngineError if it does not exist."""

    @abstractmethod
    def base_weights(self) -> BaseWeights | None:
        """Returns the base weights for adapters; None if the engine cannot return them."""

    @abstractmethod
    def with_weight_memory(self, num_bytes: int | None) -> LoadedEngine:
        """Returns the engine with ExecutorConfig.weight_memory; None: this engine. Raises ConfigError if it cannot have
        that.
        """

    def with_device(self, index: int | None) -> LoadedEngine:
        """Returns the engine for the GPU with this number in the order of CUDA; None: this engine. Raises ConfigError
        for an engine that runs on CPUs.
        """
        if index is None:
            return self
        raise ConfigError(
            f"ExecutorConfig: parallel_config.device_ids is [{index}]; accepted: None, {self.directory} is an engine "
            "for CPUs"
        )

    def gpu(self) -> dict[str, str] | None:
        """Returns what an answer's bits depend on besides the engine and AdaptRT's library; None: it runs on CPUs."""
        return None

    @abstractmethod
    def start(self, config: ExecutorConfig, *, beside: _core.Engine | None = None) -> _core.Engine:
        """Starts the engine for an executor. beside: another engine that the executor runs alternately with this one.

        Raises ConfigError that says what this machine lacks.
        """


def engine_adapters(config: EngineConfig, directory: Path) -> dict[str, Path]:
    """Returns the adapters' directories. They must lie where build() put them."""
    lora = config.build_config.lora_config
    counts = {len(lora.lora_dir), len(config.adapter_checksums), len(lora.adapter_names), len(set(lora.adapter_names))}
    if len(counts) > 1:
        raise EngineError(
            f"{directory}: config.json has {len(lora.lora_dir)} directories of adapters for "
            f"{len(set(lora.adapter_names))} different names and {len(config.adapter_checksums)} checksums"
        )
    adapters = {}
    for number, (name, place) in enumerate(zip(lora.adapter_names, lora.lora_dir, strict=True)):
        path = directory.absolute() / place  # the process may change its working directory later
        if place != Path(ADAPTERS_DIRECTORY) / str(number) or not path.is_dir() or path.is_symlink():
            raise EngineError(f"{directory}: adapter '{name}' is not at {ADAPTERS_DIRECTORY}/{number}")
        adapters[name] = path
    return adapters
