"""Qwen2ForCausalLM (Qwen 2 and 2.5): biases on q, k and v, and a sliding window by layer."""

from __future__ import annotations

from ...common.json_fields import JsonFields
from .decoder import declare_llama_like
from .family import Features, ModelFamily, sliding_window_by_layer


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    return {**sliding_window_by_layer(fields, num_hidden_layers), "attn_bias": True}


QWEN2 = ModelFamily(
    architecture="Qwen2ForCausalLM",
    read_features=_read_features,
    declare=declare_llama_like,
    optional_fields=frozenset({"head_dim"}),
    neutral_fields={"mlp_bias": False, "use_mrope": False},
)
