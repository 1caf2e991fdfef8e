"""The weights beside a TensorRT engine's plans as the base of its adapters: what normalises DoRA magnitudes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..._core import lora_modules
from ...builder.adapter import ModuleKey
from ...builder.checkpoint.casting import to_float32
from ...builder.network.adapted_linears import AdaptedLinear
from ...builder.safetensors_stream import SafetensorsReader
from ..fused_modules import parts_of


class WeightsFileBase:
    """The linear layers that adapters act on, as builder.adapter.BaseWeights."""

    def __init__(self, linears: Sequence[AdaptedLinear], weights: SafetensorsReader, directory: Path) -> None:
        """`weights` has the checkpoint's tensors by their names."""
        self._weights = weights
        self._directory = directory
        self._rows: dict[tuple[int, str], tuple[str, range, int]] = {}
        names = {info.id: info.name for info in lora_modules()}
        for linear in linears:
            first = 0
            for module, out_size in zip(linear.module_ids, linear.out_sizes, strict=True):
                rows = range(first, first + out_size)
                self._rows[linear.layer, names[module]] = linear.weight, rows, linear.in_size
                first += out_size

    def describe(self) -> str:
        """The engine directory."""
        return str(self._directory)

    def shape(self, key: ModuleKey) -> tuple[int, int] | None:
        """(out, in) of this module; None when the engine does not have it."""
        parts = self._parts_of(key)
        return (sum(len(rows) for _, rows, _ in parts), parts[0][2]) if parts else None

    def row_blocks(self, key: ModuleKey) -> Iterator[npt.NDArray[np.float32]]:
        """W's rows in order, as float32 [rows, in]."""
        for tensor, rows, _ in self._parts_of(key):
            for piece in self._weights.rows(tensor, rows.start, rows.stop):
                yield to_float32(piece)

    def _parts_of(self, key: ModuleKey) -> list[tuple[str, range, int]]:
        keys = [(key.layer, part) for part in parts_of(key.module.name)]
        return [self._rows[key] for key in keys] if all(key in self._rows for key in keys) else []
