"""BartForConditionalGeneration: learned positions, biases, and a layer norm after each sublayer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ...common.json_fields import JsonFields
from ..checkpoint.activation import Activation
from ..checkpoint.config import LEARNED_POSITIONS
from ..network.network import Network
from ..network.operands import RotaryTable, Value
from ..network.weights import Split, whole
from .decoder import qkv_parts
from .encoder_decoder import EncoderDecoderConfig, decoder_start_ids, keep_cross_keys
from .family import GELUS, Features, ModelFamily, no_rope

_MODEL: Final = "model"
_SHARED: Final = f"{_MODEL}.shared"
# Unused rows at the start of the position tables.
_POSITION_OFFSET: Final = 2


@dataclass(frozen=True, kw_only=True)
class BartConfig(EncoderDecoderConfig):
    """Fields of BART, in addition to those of other encoder-decoders."""

    scale_embedding: bool = False
    """True multiplies embeddings by sqrt(hidden_size)."""
    encoder_intermediate_size: int = 1

    @property
    def embedding_scale(self) -> float:
        """Factor of the embeddings."""
        return float(self.hidden_size**0.5) if self.scale_embedding else 1.0

    def mapping_inconsistencies(self) -> list[str]:
        """Lists reasons why this model cannot be cut by its mapping."""
        problems = super().mapping_inconsistencies()
        tp_size, size = self.mapping.tp_size, self.encoder_intermediate_size
        if size % tp_size != 0:
            problems.append(f"tp_size {tp_size} does not divide encoder_intermediate_size {size}")
        return problems


def _fill_in(fields: JsonFields) -> Mapping[str, Any]:
    return {"layer_norm_eps": 1e-5}  # torch's default; the family has no field for it


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    heads = fields.raw("decoder_attention_heads")
    if fields.integer("encoder_attention_heads") != heads:
        fields.problem("encoder_attention_heads", f"must be decoder_attention_heads {heads}")
    return {
        "decoder_start_ids": decoder_start_ids(fields),
        "attn_bias": True,
        "attn_dense_bias": True,
        "mlp_bias": True,
        "encoder_layers": fields.integer("encoder_layers"),
        "encoder_intermediate_size": fields.integer("encoder_ffn_dim"),
        "scale_embedding": fields.boolean("scale_embedding", default=False),
    }


def _declare(net: Network, c: BartConfig) -> None:
    with net.encoder():
        x, rotary = _embedded(net, c, f"{_MODEL}.encoder", "encoder"), net.no_rotation()
        for layer in net.encoder_layers():
            p = f"{_MODEL}.encoder.layers.{layer}"
            x = _self_attention(net, c, x, p, rotary, is_causal=False)
            x = _mlp(net, c, x, p, c.encoder_intermediate_size)
            x = _normed(net, x, f"{p}.final_layer_norm", "post_layernorm")
        net.encoder_output = x
        encoded = net.cast(x)
        names = ("k_proj", "v_proj")
        keep_cross_keys(net, encoded, f"{_MODEL}.decoder.layers.{{}}.encoder_attn", names, bias=True)
    x, rotary = _embedded(net, c, f"{_MODEL}.decoder", "transformer"), net.no_rotation()
    for layer in net.layers():
        p = f"{_MODEL}.decoder.layers.{layer}"
        x = _self_attention(net, c, x, p, rotary, is_causal=True)
        x = _cross_attention(net, c, x, p)
        x = _mlp(net, c, x, p, c.intermediate_size)
        if layer < c.num_hidden_layers - 1:
            x = _normed(net, x, f"{p}.final_layer_norm", "post_layernorm")
    with net.scope("head"):
        last = f"{_MODEL}.decoder.layers.{c.num_hidden_layers - 1}.final_layer_norm"
        h = net.layer_norm(x, last, "transformer.ln_f", logit_rows=True)
        net.lm_head(h, "lm_head", _SHARED, row_bias="final_logits_bias")


def _embedded(net: Network, c: BartConfig, stack: str, name: str) -> Value:
    positions = f"{stack}.embed_positions"
    x = net.embedding(_SHARED, scale=c.embedding_scale, positions=positions, rows_before=_POSITION_OFFSET)
    with net.scope("embedding"):
        return _normed(net, x, f"{stack}.layernorm_embedding", f"{name}.ln_embed")


def _normed(net: Network, x: Value, source: str, name: str) -> Value:
    return net.layer_norm(x, source, name, is_stream=True)


def _self_attention(net: Network, c: BartConfig, x: Value, p: str, rotary: RotaryTable, *, is_causal: bool) -> Value:
    with net.scope("attention"):
        qkv = net.linear(net.cast(x), "attention.qkv", qkv_parts(c, f"{p}.self_attn"), split=Split.COLUMN, bias=True)
        attended = net.attention(qkv, rotary, is_causal=is_causal)
        dense = whole(f"{p}.self_attn.out_proj", "attn_dense", c.hidden_size)
        x = net.linear(attended, "attention.dense", [dense], split=Split.ROW, bias=True, add_to=x)
        return _normed(net, x, f"{p}.self_attn_layer_norm", "input_layernorm")


def _cross_attention(net: Network, c: BartConfig, x: Value, p: str) -> Value:
    heads, width = c.num_attention_heads, c.num_attention_heads * c.head_size
    with net.scope("cross_attention"):
        query = whole(f"{p}.encoder_attn.q_proj", "cross_attn_q", width, heads)
        q = net.linear(net.cast(x), "cross_attention.q", [query], split=Split.COLUMN, bias=True)
        dense = whole(f"{p}.encoder_attn.out_proj", "cross_attn_dense", c.hidden_size)
        attended = net.cross_attention(q)
        x = net.linear(attended, "cross_attention.dense", [dense], split=Split.ROW, bias=True, add_to=x)
        return _normed(net, x, f"{p}.encoder_attn_layer_norm", "cross_attention_layernorm")


def _mlp(net: Network, c: BartConfig, x: Value, p: str, inner: int) -> Value:
    with net.scope("mlp"):
        up = whole(f"{p}.fc1", "mlp_h_to_4h", inner)
        activation = Activation(c.hidden_act)
        h = net.linear(net.cast(x), "mlp.fc", [up], split=Split.COLUMN, bias=True, activation=activation)
        down = whole(f"{p}.fc2", "mlp_4h_to_h", c.hidden_size)
        return net.linear(h, "mlp.proj", [down], split=Split.ROW, bias=True, add_to=x)


BART = ModelFamily(
    architecture="BartForConditionalGeneration",
    config_class=BartConfig,
    read_features=_read_features,
    read_rope=no_rope,
    fill_in=_fill_in,
    declare=_declare,
    # Names in models that were saved without lm_head.
    older_names={f"{name}.": f"{_MODEL}.{name}." for name in ("shared", "encoder", "decoder")},
    position_embedding_type=LEARNED_POSITIONS,
    activations={**GELUS, "relu": "relu"},
    field_names={
        "hidden_act": "activation_function",
        "hidden_size": "d_model",
        "num_hidden_layers": "decoder_layers",
        "num_attention_heads": "decoder_attention_heads",
        "intermediate_size": "decoder_ffn_dim",
        "rms_norm_eps": "layer_norm_eps",
    },
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
    tied_by_default=True,
    # Fields that only other models with BART's code use, with the values that change nothing here.
    neutral_fields={
        "is_encoder_decoder": True,
        "normalize_before": False,
        "normalize_embedding": True,
        "add_final_layer_norm": False,
        "add_bias_logits": False,
        "static_position_embeddings": False,
        "extra_pos_embeddings": _POSITION_OFFSET,
    },
    harmless_fields=frozenset(
        {
            "activation_dropout",
            "classif_dropout",
            "classifier_dropout",
            "decoder_layerdrop",
            "dropout",
            "encoder_layerdrop",
            "force_bos_token_to_be_generated",
            "gradient_checkpointing",
            "init_std",
            "num_hidden_layers",
            "output_past",
            "save_step",
        }
    ),
    ignored_tensors=(r"model\.(encoder|decoder)\.(embed_tokens\.weight|version)",),
)
