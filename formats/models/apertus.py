"""ApertusForCausalLM (Apertus): norms of each head, and MLPs without a gate whose activation has learned parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ...common.json_fields import JsonFields
from ..checkpoint.config import CheckpointConfig
from ..network.network import Network
from ..network.operands import Value
from ..network.weights import Split, whole
from .decoder import MODEL, declare_llama_like
from .family import Features, ModelFamily

_PARAMETERS: Final = "act_fn.parameters"
"""Name for the parameters of an activation together."""
_ROPE: Final = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""Apertus' default of rope_parameters."""


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    attention_bias = fields.boolean("attention_bias", default=False)
    return {"attn_bias": attention_bias, "attn_dense_bias": attention_bias, "qk_layernorm": True}


def _fill_in(fields: JsonFields) -> Mapping[str, Any]:
    has_rope = any(fields.raw(name) is not None for name in ("rope_parameters", "rope_scaling", "rope_theta"))
    return {} if has_rope else {"rope_parameters": _ROPE}


def _declare(net: Network, c: CheckpointConfig) -> None:
    def mlp(layer: int, h: Value, x: Value) -> Value:
        block = f"{MODEL}.layers.{layer}.mlp"
        up = whole(f"{block}.up_proj", "mlp_h_to_4h", c.intermediate_size)
        made = net.xielu(net.linear(h, "mlp.fc", [up], split=Split.COLUMN), f"{block}.{_PARAMETERS}", "mlp.activation")
        down = whole(f"{block}.down_proj", "mlp_4h_to_h", c.hidden_size)
        return net.linear(made, "mlp.proj", [down], split=Split.ROW, add_to=x)

    declare_llama_like(net, c, mlp=mlp, layer_norms=("attention_layernorm", "feedforward_layernorm"))


APERTUS = ModelFamily(
    architecture="ApertusForCausalLM",
    read_features=_read_features,
    declare=_declare,
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
    activations={"xielu": "xielu"},
    fill_in=_fill_in,
    default_rope_theta=12000000.0,
    joined_tensors={_PARAMETERS: ("act_fn.alpha_p", "act_fn.alpha_n", "act_fn.beta", "act_fn.eps")},
    neutral_fields={"mlp_bias": False, "qk_norm": True, "post_norm": False},
)
