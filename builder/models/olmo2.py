"""Olmo2ForCausalLM: norms behind attention and MLP, and over all heads of q and of k together."""

from __future__ import annotations

from ..checkpoint.config import CheckpointConfig
from ..json_fields import JsonFields
from ..network.network import Network
from ..network.ops import Activation
from ..network.weights import Split, whole
from .decoder import MODEL, gated_mlp, qkv_parts
from .family import Features, ModelFamily


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    attention_bias = fields.boolean("attention_bias", default=False)
    return {"attn_bias": attention_bias, "attn_dense_bias": attention_bias, "qk_layernorm": True}


def _declare(net: Network, c: CheckpointConfig) -> None:
    x = net.embedding(f"{MODEL}.embed_tokens")
    rotary = net.rotary()
    for layer in net.layers():
        p = f"{MODEL}.layers.{layer}"
        with net.scope("attention"):
            parts = qkv_parts(c, f"{p}.self_attn")
            qkv = net.linear(net.cast(x), "attention.qkv", parts, split=Split.COLUMN, bias=c.attn_bias)
            query, key, _ = (part.outputs for part in parts)
            attended = net.attention(
                qkv,
                rotary,
                query_norm=net.head_norm(f"{p}.self_attn.q_norm", "attention.q_layernorm", query),
                key_norm=net.head_norm(f"{p}.self_attn.k_norm", "attention.k_layernorm", key),
            )
            dense = whole(f"{p}.self_attn.o_proj", "attn_dense", c.hidden_size)
            h = net.linear(attended, "attention.dense", [dense], split=Split.ROW, bias=c.attn_dense_bias)
            x = net.rms_norm(h, f"{p}.post_attention_layernorm", "post_layernorm", add_to=x)
        with net.scope("mlp"):
            h = gated_mlp(net, c, net.cast(x), f"{p}.mlp", Activation.SILU)
            down = whole(f"{p}.mlp.down_proj", "mlp_4h_to_h", c.hidden_size)
            h = net.linear(h, "mlp.proj", [down], split=Split.ROW)
            x = net.rms_norm(h, f"{p}.post_feedforward_layernorm", "post_feedforward_layernorm", add_to=x)
    with net.scope("head"):
        h = net.rms_norm(x, f"{MODEL}.norm", "transformer.ln_f", logit_rows=True)
        net.lm_head(h, "lm_head", f"{MODEL}.embed_tokens")


OLMO2 = ModelFamily(
    architecture="Olmo2ForCausalLM",
    read_features=_read_features,
    declare=_declare,
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
)
