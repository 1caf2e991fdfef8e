"""Gates of rows, and an activation with parameters, in ONNX. All are computed in float32."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from ...formats.checkpoint.activation import Activation
from ...formats.network.ops import GatedColumns, GatedRmsNorm, SigmoidGate, SiluGate, Xielu
from .graph import GraphBuilder, Value
from .onnx_linear import activated
from .onnx_values import Values


def sigmoid_gate(graph: GraphBuilder, values: Values, op: SigmoidGate) -> None:
    """The input times the sigmoid of the last columns of the gate."""
    gate = graph.node("Sigmoid", [_last_columns(graph, values, op)])
    values[op.output.name] = graph.cast(graph.node("Mul", [gate, _input(graph, values, op)]), graph.engine_type)


def silu_gate(graph: GraphBuilder, values: Values, op: SiluGate) -> None:
    """The input times silu of the last columns of the gate."""
    gate = activated(graph, _last_columns(graph, values, op), Activation.SILU)
    values[op.output.name] = graph.cast(graph.node("Mul", [gate, _input(graph, values, op)]), graph.engine_type)


def gated_rms_norm(graph: GraphBuilder, values: Values, op: GatedRmsNorm) -> None:
    """An RMS norm of each group of each head, times silu of the gate; or first the gate, then the norm."""
    x = _input(graph, values, op)
    gate = activated(graph, _last_columns(graph, values, op), Activation.SILU)
    if op.gate_first:
        x = graph.node("Mul", [x, gate])
    (head,) = op.weight.shape
    size = head // op.num_groups
    groups = _integers(graph, -1, op.input.width // head, op.num_groups, size)
    ones = graph.constant(f"ones_{size}", np.ones(size, np.float32))
    normed = graph.node("RMSNormalization", [graph.node("Reshape", [x, groups]), ones], axis=-1, epsilon=op.epsilon)
    weight = graph.cast(graph.weight(str(op.weight.name)), TensorProto.FLOAT)
    weight = graph.node("Reshape", [weight, _integers(graph, op.num_groups, size)])
    made = graph.node("Reshape", [graph.node("Mul", [normed, weight]), _integers(graph, -1, op.input.width)])
    if not op.gate_first:
        made = graph.node("Mul", [made, gate])
    values[op.output.name] = graph.cast(made, graph.engine_type)


def gated_columns(graph: GraphBuilder, values: Values, op: GatedColumns) -> None:
    """The activation of the gate, times as many columns of the values."""
    gate = activated(graph, graph.cast(values[op.gate.name], TensorProto.FLOAT), op.activation)
    x = graph.cast(values[op.values.name], TensorProto.FLOAT)
    first, axis = _integers(graph, op.first_column), _integers(graph, 1)
    columns = graph.node("Slice", [x, first, _integers(graph, op.first_column + op.gate.width), axis])
    values[op.output.name] = graph.cast(graph.node("Mul", [gate, columns]), graph.engine_type)


def xielu(graph: GraphBuilder, values: Values, op: Xielu) -> None:
    """xIELU: alpha_p x^2 + beta x above 0, alpha_n (expm1(min(x, epsilon)) - x) + beta x up to 0."""
    x = graph.cast(values[op.input.name], TensorProto.FLOAT)
    parameters = graph.cast(graph.weight(str(op.parameters.name)), TensorProto.FLOAT)
    positive, negative, beta, epsilon = graph.split(parameters, (1, 1, 1, 1), axis=0)
    positive = graph.node("Softplus", [positive])
    negative = graph.node("Add", [beta, graph.node("Softplus", [negative])])
    # Elu is expm1 up to 0, and epsilon is below 0.
    curve = graph.node("Sub", [graph.node("Elu", [graph.node("Min", [x, epsilon])], alpha=1.0), x])
    below = graph.node("Mul", [curve, negative])
    above = graph.node("Mul", [graph.node("Mul", [x, x]), positive])
    zero = graph.constant("zero_float", np.asarray(0, np.float32))
    is_above = graph.node("Greater", [x, zero], element_type=TensorProto.BOOL)
    bent = graph.node("Where", [is_above, above, below], element_type=TensorProto.FLOAT)
    made = graph.node("Add", [bent, graph.node("Mul", [x, beta])])
    values[op.output.name] = graph.cast(made, graph.engine_type)


def _input(graph: GraphBuilder, values: Values, op: SigmoidGate | SiluGate | GatedRmsNorm) -> Value:
    return graph.cast(values[op.input.name], TensorProto.FLOAT)


def _last_columns(graph: GraphBuilder, values: Values, op: SigmoidGate | SiluGate | GatedRmsNorm) -> Value:
    """Columns of the gate, as many as the input has."""
    gate = graph.cast(values[op.gate.name], TensorProto.FLOAT)
    before = op.gate.width - op.input.width
    return graph.split(gate, (before, op.input.width), axis=1)[1] if before else gate


def _integers(graph: GraphBuilder, *values: int) -> Value:
    return graph.constant(f"integers_{'_'.join(map(str, values))}", np.asarray(values, np.int64))
