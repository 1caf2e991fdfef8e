"""GptOssForCausalLM: experts with biases and a clamped activation, attention sinks, a window in every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..._core import RouterScores
from ...common.json_fields import JsonFields
from ..checkpoint.activation import Activation
from ..checkpoint.stacked_experts import ALTERNATING_EXPERTS
from ..network.network import Network
from ..network.operands import Value
from .decoder import MODEL, declare_llama_like
from .family import Features, ModelFamily, sliding_window_of_kinds
from .mixture import ROUTER_FIELDS, ExpertNames, MixtureConfig, add_experts, number_of_experts

_NAMES = ExpertNames(router="router")
_YARN: Final = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Default of rope_parameters."""


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    attention_bias = fields.boolean("attention_bias", default=True)
    return {
        **sliding_window_of_kinds(fields, num_hidden_layers, lambda layer: layer % 2 == 0),
        "attn_bias": attention_bias,
        "attn_dense_bias": attention_bias,
        "moe_num_experts": number_of_experts(fields, "num_experts"),
        "moe_top_k": fields.integer("num_experts_per_tok"),
        "moe_intermediate_size": fields.integer("intermediate_size"),
        "moe_normalised": False,
    }


def _fill_in(fields: JsonFields) -> Mapping[str, Any]:
    filled: dict[str, Any] = {}
    if not any(fields.raw(name) is not None for name in ("rope_parameters", "rope_scaling")):
        filled["rope_parameters"] = _YARN
    published = fields.raw("quantization_config")
    is_mxfp4 = isinstance(published, dict) and published.get("quant_method") == "mxfp4"
    if is_mxfp4 and not any(fields.raw(name) is not None for name in ("dtype", "torch_dtype")):
        filled["dtype"] = "bfloat16"  # OpenAI's own files omit it
    return filled


def _declare(net: Network, c: MixtureConfig) -> None:
    def mlp(layer: int, h: Value, x: Value) -> Value:
        return add_experts(
            net,
            c,
            h,
            x,
            f"{MODEL}.layers.{layer}.mlp",
            c.routing(RouterScores.SOFTMAX_OF_CHOSEN),
            _NAMES,
            bias=True,
            activation=Activation.CLAMPED_SILU,
        )

    declare_llama_like(net, c, mlp=mlp, sinks=True)


GPT_OSS = ModelFamily(
    architecture="GptOssForCausalLM",
    config_class=MixtureConfig,
    read_features=_read_features,
    declare=_declare,
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
    default_rope_theta=150000.0,
    stacked_experts=ALTERNATING_EXPERTS,
    fill_in=_fill_in,
    # OpenAI's own names of fields that are also there under transformers' names: num_experts_per_tok, and
    # original_max_position_embeddings of rope_scaling.
    harmless_fields=ROUTER_FIELDS | {"experts_per_token", "initial_context_length"},
    neutral_fields={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
)
