"""Splits fused linear layers of files into the layers that transformers has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._core import CheckpointError
from .casting import Array
from .hf_weights import HfWeights, MadeTensor


def layers_apart(weights: HfWeights, fused: Mapping[str, tuple[str, ...]]) -> HfWeights:
    """Replaces each fused layer by layers that have equal shares of its outputs, in order.

    fused: last names of the layers, by the end of the fused layer's name.

    Raises CheckpointError that lists every fused tensor whose outputs have no such shares.
    """
    made: dict[str, MadeTensor] = {}
    problems: list[str] = []
    for name in weights.names:
        path, _, kind = name.rpartition(".")
        for layer, parts in fused.items():
            if kind not in ("weight", "bias") or not path.endswith(f".{layer}"):
                continue
            shape = weights.spec(name).shape
            if not shape or shape[0] % len(parts) != 0:
                problems.append(f"{weights.where(name)}: is {list(shape)}; expected a multiple of {len(parts)} outputs")
                continue
            share = shape[0] // len(parts)
            for number, part in enumerate(parts):
                rows = range(number * share, (number + 1) * share)
                made[f"{path.removesuffix(layer)}{part}.{kind}"] = _Rows(weights, name, rows)
    if problems:
        raise CheckpointError("; ".join(problems))
    return weights.with_made(made) if made else weights


@dataclass(frozen=True)
class _Rows:
    """Some rows of a tensor."""

    weights: HfWeights
    name: str
    taken: range

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
