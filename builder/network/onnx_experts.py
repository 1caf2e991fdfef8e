"""Mixtures of experts in ONNX: every expert computes every row, and the routing weights select the outputs.

This is correct but slow: it serves as a test oracle and for inspection, not for TensorRT.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from ..._core import RouterScores
from ...formats.network.operands import Routing
from ...formats.network.ops import Experts, GatedAdd
from .graph import GraphBuilder, Value
from .onnx_linear import activated
from .onnx_rows import number, scaled
from .onnx_values import Values
from .weight_matrix import weight_matrix


def experts(graph: GraphBuilder, values: Values, op: Experts) -> None:
    """The weighted sum of the selected experts, added to the residual stream if the op adds it."""
    x = values[op.input.name]
    weights = graph.split(
        _weights(graph, values[op.router_logits.name], op.routing, len(op.down)), [1] * len(op.down), axis=1
    )
    total = None if op.add_to is None else values[op.add_to.name]
    for expert, weight in enumerate(weights):
        gate, up = (
            graph.node("Gemm", [x, weight_matrix(graph, layer[expert])], transB=1) for layer in (op.gate, op.up)
        )
        if op.routing.scales_inputs:
            factor = graph.cast(weight, graph.engine_type)
            gate, up = (graph.node("Mul", [made, factor]) for made in (gate, up))
        made = graph.node("Mul", [activated(graph, gate, op.activation), up])
        if any(layer[expert].bias for layer in (op.gate, op.up, op.down)):
            raise ValueError("experts with biases cannot be written as ONNX")
        made = graph.node("Gemm", [made, weight_matrix(graph, op.down[expert])], transB=1)
        share = graph.cast(made, TensorProto.FLOAT)
        if not op.routing.scales_inputs:  # otherwise experts that are not selected give 0
            share = graph.node("Mul", [share, weight])
        total = share if total is None else graph.node("Add", [total, share])
    assert total is not None
    values[op.output.name] = total


def gated_add(graph: GraphBuilder, values: Values, op: GatedAdd) -> None:
    """Adds the input times the sigmoid of its gate to the residual stream."""
    x, gate, add_to = (graph.cast(values[value.name], TensorProto.FLOAT) for value in (op.input, op.gate, op.add_to))
    values[op.output.name] = graph.node("Add", [add_to, graph.node("Mul", [x, graph.node("Sigmoid", [gate])])])


def _weights(graph: GraphBuilder, logits: Value, routing: Routing, num_experts: int) -> Value:
    """Routing weights, float32 [rows, experts]; 0 for experts that are not selected."""
    scores = graph.cast(logits, TensorProto.FLOAT)
    if routing.scores is RouterScores.SOFTMAX:
        scores = graph.node("Softmax", [scores], axis=1)
    elif routing.scores is RouterScores.SIGMOID:
        scores = graph.node("Sigmoid", [scores])
    choice = scores
    if routing.bias is not None:
        choice = graph.node("Add", [choice, graph.weight(str(routing.bias.name))])
    if routing.num_groups > 1:
        choice = _without_groups(graph, choice, routing, num_experts)
    chosen = _mask_of_largest(graph, choice, routing.top_k)
    if routing.scores is RouterScores.SOFTMAX_OF_CHOSEN:
        scores = graph.node("Softmax", [_where(graph, chosen, scores)], axis=1)
    weights = graph.node("Mul", [scores, chosen])
    if routing.norm_topk_prob:
        total = graph.node("ReduceSum", [weights, _integers(graph, 1)], keepdims=1)
        weights = graph.node("Div", [weights, total])
    weights = scaled(graph, weights, routing.scale)
    if routing.expert_scale is not None:
        scales = graph.cast(graph.weight(str(routing.expert_scale.name)), TensorProto.FLOAT)
        weights = graph.node("Mul", [weights, scales])
    return weights


def _without_groups(graph: GraphBuilder, choice: Value, routing: Routing, num_experts: int) -> Value:
    """Sets the scores of experts in groups that are not selected to minus infinity."""
    size = num_experts // routing.num_groups
    grouped = graph.node("Reshape", [choice, _integers(graph, -1, routing.num_groups, size)])
    best, _ = graph.top_k(grouped, 1 if routing.rates_groups_by_best else min(2, size))
    strengths = graph.node("ReduceSum", [best, _integers(graph, 2)], keepdims=0)
    taken = _mask_of_largest(graph, strengths, routing.topk_groups)
    taken = graph.node("Unsqueeze", [taken, _integers(graph, 2)])
    kept = _where(graph, taken, grouped)
    return graph.node("Reshape", [kept, _integers(graph, -1, num_experts)])


def _mask_of_largest(graph: GraphBuilder, values: Value, count: int) -> Value:
    """1 at the `count` largest values of each row, 0 elsewhere."""
    largest, places = graph.top_k(values, count)
    zeros = graph.node("ConstantOfShape", [_shape(graph, values)], element_type=TensorProto.FLOAT)
    # ConstantOfShape gives zeros, and their cosine is 1.
    ones = graph.node("Cos", [graph.node("ConstantOfShape", [_shape(graph, largest)], element_type=TensorProto.FLOAT)])
    return graph.node("ScatterElements", [zeros, places, ones], axis=-1)


def _shape(graph: GraphBuilder, values: Value) -> Value:
    return graph.node("Shape", [values], element_type=TensorProto.INT64)


def _where(graph: GraphBuilder, mask: Value, values: Value) -> Value:
    """`values` where the mask is 1, minus infinity elsewhere."""
    taken = graph.cast(mask, TensorProto.BOOL)
    return graph.node("Where", [taken, values, number(graph, float("-inf"))], element_type=TensorProto.FLOAT)


def _integers(graph: GraphBuilder, *values: int) -> Value:
    return graph.constant(f"integers_{'_'.join(map(str, values))}", np.asarray(values, np.int64))
