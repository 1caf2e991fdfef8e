"""Some rows of a tensor as a tensor of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .casting import Array
from .hf_weights import HfWeights


@dataclass(frozen=True)
class TensorRows:
    """Some rows of a tensor (see MadeTensor)."""

    weights: HfWeights
    name: str
    """Name of the source tensor, which has one or two dimensions."""
    taken: range
    """Its rows that this tensor has."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """See MadeTensor.tensors."""
        return (self.name,)

    @property
    def shape(self) -> tuple[int, ...]:
        """See MadeTensor.shape."""
        return (len(self.taken), *self.weights.spec(self.name).shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        """See MadeTensor.dtype."""
        return self.weights.spec(self.name).dtype

    def rows(self, rows: range, step: int) -> Iterator[Array]:
        """See MadeTensor.rows."""
        return self.weights.rows(self.name, self.taken[rows.start : rows.stop], step)
