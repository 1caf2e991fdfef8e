"""A linear layer, and the adapters that act on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...plugins import DORA, LORA
from .graph import GraphBuilder, Value
from .inputs import LoraInputs
from .weight_matrix import weight_matrix


@dataclass(frozen=True)
class Adaptation:
    """How adapters act on the layers of a network."""

    inputs: LoraInputs
    sequence_offsets: Value
    max_rank: int
    dora: bool
    module_ids: Mapping[str, int]

    def apply(self, graph: GraphBuilder, layer: int, modules: Mapping[str, int], x: Value, base: Value) -> Value:
        """`base` as the adapters change it; `modules` are the parts of the output by name, with their widths."""
        attributes = {
            "layer": layer,
            "module_ids": [self.module_ids[name] for name in modules],
            "out_sizes": list(modules.values()),
            "max_rank": self.max_rank,
        }
        tables = [self.sequence_offsets, self.inputs.adapter_slots, self.inputs.ranks, self.inputs.pointers]
        (y,) = graph.plugin(DORA if self.dora else LORA, [x, base, *tables], **attributes)
        return y


def linear(
    graph: GraphBuilder,
    x: Value,
    name: str,
    *,
    bias: bool = False,
    layer: int = 0,
    modules: Mapping[str, int] | None = None,
    adaptation: Adaptation | None = None,
) -> Value:
    """x W^T, changed by the adapters, plus the bias.

    W is `{name}.weight` [out, in], as the checkpoint has it or stands for it; `modules` are the parts of the output
    that adapters know, in order and with their widths.
    """
    y = graph.node("Gemm", [x, weight_matrix(graph, name)], transB=1)
    if adaptation is not None and modules:
        y = adaptation.apply(graph, layer, modules, x, y)
    return graph.node("Add", [y, graph.weight(f"{name}.bias")]) if bias else y
