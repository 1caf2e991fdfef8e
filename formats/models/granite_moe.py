"""GraniteMoeForCausalLM and GraniteMoeSharedForCausalLM (Granite 3 with experts): Granite with experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ..._core import RouterScores
from ...common.json_fields import JsonFields
from ..checkpoint.activation import Activation
from ..checkpoint.stacked_experts import CONSECUTIVE_EXPERTS
from ..network.network import Network
from ..network.operands import Value
from ..network.weights import Split, stacked, whole
from .decoder import MODEL, Mlp, declare_llama_like
from .family import Features, ModelFamily
from .granite import GraniteConfig, granite_multipliers, read_granite_multipliers
from .mixture import ROUTER_FIELDS, ExpertNames, MixtureConfig, add_experts

EXPERT_BLOCK: Final = "block_sparse_moe"
EXPERT_NAMES: Final = ExpertNames(router="router")


@dataclass(frozen=True, kw_only=True)
class GraniteMoeConfig(MixtureConfig, GraniteConfig):
    """Fields of Granite with experts."""


def read_granite_moe_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    """Reads the own fields of Granite with experts."""
    attention_bias = fields.boolean("attention_bias", default=False)
    return {
        "attn_bias": attention_bias,
        "attn_dense_bias": attention_bias,
        "moe_num_experts": fields.integer("num_local_experts", default=8),
        "moe_top_k": fields.integer("num_experts_per_tok", default=2),
        "moe_intermediate_size": fields.integer("intermediate_size"),
        **read_granite_multipliers(fields),
    }


def _read_shared_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    inner = fields.integer("shared_intermediate_size", minimum=0, default=1024)
    return {**read_granite_moe_features(fields, num_hidden_layers), "shared_expert_intermediate_size": inner or None}


def granite_moe_mlp(net: Network, c: GraniteMoeConfig) -> Mlp:
    """Returns the MLP for declare_llama_like(): experts, and an MLP that every token uses if the config has one."""

    def mlp(layer: int, h: Value, x: Value) -> Value:
        routing = replace(c.routing(RouterScores.SOFTMAX_OF_CHOSEN), scale=c.residual_multiplier)
        x = add_experts(net, c, h, x, f"{MODEL}.layers.{layer}.{EXPERT_BLOCK}", routing, EXPERT_NAMES)
        return x if c.shared_expert_intermediate_size is None else _shared_mlp(net, c, h, x, layer)

    return mlp


def _declare(net: Network, c: GraniteMoeConfig) -> None:
    declare_llama_like(net, c, granite_multipliers(c), mlp=granite_moe_mlp(net, c))


def _shared_mlp(net: Network, c: GraniteMoeConfig, h: Value, x: Value, layer: int) -> Value:
    """Declares `x` plus the output of an MLP that every token uses, for `h`."""
    block = f"{MODEL}.layers.{layer}.shared_mlp"
    inner = c.shared_expert_intermediate_size
    assert inner is not None
    parts = stacked(f"{block}.input_linear", [("mlp_h_to_4h", inner, inner), ("mlp_gate", inner, inner)])
    gate, up = (net.weight(h, name, [part]) for name, part in zip(("mlp.fc", "mlp.gate"), parts, strict=True))
    made = net.gated(h, gate, up, Activation.SILU)
    down = whole(f"{block}.output_linear", "mlp_4h_to_h", c.hidden_size)
    return net.linear(made, "mlp.proj", [down], split=Split.ROW, add_to=x, scale=c.residual_multiplier)


GRANITE_MOE = ModelFamily(
    architecture="GraniteMoeForCausalLM",
    config_class=GraniteMoeConfig,
    read_features=read_granite_moe_features,
    declare=_declare,
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
    older_endings={f".{EXPERT_BLOCK}.router.layer.weight": f".{EXPERT_BLOCK}.router.weight"},
    harmless_fields=ROUTER_FIELDS,
    stacked_experts=replace(
        CONSECUTIVE_EXPERTS,
        older_names={
            f".{EXPERT_BLOCK}.input_linear.weight": f".{EXPERT_BLOCK}.experts.gate_up_proj",
            f".{EXPERT_BLOCK}.output_linear.weight": f".{EXPERT_BLOCK}.experts.down_proj",
        },
    ),
)

GRANITE_MOE_SHARED = replace(
    GRANITE_MOE, architecture="GraniteMoeSharedForCausalLM", read_features=_read_shared_features
)
