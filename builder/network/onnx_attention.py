"""Self-attention over the paged KV pool, in ONNX."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from ...plugins import PAGED_ATTENTION
from .graph import GraphBuilder, Value
from .inputs import StepInputs, kv_pool_out_name
from .onnx_rows import normalized
from .onnx_values import Values
from .ops import Attention, HeadNorm


def attention(graph: GraphBuilder, values: Values, op: Attention, inputs: StepInputs) -> None:
    """The heads' outputs, and the layer's KV pool with this step's keys and values."""
    query, key = op.num_heads * op.head_size, op.num_kv_heads * op.head_size
    q, k, v = graph.split(values[op.qkv.name], (query, key, key), axis=1)
    if op.query_norm is not None:
        q = _head_norm(graph, op, q, op.query_norm, op.num_heads)
    if op.key_norm is not None:
        k = _head_norm(graph, op, k, op.key_norm, op.num_kv_heads)
    attended, kv_pool = graph.plugin(
        PAGED_ATTENTION,
        [
            q,
            k,
            v,
            inputs.kv_pools[op.layer],
            inputs.block_tables,
            inputs.sequence_offsets,
            inputs.positions,
            values[op.rotary.cosine.name],
            values[op.rotary.sine.name],
        ],
        layer=op.layer,
        num_heads=op.num_heads,
        num_kv_heads=op.num_kv_heads,
        head_dim=op.head_size,
        scale=float(op.scale),
        sliding_window=op.window or 0,
    )
    values[op.output.name] = attended
    values[kv_pool_out_name(op.layer)] = kv_pool


def _head_norm(graph: GraphBuilder, op: Attention, x: Value, norm: HeadNorm, heads: int) -> Value:
    """RMS norm of each head of [T, heads * head_dim]."""
    apart = graph.constant(f"heads_{heads}", np.asarray([-1, heads, op.head_size], np.int64))
    together = graph.constant(f"width_{heads}", np.asarray([-1, heads * op.head_size], np.int64))
    wide = graph.cast(x, TensorProto.FLOAT)
    normed = normalized(graph, graph.node("Reshape", [wide, apart]), str(norm.weight.name), norm.epsilon)
    return graph.node("Reshape", [normed, together])
