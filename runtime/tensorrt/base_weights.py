"""Weights in the file next to a TensorRT engine's plans, for normalising DoRA magnitudes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..._core import AdapterError
from ...common.safetensors_stream import SafetensorsReader
from ...formats.adapter import ModuleKey
from ...formats.checkpoint.casting import to_float32
from ...formats.network.adapter_sites import AdapterSite


class WeightsFileBase:
    """The linear layers that adapters act on, as formats.adapter.BaseWeights."""

    def __init__(self, sites: Sequence[AdapterSite], weights: SafetensorsReader, directory: Path) -> None:
        """weights: the checkpoint's tensors by name."""
        self._weights = weights
        self._directory = directory
        self._rows: dict[tuple[int, str], tuple[str, range, int]] = {}
        for site in sites:
            for weight in site.weights:
                first = 0
                for part in weight.parts:
                    assert part.module is not None
                    rows = range(first, first + part.outputs)
                    self._rows[site.layer, part.module] = f"{weight.name}.weight", rows, site.in_size
                    first += part.outputs

    def describe(self) -> str:
        """Returns the path of the engine directory."""
        return str(self._directory)

    def shape(self, key: ModuleKey) -> tuple[int, int] | None:
        """Returns (out, in) of a module; None if the engine does not have it."""
        parts = self._parts_of(key)
        return (sum(len(rows) for _, rows, _ in parts), parts[0][2]) if parts else None

    def row_blocks(self, key: ModuleKey) -> Iterator[npt.NDArray[np.float32]]:
        """Yields W's rows in the order of the Hugging Face model, as float32 [rows, in]."""
        parts = self._parts_of(key)
        for wanted in key.in_source_order(sum(len(rows) for _, rows, _ in parts)):
            first = 0
            for tensor, rows, _ in parts:
                found = rows[max(wanted.start - first, 0) : max(wanted.stop - first, 0)]
                if found:
                    for piece in self._weights.rows(tensor, found.start, found.stop):
                        yield to_float32(piece)
                first += len(rows)

    def bias(self, key: ModuleKey) -> npt.NDArray[np.float32] | None:
        """Raises AdapterError: this engine does not support biases of adapters."""
        raise AdapterError(
            f"'{key.path}': {self._directory} is a TensorRT engine, which does not support biases of adapters"
        )

    def rows_at(self, key: ModuleKey, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Raises AdapterError: neither lm_head nor the embedding is adapted."""
        raise AdapterError(f"'{key.path}': {self._directory} is a TensorRT engine, which adapts only decoder layers")

    def rounding(self, key: ModuleKey) -> float:
        """Returns 0: the weights are not quantised."""
        return 0.0

    def _parts_of(self, key: ModuleKey) -> list[tuple[str, range, int]]:
        keys = [(key.layer, part) for part in key.module.parts]
        return [self._rows[key] for key in keys] if all(key in self._rows for key in keys) else []
