"""Lowers the network's ONNX graph to the ops of a program: fuses, and refuses what it does not know."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx

from ..._core import DType, EngineError, QuantAlgo, RowKind, activation_dtype
from ...plugins import DORA, LORA, PAGED_ATTENTION
from .graph_index import GraphIndex, Node
from .logit_rows import with_logit_rows_alone
from .lower_attention import lower_attention
from .lower_linear import Linear, find_linear, lower_gated, lower_linear
from .lower_rotary import lower_rotary
from .lowered import Compression, LoweredOp, Weights, buffer_name, check_attributes, nodes_of, norm_epsilon, refuse
from .plan import AttentionOp, EmbeddingOp, LinearOp, LoraSite, ModelShape, RmsNormOp


@dataclass(frozen=True)
class Adaptation:
    """What all adapter nodes of a graph have in common."""

    dora: bool
    """Whether they are Dora nodes; otherwise they are Lora nodes."""
    max_rank: int


@dataclass(frozen=True)
class LoweredProgram:
    """Ops in the order of execution, buffers still being values of the graph."""

    body: tuple[LoweredOp, ...]
    head: tuple[LoweredOp, ...]
    logits: str
    sites: tuple[LoraSite, ...]
    adaptation: Adaptation | None
    weights: Weights
    index: GraphIndex
    num_nodes: int


def lower(
    model: onnx.ModelProto,
    shape: ModelShape,
    dtype: DType,
    quant_algo: QuantAlgo = QuantAlgo.NONE,
    compression: Compression | None = None,
) -> LoweredProgram:
    """Lowers a graph as builder/network makes them. Raises EngineError naming the node that it cannot lower."""
    index = GraphIndex(model)
    weights = Weights(quant_algo, compression)
    activation = activation_dtype(dtype)
    ops = _lower_attentions(index, shape, activation, weights)
    claimed = {node.position for op in ops for node in op.nodes}
    # Tables before linear layers: a matrix that is both is stored as the table wants it.
    for node in index.nodes:
        if node.position in claimed:
            continue
        if node.op_type == "Gather" and node.inputs[1] == "input_ids":
            ops.append(_lower_embedding(index, node, weights))
        elif node.op_type == "RMSNormalization":
            ops.append(_lower_norm(index, node, activation, weights))
    ops.extend(_lower_linears(index, _head_values(ops), activation, weights))
    ops.sort(key=lambda op: op.position)
    _check_complete(index, ops)
    _check_in_place(index, ops)
    ops, sites = _number_sites(ops)
    if "logits" not in index.outputs:
        raise EngineError("the network has no output 'logits'")
    head = tuple(op for op in ops if op.rows is RowKind.LOGITS)
    return LoweredProgram(
        body=with_logit_rows_alone([op for op in ops if op.rows is RowKind.TOKENS], head),
        head=head,
        logits=index.outputs["logits"],
        sites=sites,
        adaptation=_adaptation(index),
        weights=weights,
        index=index,
        num_nodes=len(model.graph.node),
    )


def _lower_attentions(index: GraphIndex, shape: ModelShape, activation: DType, weights: Weights) -> list[LoweredOp]:
    ops: list[LoweredOp] = []
    tables: dict[tuple[str, str], Node] = {}
    for node in index.nodes:
        if node.op_type != PAGED_ATTENTION.name:
            continue
        op = lower_attention(index, node, shape, activation, weights)
        assert isinstance(op.op, AttentionOp)
        tables.setdefault((op.op.cosine, op.op.sine), node)
        ops.append(op)
    ops.extend(lower_rotary(index, *values, reader, weights) for values, reader in tables.items())
    return ops


def _lower_embedding(index: GraphIndex, node: Node, weights: Weights) -> LoweredOp:
    check_attributes(node, {"axis": 0})
    op = EmbeddingOp(table=weights.table(index, node.inputs[0]), output=buffer_name(node.outputs[0]))
    return LoweredOp(op, (node,), (), node.outputs, DType.FLOAT32, RowKind.TOKENS)


def _lower_norm(index: GraphIndex, node: Node, activation: DType, weights: Weights) -> LoweredOp:
    value, weight = node.inputs
    gather = index.producer(value)
    gathers = gather is not None and gather.op_type == "Gather" and gather.inputs[1] == "logit_rows"
    nodes, source = [node], value
    if gathers and gather is not None:
        check_attributes(gather, {"axis": 0})
        nodes, source = [node, gather], gather.inputs[0]
    op = RmsNormOp(
        input=buffer_name(source),
        output=buffer_name(node.outputs[0]),
        weight=weights.vector(index, weight),
        epsilon=norm_epsilon(node),
        gather_logit_rows=gathers,
    )
    rows = RowKind.LOGITS if gathers else RowKind.TOKENS
    return LoweredOp(op, nodes_of(nodes), (source,), node.outputs, activation, rows)


def _head_values(ops: list[LoweredOp]) -> set[str]:
    return {value for op in ops if op.rows is RowKind.LOGITS for value in op.writes}


def _lower_linears(index: GraphIndex, head_values: set[str], activation: DType, weights: Weights) -> list[LoweredOp]:
    linears: dict[str, Linear] = {}
    for node in index.nodes:
        if node.op_type == "Gemm":
            linear = find_linear(index, node)
            linears[linear.output] = linear
    ops = lower_gated(index, linears, activation, weights)
    for linear in linears.values():
        rows = RowKind.LOGITS if linear.input in head_values else RowKind.TOKENS
        ops.append(lower_linear(index, linear, rows, weights))
    return ops


def _adaptation(index: GraphIndex) -> Adaptation | None:
    nodes = [node for node in index.nodes if node.op_type in (LORA.name, DORA.name)]
    if not nodes:
        return None
    first = nodes[0]
    for node in nodes[1:]:
        if node.op_type != first.op_type:
            raise refuse(node, f"{first.describe()} is of another type; a network has either Lora or Dora nodes")
        if node.attributes["max_rank"] != first.attributes["max_rank"]:
            raise refuse(
                node,
                f"its max_rank is {node.attributes['max_rank']}; that of {first.describe()} is "
                f"{first.attributes['max_rank']}",
            )
    return Adaptation(dora=first.op_type == DORA.name, max_rank=first.attributes["max_rank"])


def _check_complete(index: GraphIndex, ops: list[LoweredOp]) -> None:
    """Every node belongs to an op, and what is inside an op is used nowhere else."""
    owners: dict[int, list[LoweredOp]] = {}
    for op in ops:
        for node in op.nodes:
            owners.setdefault(node.position, []).append(op)
    for node in index.nodes:
        if node.position not in owners:
            raise refuse(node, "it is part of no pattern that it knows")
    outside = set(index.outputs.values())
    for op in ops:
        members = {node.position for node in op.nodes}
        known = {*op.writes, *op.side_outputs}
        for node in op.nodes:
            for value in node.outputs:
                if value in known:
                    if value in outside and value not in op.side_outputs and value != index.outputs.get("logits"):
                        raise refuse(
                            node, f"its value '{value}' is an output of the graph; only logits and KV pools can be"
                        )
                    continue
                readers = [reader for reader in index.consumers(value) if reader.position not in members]
                if readers:
                    raise refuse(
                        node, f"its value '{value}' is read by {readers[0].describe()} too, so it cannot be fused"
                    )
                if value in outside:
                    raise refuse(node, f"its value '{value}' is an output of the graph, so it cannot be fused")
    made = {value for op in ops for value in op.writes}
    for op in ops:
        for value in op.reads:
            if value not in made:
                raise refuse(op.nodes[0], f"it reads '{value}', which no op makes")


def _check_in_place(index: GraphIndex, ops: list[LoweredOp]) -> None:
    """A value that is overwritten has no reader after that."""
    for op in ops:
        if op.in_place is None:
            continue
        late = [other for other in ops if op.in_place in other.reads and other.position > op.position]
        if late or op.in_place in index.outputs.values():
            raise refuse(op.nodes[-1], f"'{op.in_place}' is still read after the sum that takes its place")


def _number_sites(ops: list[LoweredOp]) -> tuple[list[LoweredOp], tuple[LoraSite, ...]]:
    sites: list[LoraSite] = []
    numbered = []
    for lowered in ops:
        if lowered.site is None:
            numbered.append(lowered)
            continue
        assert isinstance(lowered.op, LinearOp)
        numbered.append(replace(lowered, op=replace(lowered.op, lora_site=len(sites))))
        sites.append(lowered.site)
    return numbered, tuple(sites)
