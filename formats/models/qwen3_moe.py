"""Qwen 3 and Qwen3-VL with experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...common.json_fields import JsonFields
from ..checkpoint.stacked_experts import CONSECUTIVE_EXPERTS
from ..network.network import Network
from ..network.operands import Value
from .decoder import MODEL, GivenRows, declare_llama_like, dense_mlp
from .family import Features, ModelFamily
from .mixture import ROUTER_FIELDS, MixtureConfig, add_experts, layers_without_experts, number_of_experts
from .qwen_tower import QWEN3_TOWER, VISION_DECODER, qwen3_tower_fields
from .qwen_vl import QWEN3_VL, QwenVlConfig, image_rows, vision_of


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    attention_bias = fields.boolean("attention_bias", default=False)
    window = fields.optional_integer("sliding_window")
    if not fields.boolean("use_sliding_window", default=False):
        window = None
    return {
        **layers_without_experts(fields, num_hidden_layers),
        "attn_bias": attention_bias,
        "attn_dense_bias": attention_bias,
        "qk_layernorm": True,
        "sliding_window": window,
        "sliding_window_layers": () if window is None else tuple(range(num_hidden_layers)),
        "moe_num_experts": number_of_experts(fields, "num_experts"),
        "moe_top_k": fields.integer("num_experts_per_tok"),
        "moe_intermediate_size": fields.integer("moe_intermediate_size"),
        "moe_normalised": fields.boolean("norm_topk_prob", default=False),
    }


def _read_vision_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    if fields.raw("norm_topk_prob") is False:
        fields.problem("norm_topk_prob", "is false; only true is supported")
    return {**_read_features(fields, num_hidden_layers), "moe_normalised": True}


@dataclass(frozen=True, kw_only=True)
class Qwen3VlMoeConfig(QwenVlConfig, MixtureConfig):
    """Config of Qwen3-VL with experts."""


def _declare(net: Network, c: MixtureConfig, *, decoder: str = MODEL, given: GivenRows | None = None) -> None:
    def mlp(layer: int, h: Value, x: Value) -> Value:
        block = f"{decoder}.layers.{layer}.mlp"
        if layer in c.dense_layers:
            return dense_mlp(net, c, h, x, block)
        return add_experts(net, c, h, x, block, c.routing())

    declare_llama_like(net, c, decoder=decoder, mlp=mlp, given=given)


def _declare_vision(net: Network, c: Qwen3VlMoeConfig) -> None:
    _declare(net, c, decoder=VISION_DECODER, given=image_rows(net, c))


QWEN3_MOE = ModelFamily(
    architecture="Qwen3MoeForCausalLM",
    config_class=MixtureConfig,
    read_features=_read_features,
    declare=_declare,
    optional_fields=frozenset({"head_dim"}),
    # Files have max_window_layers together with a window that no layer uses.
    harmless_fields=ROUTER_FIELDS | {"max_window_layers"},
    neutral_fields={"mlp_bias": False},
    stacked_experts=CONSECUTIVE_EXPERTS,
)

QWEN3_VL_MOE = replace(
    QWEN3_VL,
    architecture="Qwen3VLMoeForConditionalGeneration",
    config_class=Qwen3VlMoeConfig,
    read_features=_read_vision_features,
    declare=_declare_vision,
    vision=vision_of("qwen3_vl_moe", QWEN3_TOWER, qwen3_tower_fields),
    harmless_fields=ROUTER_FIELDS,
    neutral_fields={"mlp_bias": False, **QWEN3_VL.neutral_fields},
    # Published files are [experts, in, out], files of transformers 5 are [experts, out, in].
    stacked_experts=replace(CONSECUTIVE_EXPERTS, inputs_first=None),
)
