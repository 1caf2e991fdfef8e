"""OlmoForCausalLM (OLMo 1): Llama with layer norms that have no weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...common.json_fields import JsonFields
from ..checkpoint.config import CheckpointConfig
from ..network.network import Network
from ..network.weights import Split, whole
from .decoder import MODEL, dense_mlp, qkv_parts
from .family import Features, ModelFamily


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    attention_bias = fields.boolean("attention_bias", default=False)
    bound = fields.raw("clip_qkv")
    if bound is not None:
        fields.problem("clip_qkv", f"is {bound}; bounds on q, k and v are not supported, only null is")
    return {"attn_bias": attention_bias, "attn_dense_bias": attention_bias}


def _fill_in(fields: JsonFields) -> Mapping[str, Any]:
    return {"rms_norm_eps": 1e-5}


def _declare(net: Network, c: CheckpointConfig) -> None:
    x = net.embedding(f"{MODEL}.embed_tokens")
    rotary = net.rotary()
    for layer in net.layers():
        p = f"{MODEL}.layers.{layer}"
        with net.scope("attention"):
            h = net.layer_norm(x, None, "input_layernorm")
            qkv = net.linear(h, "attention.qkv", qkv_parts(c, f"{p}.self_attn"), split=Split.COLUMN, bias=c.attn_bias)
            dense = whole(f"{p}.self_attn.o_proj", "attn_dense", c.hidden_size)
            x = net.linear(
                net.attention(qkv, rotary),
                "attention.dense",
                [dense],
                split=Split.ROW,
                bias=c.attn_dense_bias,
                add_to=x,
            )
        with net.scope("mlp"):
            x = dense_mlp(net, c, net.layer_norm(x, None, "post_layernorm"), x, f"{p}.mlp")
    with net.scope("head"):
        h = net.layer_norm(x, None, "transformer.ln_f", logit_rows=True)
        net.lm_head(h, "lm_head", f"{MODEL}.embed_tokens")


OLMO = ModelFamily(
    architecture="OlmoForCausalLM",
    read_features=_read_features,
    declare=_declare,
    fill_in=_fill_in,
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
)
