"""Makes the _core.Program of a plan. Its weights are views of arrays that the caller keeps alive."""

from __future__ import annotations

import enum
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import numpy as np

from ... import _core
from ..._core import (
    AdaptrtError,
    EngineError,
    QuantAlgo,
    compressed_bytes,
    dtype_name,
    neuron_bytes,
    panel_bytes,
    quantized_panel_bytes,
)
from .plan import BufferName, Matrix, NeuronTable, Program, Quantization, Vector

Array = np.ndarray[Any, np.dtype[Any]]


def bind_program(program: Program, tensors: Mapping[str, Array], subject: str) -> _core.Program:
    """Binds a program to tensors. Raises EngineError, which begins with `subject`, for names and sizes that do not fit.

    The content of the result is not checked here: see _core.Program.validate.
    """
    buffers = {buffer.name: at for at, buffer in enumerate(program.buffers)}
    if len(buffers) != len(program.buffers):
        raise EngineError(f"{subject}: two buffers have one name")
    try:
        return typing.cast(_core.Program, _Binder(program, tensors, buffers).bind(program))
    except (ValueError, TypeError, OverflowError) as reason:
        # The structs of _core refuse numbers beyond their fields, and buffers beyond their tensors.
        raise EngineError(f"{subject}: {str(reason).splitlines()[0]}") from None
    except AdaptrtError as reason:
        raise EngineError(f"{subject}: {reason}") from None


class _Binder:
    def __init__(self, program: Program, tensors: Mapping[str, Array], buffers: Mapping[str, int]) -> None:
        self._dtype = program.dtype
        self._tensors = tensors
        self._buffers = buffers

    def bind(self, value: Any) -> Any:
        """Returns the counterpart in _core of a part of a program."""
        if isinstance(value, Matrix):
            return self._matrix(value)
        if isinstance(value, Vector):
            return self._vector(value)
        if isinstance(value, NeuronTable):
            return self._neurons(value)
        if isinstance(value, tuple):
            return [self.bind(item) for item in value]
        if not is_dataclass(value) or isinstance(value, enum.Enum):
            return value
        kind: type = type(value)
        buffer_fields = _fields_of(kind, BufferName) | _fields_of(kind, BufferName | None)
        list_fields = _fields_of(kind, tuple[BufferName, ...])
        arguments: dict[str, Any] = {}
        for field in fields(value):
            item = getattr(value, field.name)
            if item is None:
                continue  # use the struct's own default: an empty vector, no LoRA
            if field.name in buffer_fields:
                arguments[field.name] = self._buffer(item)
            elif field.name in list_fields:
                arguments[field.name] = [self._buffer(name) for name in item]
            else:
                arguments[field.name] = self.bind(item)
        return getattr(_core, kind.__name__)(**arguments)

    def _buffer(self, name: str) -> int:
        if name not in self._buffers:
            raise EngineError(f"there is no buffer '{name}'")
        return self._buffers[name]

    def _tensor(self, name: str, dtype: str, num_bytes: int) -> Array:
        if name not in self._tensors:
            raise EngineError(f"there is no tensor '{name}'")
        tensor = self._tensors[name]
        if tensor.dtype != np.dtype(dtype) or tensor.nbytes != num_bytes:
            raise EngineError(
                f"tensor '{name}' holds {tensor.nbytes} bytes of {tensor.dtype}; the program expects {num_bytes} of "
                f"{dtype}"
            )
        return tensor

    def _matrix(self, matrix: Matrix) -> Any:
        if matrix.n < 0 or matrix.k < 0 or matrix.n >= 1 << 31 or matrix.k >= 1 << 31:
            raise EngineError(f"matrix '{matrix.tensor}' has impossible sizes [{matrix.n}, {matrix.k}]")
        if matrix.is_stored_twice and not (matrix.quantization is None and matrix.outliers is None):
            raise EngineError(f"matrix '{matrix.tensor}' has rows or columns, and is quantised or compressed")
        if matrix.has_rows and matrix.has_columns:
            raise EngineError(f"matrix '{matrix.tensor}' has both rows and columns")
        if matrix.quantization is not None:
            if matrix.outliers is not None:
                raise EngineError(f"matrix '{matrix.tensor}' is both quantised and compressed")
            return self._quantized_matrix(matrix, matrix.quantization)
        if matrix.outliers is not None:
            return self._compressed_matrix(matrix, matrix.outliers)
        num_bytes = panel_bytes(self._dtype, matrix.n, matrix.k) * (2 if matrix.is_stored_twice else 1)
        tensor = self._tensor(matrix.tensor, dtype_name(self._dtype), num_bytes)
        return _core.PanelMatrix(
            data=tensor.view(np.uint8),
            dtype=self._dtype,
            n=matrix.n,
            k=matrix.k,
            has_rows=matrix.has_rows,
            has_columns=matrix.has_columns,
        )

    def _quantized_matrix(self, matrix: Matrix, how: Quantization) -> Any:
        if how.algo is QuantAlgo.NONE:
            raise EngineError(f"matrix '{matrix.tensor}' has a quantization with algo NONE; expected another algo")
        quantization = self.bind(how)
        tensor = self._tensor(matrix.tensor, "uint8", quantized_panel_bytes(quantization, matrix.n, matrix.k))
        return _core.PanelMatrix(data=tensor, dtype=self._dtype, n=matrix.n, k=matrix.k, quantization=quantization)

    def _compressed_matrix(self, matrix: Matrix, outliers: int) -> Any:
        tensor = self._tensor(matrix.tensor, "uint8", compressed_bytes(matrix.n, matrix.k, outliers))
        return _core.PanelMatrix(data=tensor, dtype=self._dtype, n=matrix.n, k=matrix.k, outliers=outliers)

    def _neurons(self, neurons: NeuronTable) -> Any:
        sizes = (neurons.count, neurons.size)
        if not all(0 < size < 1 << 31 for size in sizes):
            raise EngineError(f"neurons '{neurons.tensor}' have impossible sizes {list(sizes)}")
        tensor = self._tensor(neurons.tensor, "uint8", neuron_bytes(self._dtype, *sizes))
        return _core.NeuronTable(data=tensor, dtype=self._dtype, count=neurons.count, size=neurons.size)

    def _vector(self, vector: Vector) -> Any:
        tensor = self._tensor(vector.tensor, "float32", 4 * vector.size)
        return _core.VectorView(data=tensor.view(np.uint8))


@cache
def _fields_of(kind: type, hint: object) -> frozenset[str]:
    return frozenset(name for name, found in typing.get_type_hints(kind).items() if found == hint)
