"""OPTForCausalLM: learned positions, layer norms before or after each sublayer, a ReLU without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ...common.json_fields import JsonFields, describe
from ..checkpoint.activation import Activation
from ..checkpoint.config import LEARNED_POSITIONS, CheckpointConfig
from ..network.network import Network
from ..network.operands import Value
from ..network.weights import Split, whole
from .decoder import qkv_parts
from .family import GELUS, Features, ModelFamily, no_rope

_MODEL: Final = "model.decoder"
# Unused rows at the start of the position table.
_POSITION_OFFSET: Final = 2


@dataclass(frozen=True, kw_only=True)
class OptConfig(CheckpointConfig):
    """Fields of OPT, in addition to Llama's."""

    do_layer_norm_before: bool = True
    """True: norms before sublayers, and one after the last layer. False: norms after sublayers."""


def _fill_in(fields: JsonFields) -> Mapping[str, Any]:
    return {"layer_norm_eps": 1e-5}  # torch's default; the family has no field for it


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    bias = fields.boolean("enable_bias", default=True)
    embedding_size = fields.optional_integer("word_embed_proj_dim")
    hidden_size = fields.raw("hidden_size")
    if embedding_size not in (None, hidden_size):
        fields.problem(
            "word_embed_proj_dim",
            f"is {embedding_size}; only hidden_size {describe(hidden_size)} is supported: no op projects embeddings",
        )
    return {
        "attn_bias": bias,
        "attn_dense_bias": bias,
        "mlp_bias": bias,
        "do_layer_norm_before": fields.boolean("do_layer_norm_before", default=True),
    }


def _declare(net: Network, c: OptConfig) -> None:
    before = c.do_layer_norm_before
    x = net.embedding(f"{_MODEL}.embed_tokens", positions=f"{_MODEL}.embed_positions", rows_before=_POSITION_OFFSET)
    rotary = net.no_rotation()
    for layer in net.layers():
        p = f"{_MODEL}.layers.{layer}"
        with net.scope("attention"):
            norm = (f"{p}.self_attn_layer_norm", "input_layernorm")
            h = net.layer_norm(x, *norm) if before else net.cast(x)
            qkv = net.linear(h, "attention.qkv", qkv_parts(c, f"{p}.self_attn"), split=Split.COLUMN, bias=c.attn_bias)
            dense = whole(f"{p}.self_attn.out_proj", "attn_dense", c.hidden_size)
            attended = net.attention(qkv, rotary)
            x = net.linear(attended, "attention.dense", [dense], split=Split.ROW, bias=c.attn_dense_bias, add_to=x)
            x = x if before else net.layer_norm(x, *norm, is_stream=True)
        with net.scope("mlp"):
            norm = (f"{p}.final_layer_norm", "post_layernorm")
            x = _mlp(net, c, net.layer_norm(x, *norm) if before else net.cast(x), x, p)
            if not before and layer < c.num_hidden_layers - 1:
                x = net.layer_norm(x, *norm, is_stream=True)
    with net.scope("head"):
        last = _MODEL if before else f"{_MODEL}.layers.{c.num_hidden_layers - 1}"
        h = net.layer_norm(x, f"{last}.final_layer_norm", "transformer.ln_f", logit_rows=True)
        net.lm_head(h, "lm_head", f"{_MODEL}.embed_tokens")


def _mlp(net: Network, c: OptConfig, h: Value, x: Value, p: str) -> Value:
    up = whole(f"{p}.fc1", "mlp_h_to_4h", c.intermediate_size)
    activation = Activation(c.hidden_act)
    h = net.linear(h, "mlp.fc", [up], split=Split.COLUMN, bias=c.mlp_bias, activation=activation)
    down = whole(f"{p}.fc2", "mlp_4h_to_h", c.hidden_size)
    return net.linear(h, "mlp.proj", [down], split=Split.ROW, bias=c.mlp_bias, add_to=x)


OPT = ModelFamily(
    architecture="OPTForCausalLM",
    config_class=OptConfig,
    read_features=_read_features,
    read_rope=no_rope,
    fill_in=_fill_in,
    declare=_declare,
    # Names in decoders that were saved without the model around them.
    older_names={"decoder.": f"{_MODEL}."},
    position_embedding_type=LEARNED_POSITIONS,
    activations={"relu": "relu", **GELUS},
    field_names={
        "hidden_act": "activation_function",
        "intermediate_size": "ffn_dim",
        "rms_norm_eps": "layer_norm_eps",
    },
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
    tied_by_default=True,
    neutral_fields={"_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True},
    harmless_fields=frozenset({"activation_dropout", "dropout", "init_std", "layerdrop"}),
)
