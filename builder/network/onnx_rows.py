"""Row-wise ops in ONNX."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from ...formats.network.ops import Embedding, LayerNorm, RmsNorm, Scale
from ...formats.network.weights import Tensor
from .graph import GraphBuilder, Value
from .inputs import StepInputs
from .onnx_values import Values


def embedding(graph: GraphBuilder, values: Values, op: Embedding, inputs: StepInputs) -> None:
    """Rows of the embedding table for the tokens, in float32."""
    tokens = inputs.tokens(op.output.rows)
    embedded = graph.node("Gather", [graph.weight(str(op.table.name)), tokens.input_ids], axis=0)
    embedded = scaled(graph, graph.cast(embedded, TensorProto.FLOAT), op.scale)
    if op.types is not None:
        # All tokens of a graph's step have token type 0.
        first = graph.node(
            "Gather", [graph.weight(str(op.types.name)), graph.constant("first_type", np.zeros(1, np.int64))]
        )
        embedded = graph.node("Add", [embedded, graph.cast(first, TensorProto.FLOAT)])
    if op.positions is not None:
        rows = graph.node("Gather", [graph.weight(str(op.positions.name)), tokens.positions], axis=0)
        embedded = graph.node("Add", [embedded, graph.cast(rows, TensorProto.FLOAT)])
    values[op.output.name] = embedded


def rms_norm(graph: GraphBuilder, values: Values, op: RmsNorm, inputs: StepInputs) -> None:
    """RMS norm of all rows, or only of the rows that get logits. Raises ValueError for a sum_scale without a sum."""
    if op.sum_scale is not None and op.add_to is None:
        raise ValueError(f"{op.scope}: sum_scale is {op.sum_scale}; expected none without add_to")
    x = values[op.input.name]
    if op.gather_logit_rows:
        x = graph.node("Gather", [x, inputs.logit_rows], axis=0)
    normed = _normalized_groups(graph, op, x)
    if op.add_to is None:
        values[op.output.name] = normed if op.is_stream else graph.cast(normed, graph.engine_type)
        return
    total = graph.node("Add", [values[op.add_to.name], normed])
    if isinstance(op.sum_scale, Tensor):
        scale = graph.cast(graph.weight(str(op.sum_scale.name)), TensorProto.FLOAT)
        total = graph.node("Mul", [total, scale])
    elif op.sum_scale is not None:
        total = scaled(graph, total, op.sum_scale)
    values[op.output.name] = total


def scale(graph: GraphBuilder, values: Values, op: Scale, inputs: StepInputs) -> None:
    """A factor for each column of all rows, or only of the rows that get logits."""
    x = values[op.input.name]
    if op.gather_logit_rows:
        x = graph.node("Gather", [x, inputs.logit_rows], axis=0)
    name = "_".join(f"{count}x{np.float32(factor)!s}" for count, factor in op.factors)
    factors = np.concatenate([np.full(count, factor, np.float32) for count, factor in op.factors])
    made = graph.node("Mul", [graph.cast(x, TensorProto.FLOAT), graph.constant(f"factors_{name}", factors)])
    values[op.output.name] = made if op.is_stream else graph.cast(made, graph.engine_type)


def layer_norm(graph: GraphBuilder, values: Values, op: LayerNorm, inputs: StepInputs) -> None:
    """Layer norm of all rows, or only of the rows that get logits."""
    x = values[op.input.name]
    if op.gather_logit_rows:
        x = graph.node("Gather", [x, inputs.logit_rows], axis=0)
    wide = [graph.cast(x, TensorProto.FLOAT), _layer_norm_weight(graph, op)]
    if op.bias is not None:
        wide.append(graph.cast(graph.weight(str(op.bias.name)), TensorProto.FLOAT))
    normed = graph.node("LayerNormalization", wide, axis=-1, epsilon=op.epsilon)
    values[op.output.name] = normed if op.is_stream else graph.cast(normed, graph.engine_type)


def _layer_norm_weight(graph: GraphBuilder, op: LayerNorm) -> Value:
    if op.weight is not None:
        return _norm_weight(graph, op.weight)
    width = op.input.width
    return graph.constant(f"ones_{width}", np.ones(width, np.float32))


def normalized(graph: GraphBuilder, x: Value, weight: Tensor, epsilon: float) -> Value:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last axis, computed in float32; the result has the
    engine's type."""
    return graph.cast(_normalized(graph, x, weight, epsilon), graph.engine_type)


def _normalized_groups(graph: GraphBuilder, op: RmsNorm, x: Value) -> Value:
    """The norm of each group of a row. Groups are as wide as the weight."""
    (size,) = op.weight.shape
    if size == op.input.width:
        return _normalized(graph, x, op.weight, op.epsilon)
    groups, row = (
        graph.constant(f"groups_{'_'.join(map(str, shape))}", np.asarray(shape, np.int64))
        for shape in ((-1, op.input.width // size, size), (-1, op.input.width))
    )
    normed = _normalized(graph, graph.node("Reshape", [x, groups]), op.weight, op.epsilon)
    return graph.node("Reshape", [normed, row])


def _normalized(graph: GraphBuilder, x: Value, weight: Tensor, epsilon: float) -> Value:
    wide = graph.cast(x, TensorProto.FLOAT)
    return graph.node("RMSNormalization", [wide, _norm_weight(graph, weight)], axis=-1, epsilon=epsilon)


def _norm_weight(graph: GraphBuilder, weight: Tensor) -> Value:
    """A norm's weight, in float32."""
    scale = graph.cast(graph.weight(str(weight.name)), TensorProto.FLOAT)
    return graph.node("Add", [scale, number(graph, 1.0)]) if weight.plus_one else scale


def scaled(graph: GraphBuilder, x: Value, factor: float) -> Value:
    """x (float32) times a number; unchanged for 1."""
    return x if factor == 1.0 else graph.node("Mul", [x, number(graph, factor)])


def capped(graph: GraphBuilder, x: Value, cap: float | None) -> Value:
    """cap * tanh(x / cap) of a float32 value; unchanged without a cap."""
    if cap is None:
        return x
    bounded = graph.node("Tanh", [graph.node("Div", [x, number(graph, cap)])])
    return graph.node("Mul", [bounded, number(graph, cap)])


def number(graph: GraphBuilder, value: float) -> Value:
    """A float32 constant of one element."""
    return graph.constant(f"number_{np.float32(value)!s}", np.asarray([value], np.float32))
