"""Tensors of a rank whose quantised layers have the published integers and scales."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, cast

import numpy as np

from ....formats.checkpoint.casting import Array
from ....formats.checkpoint.hf_weights import HfWeights
from ....formats.checkpoint.planned_tensor import PlannedTensor, Slice
from ....formats.checkpoint.quantization import QuantConfig
from ....formats.checkpoint.quantizer import QuantizationError, QuantizedRows
from ....formats.hugging_face.published.formats import ActOrderMatrix
from ..model_tensors import ModelTensors
from .kept_layers import KeptLayers

_ROWS_OF_A_PIECE: Final = 512


class KeptTensors:
    """Tensors that a plan makes from a model's weights, some of them quantised."""

    def __init__(
        self,
        weights: HfWeights,
        plan: Sequence[PlannedTensor],
        dtype: np.dtype[Any],
        kept: KeptLayers,
    ) -> None:
        self._plain = ModelTensors(weights, plan, dtype)
        self._plan = {tensor.name: tensor for tensor in plan}
        self._kept = kept

    @property
    def errors(self) -> tuple[QuantizationError, ...]:
        """Always empty: nothing is rounded."""
        return ()

    def rows(self, name: str, rows: range, step: int | None = None) -> Iterator[Array]:
        """Implements PlainTensors.rows."""
        return self._plain.rows(name, rows, step)

    def quantized_rows(self, name: str, rows: range, step: int | None = None) -> Iterator[QuantizedRows]:
        """Implements RankTensors.quantized_rows."""
        size = _ROWS_OF_A_PIECE if step is None else step
        how = self._kept.quantization.of_weight(name)
        pieces = (
            piece if part.columns is None else _columns(piece, part.columns, how)
            for part, taken in _parts(self._plan[name], rows)
            for piece in self._kept.matrices[part.source].quantized_rows(taken, size, how)
        )
        return _in_steps(pieces, size)

    def permutations(self, name: str) -> Array:
        """Implements RankTensors.permutations."""
        orders, first = [], 0
        for outputs in self._plan[name].parts:
            (part, _), *_ = _parts(self._plan[name], range(first, first + outputs))
            orders.append(cast(ActOrderMatrix, self._kept.matrices[part.source]).permutation())
            first += outputs
        return np.stack(orders)


def _columns(piece: QuantizedRows, columns: range, how: QuantConfig) -> QuantizedRows:
    """A slice of the inputs, in whole groups."""
    inputs = slice(columns.start, columns.stop)
    if how.has_few_bits:
        inputs = slice(columns.start // 2, -(-columns.stop // 2))
    groups = slice(None)
    if how.group_size is not None:
        groups = slice(columns.start // how.group_size, -(-columns.stop // how.group_size))
    zeros = None if piece.zeros is None else piece.zeros[:, groups]
    minimums = None if piece.minimums is None else piece.minimums[:, groups]
    return QuantizedRows(piece.weights[:, inputs], piece.scales[:, groups], zeros, minimums)


def _in_steps(pieces: Iterable[QuantizedRows], step: int) -> Iterator[QuantizedRows]:
    """The same rows, `step` at a time."""
    kept: list[QuantizedRows] = []
    missing = step
    for piece in pieces:
        first, count = 0, len(piece.weights)
        while count - first >= missing:
            yield _joined([*kept, _cut(piece, slice(first, first + missing))])
            kept, first, missing = [], first + missing, step
        if first < count:
            kept.append(_cut(piece, slice(first, count)))
            missing -= count - first
    if kept:
        yield _joined(kept)


def _cut(piece: QuantizedRows, rows: slice) -> QuantizedRows:
    return QuantizedRows(
        piece.weights[rows],
        piece.scales[rows],
        None if piece.zeros is None else piece.zeros[rows],
        None if piece.minimums is None else piece.minimums[rows],
    )


def _joined(pieces: Sequence[QuantizedRows]) -> QuantizedRows:
    zeros = [piece.zeros for piece in pieces if piece.zeros is not None]
    minimums = [piece.minimums for piece in pieces if piece.minimums is not None]
    return QuantizedRows(
        np.concatenate([piece.weights for piece in pieces]),
        np.concatenate([piece.scales for piece in pieces]),
        np.concatenate(zeros) if zeros else None,
        np.concatenate(minimums) if minimums else None,
    )


def _parts(tensor: PlannedTensor, rows: range) -> Iterator[tuple[Slice, range]]:
    """Slices that contain some rows of a planned tensor, with the rows in each source."""
    first = 0
    for part in tensor.slices:
        taken = part.rows[max(rows.start - first, 0) : max(rows.stop - first, 0)]
        first += len(part.rows)
        if taken:
            yield part, taken
