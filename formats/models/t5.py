"""T5ForConditionalGeneration: T5, T5 v1.1 and Flan-T5, which add a bias by position to scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ...common.json_fields import JsonFields, describe
from ..checkpoint.activation import Activation
from ..checkpoint.config import RELATIVE_POSITIONS
from ..network.network import Network
from ..network.operands import PositionBias, RotaryTable, Value
from ..network.weights import Split, whole
from .encoder_decoder import EncoderDecoderConfig, decoder_start_ids, keep_cross_keys
from .family import Features, ModelFamily, no_rope

# Values of feed_forward_proj; those with a gate have two layers before the activation.
_ACTIVATIONS: Final = {"relu": "relu", "gated-gelu": "gelu_tanh", "gated-silu": "silu"}
# transformers' names of the functions.
_DENSE_ACT_FNS: Final = {"relu": "relu", "gated-gelu": "gelu_new", "gated-silu": "silu"}
_SHARED: Final = "shared"


@dataclass(frozen=True, kw_only=True)
class T5Config(EncoderDecoderConfig):
    """Fields of T5, in addition to those of other encoder-decoders."""

    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    scale_logits: bool = True
    """True multiplies the input of lm_head by 1 / sqrt(hidden_size)."""

    @property
    def is_gated(self) -> bool:
        """True if the MLP has a gate."""
        return self.hidden_act != "relu"

    def inconsistencies(self) -> list[str]:
        """Lists contradictions between fields that are each acceptable."""
        problems = super().inconsistencies()
        buckets, distance = self.relative_attention_num_buckets, self.relative_attention_max_distance
        if buckets % 4 != 0 or buckets < 4 or distance <= buckets // 2:
            problems.append(
                f"relative_attention_num_buckets {buckets} and relative_attention_max_distance {distance}: the first "
                "must be a multiple of 4, and the second above its half"
            )
        return problems


def _fill_in(fields: JsonFields) -> Mapping[str, Any]:
    return {
        "num_decoder_layers": fields.raw("num_layers"),
        "n_positions": 512,  # nothing in the model depends on it
        "feed_forward_proj": "relu",
        "layer_norm_epsilon": 1e-6,
    }


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    # transformers derives these from feed_forward_proj, and writes them too.
    projection = fields.raw("feed_forward_proj")
    derived = {
        "dense_act_fn": _DENSE_ACT_FNS.get(str(projection)),
        "is_gated_act": str(projection).startswith("gated-"),
    }
    for name, expected in derived.items():
        found = fields.raw(name)
        if found is not None and found != expected and str(projection) in _ACTIVATIONS:
            fields.problem(
                name, f"is {describe(found)}; expected {describe(expected)} with feed_forward_proj {projection}"
            )
    # T5 v1.1 and Flan-T5 say that lm_head is not the embedding, and then logits are not scaled; newer files state both.
    untied = fields.raw("tie_word_embeddings") is False
    return {
        "decoder_start_ids": decoder_start_ids(fields),
        "encoder_layers": fields.integer("num_layers"),
        "relative_attention_num_buckets": fields.integer("relative_attention_num_buckets", default=32),
        "relative_attention_max_distance": fields.integer("relative_attention_max_distance", default=128),
        "scale_logits": fields.boolean("scale_decoder_outputs", default=not untied),
    }


def position_buckets(c: T5Config, *, bidirectional: bool) -> list[int]:
    """Returns the buckets of the relative positions -max_distance to max_distance, computed as in transformers."""
    num_buckets, reach = c.relative_attention_num_buckets, c.relative_attention_max_distance
    relative = np.arange(-reach, reach + 1)
    behind = np.zeros_like(relative)
    if bidirectional:
        num_buckets //= 2
        behind = np.where(relative > 0, num_buckets, 0)
        distance = np.abs(relative)
    else:
        distance = np.maximum(-relative, 0)
    exact = num_buckets // 2
    logarithm = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
    share = logarithm / np.float32(math.log(reach / exact)) * np.float32(num_buckets - exact)
    far = np.minimum(exact + share.astype(np.int64), num_buckets - 1)
    buckets: list[int] = (behind + np.where(distance < exact, distance, far)).tolist()
    return buckets


def _declare(net: Network, c: T5Config) -> None:
    with net.encoder():
        x = net.embedding(_SHARED)
        rotary, bias = net.no_rotation(), _position_bias(net, c, "encoder", bidirectional=True)
        for layer in net.encoder_layers():
            p = f"encoder.block.{layer}"
            x = _self_attention(net, c, x, p, rotary, bias, is_causal=False)
            x = _mlp(net, c, x, f"{p}.layer.1")
        with net.scope("norm"):
            encoded = net.rms_norm(x, "encoder.final_layer_norm", "encoder.ln_f")
        net.encoder_output = encoded
        keep_cross_keys(net, encoded, "decoder.block.{}.layer.1.EncDecAttention", ("k", "v"), bias=False)
    x = net.embedding(_SHARED)
    rotary, bias = net.no_rotation(), _position_bias(net, c, "decoder", bidirectional=False)
    for layer in net.layers():
        p = f"decoder.block.{layer}"
        x = _self_attention(net, c, x, p, rotary, bias, is_causal=True)
        x = _cross_attention(net, c, x, f"{p}.layer.1")
        x = _mlp(net, c, x, f"{p}.layer.2")
    with net.scope("head"):
        h = net.rms_norm(x, "decoder.final_layer_norm", "transformer.ln_f", logit_rows=True)
        net.lm_head(h, "lm_head", _SHARED, scale=c.hidden_size**-0.5 if c.scale_logits else 1.0)


def _position_bias(net: Network, c: T5Config, stack: str, *, bidirectional: bool) -> PositionBias:
    """Bias of the first layer, which all layers share."""
    source = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
    buckets = position_buckets(c, bidirectional=bidirectional)
    return net.position_bias(source, "relative_attention_bias", c.relative_attention_num_buckets, buckets)


def _self_attention(
    net: Network, c: T5Config, x: Value, block: str, rotary: RotaryTable, bias: PositionBias, *, is_causal: bool
) -> Value:
    heads, width = c.num_attention_heads, c.num_attention_heads * c.head_size
    with net.scope("attention"):
        h = net.rms_norm(x, f"{block}.layer.0.layer_norm", "input_layernorm")
        p = f"{block}.layer.0.SelfAttention"
        parts = [whole(f"{p}.{name}", f"attn_{name}", width, heads) for name in ("q", "k", "v")]
        qkv = net.linear(h, "attention.qkv", parts, split=Split.COLUMN)
        attended = net.attention(qkv, rotary, scale=1.0, is_causal=is_causal, position_bias=bias)
        dense = whole(f"{p}.o", "attn_dense", c.hidden_size)
        return net.linear(attended, "attention.dense", [dense], split=Split.ROW, add_to=x)


def _cross_attention(net: Network, c: T5Config, x: Value, p: str) -> Value:
    heads, width = c.num_attention_heads, c.num_attention_heads * c.head_size
    with net.scope("cross_attention"):
        h = net.rms_norm(x, f"{p}.layer_norm", "cross_attention_layernorm")
        query = whole(f"{p}.EncDecAttention.q", "cross_attn_q", width, heads)
        q = net.linear(h, "cross_attention.q", [query], split=Split.COLUMN)
        attended = net.cross_attention(q, scale=1.0)
        dense = whole(f"{p}.EncDecAttention.o", "cross_attn_dense", c.hidden_size)
        return net.linear(attended, "cross_attention.dense", [dense], split=Split.ROW, add_to=x)


def _mlp(net: Network, c: T5Config, x: Value, p: str) -> Value:
    activation = Activation(c.hidden_act)
    with net.scope("mlp"):
        h = net.rms_norm(x, f"{p}.layer_norm", "post_layernorm")
        first = whole(f"{p}.DenseReluDense.{'wi_0' if c.is_gated else 'wi'}", "mlp_h_to_4h", c.intermediate_size)
        if c.is_gated:
            second = whole(f"{p}.DenseReluDense.wi_1", "mlp_gate", c.intermediate_size)
            h = net.gated(h, net.weight(h, "mlp.fc", [first]), net.weight(h, "mlp.gate", [second]), activation)
        else:
            h = net.linear(h, "mlp.fc", [first], split=Split.COLUMN, activation=activation)
        down = whole(f"{p}.DenseReluDense.wo", "mlp_4h_to_h", c.hidden_size)
        return net.linear(h, "mlp.proj", [down], split=Split.ROW, add_to=x)


T5 = ModelFamily(
    architecture="T5ForConditionalGeneration",
    config_class=T5Config,
    read_features=_read_features,
    read_rope=no_rope,
    fill_in=_fill_in,
    declare=_declare,
    position_embedding_type=RELATIVE_POSITIONS,
    activations=_ACTIVATIONS,
    field_names={
        "hidden_act": "feed_forward_proj",
        "hidden_size": "d_model",
        "num_hidden_layers": "num_decoder_layers",
        "num_attention_heads": "num_heads",
        "head_dim": "d_kv",
        "max_position_embeddings": "n_positions",
        "intermediate_size": "d_ff",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    optional_fields=frozenset({"num_key_value_heads"}),
    tied_by_default=True,
    # T5 v1.1 has an lm_head of its own if the file has one, even though transformers 5 calls it tied.
    lm_head_is_embedding=lambda c, has_own: c.share_embedding_table if c.scale_logits else not has_own,
    neutral_fields={"is_encoder_decoder": True},
    harmless_fields=frozenset({"dropout_rate", "classifier_dropout", "initializer_factor", "output_past"}),
    # Copies of the embedding, and a table that no layer reads.
    ignored_tensors=(
        r"(encoder|decoder)\.embed_tokens\.weight",
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    ),
)
