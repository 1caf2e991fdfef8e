"""Ops of a program with their input and output values, before buffers are placed, and the tensors they use."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..._core import DType, QuantAlgo, RowKind
from ...formats.checkpoint.quantization import QuantConfig
from ...formats.engine.plan import BufferName, LoraSite, Matrix, NeuronTable, Op, Quantization, Vector
from ...formats.network.operands import Value
from ...formats.network.weights import LinearWeight, Tensor

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class WeightRows:
    """Rows of a checkpoint tensor: the source of an engine tensor."""

    tensor: str
    rows: range
    plus_one: bool = False
    """True if one is added to each element of a vector."""
    part: int = 0
    """Index of the part of a linear layer's weight that the rows belong to."""


@dataclass(frozen=True)
class ChosenRows:
    """Some columns of a checkpoint tensor [rows, ..., columns], one after another: the source of a vector."""

    tensor: str
    num_rows: int
    chosen: tuple[int, ...]
    columns: range


@dataclass(frozen=True)
class WeightNeurons:
    """Rows of one checkpoint tensor and columns of another: the source of a NeuronTable."""

    up: str
    down: str


Compression = Callable[[WeightRows, int], int | None]
"""Outlier slots in the compressed panels of rows of k inputs; None: compression is not worth it."""


@dataclass(frozen=True, kw_only=True)
class EmittedOp:
    """An op whose buffers are still named as the network's values."""

    op: Op
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    dtype: DType
    """Type of its outputs."""
    sites: tuple[LoraSite, ...] = ()
    """Sites where adapters act."""
    in_place: Value | None = None
    """The value whose buffer the op's only output reuses."""

    @property
    def rows(self) -> RowKind:
        """Row kind of its section: that of its output, or of its input if it writes nothing."""
        return (self.writes or self.reads)[0].rows


@dataclass
class Weights:
    """Engine tensors that ops refer to, by name, and their sources."""

    quantization: QuantConfig | None = None
    compression: Compression | None = None
    """Compression of linear layers' matrices; None: they stay uncompressed."""
    float32_scales: bool = False
    """True if scales of quantised matrices are stored as float32. Their values do not change."""
    matrices: dict[str, tuple[Matrix, WeightRows]] = field(default_factory=dict)
    vectors: dict[str, tuple[Vector, WeightRows | ChosenRows | Array]] = field(default_factory=dict)
    neurons: dict[str, tuple[NeuronTable, WeightNeurons]] = field(default_factory=dict)

    def table(self, tensor: Tensor) -> Matrix:
        """A weight that is read row by row. A matrix that is also a table is stored like the table."""
        name, (size, k) = str(tensor.name), tensor.shape
        return self._matrix(name, WeightRows(name, range(size)), size, k, None)

    def is_plain(self, weight: LinearWeight) -> bool:
        """True if a linear layer's weight has the engine's type: neither quantised nor compressed."""
        return self.compression is None and (self.quantization is None or not weight.quantized)

    def matrix_with_rows(self, weight: LinearWeight) -> Matrix:
        """Panels of a plain weight, and a copy in rows."""
        return self._stored_twice(weight, has_rows=True)

    def matrix_with_columns(self, weight: LinearWeight) -> Matrix:
        """Panels of a plain weight, and a copy in columns."""
        return self._stored_twice(weight, has_columns=True)

    def _stored_twice(self, weight: LinearWeight, *, has_rows: bool = False, has_columns: bool = False) -> Matrix:
        source = WeightRows(f"{weight.name}.weight", range(weight.outputs))
        matrix = Matrix(
            tensor=source.tensor,
            n=weight.outputs,
            k=weight.inputs,
            has_rows=has_rows,
            has_columns=has_columns,
        )
        self.matrices[matrix.tensor] = (matrix, source)
        return matrix

    def neuron_table(self, up: LinearWeight, down: LinearWeight) -> NeuronTable:
        """Rows of `up` and columns of `down`, both plain weights, stored neuron by neuron."""
        source = WeightNeurons(f"{up.name}.weight", f"{down.name}.weight")
        table = NeuronTable(tensor=f"{up.name}.neurons", count=up.outputs, size=up.inputs)
        self.neurons[table.tensor] = (table, source)
        return table

    def matrix(self, weight: LinearWeight, part: int, first: int, last: int, rows: RowKind) -> Matrix:
        """Panels of the rows of one part of a linear layer's weight. In the head, activations are not quantised."""
        tensor = f"{weight.name}.weight"
        source = WeightRows(tensor, range(first, last), part=part)
        if self.quantization is None or not weight.quantized:
            return self._matrix(tensor, source, weight.outputs, weight.inputs, self.compression)
        how = self.quantization.of_weight(tensor)
        algo, group_size = how.quant_algo, how.group_size
        if not how.has_few_bits:
            rounds = self.quantization.rounds_activations_of(tensor) and rows is not RowKind.LOGITS
            algo = QuantAlgo.W8A8 if rounds else QuantAlgo.W8A16
        matrix = Matrix(
            tensor=_rows_name(source, weight.outputs),
            n=last - first,
            k=weight.inputs,
            quantization=Quantization(
                algo=algo,
                group_size=group_size or 0,
                zero_points=how.has_zero_point,
                scale_type=DType.FLOAT32 if self.float32_scales and how.has_typed_scales else how.scale_dtype,
                code=how.code,
                value_type=DType.FLOAT32 if how.value_dtype is None else how.value_dtype,
                bits=how.bits,
                act_order=how.act_order,
                minimums=how.has_minimum,
            ),
        )
        self.matrices[matrix.tensor] = (matrix, source)
        return matrix

    def vector(self, tensor: str, first: int, last: int, size: int) -> Vector:
        """A slice of a one-dimensional weight with `size` elements."""
        source = WeightRows(tensor, range(first, last))
        vector = Vector(tensor=_rows_name(source, size), size=last - first)
        self.vectors[vector.tensor] = (vector, source)
        return vector

    def norm(self, tensor: Tensor, elements: range | None = None) -> Vector:
        """A vector that every rank has in full, such as a norm's weight, or some of its elements."""
        (size,) = tensor.shape
        source = WeightRows(str(tensor.name), range(size) if elements is None else elements, tensor.plus_one)
        vector = Vector(tensor=_rows_name(source, size), size=len(source.rows))
        self.vectors[vector.tensor] = (vector, source)
        return vector

    def by_distance(self, table: Tensor, buckets: tuple[int, ...], heads: range) -> Vector:
        """Values [heads, distances] for these heads, from a table [buckets, heads] and the bucket of each distance."""
        vector = Vector(tensor=str(table.name), size=len(heads) * len(buckets))
        self.vectors[vector.tensor] = (vector, ChosenRows(vector.tensor, table.shape[0], buckets, heads))
        return vector

    def columns(self, tensor: Tensor, rows: tuple[range, ...] | None = None) -> Vector:
        """Values [columns, rows] of a tensor [rows, ..., columns], or of some of its rows."""
        num_rows, size = tensor.shape[0], math.prod(tensor.shape[1:])
        chosen = tuple(range(num_rows)) if rows is None else tuple(row for part in rows for row in part)
        vector = Vector(tensor=str(tensor.name), size=len(chosen) * size)
        self.vectors[vector.tensor] = (vector, ChosenRows(vector.tensor, num_rows, chosen, range(size)))
        return vector

    def elements(self, tensor: Tensor, ranges: tuple[range, ...] | None = None) -> Vector:
        """A vector, or some ranges of its elements."""
        return self.norm(tensor) if ranges is None else self.columns(replace(tensor, shape=(*tensor.shape, 1)), ranges)

    def values(self, tensor: Tensor) -> None:
        """A tensor that the program does not refer to, stored row by row in float32."""
        name, rows = str(tensor.name), range(tensor.shape[0])
        self.vectors[name] = (
            Vector(tensor=name, size=math.prod(tensor.shape)),
            WeightRows(name, rows, tensor.plus_one),
        )

    def constant(self, name: str, value: Array) -> Vector:
        """A constant as an engine vector."""
        flat = np.ascontiguousarray(value, np.float32).reshape(-1)
        vector = Vector(tensor=name, size=flat.size)
        self.vectors[name] = (vector, flat)
        return vector

    def _matrix(self, tensor: str, source: WeightRows, size: int, k: int, compression: Compression | None) -> Matrix:
        name = _rows_name(source, size)
        if name not in self.matrices:
            outliers = None if compression is None else compression(source, k)
            matrix = Matrix(tensor=name, n=len(source.rows), k=k, outliers=outliers)
            self.matrices[name] = (matrix, source)
        return self.matrices[name][0]


def _rows_name(source: WeightRows, size: int) -> str:
    rows = source.rows
    return source.tensor if rows == range(size) else f"{source.tensor}[{rows.start}:{rows.stop}]"


def buffer_of(value: Value) -> BufferName:
    """The buffer of a value. It has the value's name until in-place values are renamed."""
    return BufferName(value.name)


def as_float32(value: float) -> float:
    """The value rounded to float32, as the engine stores it."""
    return float(np.float32(value))
