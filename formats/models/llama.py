"""LlamaForCausalLM: Llama 1 to 3.x and the many models that share its shape."""

from __future__ import annotations

from typing import Final

import numpy as np

from ...common.json_fields import JsonFields
from .decoder import declare_llama_like
from .family import Features, ModelFamily

_FATRELU: Final = "fatrelu"


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    attention_bias = fields.boolean("attention_bias", default=False)
    return {
        "attn_bias": attention_bias,
        "attn_dense_bias": attention_bias,
        "mlp_bias": fields.boolean("mlp_bias", default=False),
        "relu_threshold": _relu_threshold(fields),
    }


def _relu_threshold(fields: JsonFields) -> float:
    """Reads the threshold of ProSparse's FATReLU, which keeps x >= hidden_act_param: x above the previous float32."""
    if fields.raw("hidden_act") != _FATRELU:
        return 0.0
    least = np.float32(fields.number("hidden_act_param", above=True))
    return float(np.nextafter(least, np.float32(0.0)))


LLAMA = ModelFamily(
    architecture="LlamaForCausalLM",
    read_features=_read_features,
    declare=declare_llama_like,
    activations={"silu": "silu", "relu": "relu", _FATRELU: "relu"},
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
)
