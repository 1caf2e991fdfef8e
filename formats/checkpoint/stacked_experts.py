"""Splits tensors that hold all experts of a layer into the linear layers of each expert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ..._core import CheckpointError
from .casting import Array
from .hf_weights import HfWeights, MadeTensor


@dataclass(frozen=True)
class StackedExperts:
    """Parameters that hold linear layers of all experts. Their biases are in `{name}_bias` [experts, out]."""

    layers: Mapping[str, tuple[str, ...]]
    """Last names of the linear layers, by the parameter's name."""
    alternates: bool
    """True if the outputs of a parameter's layers are interleaved. False if the outputs of a layer follow those of the
    one before it."""
    inputs_first: bool | None
    """True if parameters are [experts, in, out] in files, False if they are [experts, out, in].

    None: their sizes tell; if both axes are as long, they are [experts, out, in].
    """
    older_names: Mapping[str, str] = field(default_factory=dict)
    """Ends of the parameters' names in files, with the current ones."""
    swapped_by_peft: bool = False
    """True if PEFT takes a parameter's inputs for its outputs, because transformers does not mark them."""

    def axes(self, shape: tuple[int, ...], layers: int, hidden_size: int) -> tuple[str, str, str]:
        """Names of the axes of a parameter in a file; it holds `layers` layers per expert."""
        inputs_first = self.inputs_first
        if inputs_first is None:
            # gate and up have hidden_size inputs, down has hidden_size outputs.
            inputs_first = len(shape) == 3 and shape[1 if layers == 1 else 2] != hidden_size
        return ("experts", "in", "out") if inputs_first else ("experts", "out", "in")

    def name_now(self, name: str) -> str:
        """Current name of a tensor of a file."""
        for older, now in self.older_names.items():
            if name.endswith(older):
                return name.removesuffix(older) + now
        return name

    def outputs_of(self, layer: int, layers: int, outputs: int) -> range:
        """Indices of one layer's outputs in a parameter that holds `layers` layers with `outputs` outputs in all."""
        if self.alternates:
            return range(layer, outputs, layers)
        size = outputs // layers
        return range(layer * size, (layer + 1) * size)


_LAYERS: Final = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
ALTERNATING_EXPERTS: Final = StackedExperts(_LAYERS, alternates=True, inputs_first=True)
"""Parameters of GPT-OSS."""
CONSECUTIVE_EXPERTS: Final = StackedExperts(_LAYERS, alternates=False, inputs_first=False)
"""Parameters of Qwen3.5, and of other families in transformers 5."""


def layer_name(block: str, expert: int, layer: str) -> str:
    """Name of one expert's linear layer, as in models with separate experts."""
    return f"{block}.{expert}.{layer}"


def experts_apart(weights: HfWeights, stacked: StackedExperts | None, hidden_size: int) -> HfWeights:
    """Replaces tensors of all experts by the weight and the bias of each expert's linear layers. Models that have a
    tensor for each expert stay as they are.

    stacked: None: the family has no such tensors.
    hidden_size: the model's.

    Raises CheckpointError that lists every such tensor of another shape.
    """
    if stacked is None:
        return weights
    made: dict[str, MadeTensor] = {}
    problems: list[str] = []
    kinds = {
        (parameter + end, kind): layers
        for parameter, layers in stacked.layers.items()
        for end, kind in (("", "weight"), ("_bias", "bias"))
    }
    for name in weights.names:
        block, _, last = stacked.name_now(name).rpartition(".")
        for (parameter, kind), layers in kinds.items():
            if last != parameter:
                continue
            shape = weights.spec(name).shape
            axes: tuple[str, ...] = (
                ("experts", "out") if kind == "bias" else stacked.axes(shape, len(layers), hidden_size)
            )
            if len(shape) != len(axes) or shape[axes.index("out")] % len(layers) != 0:
                odd = "" if len(layers) == 1 else f", out a multiple of {len(layers)}"
                problems.append(f"{weights.where(name)}: is {list(shape)}; expected [{', '.join(axes)}]{odd}")
                continue
            for expert in range(shape[0]):
                for number, layer in enumerate(layers):
                    outputs = stacked.outputs_of(number, len(layers), shape[axes.index("out")])
                    of_expert = _OfExpert(weights, name, expert, outputs, has_inputs_last=axes[-1] == "in")
                    made[f"{layer_name(block, expert, layer)}.{kind}"] = of_expert
    if problems:
        raise CheckpointError("; ".join(problems))
    return weights.with_made(made) if made else weights


@dataclass(frozen=True)
class _OfExpert:
    """One expert's weight [out, in] or bias [out], from a tensor of all experts."""

    weights: HfWeights
    name: str
    expert: int
    outputs: range
    has_inputs_last: bool
    """True: the tensor is [experts, out, in]. False: [experts, in, out] or, for biases, [experts, out]."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """See MadeTensor.tensors."""
        return (self.name,)

    @property
    def shape(self) -> tuple[int, ...]:
        """See MadeTensor.shape."""
        shape = self.weights.spec(self.name).shape
        return (len(self.outputs), *(shape[2:] if self.has_inputs_last else shape[1:-1]))

    @property
    def dtype(self) -> np.dtype[Any]:
        """See MadeTensor.dtype."""
        return self.weights.spec(self.name).dtype

    def rows(self, rows: range, step: int) -> Iterator[Array]:
        """See MadeTensor.rows. Reads the expert once."""
        taken = self.outputs[rows.start : rows.stop]
        for stack in self.weights.rows(self.name, range(self.expert, self.expert + 1)):
            outputs = slice(taken.start, taken.stop, taken.step)
            whole = np.ascontiguousarray(stack[0, outputs] if self.has_inputs_last else stack[0, ..., outputs].T)
            for first in range(0, len(rows), step):
                yield whole[first : first + step]
