"""MistralForCausalLM: no biases, and a sliding window in all layers or in none."""

from __future__ import annotations

from .decoder import declare_llama_like
from .family import ModelFamily, sliding_window_of_all_layers

MISTRAL = ModelFamily(
    architecture="MistralForCausalLM",
    read_features=sliding_window_of_all_layers,
    declare=declare_llama_like,
    optional_fields=frozenset({"head_dim"}),
    neutral_fields={"attention_bias": False, "mlp_bias": False},
)
