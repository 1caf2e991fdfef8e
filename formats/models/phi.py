"""PhiForCausalLM (Phi-1, 1.5 and 2): parallel attention and MLP with one layer norm, biases everywhere."""

from __future__ import annotations

from ...common.json_fields import JsonFields
from ..checkpoint.activation import Activation
from ..network.network import Network
from ..network.weights import Split, whole
from .decoder import MODEL, qkv_parts
from .family import GELU_TANH_NAMES, Features, ModelFamily, PartialRotaryConfig


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    return {"attn_bias": True, "attn_dense_bias": True, "mlp_bias": True}


def _declare(net: Network, c: PartialRotaryConfig) -> None:
    x = net.embedding(f"{MODEL}.embed_tokens")
    rotary = net.rotary()
    for layer in net.layers():
        p = f"{MODEL}.layers.{layer}"
        with net.scope("attention"):
            normed = net.layer_norm(x, f"{p}.input_layernorm", "input_layernorm")
            qkv = net.linear(normed, "attention.qkv", qkv_parts(c, f"{p}.self_attn"), split=Split.COLUMN, bias=True)
            attended = net.attention(qkv, rotary)
            dense = whole(f"{p}.self_attn.dense", "attn_dense", c.hidden_size)
            x = net.linear(attended, "attention.dense", [dense], split=Split.ROW, bias=True, add_to=x)
        with net.scope("mlp"):
            up = whole(f"{p}.mlp.fc1", "mlp_h_to_4h", c.intermediate_size)
            activation = Activation(c.hidden_act)
            h = net.linear(normed, "mlp.fc", [up], split=Split.COLUMN, bias=True, activation=activation)
            down = whole(f"{p}.mlp.fc2", "mlp_4h_to_h", c.hidden_size)
            x = net.linear(h, "mlp.proj", [down], split=Split.ROW, bias=True, add_to=x)
    with net.scope("head"):
        h = net.layer_norm(x, f"{MODEL}.final_layernorm", "transformer.ln_f", logit_rows=True)
        net.lm_head(h, "lm_head", f"{MODEL}.embed_tokens", bias=True)


PHI = ModelFamily(
    architecture="PhiForCausalLM",
    config_class=PartialRotaryConfig,
    read_features=_read_features,
    declare=_declare,
    activations=dict.fromkeys(GELU_TANH_NAMES, "gelu_tanh"),
    field_names={"rms_norm_eps": "layer_norm_eps"},
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
    partial_rotary_factor=0.5,
    neutral_fields={"qk_layernorm": False},
    harmless_fields=frozenset({"embd_pdrop", "resid_pdrop"}),
)
