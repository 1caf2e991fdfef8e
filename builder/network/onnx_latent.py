"""The layers around an attention to compressed rows, in ONNX: a product for each head."""

from __future__ import annotations

from ...formats.network import operands
from ...formats.network.ops import LatentQueries, LatentValues
from .graph import GraphBuilder, Value
from .onnx_rows import normalized
from .onnx_values import Values
from .weight_matrix import weight_matrix


def latent_queries(graph: GraphBuilder, values: Values, op: LatentQueries) -> None:
    """[q | k]: heads of q over compressed rows, and the compressed row itself, each after its rotated elements."""
    shape = op.shape
    made: list[Value] = []
    for query, weight in zip(_heads(graph, values, op.queries, shape.num_heads), op.keys, strict=True):
        plain, rotated = graph.split(query, (shape.plain_dim, shape.rotary_dim), axis=1)
        made += [rotated, graph.node("Gemm", [plain, weight_matrix(graph, weight)], transB=1)]
    row, rotated = graph.split(values[op.rows.name], (shape.latent_dim, shape.rotary_dim), axis=1)
    made += [rotated, normalized(graph, row, op.norm, op.epsilon)]
    values[op.output.name] = graph.node("Concat", made, axis=1)


def latent_values(graph: GraphBuilder, values: Values, op: LatentValues) -> None:
    """Values of each head, from the compressed rows that it attended to."""
    shape = op.shape
    made = []
    for attended, weight in zip(_heads(graph, values, op.input, shape.num_heads), op.values, strict=True):
        _, latent = graph.split(attended, (shape.rotary_dim, shape.latent_dim), axis=1)
        made.append(graph.node("Gemm", [latent, weight_matrix(graph, weight)], transB=1))
    values[op.output.name] = graph.node("Concat", made, axis=1)


def _heads(graph: GraphBuilder, values: Values, x: operands.Value, count: int) -> list[Value]:
    """Columns of each head, in the engine's type."""
    read = graph.cast(values[x.name], graph.engine_type)
    return graph.split(read, [x.width // count] * count, axis=1) if count > 1 else [read]
