"""LlamaForCausalLM: Llama 1 to 3.x and the many models that share its shape."""

from __future__ import annotations

from ..json_fields import JsonFields
from .decoder import declare_llama_like
from .family import Features, ModelFamily


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    attention_bias = fields.boolean("attention_bias", default=False)
    return {
        "attn_bias": attention_bias,
        "attn_dense_bias": attention_bias,
        "mlp_bias": fields.boolean("mlp_bias", default=False),
    }


LLAMA = ModelFamily(
    architecture="LlamaForCausalLM",
    read_features=_read_features,
    declare=declare_llama_like,
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
)
