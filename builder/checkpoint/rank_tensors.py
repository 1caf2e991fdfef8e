"""The tensors of one rank of a checkpoint, read in pieces: from its file, or made of others meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

from ..safetensors_stream import SafetensorsReader
from .casting import Array
from .quantization import QuantConfig
from .quantizer import QuantizedRows


class PlainTensors(Protocol):
    """Tensors by their names in a checkpoint."""

    def rows(self, name: str, rows: range, step: int | None = None) -> Iterator[Array]:
        """Rows of a tensor that is not quantised, in the checkpoint's dtype.

        They come `step` at a time, the last ones fewer; None: in pieces of a few MiB.
        """


class RankTensors(PlainTensors, Protocol):
    """Those of a checkpoint whose linear layers may be quantised."""

    def quantized_rows(self, name: str, rows: range, step: int | None = None) -> Iterator[QuantizedRows]:
        """Rows of a weight that is quantised, as rows() gives those of others."""


class CheckpointFile:
    """The tensors of a rank's file."""

    def __init__(self, reader: SafetensorsReader, quantization: QuantConfig | None) -> None:
        self.reader: Final = reader
        self._quantization = quantization

    def rows(self, name: str, rows: range, step: int | None = None) -> Iterator[Array]:
        """As PlainTensors.rows; views of the mapped file."""
        return self.reader.rows(name, rows.start, rows.stop, step=step)

    def quantized_rows(self, name: str, rows: range, step: int | None = None) -> Iterator[QuantizedRows]:
        """As RankTensors.quantized_rows; views of the mapped file."""
        assert self._quantization is not None
        how = self._quantization.of_weight(name)
        scales, zeros = self.reader.array(how.scales_of(name)), None
        if how.has_zero_point:
            zeros = self.reader.array(how.zeros_of(name)).reshape(len(scales), -1)
        first = rows.start
        for piece in self.rows(name, rows, step):
            these = slice(first, first + len(piece))
            first = these.stop
            yield QuantizedRows(piece, scales.reshape(len(scales), -1)[these], None if zeros is None else zeros[these])
