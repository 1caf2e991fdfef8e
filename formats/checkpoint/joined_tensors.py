"""Joins tensors of files that the model holds as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._core import CheckpointError
from .casting import Array
from .hf_weights import HfWeights


def with_joined(weights: HfWeights, joined: Mapping[str, tuple[str, ...]]) -> HfWeights:
    """Replaces tensors whose names end like those in `joined` by one tensor with the rows of all of them.

    Raises CheckpointError if one of them is missing, or if rows differ in their shapes or types.
    """
    made: dict[str, _Joined] = {}
    for end, parts in joined.items():
        for name in weights.names:
            if name.endswith(f".{parts[0]}"):
                before = name.removesuffix(parts[0])
                made[before + end] = _Joined(weights, tuple(before + part for part in parts))
    problems = [problem for tensor in made.values() for problem in tensor.problems()]
    if problems:
        raise CheckpointError("; ".join(problems))
    return weights.with_made(made) if made else weights


@dataclass(frozen=True)
class _Joined:
    """Tensors whose rows follow one another."""

    weights: HfWeights
    tensors: tuple[str, ...]
    """See MadeTensor.tensors."""

    def problems(self) -> Iterator[str]:
        """Yields what keeps the tensors from being joined."""
        first = self.weights.spec(self.tensors[0])
        for name in self.tensors[1:]:
            if name not in self.weights:
                yield f"{self.weights.where(self.tensors[0])}: tensor '{name}' is missing, whose rows follow"
                continue
            spec = self.weights.spec(name)
            if (spec.shape[1:], spec.dtype) != (first.shape[1:], first.dtype):
                yield (
                    f"{self.weights.where(name)}: is {spec.dtype} {list(spec.shape)}; expected {first.dtype} "
                    f"[rows, {', '.join(map(str, first.shape[1:]))}]"
                )

    @property
    def shape(self) -> tuple[int, ...]:
        """See MadeTensor.shape."""
        return (sum(map(self._num_rows, self.tensors)), *self.weights.spec(self.tensors[0]).shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        """See MadeTensor.dtype."""
        return self.weights.spec(self.tensors[0]).dtype

    def rows(self, rows: range, step: int) -> Iterator[Array]:
        """See MadeTensor.rows."""
        first = 0
        for name in self.tensors:
            count = self._num_rows(name)
            taken = range(max(rows.start - first, 0), max(min(rows.stop - first, count), 0))
            first += count
            if taken:
                yield from (piece.reshape(-1, *self.shape[1:]) for piece in self.weights.rows(name, taken, step))

    def _num_rows(self, name: str) -> int:
        """Number of rows of a tensor; a scalar is one."""
        shape = self.weights.spec(name).shape
        return shape[0] if shape else 1
