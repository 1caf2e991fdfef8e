"""The matrix of a linear layer: a tensor of the checkpoint, dequantised if necessary."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto

from ..._core import LLM_INT8_FACTOR, code_table
from ...formats.checkpoint.quantization import QuantConfig
from ...formats.network.weights import LinearWeight
from .graph import ELEMENT_TYPES, GraphBuilder, Value


def weight_matrix(graph: GraphBuilder, of: LinearWeight) -> Value:
    """W [out, in] of the engine's type: `{name}.weight`, through DequantizeLinear if it is quantised.

    Codebook and 8-bit weights are multiplied with their scales instead; codes are looked up in the table first.
    """
    weight = graph.weight(f"{of.name}.weight")
    if weight.element_type == graph.engine_type:
        return weight
    if graph.quantization is None:
        raise ValueError(f"weight '{weight.name}' is not of the engine's type, and its quantisation is unknown")
    how = graph.quantization.of_weight(weight.name)
    if how.is_of_eight_bits:
        return _values_of_eight_bits(graph, weight, how)
    if how.is_codebook:
        return _values_of_code(graph, weight, how)
    attributes: dict[str, Any] = {"axis": 0}
    if how.group_size is not None:
        attributes = {"axis": 1, "block_size": how.group_size}
    inputs = [weight, graph.weight(how.scales_of(weight.name))]
    if how.has_zero_point:
        inputs.append(graph.cast(graph.weight(how.zeros_of(weight.name)), weight.element_type))
    engine_type = graph.engine_type
    made = graph.node("DequantizeLinear", inputs, element_type=engine_type, output_dtype=engine_type, **attributes)
    if how.has_minimum:
        minimums = graph.cast(graph.weight(how.minimums_of(weight.name)), engine_type)
        made = graph.node("Sub", [made, _of_each_input(graph, minimums, weight, how)])
    return _in_order(graph, made, of, how) if how.act_order else made


def _of_each_input(graph: GraphBuilder, values: Value, weight: Value, how: QuantConfig) -> Value:
    """Repeats values [out, groups] for each input of a group. The last group may be shorter."""
    inputs = graph.stored_shape(weight.name)[1]
    groups = graph.constant(f"groups_of_{inputs}_by_{how.group_size}", np.arange(inputs) // (how.group_size or inputs))
    return graph.node("Gather", [values, groups], axis=1)


def _in_order(graph: GraphBuilder, weight: Value, of: LinearWeight, how: QuantConfig) -> Value:
    """Moves the inputs of a permuted weight back to their places. Each part of the rows has its own permutation."""
    orders = graph.cast(graph.weight(how.permutation_name(f"{of.name}.weight")), TensorProto.INT64)
    sizes = [part.outputs for part in of.parts]
    parts = graph.constant("parts_of_" + "_".join(map(str, sizes)), np.repeat(np.arange(len(sizes)), sizes))
    places = graph.node("Gather", [orders, parts], axis=0)
    return graph.node("ScatterElements", [weight, places, weight], axis=1)


def _values_of_eight_bits(graph: GraphBuilder, weight: Value, how: QuantConfig) -> Value:
    """Each number times its group's scale in float32, rounded to the values' type. The last group may be shorter.

    LLM.int8() integers are also multiplied by that method's factor.
    """
    assert how.value_dtype is not None
    last = graph.constant("last_axis", np.asarray([-1], np.int64))
    scales = graph.cast(graph.weight(how.scales_of(weight.name)), TensorProto.FLOAT)
    if how.group_size is None:
        each = graph.node("Unsqueeze", [scales, last])
    else:
        each = _of_each_input(graph, scales, weight, how)
    products = graph.node("Mul", [graph.cast(weight, TensorProto.FLOAT), each])
    if how.is_llm_int8:
        products = graph.node(
            "Mul", [products, graph.constant("llm_int8_factor", np.asarray(LLM_INT8_FACTOR, np.float32))]
        )
    return graph.cast(graph.cast(products, ELEMENT_TYPES[how.value_dtype]), graph.engine_type)


def _values_of_code(graph: GraphBuilder, weight: Value, how: QuantConfig) -> Value:
    """Each codebook entry times its group's scale in float32, rounded to the values' type."""
    assert how.value_dtype is not None
    assert how.group_size is not None
    table = graph.constant(f"table_{how.code.name.lower()}", code_table(how.code))
    places = graph.cast(weight, TensorProto.INT32)
    numbers = graph.node("Gather", [table, places], axis=0)
    in_groups = graph.constant(f"groups_of_{how.group_size}", np.asarray([0, -1, how.group_size], np.int64))
    scales = graph.cast(graph.weight(how.scales_of(weight.name)), TensorProto.FLOAT)
    last = graph.constant("last_axis", np.asarray([-1], np.int64))
    products = graph.node("Mul", [graph.node("Reshape", [numbers, in_groups]), graph.node("Unsqueeze", [scales, last])])
    flat = graph.node("Reshape", [products, graph.constant("in_rows", np.asarray([0, -1], np.int64))])
    return graph.cast(graph.cast(flat, ELEMENT_TYPES[how.value_dtype]), graph.engine_type)
