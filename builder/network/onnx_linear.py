"""Linear layers with their adapters, in ONNX."""

from __future__ import annotations

from dataclasses import dataclass

from onnx import TensorProto

from ..._core import ConfigError, RowKind
from ...formats.checkpoint.activation import Activation
from ...formats.network.adapter_sites import module_id
from ...formats.network.ops import Linear
from ...formats.network.weights import LinearWeight
from ...plugins import DORA, LORA
from ...plugins.adapter_tables import NUM_MODULES
from .graph import GraphBuilder, Value
from .inputs import LoraInputs, StepInputs
from .onnx_rows import capped, scaled
from .onnx_values import Values
from .weight_matrix import weight_matrix


@dataclass(frozen=True)
class Adaptation:
    """Applies adapters to the layers of a network."""

    inputs: LoraInputs
    step: StepInputs
    max_rank: int
    dora: bool

    def apply(
        self, graph: GraphBuilder, layer: int, weight: LinearWeight, rows: RowKind, x: Value, base: Value
    ) -> Value:
        """Adds the adapters' contribution to `base`, whose rows are of this kind.

        Raises ConfigError for modules that the tables do not have.
        """
        if missing := [part.module for part in weight.parts if module_id(part) >= NUM_MODULES]:
            raise ConfigError(
                f"adapters of {', '.join(map(str, missing))} cannot be written as ONNX; build with --lora_plugin "
                "disable"
            )
        attributes = {
            "layer": layer,
            "module_ids": [module_id(part) for part in weight.parts],
            "out_sizes": [part.outputs for part in weight.parts],
            "max_rank": self.max_rank,
        }
        tables = [
            self.step.tokens(rows).sequence_offsets,
            self.inputs.adapter_slots,
            self.inputs.ranks,
            self.inputs.pointers,
        ]
        (y,) = graph.plugin(DORA if self.dora else LORA, [x, base, *tables], **attributes)
        return y


def linear(graph: GraphBuilder, values: Values, op: Linear, adaptation: Adaptation | None) -> None:
    """x W^T with adapters, plus the bias, followed by the op's remaining steps. Raises ValueError for gates with
    scores."""
    if op.scores is not None:
        raise ValueError(f"{op.scope}: gates with predictors cannot be written as ONNX")
    x, threshold = values[op.input.name], op.gate_threshold
    y, *others = [_product(graph, x, weight, op, adaptation) for weight in op.weights]
    if op.scale != 1.0 or op.softcap is not None:
        y = capped(graph, scaled(graph, graph.cast(y, TensorProto.FLOAT), op.scale), op.softcap)
    if op.activation is not None:
        y = activated(graph, y, op.activation, threshold)
        if op.activation is Activation.RELU_BOTH:
            others = [graph.node("Relu", [other]) for other in others]
        if others:  # `scale` makes y float32, but linear layers read the engine's type.
            y = graph.cast(graph.node("Mul", [y, *(graph.cast(x, y.element_type) for x in others)]), graph.engine_type)
    if op.add_to is not None:
        y = graph.node("Add", [values[op.add_to.name], graph.cast(y, TensorProto.FLOAT)])
    values[op.output.name] = y


def activated(graph: GraphBuilder, x: Value, activation: Activation, threshold: float = 0.0) -> Value:
    """Applies an activation to `x`. Raises ValueError for an activation that graphs do not have."""
    match activation:  # mypy reports an activation without a case
        case Activation.SILU:
            return graph.node("Mul", [x, graph.node("Sigmoid", [x])])
        case Activation.GELU:
            return graph.node("Gelu", [x], approximate="none")
        case Activation.GELU_TANH:
            return graph.node("Gelu", [x], approximate="tanh")
        case Activation.RELU | Activation.RELU_BOTH if threshold:
            return graph.node("ThresholdedRelu", [x], alpha=threshold)
        case Activation.RELU | Activation.RELU_BOTH:
            return graph.node("Relu", [x])
        case Activation.RELU_SQUARED:
            positive = graph.node("Relu", [x])
            return graph.node("Mul", [positive, positive])
        case Activation.QUICK_GELU:
            raise ValueError(f"activation {activation.value} has several ops; it cannot be written as ONNX")
        case Activation.XIELU:
            raise ValueError(f"activation {activation.value} has parameters; it cannot be written as ONNX")
        case Activation.CLAMPED_SILU:
            raise ValueError(f"activation {activation.value} has two inputs; it cannot be written as ONNX")


def _product(graph: GraphBuilder, x: Value, weight: LinearWeight, op: Linear, adaptation: Adaptation | None) -> Value:
    y = graph.node("Gemm", [x, weight_matrix(graph, weight)], transB=1)
    if adaptation is not None and op.layer is not None:
        y = adaptation.apply(graph, op.layer, weight, op.input.rows, x, y)
    return graph.node("Add", [y, graph.weight(weight.bias_name)]) if weight.bias else y
