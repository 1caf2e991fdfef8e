"""GemmaForCausalLM (Gemma 1 and 1.1, CodeGemma): Llama with a gated GELU, scaled embeddings, norms stored minus one."""

from __future__ import annotations

import math

from ...common.json_fields import JsonFields
from ..checkpoint.config import CheckpointConfig
from ..network.network import Network
from .decoder import Multipliers, declare_llama_like
from .family import Features, ModelFamily
from .gemma2 import GEMMA_ACTIVATIONS


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    attention_bias = fields.boolean("attention_bias", default=False)
    return {"attn_bias": attention_bias, "attn_dense_bias": attention_bias}


def _declare(net: Network, c: CheckpointConfig) -> None:
    declare_llama_like(net, c, Multipliers(embedding=math.sqrt(c.hidden_size)), plus_one=True)


GEMMA = ModelFamily(
    architecture="GemmaForCausalLM",
    read_features=_read_features,
    declare=_declare,
    # The first models say gelu; transformers uses the approximation by tanh for it too.
    activations={**GEMMA_ACTIVATIONS, "gelu": "gelu_tanh"},
    tied_by_default=True,
    neutral_fields={"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False},
)
