"""Tensors of one checkpoint rank, read in pieces: from its file, or computed on the fly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

import numpy as np

from ..._core import CheckpointError
from ...common.safetensors_stream import SafetensorsReader
from .casting import Array
from .quantization import QuantConfig
from .quantizer import QuantizedRows


class PlainTensors(Protocol):
    """Tensors by their names in a checkpoint."""

    def rows(self, name: str, rows: range, step: int | None = None) -> Iterator[Array]:
        """Yields rows of a tensor that is not quantised, in the checkpoint's dtype.

        step: number of rows per piece; None: pieces of a few MiB.
        """


class RankTensors(PlainTensors, Protocol):
    """Tensors of a checkpoint whose linear layers may be quantised."""

    def quantized_rows(self, name: str, rows: range, step: int | None = None) -> Iterator[QuantizedRows]:
        """Yields rows of a quantised weight, in pieces like rows()."""

    def permutations(self, name: str) -> Array:
        """Permutations int32 [parts, in] of a weight with permuted inputs: input i of a part is input order[part, i].

        Raises CheckpointError if a row is not a permutation.
        """


class CheckpointFile:
    """Tensors of a rank's file."""

    def __init__(self, reader: SafetensorsReader, quantization: QuantConfig | None) -> None:
        self.reader: Final = reader
        self._quantization = quantization

    def rows(self, name: str, rows: range, step: int | None = None) -> Iterator[Array]:
        """See PlainTensors.rows; yields views of the mapped file."""
        return self.reader.rows(name, rows.start, rows.stop, step=step)

    def quantized_rows(self, name: str, rows: range, step: int | None = None) -> Iterator[QuantizedRows]:
        """See RankTensors.quantized_rows; yields views of the mapped file."""
        assert self._quantization is not None
        how = self._quantization.of_weight(name)
        scales, zeros, minimums = self.reader.array(how.scales_of(name)), None, None
        if how.has_zero_point:
            zeros = self.reader.array(how.zeros_of(name)).reshape(len(scales), -1)
        if how.has_minimum:
            minimums = self.reader.array(how.minimums_of(name))
        first = rows.start
        for piece in self.rows(name, rows, step):
            these = slice(first, first + len(piece))
            first = these.stop
            yield QuantizedRows(
                piece,
                scales.reshape(len(scales), -1)[these],
                None if zeros is None else zeros[these],
                None if minimums is None else minimums[these],
            )

    def permutations(self, name: str) -> Array:
        """See RankTensors.permutations."""
        assert self._quantization is not None
        tensor = self._quantization.permutation_name(name)
        orders = self.reader.array(tensor)
        for order in orders:
            if not np.array_equal(np.sort(order), np.arange(len(order))):
                raise CheckpointError(
                    f"{self.reader.path}: tensor '{tensor}' is not a permutation of {len(order)} inputs"
                )
        return orders
