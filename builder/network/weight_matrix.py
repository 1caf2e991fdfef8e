"""The matrix of a linear layer: a tensor of the checkpoint, or what a quantised one stands for."""

from __future__ import annotations

from typing import Any

from onnx import TensorProto

from .graph import GraphBuilder, Value


def weight_matrix(graph: GraphBuilder, module: str) -> Value:
    """W [out, in] of the engine's type: `{module}.weight`, through DequantizeLinear when that is quantised."""
    weight = graph.weight(f"{module}.weight")
    if weight.element_type == graph.engine_type:
        return weight
    if graph.quantization is None:
        raise ValueError(f"weight '{weight.name}' is not of the engine's type, and no quantisation is known of it")
    how = graph.quantization.of_weight(weight.name)
    attributes: dict[str, Any] = {"axis": 0}
    if how.group_size is not None:
        attributes = {"axis": 1, "block_size": how.group_size}
    inputs = [weight, graph.weight(how.scales_of(weight.name))]
    if how.has_zero_point:
        inputs.append(graph.cast(graph.weight(how.zeros_of(weight.name)), TensorProto.UINT4))
    engine_type = graph.engine_type
    return graph.node("DequantizeLinear", inputs, element_type=engine_type, output_dtype=engine_type, **attributes)
