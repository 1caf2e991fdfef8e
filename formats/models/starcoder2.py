"""Starcoder2ForCausalLM: layer norms, biases everywhere, an MLP without a gate."""

from __future__ import annotations

from ...common.json_fields import JsonFields
from ..checkpoint.activation import Activation
from ..checkpoint.config import CheckpointConfig
from ..network.network import Network
from ..network.weights import Split, whole
from .decoder import MODEL, qkv_parts
from .family import GELU_TANH_NAMES, Features, ModelFamily, sliding_window_of_all_layers


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    bias = fields.boolean("use_bias", default=True)
    features = sliding_window_of_all_layers(fields, num_hidden_layers)
    return {**features, "attn_bias": bias, "attn_dense_bias": bias, "mlp_bias": bias}


def _declare(net: Network, c: CheckpointConfig) -> None:
    x = net.embedding(f"{MODEL}.embed_tokens")
    rotary = net.rotary()
    for layer in net.layers():
        p = f"{MODEL}.layers.{layer}"
        with net.scope("attention"):
            h = net.layer_norm(x, f"{p}.input_layernorm", "input_layernorm")
            qkv = net.linear(h, "attention.qkv", qkv_parts(c, f"{p}.self_attn"), split=Split.COLUMN, bias=c.attn_bias)
            attended = net.attention(qkv, rotary, window=c.window_of(layer))
            dense = whole(f"{p}.self_attn.o_proj", "attn_dense", c.hidden_size)
            x = net.linear(attended, "attention.dense", [dense], split=Split.ROW, bias=c.attn_dense_bias, add_to=x)
        with net.scope("mlp"):
            h = net.layer_norm(x, f"{p}.post_attention_layernorm", "post_layernorm")
            up = whole(f"{p}.mlp.c_fc", "mlp_h_to_4h", c.intermediate_size)
            activation = Activation(c.hidden_act)
            h = net.linear(h, "mlp.fc", [up], split=Split.COLUMN, bias=c.mlp_bias, activation=activation)
            down = whole(f"{p}.mlp.c_proj", "mlp_4h_to_h", c.hidden_size)
            x = net.linear(h, "mlp.proj", [down], split=Split.ROW, bias=c.mlp_bias, add_to=x)
    with net.scope("head"):
        h = net.layer_norm(x, f"{MODEL}.norm", "transformer.ln_f", logit_rows=True)
        net.lm_head(h, "lm_head", f"{MODEL}.embed_tokens")


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
