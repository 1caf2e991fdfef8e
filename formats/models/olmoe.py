"""OlmoeForCausalLM: experts in every layer, and one norm each over all heads of q and of k."""

from __future__ import annotations

from ...common.json_fields import JsonFields
from ..network.network import Network
from ..network.operands import Value
from .decoder import MODEL, declare_llama_like
from .family import Features, ModelFamily
from .mixture import ROUTER_FIELDS, MixtureConfig, add_experts, number_of_experts


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    attention_bias = fields.boolean("attention_bias", default=False)
    return {
        "attn_bias": attention_bias,
        "attn_dense_bias": attention_bias,
        "qk_layernorm": True,
        "moe_num_experts": number_of_experts(fields, "num_experts"),
        "moe_top_k": fields.integer("num_experts_per_tok"),
        "moe_intermediate_size": fields.integer("intermediate_size"),
        "moe_normalised": fields.boolean("norm_topk_prob", default=False),
    }


def _declare(net: Network, c: MixtureConfig) -> None:
    def mlp(layer: int, h: Value, x: Value) -> Value:
        return add_experts(net, c, h, x, f"{MODEL}.layers.{layer}.mlp", c.routing())

    declare_llama_like(net, c, mlp=mlp, norms_of_all_heads=True)


OLMOE = ModelFamily(
    architecture="OlmoeForCausalLM",
    config_class=MixtureConfig,
    read_features=_read_features,
    declare=_declare,
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
    harmless_fields=ROUTER_FIELDS,
    neutral_fields={"mlp_bias": False},
)
