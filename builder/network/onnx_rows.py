"""Ops that treat each row by itself, in ONNX."""

from __future__ import annotations

from onnx import TensorProto

from .graph import GraphBuilder, Value
from .inputs import StepInputs
from .onnx_values import Values
from .ops import Embedding, RmsNorm


def embedding(graph: GraphBuilder, values: Values, op: Embedding, inputs: StepInputs) -> None:
    """The tokens' rows of the table, in float32."""
    embedded = graph.node("Gather", [graph.weight(str(op.table.name)), inputs.input_ids], axis=0)
    values[op.output.name] = graph.cast(embedded, TensorProto.FLOAT)


def rms_norm(graph: GraphBuilder, values: Values, op: RmsNorm, inputs: StepInputs) -> None:
    """RMS norm of rows, or of those that logits are made of."""
    x = values[op.input.name]
    if op.gather_logit_rows:
        x = graph.node("Gather", [x, inputs.logit_rows], axis=0)
    values[op.output.name] = normalized(graph, x, str(op.weight.name), op.epsilon)


def normalized(graph: GraphBuilder, x: Value, weight: str, epsilon: float) -> Value:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last axis, in float32; the result in the engine's type."""
    scale = graph.cast(graph.weight(weight), TensorProto.FLOAT)
    wide = graph.cast(x, TensorProto.FLOAT)
    return graph.cast(graph.node("RMSNormalization", [wide, scale], axis=-1, epsilon=epsilon), graph.engine_type)
