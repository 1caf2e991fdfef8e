"""The gated feed-forward layer."""

from __future__ import annotations

from ..checkpoint.config import CheckpointConfig
from .graph import GraphBuilder, Value
from .linear import Adaptation, linear


def gated_mlp(
    graph: GraphBuilder, config: CheckpointConfig, x: Value, layer: int, adaptation: Adaptation | None
) -> Value:
    """proj(silu(fc(x)) * gate(x)). Hugging Face calls fc gate_proj, gate up_proj and proj down_proj."""
    prefix = f"transformer.layers.{layer}.mlp"

    def part(name: str, module: str, value: Value, width: int) -> Value:
        return linear(
            graph,
            value,
            f"{prefix}.{name}",
            bias=config.mlp_bias,
            layer=layer,
            modules={module: width},
            adaptation=adaptation,
        )

    gated = part("fc", "mlp_h_to_4h", x, config.intermediate_size)
    up = part("gate", "mlp_gate", x, config.intermediate_size)
    silu = graph.node("Mul", [gated, graph.node("Sigmoid", [gated])])
    return part("proj", "mlp_4h_to_h", graph.node("Mul", [silu, up]), config.hidden_size)
