"""Names of buffers and tensors in a program of an engine file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from ..._core import DType, QuantAlgo, WeightCode

BufferName = NewType("BufferName", str)
"""Name of one of Program.buffers."""


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Has the fields of adaptrt._core.Quantization."""

    algo: QuantAlgo
    group_size: int
    zero_points: bool
    scale_type: DType = DType.BFLOAT16
    code: WeightCode = WeightCode.INTEGER
    value_type: DType = DType.FLOAT32
    bits: int = 4
    act_order: bool = False
    minimums: bool = False


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Panels of W[n, k] in the engine's dtype, quantised or compressed; a tensor of the engine file.

    See cpp/include/adaptrt/core/panels.h, quantized_panels.h and compressed_panels.h.
    """

    tensor: str
    n: int
    k: int
    quantization: Quantization | None = None
    outliers: int | None = None
    """Compressed matrices: number of outliers that each panel has room for."""
    has_rows: bool = False
    """True if the rows follow the panels."""
    has_columns: bool = False
    """True if the columns follow the panels."""

    @property
    def is_stored_twice(self) -> bool:
        """True if rows or columns follow the panels."""
        return self.has_rows or self.has_columns


@dataclass(frozen=True, kw_only=True)
class Vector:
    """A float32 tensor of the engine file."""

    tensor: str
    size: int


@dataclass(frozen=True, kw_only=True)
class NeuronTable:
    """A tensor of the engine file; see cpp/include/adaptrt/core/neuron_table.h."""

    tensor: str
    count: int
    size: int
