"""Self-attention and cross-attention in ONNX: over the paged KV pool, or among the rows of a sequence."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from ..._core import AttentionKind, ConfigError, RowKind
from ...formats.engine.tensorrt.plan_config import kv_pool_out_name
from ...formats.network.operands import HeadNorm
from ...formats.network.ops import Attention, CrossAttention, CrossKeys
from ...plugins import PAGED_ATTENTION
from .graph import GraphBuilder, Value
from .inputs import StepInputs
from .onnx_dense_attention import cross_attention as dense_cross_attention
from .onnx_dense_attention import dense_attention
from .onnx_rows import normalized
from .onnx_sequences import sequence_of_rows
from .onnx_values import Values


def attention(graph: GraphBuilder, values: Values, op: Attention, inputs: StepInputs) -> None:
    """Adds the heads' outputs, and this step's keys and values to the layer's KV pool if it has one."""
    if op.sinks is not None:
        raise ConfigError("attention with sinks cannot be written as ONNX")
    if op.norms_after_rotation:
        raise ConfigError("norms of heads after their rotation cannot be written as ONNX")
    query, key = op.shape.query_size, op.shape.key_value_size
    q, k, v = graph.split(values[op.qkv.name], (query, key, key), axis=1)
    if op.query_norm is not None:
        q = _head_norm(graph, op, q, op.query_norm, op.shape.num_attention_heads)
    if op.key_norm is not None:
        k = _head_norm(graph, op, k, op.key_norm, op.shape.num_key_value_heads)
    if op.interleaved:
        q, k = (
            _separated(graph, op, q, op.shape.num_attention_heads),
            _separated(graph, op, k, op.shape.num_key_value_heads),
        )
    if op.layer not in inputs.kv_pools or op.kind is AttentionKind.BIDIRECTIONAL:
        dense_attention(graph, values, op, q, k, v, _sequences(graph, inputs, op.qkv.rows))
        return
    assert inputs.block_tables is not None
    if op.position_bias is not None:
        raise ValueError("PagedAttention adds nothing to scores")
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
        num_heads=op.shape.num_attention_heads,
        num_kv_heads=op.shape.num_key_value_heads,
        head_dim=op.shape.head_dim,
        scale=float(op.scale),
        sliding_window=op.window or 0,
        softcap=op.softcap or 0.0,
    )
    values[op.output.name] = attended
    values[kv_pool_out_name(op.layer)] = kv_pool


def cross_keys(values: Values, op: CrossKeys) -> None:
    """Keys and values of encoder inputs, under their own name."""
    values[_cross_keys_name(op.layer)] = values[op.kv.name]


def cross_attention(graph: GraphBuilder, values: Values, op: CrossAttention, inputs: StepInputs) -> None:
    """Adds the heads' outputs of attention to encoder inputs."""
    sequences = [_sequences(graph, inputs, rows) for rows in (RowKind.TOKENS, RowKind.ENCODER_TOKENS)]
    dense_cross_attention(graph, values, op, values[_cross_keys_name(op.layer)], *sequences)


def _cross_keys_name(layer: int) -> str:
    return f"cross_keys.{layer}"


def _sequences(graph: GraphBuilder, inputs: StepInputs, rows: RowKind) -> Value:
    tokens = inputs.tokens(rows)
    return sequence_of_rows(graph, tokens.input_ids, tokens.sequence_offsets)


def _head_norm(graph: GraphBuilder, op: Attention, x: Value, norm: HeadNorm, heads: int) -> Value:
    """RMS norm of each head of [T, heads * head_dim], or of all heads together."""
    wide = graph.cast(x, TensorProto.FLOAT)
    if norm.weight.shape != (op.shape.head_dim,):
        return normalized(graph, wide, norm.weight, norm.epsilon)
    normed = normalized(graph, _heads_apart(graph, op, wide, heads), norm.weight, norm.epsilon)
    return _heads_together(graph, op, normed, heads)


def _separated(graph: GraphBuilder, op: Attention, x: Value, heads: int) -> Value:
    """Deinterleaves the rotated elements of each head: even ones first, then odd ones.

    Scores do not depend on the order of elements, if queries and keys share it.
    """
    half = op.rotary.cosine.width
    rest = op.shape.head_dim - 2 * half
    apart = _heads_apart(graph, op, x, heads)
    parts = graph.split(apart, (2 * half, rest), axis=2) if rest else [apart]
    pairs = graph.constant(f"pairs_{heads}_{half}", np.asarray([-1, heads, half, 2], np.int64))
    turned = graph.node("Transpose", [graph.node("Reshape", [parts[0], pairs])], perm=[0, 1, 3, 2])
    joined = graph.constant(f"halves_{heads}_{half}", np.asarray([-1, heads, 2 * half], np.int64))
    separated = graph.node("Reshape", [turned, joined])
    if rest:
        separated = graph.node("Concat", [separated, parts[1]], axis=2)
    return _heads_together(graph, op, separated, heads)


def _heads_apart(graph: GraphBuilder, op: Attention, x: Value, heads: int) -> Value:
    apart = graph.constant(f"heads_{heads}_{op.shape.head_dim}", np.asarray([-1, heads, op.shape.head_dim], np.int64))
    return graph.node("Reshape", [x, apart])


def _heads_together(graph: GraphBuilder, op: Attention, x: Value, heads: int) -> Value:
    together = graph.constant(
        f"width_{heads}_{op.shape.head_dim}", np.asarray([-1, heads * op.shape.head_dim], np.int64)
    )
    return graph.node("Reshape", [x, together])
