"""Streams weights from the checkpoint into the engine's tensors: matrices as panels, vectors as float32."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import numpy as np

from ..._core import (
    DType,
    Quantization,
    compress_panels,
    compressed_bytes,
    dtype_name,
    pack_panels,
    pack_quantized_panels,
    panel_bytes,
    quantized_panel_bytes,
)
from ..checkpoint.casting import to_float32
from ..safetensors_stream import SafetensorsReader
from .emitted import QuantizedRows, WeightRows, Weights
from .engine_file import EngineTensor
from .plan import Matrix

Array = np.ndarray[Any, np.dtype[Any]]

_PANEL_ROWS: Final = 64
_PIECE_BYTES: Final = 8 << 20


def engine_tensors(weights: Weights, reader: SafetensorsReader, dtype: DType) -> list[EngineTensor]:
    """The tensors of an engine whose matrices are of `dtype`, the small ones first."""
    tensors = []
    for name, (vector, source) in weights.vectors.items():
        tensors.append(EngineTensor(name, np.dtype(np.float32), vector.size, partial(_vector_pieces, reader, source)))
    numpy_dtype = np.dtype(dtype_name(dtype))
    for name, (matrix, rows) in weights.matrices.items():
        if isinstance(rows, QuantizedRows):
            tensors.append(_quantized_tensor(reader, matrix, rows))
            continue
        if matrix.exceptions is not None:
            tensors.append(_compressed_tensor(reader, matrix, rows, matrix.exceptions))
            continue
        size = panel_bytes(dtype, matrix.n, matrix.k) // numpy_dtype.itemsize
        tensors.append(EngineTensor(name, numpy_dtype, size, partial(_panel_bytes, reader, matrix.k, rows, dtype)))
    return tensors


def _quantized_tensor(reader: SafetensorsReader, matrix: Matrix, source: QuantizedRows) -> EngineTensor:
    assert matrix.quantization is not None
    how = Quantization(
        algo=matrix.quantization.algo,
        group_size=matrix.quantization.group_size,
        zero_points=matrix.quantization.zero_points,
    )
    size = quantized_panel_bytes(how, matrix.n, matrix.k)
    pieces = partial(_quantized_pieces, reader, matrix, source, how)
    return EngineTensor(matrix.tensor, np.dtype(np.uint8), size, pieces)


def _vector_pieces(reader: SafetensorsReader, source: WeightRows | Array) -> Iterator[Array]:
    if not isinstance(source, WeightRows):
        yield np.ascontiguousarray(to_float32(source))
        return
    values = to_float32(reader.array(source.tensor)[source.first : source.last])
    yield np.ascontiguousarray(values + np.float32(1.0) if source.plus_one else values)


def _panel_bytes(reader: SafetensorsReader, k: int, rows: WeightRows, dtype: DType) -> Iterator[Array]:
    for _, panels in panel_pieces(reader, k, rows, dtype):
        yield panels


def panel_pieces(reader: SafetensorsReader, k: int, rows: WeightRows, dtype: DType) -> Iterator[tuple[int, Array]]:
    """(number of rows, their panels) of whole panels at a time, one after the other.

    A panel's bytes depend on its own rows only.
    """
    row_bytes = k * np.dtype(dtype_name(dtype)).itemsize
    step = max(1, _PIECE_BYTES // (row_bytes * _PANEL_ROWS)) * _PANEL_ROWS
    for piece in reader.rows(rows.tensor, rows.first, rows.last, piece_bytes=step * row_bytes):
        count = piece.shape[0]
        panels = np.empty(panel_bytes(dtype, count, k), np.uint8)
        bits = piece.view(np.uint16 if piece.itemsize == 2 else np.uint32)
        pack_panels(panels, dtype, count, k, 0, bits, dtype)
        yield count, panels


def _compressed_tensor(reader: SafetensorsReader, matrix: Matrix, rows: WeightRows, exceptions: int) -> EngineTensor:
    size = compressed_bytes(matrix.n, matrix.k, exceptions)
    pieces = partial(_compressed_pieces, reader, matrix.k, rows, exceptions)
    return EngineTensor(matrix.tensor, np.dtype(np.uint8), size, pieces)


def _compressed_pieces(reader: SafetensorsReader, k: int, rows: WeightRows, exceptions: int) -> Iterator[Array]:
    for count, panels in panel_pieces(reader, k, rows, DType.BFLOAT16):
        compressed = np.empty(compressed_bytes(count, k, exceptions), np.uint8)
        compress_panels(compressed, panels, count, k, exceptions)
        yield compressed


def _quantized_pieces(
    reader: SafetensorsReader, matrix: Matrix, source: QuantizedRows, how: Quantization
) -> Iterator[Array]:
    """Whole panels at a time, as _panel_pieces."""
    rows = source.rows
    row_bytes = reader.array(rows.tensor)[:1].nbytes
    step = max(1, _PIECE_BYTES // (row_bytes * _PANEL_ROWS)) * _PANEL_ROWS
    first = rows.first
    for piece in reader.rows(rows.tensor, rows.first, rows.last, piece_bytes=step * row_bytes):
        count = piece.shape[0]
        these = slice(first, first + count)
        scales = np.ascontiguousarray(to_float32(reader.array(source.scales)[these]))
        zeros = None if source.zeros is None else np.ascontiguousarray(reader.array(source.zeros)[these])
        panels = np.empty(quantized_panel_bytes(how, count, matrix.k), np.uint8)
        pack_quantized_panels(panels, how, count, matrix.k, 0, count, piece, scales, zeros)
        yield panels
        first += count
