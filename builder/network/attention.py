"""Self-attention over the paged KV pool."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from ...plugins import PAGED_ATTENTION
from ..checkpoint.config import CheckpointConfig
from .graph import GraphBuilder, Value
from .inputs import StepInputs
from .linear import Adaptation, linear
from .norm import rms_norm
from .rotary import RotaryTable


def attention(
    graph: GraphBuilder,
    config: CheckpointConfig,
    x: Value,
    layer: int,
    inputs: StepInputs,
    table: RotaryTable,
    adaptation: Adaptation | None,
) -> tuple[Value, Value]:
    """(dense(attention(qkv(x))), the layer's KV pool with this step's keys and values)."""
    prefix = f"transformer.layers.{layer}.attention"
    query = config.num_attention_heads * config.head_size
    key = config.num_key_value_heads * config.head_size
    qkv = linear(
        graph,
        x,
        f"{prefix}.qkv",
        bias=config.attn_bias,
        layer=layer,
        modules={"attn_q": query, "attn_k": key, "attn_v": key},
        adaptation=adaptation,
    )
    q, k, v = graph.split(qkv, (query, key, key), axis=1)
    if config.qk_layernorm:
        q = _head_norm(graph, config, q, f"{prefix}.q_layernorm.weight", config.num_attention_heads)
        k = _head_norm(graph, config, k, f"{prefix}.k_layernorm.weight", config.num_key_value_heads)
    window = config.sliding_window if layer in config.sliding_window_layers else None
    attended, kv_pool = graph.plugin(
        PAGED_ATTENTION,
        [
            q,
            k,
            v,
            inputs.kv_pools[layer],
            inputs.block_tables,
            inputs.sequence_offsets,
            inputs.positions,
            table.cosine,
            table.sine,
        ],
        layer=layer,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_size,
        scale=float(config.head_size**-0.5),
        sliding_window=window or 0,
    )
    dense = linear(
        graph,
        attended,
        f"{prefix}.dense",
        bias=config.attn_dense_bias,
        layer=layer,
        modules={"attn_dense": config.hidden_size},
        adaptation=adaptation,
    )
    return dense, kv_pool


def _head_norm(graph: GraphBuilder, config: CheckpointConfig, x: Value, weight: str, heads: int) -> Value:
    """RMS norm of each head of [T, heads * head_dim]."""
    apart = graph.constant(f"heads_{heads}", np.asarray([-1, heads, config.head_size], np.int64))
    together = graph.constant(f"width_{heads}", np.asarray([-1, heads * config.head_size], np.int64))
    wide = graph.cast(x, TensorProto.FLOAT)
    normed = rms_norm(graph, graph.node("Reshape", [wide, apart]), weight, config.norm_epsilon)
    return graph.node("Reshape", [normed, together])
