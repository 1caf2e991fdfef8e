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
    q, k, v = _queries_keys_values(graph, values, op)
    # Layers that share keys write them to the pool once more, and this copy of the pool is not used.
    pool_layer = op.layer if op.shared_layer is None else op.shared_layer
    if pool_layer not in inputs.kv_pools or op.kind is AttentionKind.BIDIRECTIONAL:
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
            inputs.kv_pools[pool_layer],
            inputs.block_tables,
            inputs.sequence_offsets,
            inputs.positions,
            values[op.rotary.cosine.name],
            values[op.rotary.sine.name],
        ],
        layer=pool_layer,
        num_heads=op.shape.num_attention_heads,
        num_kv_heads=op.shape.num_key_value_heads,
        head_dim=op.shape.head_dim,
        scale=float(op.scale),
        sliding_window=op.window or 0,
        softcap=op.softcap or 0.0,
    )
    values[op.output.name] = attended
    if op.shared_layer is None:
        values[kv_pool_out_name(op.layer)] = kv_pool


def _queries_keys_values(graph: GraphBuilder, values: Values, op: Attention) -> tuple[Value, Value, Value]:
    """q, k and v as PagedAttention reads them: after their norms, with the pairs of a rotation in its order."""
    query, key = op.shape.query_size, op.shape.key_value_size
    heads, kv_heads = op.shape.num_attention_heads, op.shape.num_key_value_heads
    if op.shared_layer is not None:
        q = _prepared(graph, op, values[op.qkv.name], op.query_norm, heads)
        k, v = (values[name] for name in _shared_names(op.shared_layer))
        return q, k, v
    has_values = not (op.values_from_keys or op.shape.values_are_keys)
    sizes = (query, key, key) if has_values else (query, key)
    rest = op.qkv.width - sum(sizes)
    q, k, *others = graph.split(values[op.qkv.name], (*sizes, rest) if rest else sizes, axis=1)
    # If the keys of latent attention are its values, nothing reads their rotated elements: these stay as they are.
    v = others[0] if has_values else k
    q = _prepared(graph, op, q, op.query_norm, heads)
    k = _prepared(graph, op, k, op.key_norm, kv_heads)
    if op.normalizes_values:
        assert op.query_norm is not None
        v = _plain_head_norm(graph, op, v, op.query_norm.epsilon, kv_heads)
    for name, value in zip(_shared_names(op.layer), (k, v), strict=True):
        values[name] = value
    return q, k, v


def _prepared(graph: GraphBuilder, op: Attention, x: Value, norm: HeadNorm | None, heads: int) -> Value:
    if norm is not None:
        x = _head_norm(graph, op, x, norm, heads)
    return _separated(graph, op, x, heads) if op.interleaved else x


def _shared_names(layer: int) -> tuple[str, str]:
    """Names of a layer's keys and values for later layers."""
    return f"keys.{layer}", f"values.{layer}"


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


def _plain_head_norm(graph: GraphBuilder, op: Attention, x: Value, epsilon: float, heads: int) -> Value:
    """RMS norm of each head, without a weight."""
    wide = _heads_apart(graph, op, graph.cast(x, TensorProto.FLOAT), heads)
    ones = graph.constant(f"ones_{op.shape.head_dim}", np.ones(op.shape.head_dim, np.float32))
    normed = graph.node("RMSNormalization", [wide, ones], axis=-1, epsilon=epsilon)
    return _heads_together(graph, op, graph.cast(normed, graph.engine_type), heads)


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
