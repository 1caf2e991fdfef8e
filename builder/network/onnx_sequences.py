"""Maps rows to sequences, in ONNX."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from .graph import GraphBuilder, Value


def row_numbers(graph: GraphBuilder, rows: Value) -> Value:
    """int64 [T]: the row numbers 0, 1, ... of `rows`."""
    count = graph.node("Shape", [rows], element_type=TensorProto.INT64, start=0, end=1)
    return graph.node("Range", [_integer(graph, "zero", 0), graph.node("Squeeze", [count]), _integer(graph, "step", 1)])


def sequence_of_rows(graph: GraphBuilder, rows: Value, offsets: Value) -> Value:
    """int32 [T]: the sequence of each row, which is the number of sequences that end at or before it. `offsets` is [S +
    1]."""
    past_the_end = int(np.iinfo(np.int64).max)
    ends = graph.node(
        "Slice", [offsets, _integer(graph, "second", [1]), _integer(graph, "past_the_end", [past_the_end])]
    )
    numbers = graph.cast(row_numbers(graph, rows), TensorProto.INT32)
    ended = graph.node(
        "GreaterOrEqual",
        [
            graph.node("Unsqueeze", [numbers, _integer(graph, "axis_1", [1])]),
            graph.node("Unsqueeze", [ends, _integer(graph, "axis_0", [0])]),
        ],
        element_type=TensorProto.BOOL,
    )
    return graph.node("ReduceSum", [graph.cast(ended, TensorProto.INT32), _integer(graph, "axis_1", [1])], keepdims=0)


def _integer(graph: GraphBuilder, name: str, value: int | list[int]) -> Value:
    return graph.constant(name, np.asarray(value, np.int64))
