"""Streams a checkpoint's tensors into engine tensors: matrices as panels or row by row, vectors as float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from ..._core import (
    RECORD_ALIGNMENT,
    DType,
    QuantAlgo,
    Quantization,
    compress_panels,
    compressed_bytes,
    dtype_name,
    neuron_bytes,
    pack_panels,
    pack_permutation,
    pack_quantized_panels,
    panel_bytes,
    quantized_panel_bytes,
)
from ...formats.checkpoint.casting import to_float32
from ...formats.checkpoint.rank_tensors import RankTensors
from ...formats.engine import plan
from ...formats.engine.engine_file import EngineTensor
from ...formats.engine.plan import Matrix, NeuronTable
from .emitted import ChosenRows, WeightNeurons, WeightRows, Weights
from .storage import PANELS, Storage

Array = np.ndarray[Any, np.dtype[Any]]

_PANEL_ROWS: Final = 64
_PIECE_BYTES: Final = 8 << 20


def engine_tensors(
    weights: Weights, tensors: RankTensors, dtype: DType, storage: Storage = PANELS
) -> list[EngineTensor]:
    """Tensors of an engine whose matrices are of `dtype`, small ones first."""
    made = []
    for name, (vector, values) in weights.vectors.items():
        made.append(EngineTensor(name, np.dtype(np.float32), vector.size, partial(_vector_pieces, tensors, values)))
    numpy_dtype = np.dtype(dtype_name(dtype))
    for name, (matrix, source) in weights.matrices.items():
        if storage is not PANELS and matrix.quantization is not None:
            made.append(_quantized_rows(tensors, matrix, source))
            continue
        if storage is not PANELS:
            pieces = partial(_row_pieces, tensors, matrix.k, source)
            made.append(EngineTensor(name, numpy_dtype, matrix.n * matrix.k, pieces))
            continue
        if matrix.quantization is not None:
            made.append(_quantized_tensor(tensors, matrix, source))
            continue
        if matrix.outliers is not None:
            made.append(_compressed_tensor(tensors, matrix, source, matrix.outliers))
            continue
        size = panel_bytes(dtype, matrix.n, matrix.k) // numpy_dtype.itemsize
        if matrix.is_stored_twice:
            both = _panels_and_rows if matrix.has_rows else _panels_and_columns
            made.append(EngineTensor(name, numpy_dtype, 2 * size, partial(both, tensors, matrix.k, source, dtype)))
            continue
        made.append(EngineTensor(name, numpy_dtype, size, partial(_panel_bytes, tensors, matrix.k, source, dtype)))
    for name, (neurons, tensors_of_mlp) in weights.neurons.items():
        num_bytes = neuron_bytes(dtype, neurons.count, neurons.size)
        records = partial(_neuron_records, tensors, neurons, tensors_of_mlp, num_bytes // neurons.count)
        made.append(EngineTensor(name, np.dtype(np.uint8), num_bytes, records, alignment=RECORD_ALIGNMENT))
    return made


def _quantized_tensor(tensors: RankTensors, matrix: Matrix, source: WeightRows) -> EngineTensor:
    assert matrix.quantization is not None
    size = quantized_panel_bytes(Quantization(**vars(matrix.quantization)), matrix.n, matrix.k)
    pieces = partial(_quantized_pieces, tensors, matrix.k, source, matrix.quantization)
    return EngineTensor(matrix.tensor, np.dtype(np.uint8), size, pieces)


def _quantized_rows(tensors: RankTensors, matrix: Matrix, source: WeightRows) -> EngineTensor:
    how = matrix.quantization
    assert how is not None
    size = quantized_panel_bytes(Quantization(**vars(how)), matrix.n, matrix.k)
    return EngineTensor(
        matrix.tensor, np.dtype(np.uint8), size, partial(_quantized_row_pieces, tensors, matrix.k, source, how)
    )


def _quantized_row_pieces(tensors: RankTensors, k: int, source: WeightRows, how: plan.Quantization) -> Iterator[Array]:
    """The integers row by row, then the float32 scales and the zero points. See src/program/matrix_storage.h.

    Scales and zero points are in memory meanwhile.
    """
    scales, zeros = [], []
    for piece in tensors.quantized_rows(source.tensor, source.rows, _rows_of_a_piece(k * 4)):
        scales.append(np.ascontiguousarray(to_float32(piece.scales)))
        weights: Array = np.ascontiguousarray(piece.weights).view(np.uint8)
        if how.algo is QuantAlgo.W4A16 and piece.zeros is None:
            weights = weights ^ 0x88  # from two's complement to integers above 0
        if piece.zeros is not None:
            zeros.append(_stored_zeros(piece.zeros, how))
        yield weights
    yield np.concatenate(scales).reshape(-1).view(np.uint8)
    if zeros:
        yield np.concatenate(zeros).reshape(-1)


def _stored_zeros(zeros: Array, how: plan.Quantization) -> Array:
    """Zero points of an engine, from those of a checkpoint: the integers that they are compared with are unsigned."""
    unsigned = np.ascontiguousarray(zeros).view(np.uint8)
    return unsigned ^ 0x80 if how.algo is QuantAlgo.W8A16 else unsigned


def _vector_pieces(tensors: RankTensors, source: WeightRows | ChosenRows | Array) -> Iterator[Array]:
    if isinstance(source, ChosenRows):
        whole = np.concatenate([to_float32(piece) for piece in tensors.rows(source.tensor, range(source.num_rows))])
        columns = slice(source.columns.start, source.columns.stop)
        rows = whole.reshape(len(whole), -1)
        yield np.ascontiguousarray(rows[list(source.chosen), columns].T).reshape(-1)
        return
    if not isinstance(source, WeightRows):
        yield np.ascontiguousarray(to_float32(source))
        return
    for piece in tensors.rows(source.tensor, source.rows):
        values = np.ascontiguousarray(to_float32(piece))
        yield values + np.float32(1.0) if source.plus_one else values


def _row_pieces(tensors: RankTensors, k: int, source: WeightRows) -> Iterator[Array]:
    """The plain rows, one after another."""
    for piece in tensors.rows(source.tensor, source.rows, _rows_of_a_piece(k * 4)):
        yield np.ascontiguousarray(piece)


def _panel_bytes(tensors: RankTensors, k: int, source: WeightRows, dtype: DType) -> Iterator[Array]:
    for _, panels in panel_pieces(tensors, k, source, dtype):
        yield panels


def _panels_and_rows(tensors: RankTensors, k: int, source: WeightRows, dtype: DType) -> Iterator[Array]:
    """The panels, followed by the plain rows."""
    yield from _panel_bytes(tensors, k, source, dtype)
    yield from _row_pieces(tensors, k, source)


def _panels_and_columns(tensors: RankTensors, k: int, source: WeightRows, dtype: DType) -> Iterator[Array]:
    """The panels, followed by the columns, a few at a time. The whole matrix is in memory meanwhile."""
    yield from _panel_bytes(tensors, k, source, dtype)
    whole = np.concatenate(list(tensors.rows(source.tensor, source.rows)))
    step = _rows_of_a_piece(len(whole) * whole.itemsize)
    for first in range(0, k, step):
        yield np.ascontiguousarray(whole[:, first : first + step].T)


def _neuron_records(
    tensors: RankTensors, neurons: NeuronTable, source: WeightNeurons, record_bytes: int
) -> Iterator[Array]:
    """Records of some neurons at a time. All of `down` is in memory meanwhile."""
    down = np.concatenate(list(tensors.rows(source.down, range(neurons.size))))
    first = 0
    for up in tensors.rows(source.up, range(neurons.count), _rows_of_a_piece(record_bytes)):
        last = first + up.shape[0]
        both = np.concatenate([up, down[:, first:last].T], axis=1)
        records = np.zeros((len(both), record_bytes), np.uint8)
        records[:, : both.shape[1] * both.itemsize] = both.view(np.uint8)
        yield records.reshape(-1)
        first = last


def panel_pieces(tensors: RankTensors, k: int, source: WeightRows, dtype: DType) -> Iterator[tuple[int, Array]]:
    """Yields (number of rows, their panels), whole panels at a time, in order.

    A panel's bytes depend on its own rows only.
    """
    step = _rows_of_a_piece(k * np.dtype(dtype_name(dtype)).itemsize)
    for piece in tensors.rows(source.tensor, source.rows, step):
        count = piece.shape[0]
        panels = np.empty(panel_bytes(dtype, count, k), np.uint8)
        bits = piece.view(np.uint16 if piece.itemsize == 2 else np.uint32)
        pack_panels(panels, dtype, count, k, 0, bits, dtype)
        yield count, panels


def _compressed_tensor(tensors: RankTensors, matrix: Matrix, source: WeightRows, outliers: int) -> EngineTensor:
    size = compressed_bytes(matrix.n, matrix.k, outliers)
    pieces = partial(_compressed_pieces, tensors, matrix.k, source, outliers)
    return EngineTensor(matrix.tensor, np.dtype(np.uint8), size, pieces)


def _compressed_pieces(tensors: RankTensors, k: int, source: WeightRows, outliers: int) -> Iterator[Array]:
    for count, panels in panel_pieces(tensors, k, source, DType.BFLOAT16):
        compressed = np.empty(compressed_bytes(count, k, outliers), np.uint8)
        compress_panels(compressed, panels, count, k, outliers)
        yield compressed


def _quantized_pieces(tensors: RankTensors, k: int, source: WeightRows, how: plan.Quantization) -> Iterator[Array]:
    """Yields whole panels as panel_pieces() does, followed by the input permutation if there is one."""
    whole, in_order = (Quantization(**vars(each)) for each in (how, replace(how, act_order=False)))
    step = _rows_of_a_piece(k * np.dtype(np.float32).itemsize)  # Rows are float32 during quantisation.
    for piece in tensors.quantized_rows(source.tensor, source.rows, step):
        count = piece.weights.shape[0]
        scales = np.ascontiguousarray(to_float32(piece.scales))
        zeros = None if piece.zeros is None else _stored_zeros(piece.zeros, how)
        minimums = None if piece.minimums is None else np.ascontiguousarray(to_float32(piece.minimums))
        panels = np.empty(quantized_panel_bytes(in_order, count, k), np.uint8)
        # numpy's buffer protocol has no FP8.
        weights = np.ascontiguousarray(piece.weights).view(np.uint8)
        pack_quantized_panels(panels, in_order, count, k, 0, count, weights, scales, zeros, minimums)
        yield panels
    if how.act_order:
        n = len(source.rows)
        behind = np.zeros(quantized_panel_bytes(whole, n, k) - quantized_panel_bytes(in_order, n, k), np.uint8)
        pack_permutation(behind, whole, n, k, tensors.permutations(source.tensor)[source.part])
        yield behind


def _rows_of_a_piece(row_bytes: int) -> int:
    return max(1, _PIECE_BYTES // (row_bytes * _PANEL_ROWS)) * _PANEL_ROWS
