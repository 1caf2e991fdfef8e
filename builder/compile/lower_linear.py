"""Lowers linear layers: Gemm, the adapters on it, its bias, and the activation or residual sum that follows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ..._core import DType, LinearEpilogue, RowKind
from ...plugins import DORA, LORA
from .graph_index import GraphIndex, Node
from .lower_weight import LinearWeight, find_weight
from .lowered import LoweredOp, Weights, buffer_name, check_attributes, nodes_of, refuse
from .pattern import Op, Value, match
from .plan import LinearOp, LinearPart, LoraPart, LoraSite

# Inputs of the adapter plugins that must be these inputs of the graph.
_TABLES: Final = {
    "sequence_offsets": "sequence_offsets",
    "adapter_slots": "adapter_slots",
    "ranks": "lora_ranks",
    "pointers": "lora_pointers",
}
_SILU_MUL: Final = Op("Mul", Op("Mul", Value("gated"), Op("Sigmoid", Value("gated"))), Value("up"))


@dataclass(frozen=True)
class Linear:
    """One Gemm with its adapters and its bias."""

    input: str
    output: str
    weight: LinearWeight
    bias: str | None
    part_sizes: tuple[int, ...]
    layer: int
    module_ids: tuple[int, ...]  # empty without adapters
    nodes: tuple[Node, ...]


def find_linear(index: GraphIndex, gemm: Node) -> Linear:
    """The linear layer that begins with a Gemm."""
    if len(gemm.inputs) != 2 or gemm.attributes.get("transB") != 1:
        raise refuse(gemm, "only x W^T without a third input is known")
    check_attributes(gemm, {"transA": 0, "alpha": 1.0}, ["transB", "beta"])
    x = gemm.inputs[0]
    weight = find_weight(index, gemm.inputs[1])
    nodes, output = [*weight.nodes, gemm], gemm.outputs[0]
    out_sizes: tuple[int, ...] = ()
    layer, module_ids = 0, ()
    adapter = _only_reader(index, output, LORA.name, DORA.name)
    if adapter is not None:
        _check_adapter(index, adapter, {"x": x, "base": output})
        layer, module_ids = adapter.attributes["layer"], tuple(adapter.attributes["module_ids"])
        out_sizes = tuple(adapter.attributes["out_sizes"])
        nodes, output = [*nodes, adapter], adapter.outputs[0]
    add = _only_reader(index, output, "Add")
    bias = None
    if add is not None and index.is_weight(add.inputs[1]):
        bias = add.inputs[1]
        nodes, output = [*nodes, add], add.outputs[0]
    split = _only_reader(index, output, "Split")
    if split is not None:
        sizes = tuple(index.width(part) for part in split.outputs)
        if out_sizes and sizes != out_sizes:
            raise refuse(split, f"it cuts into {list(sizes)}, the adapters' modules into {list(out_sizes)}")
        out_sizes = sizes
    return Linear(x, output, weight, bias, out_sizes or (index.width(output),), layer, module_ids, tuple(nodes))


def lower_gated(index: GraphIndex, linears: dict[str, Linear], dtype: DType, weights: Weights) -> list[LoweredOp]:
    """Ops for silu(linear) * linear over one input; they leave `linears`, which is keyed by output."""
    ops = []
    for node in index.nodes:
        found = match(index, node.outputs[0], _SILU_MUL) if node.op_type == "Mul" else None
        if found is None:
            continue
        gated, up = linears.get(found.values["gated"]), linears.get(found.values["up"])
        if gated is None or up is None or gated.input != up.input or gated.output == up.output:
            raise refuse(node, "it does not join two linear layers over one input")
        if gated.part_sizes != up.part_sizes:
            raise refuse(node, "the layers that it joins differ in width")
        del linears[gated.output], linears[up.output]
        ops.append(
            _op(
                index,
                [gated, up],
                found.nodes,
                node.outputs[0],
                LinearEpilogue.SILU_MUL,
                dtype,
                RowKind.TOKENS,
                weights,
            )
        )
    return ops


def lower_linear(index: GraphIndex, linear: Linear, rows: RowKind, weights: Weights) -> LoweredOp:
    """An op that stores its result, or adds it to the residual stream that an Add joins it with."""
    add = _only_reader(index, linear.output, "Add")
    if add is None:
        return _op(index, [linear], [], linear.output, LinearEpilogue.STORE, DType.FLOAT32, rows, weights)
    lowered = _op(index, [linear], [add], add.outputs[0], LinearEpilogue.ADD, DType.FLOAT32, rows, weights)
    others = [value for value in add.inputs if value != linear.output]
    if len(others) != 1 or index.width(others[0]) != index.width(linear.output):
        raise refuse(add, "it does not add a linear layer to another value of the same width")
    return replace(lowered, reads=(*lowered.reads, others[0]), in_place=others[0])


def _op(
    index: GraphIndex,
    linears: list[Linear],
    more_nodes: list[Node],
    output: str,
    epilogue: LinearEpilogue,
    dtype: DType,
    rows: RowKind,
    weights: Weights,
) -> LoweredOp:
    parts: list[LinearPart] = []
    for linear in linears:
        first = 0
        for size in linear.part_sizes:
            last = first + size
            bias = None if linear.bias is None else weights.vector(index, linear.bias, (first, last))
            parts.append(LinearPart(weight=linear.weight.matrix(index, (first, last), rows, weights), bias=bias))
            first = last
    op = LinearOp(
        input=buffer_name(linears[0].input),
        output=buffer_name(output),
        epilogue=epilogue,
        parts=tuple(parts),
        lora_site=-1,
    )
    nodes = nodes_of(*(linear.nodes for linear in linears), more_nodes)
    return LoweredOp(op, nodes, (linears[0].input,), (output,), dtype, rows, site=_site(linears, parts))


def _site(linears: list[Linear], parts: list[LinearPart]) -> LoraSite | None:
    module_ids = [module for linear in linears for module in linear.module_ids]
    if not module_ids:
        return None
    if len(module_ids) != len(parts) or len({linear.layer for linear in linears}) != 1:
        raise refuse(
            linears[0].nodes[-1], f"adapters of modules {module_ids} do not act on each of its {len(parts)} parts"
        )
    return LoraSite(
        layer=linears[0].layer,
        in_size=parts[0].weight.k,
        parts=tuple(
            LoraPart(module=module, out_size=part.weight.n) for module, part in zip(module_ids, parts, strict=True)
        ),
    )


def _only_reader(index: GraphIndex, value: str, *op_types: str) -> Node | None:
    readers = index.consumers(value)
    return readers[0] if len(readers) == 1 and readers[0].op_type in op_types else None


def _check_adapter(index: GraphIndex, node: Node, values: dict[str, str]) -> None:
    plugin = LORA if node.op_type == LORA.name else DORA
    for tensor, actual in zip(plugin.inputs, node.inputs, strict=True):
        expected = values.get(tensor.name) or _TABLES[tensor.name]
        if actual != expected or (tensor.name in _TABLES and actual not in index.inputs):
            raise refuse(node, f"its input {tensor.name} is '{actual}', not '{expected}'")
