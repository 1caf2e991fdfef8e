"""HunYuan V1 with one MLP or with experts: Llama with norms of each head after its rotation."""

from __future__ import annotations

from dataclasses import replace

from ...common.json_fields import JsonFields, describe
from ..checkpoint.config import CheckpointConfig
from ..checkpoint.stacked_experts import CONSECUTIVE_EXPERTS
from ..network.network import Network
from ..network.operands import Value
from .decoder import MODEL, Mlp, declare_llama_like
from .family import Features, ModelFamily
from .mixture import ROUTER_FIELDS, ExpertNames, MixtureConfig, add_experts, add_shared_expert


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    attention_bias = fields.boolean("attention_bias", default=False)
    return {"attn_bias": attention_bias, "attn_dense_bias": attention_bias, "qk_layernorm": True}


def _read_moe_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    inner = fields.integer("intermediate_size")
    return {
        **_read_features(fields, num_hidden_layers),
        "moe_num_experts": fields.integer("num_experts", default=1),
        "moe_top_k": _top_k(fields, num_hidden_layers),
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": inner,
    }


def _top_k(fields: JsonFields, num_hidden_layers: int) -> int:
    """Reads moe_topk: one number, or one for each layer, which must be equal."""
    stated = fields.raw("moe_topk")
    if not isinstance(stated, list):
        return fields.integer("moe_topk", default=1)
    numbers = fields.integers("moe_topk")
    if len(numbers) == num_hidden_layers and len(set(numbers)) == 1:
        return numbers[0]
    fields.problem("moe_topk", f"is {describe(stated)}; expected a number, or {num_hidden_layers} times the same one")
    return 1


def _declare_layers(net: Network, c: CheckpointConfig, mlp: Mlp | None = None) -> None:
    declare_llama_like(net, c, mlp=mlp, norm_names=("query_layernorm", "key_layernorm"), norms_after_rotation=True)


def _declare_moe(net: Network, c: MixtureConfig) -> None:
    def mlp(layer: int, h: Value, x: Value) -> Value:
        block = f"{MODEL}.layers.{layer}.mlp"
        x = add_experts(net, c, h, x, block, c.routing(), ExpertNames(router="gate.wg"))
        return add_shared_expert(net, h, x, f"{block}.shared_mlp", c.moe_intermediate_size)

    _declare_layers(net, c, mlp)


HUNYUAN = ModelFamily(
    architecture="HunYuanDenseV1ForCausalLM",
    read_features=_read_features,
    declare=_declare_layers,
    optional_fields=frozenset({"num_key_value_heads"}),
    harmless_fields=frozenset({"eod_token_id"}),
    neutral_fields={"mlp_bias": False, "use_cla": False, "use_qk_norm": True},
    alpha_scaling=True,
)

HUNYUAN_MOE = replace(
    HUNYUAN,
    architecture="HunYuanMoEV1ForCausalLM",
    config_class=MixtureConfig,
    read_features=_read_moe_features,
    declare=_declare_moe,
    harmless_fields=HUNYUAN.harmless_fields | ROUTER_FIELDS,
    stacked_experts=CONSECUTIVE_EXPERTS,
)
