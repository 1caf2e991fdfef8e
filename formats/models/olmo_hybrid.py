"""OlmoHybridForCausalLM: layers with the gated delta rule among layers of OLMo 3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ...common.json_fields import JsonFields
from ..network.network import Network
from ..network.operands import RotaryTable, Value
from ..network.weights import Split, whole
from .decoder import MODEL, dense_mlp
from .family import Features, ModelFamily
from .olmo2 import olmo_layer
from .qwen3_5 import Qwen35Config, linear_layers

_NORM_EPSILON: Final = 1e-5
"""Epsilon of the norm after the delta rule, whatever the config's epsilon is."""


@dataclass(frozen=True, kw_only=True)
class OlmoHybridConfig(Qwen35Config):
    """Fields of OLMo Hybrid, in addition to those of linear attention."""

    has_positions: bool = True
    """False if attention does not depend on positions."""
    linear_update_scale: float = 1.0
    """Factor of the delta rule's updates: 2 lets states change their sign."""


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    attention_bias = fields.boolean("attention_bias", default=False)
    rope = fields.raw("rope_parameters")
    heads = fields.integer("num_attention_heads")
    key_heads = fields.optional_integer("linear_num_key_heads") or heads
    key_dim = fields.optional_integer("linear_key_head_dim") or max(
        1, 3 * fields.integer("hidden_size") // (4 * key_heads)
    )
    return {
        "attn_bias": attention_bias,
        "attn_dense_bias": attention_bias,
        "qk_layernorm": True,
        "has_positions": not (isinstance(rope, dict) and "rope_theta" in rope and rope["rope_theta"] is None),
        "linear_layers": linear_layers(fields, num_hidden_layers),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": fields.optional_integer("linear_num_value_heads") or heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": fields.optional_integer("linear_value_head_dim") or 2 * key_dim,
        "linear_conv_kernel_dim": fields.integer("linear_conv_kernel_dim", default=4),
        "linear_update_scale": 2.0 if fields.boolean("linear_allow_neg_eigval", default=True) else 1.0,
    }


def _linear_attention(net: Network, c: OlmoHybridConfig, h: Value, x: Value, prefix: str) -> Value:
    """Declares `x` plus the linear attention of `h`; q, k, v, gate, b and a have a linear layer each."""
    shape = c.delta_shape
    qkvz_parts = [
        whole(f"{prefix}.q_proj", "attn_q", shape.key_size, shape.num_key_heads),
        whole(f"{prefix}.k_proj", "attn_k", shape.key_size, shape.num_key_heads),
        whole(f"{prefix}.v_proj", "attn_v", shape.value_size, shape.num_value_heads),
        whole(f"{prefix}.g_proj", "linear_attn_z", shape.value_size, shape.num_value_heads),
    ]
    gate_parts = [
        whole(f"{prefix}.b_proj", "linear_attn_b", shape.num_value_heads),
        whole(f"{prefix}.a_proj", "linear_attn_a", shape.num_value_heads),
    ]
    qkvz = net.linear(h, "linear_attention.qkvz", qkvz_parts, split=Split.COLUMN)
    gates = net.linear(h, "linear_attention.ba", gate_parts, split=Split.COLUMN, quantized=False)
    qkvz = net.causal_convolution(
        qkvz,
        f"{prefix}.conv1d",
        "linear_attention.conv1d",
        width=2 * shape.key_size + shape.value_size,
        taps=c.linear_conv_kernel_dim,
    )
    attended = net.gated_delta(qkvz, gates, shape, prefix, "linear_attention", update_scale=c.linear_update_scale)
    normed = net.gated_rms_norm(
        attended,
        qkvz,
        f"{prefix}.o_norm",
        "linear_attention.norm",
        head_size=shape.value_dim,
        epsilon=_NORM_EPSILON,
    )
    dense = whole(f"{prefix}.o_proj", "linear_attn_dense", c.hidden_size)
    return net.linear(normed, "linear_attention.dense", [dense], split=Split.ROW, add_to=x)


def _linear_layer(net: Network, c: OlmoHybridConfig, layer: int, x: Value) -> Value:
    """Declares a layer with linear attention, whose norms come before each sublayer."""
    p = f"{MODEL}.layers.{layer}"
    with net.scope("attention"):
        h = net.rms_norm(x, f"{p}.input_layernorm", "input_layernorm")
        x = _linear_attention(net, c, h, x, f"{p}.linear_attn")
    with net.scope("mlp"):
        h = net.rms_norm(x, f"{p}.post_attention_layernorm", "post_layernorm")
        return dense_mlp(net, c, h, x, f"{p}.mlp")


def _declare(net: Network, c: OlmoHybridConfig) -> None:
    x = net.embedding(f"{MODEL}.embed_tokens")
    rotary: RotaryTable = net.rotary() if c.has_positions else net.no_rotation()
    for layer in net.layers():
        x = _linear_layer(net, c, layer, x) if layer in c.linear_layers else olmo_layer(net, c, layer, x, rotary)
    with net.scope("head"):
        h = net.rms_norm(x, f"{MODEL}.norm", "transformer.ln_f", logit_rows=True)
        net.lm_head(h, "lm_head", f"{MODEL}.embed_tokens")


OLMO_HYBRID = ModelFamily(
    architecture="OlmoHybridForCausalLM",
    config_class=OlmoHybridConfig,
    read_features=_read_features,
    declare=_declare,
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
    ignored_tensors=(),
    prediction_tensors=r"mtp.*",
    joined_tensors={"conv1d.weight": ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")},
    # Names in files; transformers renames them when it loads a model.
    older_endings={
        "attention_layer_norm.weight": "input_layernorm.weight",
        "feedforward_layer_norm.weight": "post_attention_layernorm.weight",
    },
    harmless_fields=frozenset(
        """
        linear_a_log_max linear_a_log_min linear_dt_init_floor linear_dt_max linear_dt_min
        """.split()
    ),
)
