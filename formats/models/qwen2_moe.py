"""Qwen2MoeForCausalLM: Qwen 2 with experts, and a gated shared expert."""

from __future__ import annotations

from ...common.json_fields import JsonFields
from ..checkpoint.stacked_experts import CONSECUTIVE_EXPERTS
from ..network.network import Network
from ..network.operands import Value
from .decoder import MODEL, declare_llama_like, dense_mlp
from .family import Features, ModelFamily, sliding_window_by_layer
from .mixture import (
    ROUTER_FIELDS,
    MixtureConfig,
    add_experts,
    add_shared_expert,
    layers_without_experts,
    number_of_experts,
)


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    if fields.raw("use_sliding_window") is True and fields.raw("layer_types") is None:
        fields.problem("use_sliding_window", "is true, but layer_types, which selects the layers, is missing")
    return {
        **sliding_window_by_layer(fields, num_hidden_layers),
        **layers_without_experts(fields, num_hidden_layers),
        "attn_bias": fields.boolean("qkv_bias", default=True),
        "moe_num_experts": number_of_experts(fields, "num_experts"),
        "moe_top_k": fields.integer("num_experts_per_tok"),
        "moe_intermediate_size": fields.integer("moe_intermediate_size"),
        "moe_normalised": fields.boolean("norm_topk_prob", default=False),
        "shared_expert_intermediate_size": fields.integer("shared_expert_intermediate_size"),
    }


def _declare(net: Network, c: MixtureConfig) -> None:
    def mlp(layer: int, h: Value, x: Value) -> Value:
        block = f"{MODEL}.layers.{layer}.mlp"
        if layer in c.dense_layers:
            return dense_mlp(net, c, h, x, block)
        x = add_experts(net, c, h, x, block, c.routing())
        inner = c.shared_expert_intermediate_size or c.moe_intermediate_size
        return add_shared_expert(net, h, x, f"{block}.shared_expert", inner, f"{block}.shared_expert_gate")

    declare_llama_like(net, c, mlp=mlp)


QWEN2_MOE = ModelFamily(
    architecture="Qwen2MoeForCausalLM",
    config_class=MixtureConfig,
    read_features=_read_features,
    declare=_declare,
    optional_fields=frozenset({"head_dim"}),
    harmless_fields=ROUTER_FIELDS,
    neutral_fields={"attention_bias": False, "mlp_bias": False},
    stacked_experts=CONSECUTIVE_EXPERTS,
)
