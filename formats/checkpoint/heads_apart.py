"""Splits a layer of latent attention into two linear layers for each head.

The outputs of the layer in the model are, for each head, keys and then values. A network multiplies queries by the
keys' weight, so these layers have its columns as outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..._core import CheckpointError
from .casting import Array
from .hf_weights import HfWeights, MadeTensor
from .tensor_rows import TensorRows

KEYS: Final = "keys"
VALUES: Final = "values"


@dataclass(frozen=True)
class LayerOfHeads:
    """A linear layer whose outputs are [keys | values] of each head."""

    name: str
    """Last name of the layer, such as kv_b_proj."""
    num_heads: int
    key_dim: int
    """Number of outputs that are keys of a head."""
    value_dim: int
    """Number of outputs that are values of a head."""

    @property
    def outputs(self) -> int:
        """Number of outputs of the layer."""
        return self.num_heads * (self.key_dim + self.value_dim)

    def keys_of(self, head: int) -> range:
        """Outputs that are the head's keys."""
        first = head * (self.key_dim + self.value_dim)
        return range(first, first + self.key_dim)

    def values_of(self, head: int) -> range:
        """Outputs that are the head's values."""
        first = head * (self.key_dim + self.value_dim) + self.key_dim
        return range(first, first + self.value_dim)


def head_path(layer: str, head: int, kind: str) -> str:
    """Path of a head's layer; `layer` is the path of the layer in the model, `kind` is KEYS or VALUES."""
    return f"{layer}.{head}.{kind}"


def heads_apart(weights: HfWeights, layer: LayerOfHeads | None) -> HfWeights:
    """Replaces the weights of `layer` by those of each head: keys [inputs, key_dim], and values [value_dim, inputs].

    layer: None: the model has no such layer.

    Raises CheckpointError that lists every weight of another shape.
    """
    if layer is None:
        return weights
    made: dict[str, MadeTensor] = {}
    problems: list[str] = []
    for name in weights.names:
        path = name.removesuffix(".weight")
        if path == name or not path.endswith(f".{layer.name}"):
            continue
        shape = weights.spec(name).shape
        if len(shape) != 2 or shape[0] != layer.outputs:
            problems.append(f"{weights.where(name)}: is {list(shape)}; expected [{layer.outputs}, in]")
            continue
        for head in range(layer.num_heads):
            made[f"{head_path(path, head, KEYS)}.weight"] = _Keys(weights, name, layer.keys_of(head))
            made[f"{head_path(path, head, VALUES)}.weight"] = TensorRows(weights, name, layer.values_of(head))
    if problems:
        raise CheckpointError("; ".join(problems))
    return weights.with_made(made) if made else weights


@dataclass(frozen=True)
class _Keys(TensorRows):
    """Some rows of a weight as columns."""

    @property
    def shape(self) -> tuple[int, ...]:
        """See MadeTensor.shape."""
        return (self.weights.spec(self.name).shape[1], len(self.taken))

    def rows(self, rows: range, step: int) -> Iterator[Array]:
        """See MadeTensor.rows. Reads the head once."""
        whole = np.concatenate(list(self.weights.rows(self.name, self.taken))).T
        for first in range(rows.start, rows.stop, step):
            yield np.ascontiguousarray(whole[first : min(first + step, rows.stop)])
