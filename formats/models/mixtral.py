"""MixtralForCausalLM: Mistral with experts in every layer."""

from __future__ import annotations

from ...common.json_fields import JsonFields
from ..network.network import Network
from ..network.operands import Value
from .decoder import MODEL, declare_llama_like
from .family import Features, ModelFamily, sliding_window_of_all_layers
from .mixture import ROUTER_FIELDS, ExpertNames, MixtureConfig, add_experts, number_of_experts

_NAMES = ExpertNames(gate="w1", up="w3", down="w2")


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    return {
        **sliding_window_of_all_layers(fields, num_hidden_layers),
        "moe_num_experts": number_of_experts(fields, "num_experts"),
        "moe_top_k": fields.integer("num_experts_per_tok"),
        "moe_intermediate_size": fields.integer("intermediate_size"),
    }


def _declare(net: Network, c: MixtureConfig) -> None:
    def mlp(layer: int, h: Value, x: Value) -> Value:
        block = f"{MODEL}.layers.{layer}.block_sparse_moe"
        return add_experts(net, c, h, x, block, c.routing(), _NAMES)

    declare_llama_like(net, c, mlp=mlp)


MIXTRAL = ModelFamily(
    architecture="MixtralForCausalLM",
    config_class=MixtureConfig,
    read_features=_read_features,
    declare=_declare,
    optional_fields=frozenset({"head_dim"}),
    inner_names={"block_sparse_moe": "mlp"},
    harmless_fields=ROUTER_FIELDS,
    neutral_fields={"attention_bias": False, "mlp_bias": False},
)
