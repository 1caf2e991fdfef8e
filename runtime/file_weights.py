"""Reads the weights of an engine file: from its memory mapping, or without it.

Without the mapping, a read fails if the file is truncated meanwhile, instead of the process (SIGBUS).
"""

from __future__ import annotations

import os
from typing import Final

import numpy as np
import numpy.typing as npt

from .._core import EngineError, PanelMatrix, QuantAlgo, VectorView, dtype_name
from ..formats.checkpoint.casting import to_float32
from ..formats.engine.engine_file import EngineFile

FloatArray = npt.NDArray[np.float32]


class MappedWeights:
    """Weights at the addresses that the program has."""

    def rows(self, matrix: PanelMatrix, first: int, last: int) -> FloatArray:
        """Returns W[first:last] as float32 [last - first, in]."""
        return matrix.rows(first, last)

    def values(self, vector: VectorView) -> FloatArray:
        """Returns all values as float32 [size]."""
        return vector.values()


class RowMajorWeights(MappedWeights):
    """Weights of an engine whose matrices are row-major, read from its mapping."""

    def __init__(self, storage: EngineFile) -> None:
        """storage: has the mapping that the program points to, which stays alive with this object."""
        self._bytes: Final = storage.file_bytes
        self._begin: Final = int(self._bytes.__array_interface__["data"][0])

    def rows(self, matrix: PanelMatrix, first: int, last: int) -> FloatArray:
        """See MappedWeights."""
        if matrix.quantization.algo is not QuantAlgo.NONE:
            return self._quantized_rows(matrix, first, last)
        dtype = np.dtype(dtype_name(matrix.dtype))
        offset = matrix.address - self._begin
        row_bytes = matrix.k * dtype.itemsize
        content = self._bytes[offset + first * row_bytes : offset + last * row_bytes]
        return np.asarray(to_float32(content.view(dtype)), np.float32).reshape(last - first, matrix.k)

    def _quantized_rows(self, matrix: PanelMatrix, first: int, last: int) -> FloatArray:
        """Returns scale * (integer - zero point). See src/program/matrix_storage.h for the layout."""
        how, n, k = matrix.quantization, matrix.n, matrix.k
        groups = -(-k // how.group_size) if how.group_size else 1
        has_few_bits = how.algo is QuantAlgo.W4A16
        offset = matrix.address - self._begin

        def part(row_bytes: int) -> npt.NDArray[np.uint8]:
            """Returns these rows of the next part of the matrix."""
            nonlocal offset
            begin = offset + first * row_bytes
            offset += n * row_bytes
            return self._bytes[begin : begin + (last - first) * row_bytes].reshape(last - first, row_bytes)

        stored = part(k // 2 if has_few_bits else k)
        scales = np.ascontiguousarray(part(4 * groups)).view(np.float32)
        middle = 8 if has_few_bits else 128
        zeros = part(groups).astype(np.int32) if how.zero_points else np.int32(middle)
        if has_few_bits:
            integers = np.stack([stored & 15, stored >> 4], axis=-1).reshape(len(stored), k).astype(np.int32)
        else:
            integers = stored.view(np.int8).astype(np.int32) + middle
        group = np.arange(k) // (how.group_size or k)
        of_input = zeros[:, group] if how.zero_points else zeros
        return scales[:, group] * (integers - of_input).astype(np.float32)


class FileWeights(MappedWeights):
    """Weights read from the file that the program's mapping belongs to."""

    def __init__(self, storage: EngineFile) -> None:
        """storage: has the mapping. Raises EngineError if the file cannot be opened."""
        self._path: Final = storage.path
        try:
            # Opened now: the path may belong to another engine later.
            self._file: Final = storage.path.open("rb", buffering=0)
        except OSError as reason:
            raise EngineError(f"{self._path}: cannot be read: {reason.strerror}") from None
        mapping = storage.file_bytes
        self._begin: Final = int(mapping.__array_interface__["data"][0])
        self._end: Final = self._begin + mapping.nbytes

    def rows(self, matrix: PanelMatrix, first: int, last: int) -> FloatArray:
        """See MappedWeights. Raises EngineError for a file that cannot be read or was truncated."""
        if first == last:
            return np.empty((0, matrix.k), np.float32)
        begin, end = matrix.panels_of(first, last)
        panels = self._read(matrix.address + begin, end - begin)
        if not matrix.quantization.act_order:
            return matrix.rows_of(panels, first, last)
        begin, end = matrix.order_bytes
        order = self._read(matrix.address + begin, end - begin).view(np.int32)
        return matrix.rows_of(panels, first, last, order)

    def values(self, vector: VectorView) -> FloatArray:
        """See MappedWeights. Raises like rows()."""
        return self._read(vector.address, 4 * vector.size).view(np.float32)

    def _read(self, address: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        assert self._begin <= address <= self._end - num_bytes
        content = np.empty(num_bytes, np.uint8)
        unread, offset = content.data, address - self._begin
        try:
            while unread:
                count = os.preadv(self._file.fileno(), [unread], offset)
                if count == 0:
                    raise EngineError(f"{self._path}: ends at byte {offset}; it was cut short while it is in use")
                unread, offset = unread[count:], offset + count
        except OSError as reason:
            raise EngineError(f"{self._path}: cannot be read: {reason.strerror}") from None
        return content
