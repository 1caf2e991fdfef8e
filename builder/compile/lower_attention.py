"""Lowers PagedAttention, with the norms of q's and k's heads before it, to one op over the fused q, k and v."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..._core import DType, RowKind
from ...plugins import PAGED_ATTENTION
from ..network.inputs import kv_pool_name, kv_pool_out_name
from .graph_index import GraphIndex, Node
from .lowered import LoweredOp, Weights, buffer_name, nodes_of, norm_epsilon, refuse
from .pattern import AnyAttributes, Constant, Op, Value, match
from .plan import AttentionOp, ModelShape, Vector

_INPUT_NAMES: Final = tuple(tensor.name for tensor in PAGED_ATTENTION.inputs)
# Inputs of the plugin that must be the graph's inputs of the same name.
_STEP_INPUTS: Final = ("block_tables", "sequence_offsets", "positions")
_HEAD_NORM: Final = Op(
    "Reshape",
    AnyAttributes("RMSNormalization", Op("Reshape", Value("x"), Constant("apart")), Value("weight")),
    Constant("together"),
)


@dataclass(frozen=True)
class _Heads:
    """q or k before its norm."""

    value: str
    weight: str | None
    epsilon: float
    nodes: tuple[Node, ...]


def lower_attention(index: GraphIndex, node: Node, shape: ModelShape, dtype: DType, weights: Weights) -> LoweredOp:
    """The op of a PagedAttention node. `dtype` is that of its output."""
    inputs = dict(zip(_INPUT_NAMES, node.inputs, strict=True))
    for name in _STEP_INPUTS:
        if inputs[name] != name or name not in index.inputs:
            raise refuse(node, f"its input {name} is '{inputs[name]}', not the graph's input")
    _check_pool(index, node, inputs["kv_pool"])
    _check_sizes(node, shape)
    query = _before_norm(index, inputs["q"], shape.num_attention_heads, shape.head_dim)
    key = _before_norm(index, inputs["k"], shape.num_key_value_heads, shape.head_dim)
    split = index.producer(inputs["v"])
    if split is None or split.op_type != "Split" or split.outputs != (query.value, key.value, inputs["v"]):
        raise refuse(node, "q, k and v are not the three parts of one Split")
    if dict(split.attributes) not in ({"axis": 1}, {"axis": -1}):
        raise refuse(split, "it does not cut the last axis by its second input")
    if query.weight is not None and key.weight is not None and query.epsilon != key.epsilon:
        raise refuse(node, f"the norms of q and k differ in epsilon: {query.epsilon} and {key.epsilon}")
    attended, kv_pool = node.outputs
    op = AttentionOp(
        layer=node.attributes["layer"],
        qkv=buffer_name(split.inputs[0]),
        cosine=buffer_name(inputs["cosine"]),
        sine=buffer_name(inputs["sine"]),
        output=buffer_name(attended),
        query_norm=_norm_weight(index, query, weights),
        key_norm=_norm_weight(index, key, weights),
        norm_epsilon=query.epsilon or key.epsilon,
        scale=node.attributes["scale"],
        sliding_window=node.attributes["sliding_window"],
    )
    return LoweredOp(
        op,
        nodes_of([node, split], query.nodes, key.nodes),
        (split.inputs[0], inputs["cosine"], inputs["sine"]),
        (attended,),
        dtype,
        RowKind.TOKENS,
        side_outputs=(kv_pool,),
    )


def _check_pool(index: GraphIndex, node: Node, pool: str) -> None:
    """The pool is the layer's, and what is written to it goes back to where it came from."""
    layer = node.attributes["layer"]
    if pool != kv_pool_name(layer) or pool not in index.inputs:
        raise refuse(node, f"its KV pool is '{pool}', not the graph's input {kv_pool_name(layer)}")
    if index.outputs.get(kv_pool_out_name(layer)) != node.outputs[1]:
        raise refuse(node, f"its KV pool is not the graph's output {kv_pool_out_name(layer)}")


def _check_sizes(node: Node, shape: ModelShape) -> None:
    sizes = {
        "num_heads": shape.num_attention_heads,
        "num_kv_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
    }
    for name, size in sizes.items():
        if node.attributes[name] != size:
            raise refuse(node, f"its {name} is {node.attributes[name]}, the model's {size}")


def _before_norm(index: GraphIndex, value: str, heads: int, head_dim: int) -> _Heads:
    found = match(index, value, _HEAD_NORM)
    if found is None:
        return _Heads(value, None, 0.0, ())
    apart, together = (found.constants[name].tolist() for name in ("apart", "together"))
    norm = next(node for node in found.nodes if node.op_type == "RMSNormalization")
    if apart != [-1, heads, head_dim] or together != [-1, heads * head_dim]:
        raise refuse(norm, "it does not normalise the heads one by one")
    return _Heads(found.values["x"], found.values["weight"], norm_epsilon(norm), tuple(found.nodes))


def _norm_weight(index: GraphIndex, heads: _Heads, weights: Weights) -> Vector | None:
    return None if heads.weight is None else weights.vector(index, heads.weight)
