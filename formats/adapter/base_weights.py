"""Reads the base model's weights a few rows at a time, for conversion and DoRA normalisation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from ..._core import CheckpointError, DType
from ..checkpoint.casting import CHECKPOINT_DTYPES, to_float32
from ..checkpoint.config import CONFIG_FILE
from ..checkpoint.config_file import ConfigFile
from ..checkpoint.fused_layers import layers_apart
from ..checkpoint.hf_weights import HfWeights
from ..checkpoint.stacked_experts import experts_apart
from ..hugging_face.hf_config import HfConfig, published_format
from ..network.adapter_sites import AdaptedModules
from .adapter import FloatArray
from .names import EMBEDDING, ModuleKey


class BaseWeights(Protocol):
    """Source of the weights W [out, in] of the layers that an adapter changes."""

    def describe(self) -> str:
        """Name of the base in errors, such as its directory."""

    def shape(self, key: ModuleKey) -> tuple[int, int] | None:
        """(out, in) of this module; None if the base does not have it."""

    def row_blocks(self, key: ModuleKey) -> Iterator[FloatArray]:
        """Yields W's rows in order, as float32 [rows, in]."""

    def bias(self, key: ModuleKey) -> FloatArray | None:
        """Returns the layer's bias in the order of W's rows, as float32 [out]; None if it has none."""

    def rows_at(self, key: ModuleKey, tokens: Sequence[int]) -> FloatArray:
        """Returns the tokens' rows of lm_head or of the embedding, as float32 [tokens, in].

        The base must have the layer.
        """

    def rounding(self, key: ModuleKey) -> float:
        """Largest error of an element beyond the rounding of dtypes, relative to the largest element of its row."""


class HuggingFaceModel:
    """Directory of the Hugging Face model that adapters were trained on. Its config.json is read once."""

    def __init__(self, directory: Path) -> None:
        """Reads nothing yet."""
        self.directory: Final = directory

    @cached_property
    def modules(self) -> AdaptedModules | None:
        """Returns the model's modules if its config.json belongs to a supported family.

        Otherwise returns None, and paths get the meaning that they have in every family: adapters can be converted even
        if no engine can be made from the model.
        """
        try:
            file = self._config_file
            return None if file is None else AdaptedModules(HfConfig.read(file, dtype=DType.FLOAT32).network)
        except CheckpointError:
            return None

    def open_weights(self) -> HfWeights:
        """Opens the weights. Raises CheckpointError if there are none, and for a quantisation that cannot be read."""
        weights = HfWeights(self.directory)
        published = None if self._config_file is None else published_format(self._config_file)
        return weights if published is None else weights.with_matrices(published.matrices(weights))

    @cached_property
    def _config_file(self) -> ConfigFile | None:
        return ConfigFile.read(self.directory) if (self.directory / CONFIG_FILE).is_file() else None


class HuggingFaceBase:
    """Weights of a Hugging Face model directory: one or several safetensors files, or .bin files through torch."""

    def __init__(
        self,
        model: Path | HuggingFaceModel,
        modules: AdaptedModules | None = None,
        *,
        fan_in_fan_out: bool = False,
    ) -> None:
        """Opens the weights. `modules` are the model's, fan_in_fan_out comes from the adapter.

        Layers of a quantised model are dequantised. Raises CheckpointError if there are no weights, and for a
        quantisation that cannot be read.
        """
        opened = model if isinstance(model, HuggingFaceModel) else HuggingFaceModel(model)
        self._directory = opened.directory
        self._modules = modules
        self._fan_in_fan_out = fan_in_fan_out
        self._weights = opened.open_weights()
        if modules is not None:
            apart = layers_apart(self._weights, modules.fused_layers)
            apart = experts_apart(apart, modules.stacked_experts, modules.hidden_size)
            self._weights = apart.renamed(modules.name_now)

    def describe(self) -> str:
        """The model directory."""
        return str(self._directory)

    def shape(self, key: ModuleKey) -> tuple[int, int] | None:
        """(out, in); None if the base does not have this module."""
        name = self._name_of(key)
        if name is None:
            return None
        shape = self._weights.spec(name).shape
        if len(shape) != 2:
            raise CheckpointError(f"{self._weights.where(name)}: has the shape {list(shape)}, expected [out, in]")
        return (shape[1], shape[0]) if self._is_transposed(key) else (shape[0], shape[1])

    def row_blocks(self, key: ModuleKey) -> Iterator[FloatArray]:
        """Yields W's rows in order, as float32 [rows, in]. A weight stored as [in, out] comes as one block."""
        name = self._name_of(key)
        if name is None:
            raise CheckpointError(f"{self._directory}: has no weight of module '{key.path}'")
        spec = self._weights.spec(name)
        if spec.dtype not in CHECKPOINT_DTYPES:
            accepted = ", ".join(str(dtype) for dtype in CHECKPOINT_DTYPES)
            raise CheckpointError(f"{self._weights.where(name)}: is {spec.dtype}; accepted: {accepted}")
        pieces = (to_float32(piece) for piece in self._weights.rows(name, range(spec.shape[0])))
        if self._is_transposed(key):
            yield np.ascontiguousarray(np.concatenate(list(pieces)).T)
        else:
            yield from pieces

    def bias(self, key: ModuleKey) -> FloatArray | None:
        """Bias [out] as the file has it; None if the layer has none."""
        weight = self._name_of(key)
        name = "" if weight is None else f"{weight.removesuffix('weight')}bias"
        if name not in self._weights:
            return None
        spec = self._weights.spec(name)
        if spec.dtype not in CHECKPOINT_DTYPES or len(spec.shape) != 1:
            raise CheckpointError(f"{self._weights.where(name)}: is {spec.dtype} {list(spec.shape)}, expected [out]")
        return np.concatenate([to_float32(piece) for piece in self._weights.rows(name, range(spec.shape[0]))])

    def rows_at(self, key: ModuleKey, tokens: Sequence[int]) -> FloatArray:
        """The tokens' rows, as float32 [tokens, in]."""
        name = self._name_of(key)
        if name is None:
            raise CheckpointError(f"{self._directory}: has no weight of module '{key.path}'")
        pieces = [to_float32(piece) for token in tokens for piece in self._weights.rows(name, range(token, token + 1))]
        return np.concatenate(pieces)

    def rounding(self, key: ModuleKey) -> float:
        """Zero: the weights are the model's own."""
        return 0.0

    def _is_transposed(self, key: ModuleKey) -> bool:
        return key.module.name == EMBEDDING or (self._fan_in_fan_out and key.is_conv1d)

    def _name_of(self, key: ModuleKey) -> str | None:
        if self._modules is not None and (found := self._modules.find(key.path)) is not None:
            paths = [found.path] if found.tied_to is None else [found.tied_to, found.path]
            return next((name for path in paths if (name := f"{path}.weight") in self._weights), None)
        decoder, _, rest = key.path.partition(".")
        candidates = [key.path, rest if decoder == "model" else f"model.{key.path}", f"transformer.{key.path}"]
        return next((name for path in candidates if (name := f"{path}.weight") in self._weights), None)
