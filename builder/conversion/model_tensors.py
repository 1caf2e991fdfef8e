"""Tensors of a checkpoint's rank: slices of a Hugging Face model's tensors, cast while they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ...formats.checkpoint.casting import Array, cast
from ...formats.checkpoint.hf_weights import HfWeights
from ...formats.checkpoint.planned_tensor import PlannedTensor, Slice
from ...formats.checkpoint.rank_file import stored_dtype


class ModelTensors:
    """Tensors that a plan makes from a model's weights."""

    def __init__(self, weights: HfWeights, plan: Sequence[PlannedTensor], dtype: np.dtype[Any]) -> None:
        self._weights = weights
        self._plan = {tensor.name: tensor for tensor in plan}
        self._dtype = dtype

    def rows(self, name: str, rows: range, step: int | None = None) -> Iterator[Array]:
        """Implements PlainTensors.rows. Raises CheckpointError for values that the dtype cannot hold."""
        pieces = self._pieces(self._plan[name], rows, step)
        return pieces if step is None else _in_steps(pieces, len(rows), step)

    def _pieces(self, tensor: PlannedTensor, rows: range, step: int | None) -> Iterator[Array]:
        first = 0
        for part in tensor.slices:
            taken = _overlap(part.rows, first, rows)
            first += len(part.rows)
            if not taken:
                continue
            subject = self._weights.where(part.source)
            for piece in self._stored_rows(part, taken, step):
                columns = piece if part.columns is None else piece[:, part.columns.start : part.columns.stop]
                # A vector may be stored as a matrix of one row.
                values = np.ascontiguousarray(columns).reshape(-1, *tensor.shape[1:])
                yield cast(values, stored_dtype(tensor, self._dtype), subject)
        if zeros := _overlap(range(tensor.zero_rows), first, rows):
            yield np.zeros((len(zeros), *tensor.shape[1:]), self._dtype)

    def _stored_rows(self, part: Slice, rows: range, step: int | None) -> Iterator[Array]:
        """Whole rows of [out, in]. A tensor stored as [in, out] comes as one piece."""
        if not part.transposed:
            yield from self._weights.rows(part.source, rows, step)
            return
        inputs = range(self._weights.spec(part.source).shape[0])
        pieces = self._weights.rows(part.source, inputs)
        yield np.concatenate([piece[:, rows.start : rows.stop] for piece in pieces]).T


def _overlap(part: range, first: int, rows: range) -> range:
    """The rows of `part` that are within `rows`, where part's first row is row `first` of the tensor."""
    return part[max(rows.start - first, 0) : max(rows.stop - first, 0)]


def _in_steps(pieces: Iterable[Array], count: int, step: int) -> Iterator[Array]:
    """Yields the same `count` rows, `step` at a time. Pieces of the right size are passed on unchanged.

    Yields a piece before asking for the next one, because the source frees a piece when the next one is requested.
    """
    kept: list[Array] = []
    missing = min(step, count)
    for piece in pieces:
        while 0 < missing <= len(piece):
            yield _joined([*kept, piece[:missing]])
            count -= min(step, count)
            kept, piece, missing = [], piece[missing:], min(step, count)
        if len(piece) > 0:
            kept.append(piece)
            missing -= len(piece)


def _joined(pieces: list[Array]) -> Array:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
