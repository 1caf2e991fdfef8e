"""Cosines and sines of a step's positions, in ONNX."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from ...formats.checkpoint.rotary import DynamicScaling, LongRopeScaling
from ...formats.network.ops import Rotary
from .graph import GraphBuilder, Value
from .inputs import StepInputs
from .onnx_sequences import sequence_of_rows
from .onnx_values import Values
from .rotary_frequencies import exponents, inverse_frequencies, long_inverse_frequencies


def rotary_table(graph: GraphBuilder, values: Values, op: Rotary, inputs: StepInputs) -> None:
    """cos and sin of position * inverse frequency, times the scaling's factor: float32 [T, size / 2] each."""
    positions = graph.cast(inputs.tokens(op.output.cosine.rows).positions, TensorProto.FLOAT)
    column = graph.node("Unsqueeze", [positions, graph.constant("axis_1", np.asarray([1], np.int64))])
    frequencies, factor = inverse_frequencies(op.size, op.base, op.scaling)
    if isinstance(op.scaling, DynamicScaling):
        frequencies_value = _dynamic_frequencies(graph, op, op.scaling, inputs)
    else:
        frequencies_value = graph.constant(_named(op, "inverse_frequencies"), frequencies[np.newaxis])
    if isinstance(op.scaling, LongRopeScaling):
        frequencies_value = _long_frequencies(graph, op, op.scaling, inputs, frequencies_value)
    angles = graph.node("Mul", [column, frequencies_value])
    cosine, sine = graph.node("Cos", [angles]), graph.node("Sin", [angles])
    if factor != 1.0:
        scaling = graph.constant(_named(op, "attention_scaling"), np.float32(factor)[np.newaxis])
        cosine, sine = graph.node("Mul", [cosine, scaling]), graph.node("Mul", [sine, scaling])
    values[op.output.cosine.name], values[op.output.sine.name] = cosine, sine


def _named(op: Rotary, name: str) -> str:
    """A constant's name that is unique among the network's tables."""
    return name if op.scope == "rotary" else f"{op.scope}.{name}"


def _long_frequencies(
    graph: GraphBuilder, op: Rotary, scaling: LongRopeScaling, inputs: StepInputs, short: Value
) -> Value:
    """[T, size / 2]: the long frequencies where max(prompt length, position + 1) exceeds the original length."""
    lengths = graph.node("Max", [_prompt_length_of_tokens(graph, inputs), _next_position(graph, inputs)])
    original = np.asarray([scaling.original_max_position_embeddings], np.int32)
    beyond = graph.node(
        "Greater", [lengths, graph.constant("original_length", original)], element_type=TensorProto.BOOL
    )
    column = graph.node("Unsqueeze", [beyond, graph.constant("axis_1", np.asarray([1], np.int64))])
    frequencies = long_inverse_frequencies(op.size, op.base, scaling)[np.newaxis]
    long = graph.constant(_named(op, "long_inverse_frequencies"), frequencies)
    return graph.node("Where", [column, long, short], element_type=TensorProto.FLOAT)


def _dynamic_frequencies(graph: GraphBuilder, op: Rotary, scaling: DynamicScaling, inputs: StepInputs) -> Value:
    """[T, size / 2]: 1 / (base * (factor * length / original - (factor - 1))^(d / (d - 2)))^(2 i / d).

    The length is max(prompt length, position + 1, original), computed per token. It equals the sequence length that
    transformers uses when it computes that token.
    """
    size = op.size

    def number(name: str, value: float) -> Value:
        return graph.constant(name, np.asarray([value], np.float32))

    lengths = graph.node("Max", [_prompt_length_of_tokens(graph, inputs), _next_position(graph, inputs)])
    original = number("original_max_position", op.max_position_embeddings)
    length = graph.node("Max", [graph.cast(lengths, TensorProto.FLOAT), original])
    factor = number("rotary_factor", scaling.factor)
    growth = graph.node("Div", [graph.node("Mul", [length, factor]), original])
    growth = graph.node("Sub", [growth, number("rotary_factor_minus_1", scaling.factor - 1)])
    grown = graph.node("Pow", [growth, number("base_exponent", size / (size - 2))])
    base = graph.node("Mul", [grown, number("rotary_base", op.base)])
    column = graph.node("Unsqueeze", [base, graph.constant("axis_1", np.asarray([1], np.int64))])
    powers = graph.node("Pow", [column, graph.constant("rotary_exponents", exponents(size)[np.newaxis])])
    return graph.node("Reciprocal", [powers])


def _next_position(graph: GraphBuilder, inputs: StepInputs) -> Value:
    return graph.node("Add", [inputs.positions, graph.constant("one", np.asarray([1], np.int32))])


def _prompt_length_of_tokens(graph: GraphBuilder, inputs: StepInputs) -> Value:
    assert inputs.prompt_lengths is not None
    sequences = sequence_of_rows(graph, inputs.input_ids, inputs.sequence_offsets)
    return graph.node("Gather", [inputs.prompt_lengths, sequences], axis=0)
