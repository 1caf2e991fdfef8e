"""Glm4MoeForCausalLM (GLM-4.5): sigmoid routing in groups with a bias for the choice, and shared experts."""

from __future__ import annotations

from dataclasses import dataclass

from ..._core import RouterScores
from ...common.json_fields import JsonFields
from ..network.network import Network
from ..network.operands import Value
from .decoder import MODEL, declare_llama_like, dense_mlp
from .family import Features, ModelFamily, PartialRotaryConfig
from .mixture import ROUTER_FIELDS, GroupedMixtureConfig, add_experts, add_shared_expert, number_of_experts

# Layers after the last one, which predict more tokens; they form a draft model.
_PREDICTION_LAYERS = r"model\.layers\.(46|92)\..*"


@dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(GroupedMixtureConfig, PartialRotaryConfig):
    """Fields of GLM-4.5."""


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    inner = fields.integer("moe_intermediate_size")
    dense = fields.integer("first_k_dense_replace", minimum=0, default=1)
    return {
        "attn_bias": fields.boolean("attention_bias", default=False),
        "qk_layernorm": fields.boolean("use_qk_norm", default=False),
        "moe_num_experts": number_of_experts(fields, "n_routed_experts"),
        "moe_top_k": fields.integer("num_experts_per_tok"),
        "moe_intermediate_size": inner,
        "moe_normalised": fields.boolean("norm_topk_prob", default=True),
        "shared_expert_intermediate_size": inner * fields.integer("n_shared_experts", default=1),
        "dense_layers": tuple(range(min(dense, num_hidden_layers))),
        "moe_num_groups": fields.integer("n_group", default=1),
        "moe_groups_taken": fields.integer("topk_group", default=1),
        "moe_scale": fields.number("routed_scaling_factor", above=True, default=1.0),
    }


def _declare(net: Network, c: Glm4MoeConfig) -> None:
    def mlp(layer: int, h: Value, x: Value) -> Value:
        block = f"{MODEL}.layers.{layer}.mlp"
        if layer in c.dense_layers:
            return dense_mlp(net, c, h, x, block)
        routing = c.grouped_routing(net, RouterScores.SIGMOID, f"{block}.gate.e_score_correction_bias")
        x = add_experts(net, c, h, x, block, routing)
        inner = c.shared_expert_intermediate_size or c.moe_intermediate_size
        return add_shared_expert(net, h, x, f"{block}.shared_experts", inner)

    declare_llama_like(net, c, mlp=mlp)


GLM4_MOE = ModelFamily(
    architecture="Glm4MoeForCausalLM",
    config_class=Glm4MoeConfig,
    read_features=_read_features,
    declare=_declare,
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
    prediction_tensors=_PREDICTION_LAYERS,
    harmless_fields=ROUTER_FIELDS | {"num_nextn_predict_layers", "num_mtp_layers"},
    partial_rotary_factor=0.5,
)
