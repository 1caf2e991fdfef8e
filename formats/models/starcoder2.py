"""Starcoder2ForCausalLM: layer norms, biases everywhere, an MLP without a gate."""

from __future__ import annotations

from ...common.json_fields import JsonFields
from ..checkpoint.config import CheckpointConfig
from ..network.network import Network
from .decoder import declare_with_layer_norms
from .family import GELU_TANH_NAMES, Features, ModelFamily, sliding_window_of_all_layers


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    bias = fields.boolean("use_bias", default=True)
    features = sliding_window_of_all_layers(fields, num_hidden_layers)
    return {**features, "attn_bias": bias, "attn_dense_bias": bias, "mlp_bias": bias}


def _declare(net: Network, c: CheckpointConfig) -> None:
    declare_with_layer_norms(net, c, mlp_names=("c_fc", "c_proj"))


STARCODER2 = ModelFamily(
    architecture="Starcoder2ForCausalLM",
    read_features=_read_features,
    declare=_declare,
    activations={**dict.fromkeys(GELU_TANH_NAMES, "gelu_tanh"), "gelu": "gelu"},
    field_names={"rms_norm_eps": "norm_epsilon"},
    optional_fields=frozenset({"head_dim"}),
    tied_by_default=True,
    neutral_fields={"norm_type": "layer_norm", "mlp_type": "default"},
    harmless_fields=frozenset({"embedding_dropout", "residual_dropout"}),
)
