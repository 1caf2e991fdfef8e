"""Reads from a network's graph on which of its linear layers adapters act."""

from __future__ import annotations

from dataclasses import dataclass

import onnx
from onnx import helper

from ...plugins import DORA, LORA


@dataclass(frozen=True)
class AdaptedLinear:
    """A linear layer with an adapter node."""

    input: str
    """The value that it reads; layers that read the same one share the A of fused modules."""
    weight: str
    """Its tensor in the checkpoint, [sum of out_sizes, in_size]."""
    in_size: int
    layer: int
    module_ids: tuple[int, ...]
    """The modules that its output consists of, in the order of the weight's rows."""
    out_sizes: tuple[int, ...]


def adapted_linears(model: onnx.ModelProto) -> list[AdaptedLinear]:
    """Those of a graph that build_network() made, in the order of execution."""
    producers = {output: node for node in model.graph.node for output in node.output}
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    found = []
    for node in model.graph.node:
        if node.op_type not in (LORA.name, DORA.name):
            continue
        attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
        x, base = node.input[:2]
        weight = weights[producers[base].input[1]]
        found.append(
            AdaptedLinear(
                input=x,
                weight=weight.name,
                in_size=weight.dims[1],
                layer=attributes["layer"],
                module_ids=tuple(attributes["module_ids"]),
                out_sizes=tuple(attributes["out_sizes"]),
            )
        )
    return found
