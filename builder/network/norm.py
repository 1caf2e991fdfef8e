"""RMS norm."""

from __future__ import annotations

from onnx import TensorProto

from .graph import GraphBuilder, Value


def rms_norm(graph: GraphBuilder, x: Value, weight: str, epsilon: float) -> Value:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last axis, in float32; the result in the engine's type."""
    scale = graph.cast(graph.weight(weight), TensorProto.FLOAT)
    wide = graph.cast(x, TensorProto.FLOAT)
    return graph.cast(graph.node("RMSNormalization", [wide, scale], axis=-1, epsilon=epsilon), graph.engine_type)
