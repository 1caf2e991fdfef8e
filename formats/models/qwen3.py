"""Qwen3ForCausalLM: RMS norms over the heads of q and k, and a sliding window by layer."""

from __future__ import annotations

from ...common.json_fields import JsonFields
from .decoder import declare_llama_like
from .family import Features, ModelFamily, sliding_window_by_layer


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    attention_bias = fields.boolean("attention_bias", default=False)
    return {
        **sliding_window_by_layer(fields, num_hidden_layers),
        "attn_bias": attention_bias,
        "attn_dense_bias": attention_bias,
        "qk_layernorm": True,
    }


QWEN3 = ModelFamily(
    architecture="Qwen3ForCausalLM",
    read_features=_read_features,
    declare=declare_llama_like,
    neutral_fields={"mlp_bias": False},
)
