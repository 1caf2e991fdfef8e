"""Puts the inputs of layers that read joined rows in the order of the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .casting import Array
from .hf_weights import HfWeights, MadeTensor


def in_order_of_rows(matrix: Array, count: int) -> Array:
    """Returns a matrix [outputs, width * count] whose inputs are the elements of each of `count` rows, row by row.

    matrix: has the elements of each column, column by column.
    """
    made: Array = np.ascontiguousarray(matrix.reshape(len(matrix), -1, count).swapaxes(1, 2)).reshape(matrix.shape)
    return made


def with_rows_in_order(weights: HfWeights, layers: Mapping[str, int], name_now: Callable[[str], str]) -> HfWeights:
    """Puts the inputs of linear layers in the order of rows.

    layers: number of rows, by the layer's current path. name_now: returns the current name of a tensor.
    """
    counts = {f"{path}.weight": count for path, count in layers.items()}
    made: dict[str, MadeTensor] = {
        name: _InOrderOfRows(weights, name, count)
        for name in (weights.names if counts else ())
        if (count := counts.get(name_now(name), 1)) > 1 and weights.spec(name).shape[-1] % count == 0
    }
    return weights.with_made(made) if made else weights


@dataclass(frozen=True)
class _InOrderOfRows:
    """A matrix whose inputs are put in the order of rows."""

    weights: HfWeights
    name: str
    count: int

    @property
    def tensors(self) -> tuple[str, ...]:
        """See MadeTensor.tensors."""
        return (self.name,)

    @property
    def shape(self) -> tuple[int, ...]:
        """See MadeTensor.shape."""
        return self.weights.spec(self.name).shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """See MadeTensor.dtype."""
        return self.weights.spec(self.name).dtype

    def rows(self, rows: range, step: int) -> Iterator[Array]:
        """See MadeTensor.rows."""
        return (in_order_of_rows(piece, self.count) for piece in self.weights.rows(self.name, rows, step))
