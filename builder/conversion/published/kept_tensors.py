"""The tensors of a rank whose quantised layers have the integers and scales that were published."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ...._core import CheckpointError
from ...checkpoint.casting import Array
from ...checkpoint.hf_weights import HfWeights, MadeMatrix
from ...checkpoint.planned_tensor import PlannedTensor, Slice
from ...checkpoint.quantization import QuantConfig
from ...checkpoint.quantizer import QuantizationError, QuantizedRows
from ...network.network import Network
from ...network.ops import Experts, Linear
from ...network.weights import LinearWeight
from ..model_tensors import ModelTensors
from .formats import WEIGHT, QuantizedMatrix

_ROWS_OF_A_PIECE: Final = 512


def linear_weights(network: Network) -> Iterator[LinearWeight]:
    """Those of every linear layer, of experts too."""
    for op in network.ops:
        if isinstance(op, Linear):
            yield from op.weights
        elif isinstance(op, Experts):
            yield from (*op.gate, *op.up, *op.down)


def check_orientation(network: Network, matrices: Mapping[str, MadeMatrix], subject: str) -> None:
    """Raises CheckpointError for quantised layers that are Conv1D, whose weights are the other way round."""
    problems = [
        f"layer '{part.source}' is a Conv1D, which is not read quantised"
        for weight in linear_weights(network)
        for part in weight.parts
        if part.transposed and part.source + WEIGHT in matrices
    ]
    if problems:
        raise CheckpointError(f"{subject}: " + "; ".join(dict.fromkeys(problems)))


def with_excluded_modules(
    quantization: QuantConfig, network: Network, matrices: Mapping[str, QuantizedMatrix], subject: str
) -> QuantConfig:
    """The same with the linear layers that the model has as they are; `matrices` by names of `network`.

    Raises CheckpointError for a layer of which a part is quantised, and for a lm_head that is.
    """
    excluded, problems = [], []
    for weight in linear_weights(network):
        sources = {part.source: part.source + WEIGHT in matrices for part in weight.parts}
        if not any(sources.values()):
            excluded.append(str(weight.name))
        elif not weight.quantized or weight.name.layer is None:
            problems.append(f"layer '{next(iter(sources))}' cannot be quantised")
        elif not all(sources.values()):
            said = ", ".join(f"{source} is{'' if quantised else ' not'}" for source, quantised in sources.items())
            problems.append(f"layers that are one in an engine must be quantised alike: {said}")
    if problems:
        raise CheckpointError(f"{subject}: " + "; ".join(problems))
    return replace(quantization, exclude_modules=tuple(dict.fromkeys(excluded)))


class KeptTensors:
    """What a plan makes of a model's weights, of which some are quantised."""

    def __init__(
        self,
        weights: HfWeights,
        plan: Sequence[PlannedTensor],
        dtype: np.dtype[Any],
        matrices: Mapping[str, QuantizedMatrix],
    ) -> None:
        self._plain = ModelTensors(weights, plan, dtype)
        self._plan = {tensor.name: tensor for tensor in plan}
        self._matrices = matrices

    @property
    def errors(self) -> tuple[QuantizationError, ...]:
        """None: nothing is rounded."""
        return ()

    def rows(self, name: str, rows: range, step: int | None = None) -> Iterator[Array]:
        """As PlainTensors.rows."""
        return self._plain.rows(name, rows, step)

    def quantized_rows(self, name: str, rows: range, step: int | None = None) -> Iterator[QuantizedRows]:
        """As RankTensors.quantized_rows."""
        size = _ROWS_OF_A_PIECE if step is None else step
        pieces = (
            piece
            for part, taken in _parts(self._plan[name], rows)
            for piece in self._matrices[part.source].quantized_rows(taken, size)
        )
        return _in_steps(pieces, size)


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
    return QuantizedRows(piece.weights[rows], piece.scales[rows], None if piece.zeros is None else piece.zeros[rows])


def _joined(pieces: Sequence[QuantizedRows]) -> QuantizedRows:
    zeros = [piece.zeros for piece in pieces if piece.zeros is not None]
    return QuantizedRows(
        np.concatenate([piece.weights for piece in pieces]),
        np.concatenate([piece.scales for piece in pieces]),
        np.concatenate(zeros) if zeros else None,
    )


def _parts(tensor: PlannedTensor, rows: range) -> Iterator[tuple[Slice, range]]:
    """The slices that some rows of a planned tensor are of, with the rows of their sources."""
    first = 0
    for part in tensor.slices:
        taken = part.rows[max(rows.start - first, 0) : max(rows.stop - first, 0)]
        first += len(part.rows)
        if taken:
            yield part, taken
