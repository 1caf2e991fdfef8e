"""What lowering finds: ops of the program with the values they read and write, before buffers are placed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..._core import DType, EngineError, QuantAlgo, RowKind
from .graph_index import Array, GraphIndex, Node
from .plan import BufferName, LoraSite, Matrix, Op, Quantization, Vector


@dataclass(frozen=True)
class WeightRows:
    """Rows [first, last) of a checkpoint tensor, the source of a tensor of the engine."""

    tensor: str
    first: int
    last: int


Compression = Callable[[WeightRows, int], int | None]
"""Places for exceptions in the compressed panels of rows of k inputs; None: they are not worth compressing."""


@dataclass(frozen=True)
class QuantizedRows:
    """Rows of a quantised checkpoint tensor with their scales and zero points."""

    rows: WeightRows
    scales: str
    zeros: str | None


@dataclass(frozen=True)
class LoweredOp:
    """An op and the nodes that it stands for."""

    op: Op
    nodes: tuple[Node, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    dtype: DType  # of what it writes
    rows: RowKind
    site: LoraSite | None = None
    side_outputs: tuple[str, ...] = ()
    """Values of its nodes that are no buffers: the KV pools."""
    in_place: str | None = None
    """The value whose buffer its only output takes over."""

    @property
    def position(self) -> int:
        """Place in the order of execution: that of its last node."""
        return max(node.position for node in self.nodes)


@dataclass
class Weights:
    """The engine's tensors that ops refer to, by name, and where they come from."""

    quant_algo: QuantAlgo = QuantAlgo.NONE
    """How quantised weights are multiplied, which the graph does not say."""
    compression: Compression | None = None
    """Of the matrices of linear layers; None: they stay as they are."""
    matrices: dict[str, tuple[Matrix, WeightRows | QuantizedRows]] = field(default_factory=dict)
    vectors: dict[str, tuple[Vector, WeightRows | Array]] = field(default_factory=dict)

    def table(self, index: GraphIndex, value: str) -> Matrix:
        """Panels of a weight that is read row by row."""
        return self._matrix(index, value, None, None)

    def matrix(self, index: GraphIndex, value: str, rows: tuple[int, int]) -> Matrix:
        """Panels of rows of a weight [out, in] of a linear layer."""
        return self._matrix(index, value, rows, self.compression)

    def _matrix(
        self, index: GraphIndex, value: str, rows: tuple[int, int] | None, compression: Compression | None
    ) -> Matrix:
        shape = index.shape(value)
        if not index.is_weight(value) or len(shape) != 2:
            raise EngineError(f"'{value}' is no two-dimensional weight")
        size, k = (size or 0 for size in shape)
        first, last = rows or (0, size)
        name, source = _rows_name(value, first, last, size), WeightRows(value, first, last)
        if name not in self.matrices:
            exceptions = None if compression is None else compression(source, k)
            self.matrices[name] = (Matrix(tensor=name, n=last - first, k=k, exceptions=exceptions), source)
        return self.matrices[name][0]

    def quantized_matrix(
        self, index: GraphIndex, weight: str, scales: str, zeros: str | None, how: Quantization, rows: tuple[int, int]
    ) -> Matrix:
        """Panels of rows of a quantised weight of the checkpoint."""
        size, k = (size or 0 for size in index.shape(weight))
        matrix = Matrix(tensor=_rows_name(weight, *rows, size), n=rows[1] - rows[0], k=k, quantization=how)
        self.matrices[matrix.tensor] = (matrix, QuantizedRows(WeightRows(weight, *rows), scales, zeros))
        return matrix

    def vector(self, index: GraphIndex, value: str, rows: tuple[int, int] | None = None) -> Vector:
        """A one-dimensional weight of the checkpoint, or some of its elements."""
        shape = index.shape(value)
        if not index.is_weight(value) or len(shape) != 1:
            raise EngineError(f"'{value}' is no one-dimensional weight")
        size = shape[0] or 0
        first, last = rows or (0, size)
        name = _rows_name(value, first, last, size)
        vector = Vector(tensor=name, size=last - first)
        self.vectors[name] = (vector, WeightRows(value, first, last))
        return vector

    def constant(self, name: str, value: Array) -> Vector:
        """A constant of the graph as a vector of the engine."""
        flat = np.ascontiguousarray(value, np.float32).reshape(-1)
        vector = Vector(tensor=name, size=flat.size)
        self.vectors[name] = (vector, flat)
        return vector


def _rows_name(tensor: str, first: int, last: int, size: int) -> str:
    return tensor if (first, last) == (0, size) else f"{tensor}[{first}:{last}]"


def buffer_name(value: str) -> BufferName:
    """Every value that ops exchange is a buffer of the same name."""
    return BufferName(value)


def refuse(node: Node, reason: str) -> EngineError:
    """The error for a node that the native compiler cannot lower."""
    return EngineError(f"the native compiler cannot lower {node.describe()}: {reason}")


def check_attributes(node: Node, defaults: Mapping[str, Any], free: Iterable[str] = ()) -> None:
    """Refuses a node with another attribute than those in `free`, or with another value than the default's."""
    for name, value in node.attributes.items():
        if name not in free and (name not in defaults or value != defaults[name]):
            raise refuse(node, f"its attribute {name} is {value!r}")


def norm_epsilon(node: Node) -> float:
    """Epsilon of an RMSNormalization over the last axis in float32; others are refused."""
    check_attributes(node, {"axis": -1, "stash_type": 1}, ["epsilon"])
    return float(node.attributes.get("epsilon", 1e-5))


def nodes_of(*groups: Iterable[Node]) -> tuple[Node, ...]:
    """The nodes of several groups, each once, in the graph's order."""
    return tuple(sorted({node.position: node for group in groups for node in group}.values(), key=lambda n: n.position))
