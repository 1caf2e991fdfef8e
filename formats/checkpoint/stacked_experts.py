"""Splits tensors that hold all experts of a layer into the linear layers of each expert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ..._core import CheckpointError
from .casting import Array
from .hf_weights import HfWeights, MadeTensor

StackedExperts = Mapping[str, tuple[str, ...]]
"""Linear layers whose outputs are interleaved in a parameter [experts, in, out], by the parameter's name.

Their biases are in `{name}_bias` [experts, out].
"""

ALTERNATING_EXPERTS: Final[StackedExperts] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
"""Parameters of GPT-OSS."""


def outputs_of(layer: int, layers: int, outputs: int) -> range:
    """Indices of one layer's outputs, if the outputs of `layers` layers are interleaved."""
    return range(layer, outputs, layers)


def layer_name(block: str, expert: int, layer: str) -> str:
    """Name of one expert's linear layer, as in models with separate experts."""
    return f"{block}.{expert}.{layer}"


def experts_apart(weights: HfWeights, stacked: StackedExperts) -> HfWeights:
    """Replaces tensors of all experts by the weight and the bias of each expert's linear layers.

    Raises CheckpointError that lists every such tensor of another shape.
    """
    made: dict[str, MadeTensor] = {}
    problems: list[str] = []
    kinds = {(parameter + end, kind): layers for parameter, layers in stacked.items() for end, kind in _KINDS.items()}
    for name in weights.names:
        block, _, last = name.rpartition(".")
        for (parameter, kind), layers in kinds.items():
            if last != parameter:
                continue
            shape = weights.spec(name).shape
            axes = _AXES[kind]
            if len(shape) != len(axes) or shape[-1] % len(layers) != 0:
                odd = "" if len(layers) == 1 else f", out a multiple of {len(layers)}"
                problems.append(f"{weights.where(name)}: is {list(shape)}; expected [{', '.join(axes)}]{odd}")
                continue
            for expert in range(shape[0]):
                for number, layer in enumerate(layers):
                    outputs = outputs_of(number, len(layers), shape[-1])
                    made[f"{layer_name(block, expert, layer)}.{kind}"] = _OfExpert(weights, name, expert, outputs)
    if problems:
        raise CheckpointError("; ".join(problems))
    return weights.with_made(made) if made else weights


_KINDS: Final = {"": "weight", "_bias": "bias"}
_AXES: Final = {"weight": ("experts", "in", "out"), "bias": ("experts", "out")}


@dataclass(frozen=True)
class _OfExpert:
    """One expert's weight [out, in] or bias [out], from a tensor [experts, in, out] or [experts, out]."""

    weights: HfWeights
    name: str
    expert: int
    outputs: range

    @property
    def tensors(self) -> tuple[str, ...]:
        """See MadeTensor.tensors."""
        return (self.name,)

    @property
    def shape(self) -> tuple[int, ...]:
        """See MadeTensor.shape."""
        return (len(self.outputs), *self.weights.spec(self.name).shape[1:-1])

    @property
    def dtype(self) -> np.dtype[Any]:
        """See MadeTensor.dtype."""
        return self.weights.spec(self.name).dtype

    def rows(self, rows: range, step: int) -> Iterator[Array]:
        """See MadeTensor.rows. Reads the expert once."""
        taken = self.outputs[rows.start : rows.stop]
        for stack in self.weights.rows(self.name, range(self.expert, self.expert + 1)):
            whole = np.ascontiguousarray(stack[0, ..., taken.start : taken.stop : taken.step].T)
            for first in range(0, len(rows), step):
                yield whole[first : first + step]
