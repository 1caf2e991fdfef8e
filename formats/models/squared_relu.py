"""ArceeForCausalLM, NemotronForCausalLM and Jais2ForCausalLM: MLPs of two layers with a squared ReLU between them."""

from __future__ import annotations

from typing import Final

from ...common.json_fields import JsonFields
from ..checkpoint.config import CheckpointConfig
from ..network.network import Network
from ..network.operands import Value
from .decoder import MODEL, declare_llama_like, declare_with_layer_norms, plain_mlp
from .family import Features, ModelFamily, PartialRotaryConfig

_ACTIVATIONS: Final = {"relu2": "relu_squared"}
_OPTIONAL: Final = frozenset({"num_key_value_heads", "head_dim"})


def _features(fields: JsonFields, *, biases: bool) -> Features:
    attention_bias = fields.boolean("attention_bias", default=biases)
    return {
        "attn_bias": attention_bias,
        "attn_dense_bias": attention_bias,
        "mlp_bias": fields.boolean("mlp_bias", default=biases),
    }


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    return _features(fields, biases=False)


def _read_jais2(fields: JsonFields, num_hidden_layers: int) -> Features:
    return _features(fields, biases=True)


def _declare_arcee(net: Network, c: CheckpointConfig) -> None:
    def mlp(layer: int, h: Value, x: Value) -> Value:
        return plain_mlp(net, c, h, x, f"{MODEL}.layers.{layer}.mlp")

    declare_llama_like(net, c, mlp=mlp)


def _declare_nemotron(net: Network, c: CheckpointConfig) -> None:
    declare_with_layer_norms(net, c, plus_one=True)


ARCEE = ModelFamily(
    architecture="ArceeForCausalLM",
    read_features=_read_features,
    declare=_declare_arcee,
    activations=_ACTIVATIONS,
    optional_fields=_OPTIONAL,
)
NEMOTRON = ModelFamily(
    architecture="NemotronForCausalLM",
    config_class=PartialRotaryConfig,
    read_features=_read_features,
    declare=_declare_nemotron,
    activations=_ACTIVATIONS,
    field_names={"rms_norm_eps": "norm_eps"},
    optional_fields=_OPTIONAL,
    partial_rotary_factor=0.5,
)
JAIS2 = ModelFamily(
    architecture="Jais2ForCausalLM",
    read_features=_read_jais2,
    declare=declare_with_layer_norms,
    activations=_ACTIVATIONS,
    field_names={"rms_norm_eps": "layer_norm_eps"},
    optional_fields=_OPTIONAL,
)
