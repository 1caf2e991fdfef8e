"""Attention among the rows of a step, in plain ONNX: all pairs of rows, with a mask."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from ..._core import AttentionKind
from ...formats.network.operands import PositionBias
from ...formats.network.ops import Attention, CrossAttention
from .graph import GraphBuilder, Value
from .onnx_rows import capped, scaled
from .onnx_sequences import row_numbers
from .onnx_values import Values


def dense_attention(
    graph: GraphBuilder, values: Values, op: Attention, q: Value, k: Value, v: Value, sequences: Value
) -> None:
    """Attention of q [T, heads * head_size] to k and v [T, kv_heads * head_size]; `sequences` [T] is each row's
    sequence."""
    query = _rotated(graph, values, op, q, op.shape.num_attention_heads)
    key = _rotated(graph, values, op, k, op.shape.num_key_value_heads)
    value = _heads_apart(graph, v, op.shape.num_key_value_heads, op.shape.head_dim)
    numbers = row_numbers(graph, sequences)
    distances = graph.node("Sub", [_row(graph, numbers), _column(graph, numbers)])
    scores = capped(graph, _scores(graph, op, query, key), op.softcap)
    if op.position_bias is not None:
        scores = graph.node("Add", [scores, _bias(graph, op.position_bias, distances)])
    _attend(graph, values, op, scores, value, _visible(graph, op, distances, sequences))


def cross_attention(
    graph: GraphBuilder, values: Values, op: CrossAttention, kv: Value, sequences: Value, encoder_sequences: Value
) -> None:
    """Attention to kv [E, 2 * kv_heads * head_size], the rows of encoder inputs; `encoder_sequences` [E] is each row's
    sequence."""
    width = op.shape.key_value_size
    k, v = graph.split(kv, (width, width), axis=1)
    query = _heads_apart(graph, values[op.q.name], op.shape.num_attention_heads, op.shape.head_dim)
    key, value = (_heads_apart(graph, x, op.shape.num_key_value_heads, op.shape.head_dim) for x in (k, v))
    visible = _compare(graph, "Equal", _column(graph, sequences), _row(graph, encoder_sequences))
    _attend(graph, values, op, _scores(graph, op, query, key), value, visible)


def _scores(graph: GraphBuilder, op: Attention | CrossAttention, query: Value, key: Value) -> Value:
    """Scores [num_heads, T, T'] of [T, num_heads, head_size] and [T', num_kv_heads, head_size]."""
    by_head = graph.node("Transpose", [_repeated(graph, op, key)], perm=[1, 2, 0])
    return scaled(graph, graph.node("MatMul", [_by_head(graph, query), by_head]), op.scale)


def _attend(
    graph: GraphBuilder,
    values: Values,
    op: Attention | CrossAttention,
    scores: Value,
    value: Value,
    visible: Value,
) -> None:
    hidden = graph.constant("hidden_score", np.asarray(-np.inf, np.float32))
    scores = graph.node("Where", [visible, scores, hidden], element_type=TensorProto.FLOAT)
    weights = graph.node("Softmax", [scores], axis=-1)
    attended = graph.node("MatMul", [weights, _by_head(graph, _repeated(graph, op, value))])
    width = _integers(
        graph,
        f"width_{op.shape.num_attention_heads}_{op.shape.head_dim}",
        [-1, op.shape.num_attention_heads * op.shape.head_dim],
    )
    together = graph.node("Reshape", [_by_head(graph, attended), width])
    values[op.output.name] = graph.cast(together, graph.engine_type)


def _heads_apart(graph: GraphBuilder, x: Value, heads: int, head_size: int) -> Value:
    """Reshapes to float32 [T, heads, head_size]."""
    apart = _integers(graph, f"heads_{heads}_{head_size}", [-1, heads, head_size])
    return graph.node("Reshape", [graph.cast(x, TensorProto.FLOAT), apart])


def _repeated(graph: GraphBuilder, op: Attention | CrossAttention, x: Value) -> Value:
    """Repeats key-value heads to [T, num_heads, head_size]."""
    group = op.shape.num_attention_heads // op.shape.num_key_value_heads
    heads = _integers(
        graph,
        f"heads_read_{op.shape.num_attention_heads}_{group}",
        [head // group for head in range(op.shape.num_attention_heads)],
    )
    return graph.node("Gather", [x, heads], axis=1)


def _by_head(graph: GraphBuilder, x: Value) -> Value:
    return graph.node("Transpose", [x], perm=[1, 0, 2])


def _rotated(graph: GraphBuilder, values: Values, op: Attention, x: Value, heads: int) -> Value:
    """Applies the rotary embedding to all heads of [T, heads * head_size]; float32 [T, heads, head_size]."""
    x = _heads_apart(graph, x, heads, op.shape.head_dim)
    half = op.rotary.cosine.width
    rest = op.shape.head_dim - 2 * half
    first, second, *others = graph.split(x, (half, half, rest) if rest else (half, half), axis=2)
    cosine, sine = (_column(graph, values[angles.name]) for angles in (op.rotary.cosine, op.rotary.sine))

    def times(part: Value, factor: Value) -> Value:
        return graph.node("Mul", [part, factor])

    turned = [
        graph.node("Sub", [times(first, cosine), times(second, sine)]),
        graph.node("Add", [times(second, cosine), times(first, sine)]),
    ]
    return graph.node("Concat", [*turned, *others], axis=2)


def _bias(graph: GraphBuilder, bias: PositionBias, distances: Value) -> Value:
    """Bias [heads, T, T]."""
    reach = len(bias.buckets) // 2
    low, high = (graph.constant(f"distance_{at}", np.asarray(at, np.int64)) for at in (-reach, reach))
    place = graph.node("Add", [graph.node("Clip", [distances, low, high]), high])
    buckets = graph.constant(f"{bias.table.name}.buckets", np.asarray(bias.buckets, np.int64))
    bucket = graph.node("Gather", [buckets, place], axis=0)
    table = graph.cast(graph.weight(str(bias.table.name)), TensorProto.FLOAT)
    return graph.node("Transpose", [graph.node("Gather", [table, bucket], axis=0)], perm=[2, 0, 1])


def _visible(graph: GraphBuilder, op: Attention, distances: Value, sequences: Value) -> Value:
    """Mask [T, T]: True if a row attends to another one."""
    visible = _compare(graph, "Equal", _column(graph, sequences), _row(graph, sequences))
    bounds: list[tuple[str, int]] = []
    if op.kind is AttentionKind.CAUSAL:
        bounds.append(("LessOrEqual", 0))
    elif op.window is not None:
        bounds.append(("LessOrEqual", op.window - 1))
    if op.window is not None:
        bounds.append(("GreaterOrEqual", 1 - op.window))
    for comparison, bound in bounds:
        limit = graph.constant(f"distance_{bound}", np.asarray(bound, np.int64))
        inside = _compare(graph, comparison, distances, limit)
        visible = graph.node("And", [visible, inside])
    return visible


def _compare(graph: GraphBuilder, comparison: str, a: Value, b: Value) -> Value:
    return graph.node(comparison, [a, b], element_type=TensorProto.BOOL)


def _column(graph: GraphBuilder, x: Value) -> Value:
    return graph.node("Unsqueeze", [x, _integers(graph, "axis_1", [1])])


def _row(graph: GraphBuilder, x: Value) -> Value:
    return graph.node("Unsqueeze", [x, _integers(graph, "axis_0", [0])])


def _integers(graph: GraphBuilder, name: str, values: list[int]) -> Value:
    return graph.constant(name, np.asarray(values, np.int64))
