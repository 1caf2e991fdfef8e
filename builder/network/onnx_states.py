"""Ops that keep a state for each sequence, in ONNX: a Scan over the step's tokens that carries the states of all slots.

This is correct but slow: it serves as a test oracle and for inspection, not for TensorRT.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from onnx import TensorProto

from ...formats.checkpoint.activation import Activation
from ...formats.network.ops import CausalConvolution, GatedConvolution, GatedDelta, Op, SelectiveScan
from ...formats.network.weights import Tensor
from .graph import GraphBuilder, Value
from .inputs import StepInputs, state_of, state_out_name
from .onnx_linear import activated
from .onnx_rows import number, scaled
from .onnx_sequences import sequence_of_rows
from .onnx_values import Values

_LENGTH_EPSILON = 1e-6
"""Epsilon of the L2 norms of q and k, as in transformers."""


def causal_convolution(graph: GraphBuilder, values: Values, op: CausalConvolution, inputs: StepInputs) -> None:
    """Replaces the first columns by silu of their convolution, in float32."""
    width = op.weight.shape[0]
    x, *rest = _columns(graph, graph.cast(values[op.input.name], TensorProto.FLOAT), (width,), op.input.width)
    convolved = activated(graph, _convolved(graph, values, op, inputs, x), Activation.SILU)
    values[op.output.name] = graph.node("Concat", [convolved, *rest], axis=1) if rest else convolved


def gated_convolution(graph: GraphBuilder, values: Values, op: GatedConvolution, inputs: StepInputs) -> None:
    """Convolution of b * x, times c."""
    width = op.weight.shape[0]
    b, c, x = graph.split(graph.cast(values[op.input.name], TensorProto.FLOAT), (width,) * 3, axis=1)
    convolved = _convolved(graph, values, op, inputs, graph.node("Mul", [b, x]))
    values[op.output.name] = graph.cast(graph.node("Mul", [c, convolved]), graph.engine_type)


def gated_delta(graph: GraphBuilder, values: Values, op: GatedDelta, inputs: StepInputs) -> None:
    """Heads' outputs of the gated delta rule."""
    shape = op.shape
    heads, key_dim = shape.num_value_heads, shape.key_dim
    qkv = graph.cast(values[op.qkv.name], TensorProto.FLOAT)
    q, k, v, *_ = _columns(graph, qkv, (shape.key_size, shape.key_size, shape.value_size), op.qkv.width)
    groups = shape.num_key_heads
    q, k = (_of_length_one(graph, _reshaped(graph, x, -1, groups, key_dim)) for x in (q, k))
    q, k = (_repeated(graph, x, groups, heads) for x in (q, k))
    b, a = graph.split(graph.cast(values[op.gates.name], TensorProto.FLOAT), (heads, heads), axis=1)
    time = graph.node("Softplus", [graph.node("Add", [a, _vector(graph, op.time_bias)])])
    decay = graph.node("Exp", [graph.node("Mul", [time, _rates(graph, op.log_decay)])])
    strength = scaled(graph, graph.node("Sigmoid", [b]), op.update_scale)

    def body(before: Value, rows: Sequence[Value]) -> tuple[Value, Value]:
        query, key, key_column, value, kept, share = rows
        decayed = graph.node("Mul", [before, kept])
        known = graph.node("MatMul", [key, decayed])
        change = graph.node("Mul", [graph.node("Sub", [value, known]), share])
        after = graph.node("Add", [decayed, graph.node("Mul", [key_column, change])])
        return after, graph.node("MatMul", [query, after])

    rows = [
        _reshaped(graph, scaled(graph, q, key_dim**-0.5), -1, heads, 1, key_dim),
        _reshaped(graph, k, -1, heads, 1, key_dim),
        _reshaped(graph, k, -1, heads, key_dim, 1),
        _reshaped(graph, v, -1, heads, 1, shape.value_dim),
        _reshaped(graph, decay, -1, heads, 1, 1),
        _reshaped(graph, strength, -1, heads, 1, 1),
    ]
    made = _advanced(graph, values, op, inputs, rows, body)
    values[op.output.name] = graph.cast(_reshaped(graph, made, -1, shape.value_size), graph.engine_type)


def selective_scan(graph: GraphBuilder, values: Values, op: SelectiveScan, inputs: StepInputs) -> None:
    """Heads' outputs of Mamba 2's scan, in float32."""
    shape = op.shape
    heads, state_dim, head_dim = shape.num_heads, shape.state_dim, shape.head_dim
    read = graph.cast(values[op.values.name], TensorProto.FLOAT)
    sizes = (shape.value_size, shape.group_size, shape.group_size, heads)
    x, b, c, dt, *_ = _columns(graph, read, sizes, op.values.width)
    groups = shape.num_groups
    b, c = (_repeated(graph, _reshaped(graph, x, -1, groups, state_dim), groups, heads) for x in (b, c))
    time = graph.node("Softplus", [graph.node("Add", [dt, _vector(graph, op.time_bias)])])
    time = graph.node("Clip", [time, *(_scalar(graph, limit) for limit in (op.time_min, op.time_max))])
    decay = graph.node("Exp", [graph.node("Mul", [time, _rates(graph, op.log_decay)])])
    x = _reshaped(graph, x, -1, heads, 1, head_dim)

    def body(before: Value, rows: Sequence[Value]) -> tuple[Value, Value]:
        change, write, read, kept = rows
        after = graph.node("Add", [graph.node("Mul", [before, kept]), graph.node("Mul", [write, change])])
        return after, graph.node("MatMul", [read, after])

    rows = [
        graph.node("Mul", [x, _reshaped(graph, time, -1, heads, 1, 1)]),
        _reshaped(graph, b, -1, heads, state_dim, 1),
        _reshaped(graph, c, -1, heads, 1, state_dim),
        _reshaped(graph, decay, -1, heads, 1, 1),
    ]
    made = _reshaped(graph, _advanced(graph, values, op, inputs, rows, body), -1, heads, 1, head_dim)
    skipped = graph.node("Mul", [x, _reshaped(graph, _vector(graph, op.skip), heads, 1, 1)])
    values[op.output.name] = _reshaped(graph, graph.node("Add", [made, skipped]), -1, shape.value_size)


def _convolved(
    graph: GraphBuilder, values: Values, op: CausalConvolution | GatedConvolution, inputs: StepInputs, x: Value
) -> Value:
    """Each column's sum over taps, with the bias. The state has the inputs of the last taps - 1 tokens."""
    width, _, taps = op.weight.shape
    weight = graph.node("Transpose", [_reshaped(graph, _vector(graph, op.weight), width, taps)], perm=[1, 0])

    def body(before: Value, rows: Sequence[Value]) -> tuple[Value, Value]:
        window = graph.node("Concat", [before, rows[0]], axis=1)
        first, end, axis = (_integers(graph, at) for at in (1, taps, 1))
        products = graph.node("Mul", [window, weight])
        total = graph.node("ReduceSum", [products, axis], keepdims=0)
        return graph.node("Slice", [window, first, end, axis]), total

    made = _advanced(graph, values, op, inputs, [_reshaped(graph, x, -1, 1, 1, width)], body)
    convolved = _reshaped(graph, made, -1, width)
    return convolved if op.bias is None else graph.node("Add", [convolved, _vector(graph, op.bias)])


def _advanced(
    graph: GraphBuilder,
    values: Values,
    op: Op,
    inputs: StepInputs,
    rows: Sequence[Value],
    body: Callable[[Value, Sequence[Value]], tuple[Value, Value]],
) -> Value:
    """Outputs of `body` for all tokens, in order. It makes a sequence's state [1, ...] after a token from that before
    it. States start with zeros at position 0."""
    found = state_of(op)
    assert found is not None
    assert inputs.state_slots is not None
    sequences = sequence_of_rows(graph, inputs.input_ids, inputs.sequence_offsets)
    slots = graph.cast(graph.node("Gather", [inputs.state_slots, sequences], axis=0), TensorProto.INT64)
    first = graph.constant("first_position", np.asarray(0, np.int32))
    starts = graph.node("Equal", [inputs.positions, first], element_type=TensorProto.BOOL)

    def of_token(states: Value, of_row: Sequence[Value]) -> tuple[Value, Value]:
        slot, is_start, *others = of_row
        kept = graph.node("Gather", [states, slot], axis=0)
        before = graph.node("Where", [is_start, number(graph, 0.0), kept], element_type=TensorProto.FLOAT)
        after, output = body(before, others)
        place = graph.node("Unsqueeze", [slot, _integers(graph, 1)])
        return graph.node("ScatterND", [states, place, after]), output

    of_rows = [_reshaped(graph, slots, -1, 1), _reshaped(graph, starts, -1, 1), *rows]
    states, outputs = graph.scan(inputs.states[found[0]], of_rows, of_token)
    values[state_out_name(found[0])] = states
    return outputs


def _columns(graph: GraphBuilder, x: Value, sizes: Sequence[int], width: int) -> list[Value]:
    """Splits the first columns of x, which is `width` wide; the others, if there are any, are the last piece."""
    rest = width - sum(sizes)
    if not rest and len(sizes) == 1:
        return [x]
    return graph.split(x, (*sizes, rest) if rest else sizes, axis=1)


def _of_length_one(graph: GraphBuilder, x: Value) -> Value:
    """Vectors along the last axis, divided by their L2 norms."""
    squares = graph.node("ReduceSumSquare", [x, _integers(graph, -1)], keepdims=1)
    length = graph.node("Sqrt", [graph.node("Add", [squares, number(graph, _LENGTH_EPSILON)])])
    return graph.node("Div", [x, length])


def _repeated(graph: GraphBuilder, x: Value, groups: int, heads: int) -> Value:
    """Repeats each group of [T, groups, width] for the consecutive heads that share it."""
    return graph.node("Gather", [x, _integers(graph, *(head * groups // heads for head in range(heads)))], axis=1)


def _rates(graph: GraphBuilder, log_decay: Tensor) -> Value:
    """-exp(log_decay)."""
    return graph.node("Neg", [graph.node("Exp", [_vector(graph, log_decay)])])


def _vector(graph: GraphBuilder, of: Tensor) -> Value:
    return graph.cast(graph.weight(str(of.name)), TensorProto.FLOAT)


def _reshaped(graph: GraphBuilder, x: Value, *shape: int) -> Value:
    return graph.node("Reshape", [x, _integers(graph, *shape)])


def _scalar(graph: GraphBuilder, value: float) -> Value:
    return graph.constant(f"scalar_{np.float32(value)!s}", np.asarray(value, np.float32))


def _integers(graph: GraphBuilder, *values: int) -> Value:
    return graph.constant(f"integers_{'_'.join(map(str, values))}", np.asarray(values, np.int64))
