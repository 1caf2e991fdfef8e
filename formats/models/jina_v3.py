"""JinaEmbeddingsV3Model: XLM-RoBERTa with rotary positions instead of learned ones."""

from __future__ import annotations

from typing import Final

from ...common.json_fields import JsonFields
from ..checkpoint.activation import Activation
from ..network.network import Network
from ..network.operands import RotaryTable, Value
from ..network.weights import Split, whole
from .decoder import qkv_parts
from .family import GELUS, Features, ModelFamily
from .roberta import ROBERTA_MODEL, RobertaHeadConfig, declare_roberta_head, roberta_type_vocab_size

_LAYERS: Final = f"{ROBERTA_MODEL}.layers."
_NORM: Final = f"{ROBERTA_MODEL}.embeddings.LayerNorm."


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    biases = {"attn_bias": True, "attn_dense_bias": True, "mlp_bias": True}
    return {**biases, "type_vocab_size": roberta_type_vocab_size(fields)}


def _declare(net: Network, c: RobertaHeadConfig) -> None:
    p = f"{ROBERTA_MODEL}.embeddings"
    types = f"{p}.token_type_embeddings"
    x = net.embedding(f"{p}.word_embeddings", types=types, num_types=c.type_vocab_size)
    with net.scope("embedding"):
        x = net.layer_norm(x, f"{p}.LayerNorm", "transformer.ln_embed", is_stream=True)
    rotary = net.rotary()
    for layer in net.layers():
        p = f"{_LAYERS}{layer}"
        x = _attention(net, c, x, p, rotary)
        x = _mlp(net, c, x, p)
        if layer < c.num_hidden_layers - 1:
            x = net.layer_norm(x, f"{p}.post_mlp_layernorm", "post_layernorm", is_stream=True)
    with net.scope("head"):
        last = f"{_LAYERS}{c.num_hidden_layers - 1}.post_mlp_layernorm"
        net.hidden = net.layer_norm(x, last, "transformer.ln_f", logit_rows=True)
    declare_roberta_head(net, c)


def _attention(net: Network, c: RobertaHeadConfig, x: Value, p: str, rotary: RotaryTable) -> Value:
    with net.scope("attention"):
        parts = qkv_parts(c, f"{p}.self_attn")
        qkv = net.linear(net.cast(x), "attention.qkv", parts, split=Split.COLUMN, bias=True)
        attended = net.attention(qkv, rotary, is_causal=False)
        dense = whole(f"{p}.self_attn.o_proj", "attn_dense", c.hidden_size)
        x = net.linear(attended, "attention.dense", [dense], split=Split.ROW, bias=True, add_to=x)
        return net.layer_norm(x, f"{p}.post_attention_layernorm", "input_layernorm", is_stream=True)


def _mlp(net: Network, c: RobertaHeadConfig, x: Value, p: str) -> Value:
    with net.scope("mlp"):
        up = whole(f"{p}.mlp.fc1", "mlp_h_to_4h", c.intermediate_size)
        activation = Activation(c.hidden_act)
        h = net.linear(net.cast(x), "mlp.fc", [up], split=Split.COLUMN, bias=True, activation=activation)
        down = whole(f"{p}.mlp.fc2", "mlp_4h_to_h", c.hidden_size)
        return net.linear(h, "mlp.proj", [down], split=Split.ROW, bias=True, add_to=x)


JINA_V3 = ModelFamily(
    architecture="JinaEmbeddingsV3Model",
    bare_architectures=frozenset({"JinaEmbeddingsV3ForMaskedLM"}),
    config_class=RobertaHeadConfig,
    read_features=_read_features,
    declare=_declare,
    # Names in files, and in models without a head.
    older_names={
        f"{ROBERTA_MODEL}.emb_ln.": _NORM,
        "emb_ln.": _NORM,
        f"{ROBERTA_MODEL}.encoder.layers.": _LAYERS,
        "encoder.layers.": _LAYERS,
        **{f"{part}.": f"{ROBERTA_MODEL}.{part}." for part in ("embeddings", "layers", "pooler")},
    },
    older_endings={
        f".{older}.{kind}": f".{now}.{kind}"
        for older, now in (
            ("mixer.out_proj", "self_attn.o_proj"),
            ("norm1", "post_attention_layernorm"),
            ("norm2", "post_mlp_layernorm"),
        )
        for kind in ("weight", "bias")
    },
    fused_layers={"mixer.Wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
    default_rope_theta=20000.0,
    activations={**GELUS, "relu": "relu"},
    field_names={"rms_norm_eps": "layer_norm_eps"},
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
    tied_by_default=True,
    harmless_fields=frozenset({"attention_probs_dropout_prob", "classifier_dropout", "hidden_dropout_prob"}),
    # Head of bare_architectures, and the unused pooler.
    ignored_tensors=(r"lm_head\..*", rf"{ROBERTA_MODEL}\.pooler\..*"),
)
